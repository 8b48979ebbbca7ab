"""Keys of rows against NumPy: jobs of workers and servers in one process, and sessions."""

import itertools
import os
import signal
import weakref

import numpy as np
import plugin_jobs as jobs
import pytest
from core_jobs import ADAM, DEADLINE_S, MOMENTUM, SGD, SKIP, Job, RowsJob, random_gradient, rows_of, sum_of, wait_all
from processes import PYTHONPATH

from p3._core import DTYPES, MASTER, P3Error
from p3.settings import Settings
from p3.worker.session import Session


@pytest.mark.parametrize("partitions", [1, 2, 5, 23])
@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (4, 3)])
def test_the_union_of_rows_is_updated_and_lands_everywhere(workers, servers, partitions):
    random = np.random.RandomState(workers * 100 + servers * 10 + partitions)
    value = random.randn(23, 3).astype(np.float32)
    expected = value.copy()
    with RowsJob(value, workers, servers, partitions, optimizer=SGD) as job:
        for landing in job.landings:
            np.testing.assert_array_equal(landing, value)
        for number in range(12):
            for worker in job.workers:
                worker.choose_route(0, 0, number % 3 == 2)
            gradients = [random_gradient(random, value.shape) for _ in range(workers)]
            sums = sum_of(gradients, value)
            for row, total in sums.items():
                expected[row] -= np.float32(0.5) * total
            assert job.round(gradients) == list(sums)
            for landing in job.landings:
                np.testing.assert_array_equal(landing, expected)
            counters = job.workers[-1].key_counters(0)
            assert counters["own_rows"] == len(set(gradients[-1][0]))
            assert counters["pushed_rows"] == sum(len(set(ids)) for ids, _ in gradients)
            assert counters["touched_rows"] == len(sums)


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"bfloat16"}))
@pytest.mark.parametrize("as_slices", [False, True])
def test_without_an_optimizer_sums_land_and_those_of_the_round_before_become_zero(dtype, as_slices):
    random = np.random.RandomState(3)
    with RowsJob(np.zeros((11, 2), dtype), 3, 2, 3) as job:
        before = []
        for worker in job.workers:
            worker.choose_route(0, 0, as_slices)
        for _ in range(8):
            gradients = [random_gradient(random, (11, 2), dtype) for _ in range(3)]
            expected = np.zeros((11, 2), dtype)
            if dtype == "float16":  # exact in float32, so that only the last rounding shows
                gradients = [
                    (rows_of(sorted(set(ids))), np.round(values[: len(set(ids))])) for ids, values in gradients
                ]
            sums = sum_of(gradients, expected)
            for row, total in sums.items():
                expected[row] = total
            assert job.round(gradients) == sorted({*sums, *before})
            before = list(sums)
            for landing in job.landings:
                np.testing.assert_array_equal(landing, expected)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
def test_each_row_has_its_own_state_and_only_touched_rows_move(optimizer):
    """As if every row were a dense key of its own that skips the rounds in which nobody touches it."""
    random = np.random.RandomState(5)
    value = random.randn(9, 4).astype(np.float32)
    with RowsJob(value, 2, 2, 4, optimizer=optimizer) as job, Job(2, 1) as dense:
        dense.set_optimizer(optimizer)
        keys = [dense.key(4) for _ in value]
        for key, row in zip(keys, value):
            dense.init(key, row)
        expected = value.copy()
        for number in range(10):
            gradients = [random_gradient(random, value.shape) for _ in range(2)]
            scalars = (0.1 + 0.01 * number, 0.05, 0.5, 0.0, 1.0)
            for worker in job.workers:
                worker.choose_route(0, 0, number % 2 == 1)
            for row, total in sum_of(gradients, value).items():
                expected[row] = dense.push(keys[row], [total, np.zeros_like(total)], scalars)[0]
            job.round(gradients, scalars)
            for landing in job.landings:
                np.testing.assert_array_equal(landing, expected)
        states = 2 if optimizer is ADAM else 1
        for part in range(1, states + 1):
            fetched = job.fetch(range(9), value, 1, part)
            for key, row in zip(keys, fetched):
                of_row = np.empty(4, np.float32)
                dense.workers[0].fetch(key, part, of_row).wait(DEADLINE_S)
                np.testing.assert_array_equal(row, of_row)


def test_half_precision_is_summed_in_single_and_keeps_a_master():
    value = np.full((6, 2), 1, np.float16)
    with RowsJob(value, 2, 1, 2, optimizer=dict(SGD, multi_precision=True)) as job:
        tiny = np.full((1, 2), 2.0**-11, np.float16)  # one step of it is lost in float16, two are not
        for rounds in (1, 2, 3):
            job.round([(rows_of([4]), tiny), (rows_of([]), tiny[:0])])
            assert job.landings[1][4].tolist() == [np.float16(1 - rounds * 2.0**-12)] * 2
        assert (job.fetch([4, 1], value, 0, MASTER) == [[1 - 3 * 2.0**-12] * 2, [1, 1]]).all()


@pytest.mark.parametrize("sum_order, threads", [("rank", 0), ("rank", 2), ("arrival", 0)])
@pytest.mark.parametrize("optimizer", [None, SGD])
def test_the_average_is_over_the_workers_that_take_part(optimizer, sum_order, threads):
    value = np.full((5, 2), 8, np.float32)
    with RowsJob(value, 3, 2, 2, optimizer=optimizer, average=True, sum_order=sum_order, threads=threads) as job:
        def one(row, number):
            return rows_of([row]), np.full((1, 2), number, np.float32)

        assert job.round([one(1, 2), one(1, 4), one(3, 6)]) == [1, 3]
        means = {1: 2, 3: 2}
        for row, mean in means.items():
            assert (job.landings[2][row] == (mean if optimizer is None else 8 - mean / 2)).all()
        assert job.round([one(0, 3), SKIP, (rows_of([]), np.zeros((0, 2), np.float32))]) == (
            [0, 1, 3] if optimizer is None else [0])  # an empty gradient takes part, a skip does not
        assert (job.landings[1][0] == (1.5 if optimizer is None else 8 - 0.75)).all()
        landings = [landing.copy() for landing in job.landings]
        assert job.round([SKIP] * 3) == [False] * 3
        np.testing.assert_array_equal(job.landings, landings)
        assert job.round([SKIP, one(2, 1), SKIP])[0] == (0 if optimizer is None else 2)


def test_rows_that_stay_on_the_servers_are_fetched():
    random = np.random.RandomState(7)
    value = random.randn(50, 3).astype(np.float32)
    with RowsJob(value, 2, 3, 7, optimizer=SGD) as job:
        untouched = [landing.copy() for landing in job.landings]
        expected = value.copy()
        for _ in range(5):
            gradients = [random_gradient(random, value.shape) for _ in range(2)]
            for row, total in sum_of(gradients, value).items():
                expected[row] -= np.float32(0.5) * total
            assert job.round(gradients, lands=False) == []
            for worker, ids in itertools.product(range(2), ([], [0], range(50), [49, 3, 3, 0, 49], [17, 18, 30])):
                np.testing.assert_array_equal(job.fetch(ids, value, worker), expected[list(ids)])
        np.testing.assert_array_equal(job.landings, untouched)


def test_stored_rows_and_states_are_what_the_next_round_begins_from():
    value = np.zeros((20, 2), np.float32)
    with RowsJob(value, 2, 2, 3, optimizer=MOMENTUM) as job:
        gradient = rows_of([5]), np.ones((1, 2), np.float32)
        job.round([gradient, gradient])
        job.workers[0].store_rows(0, 0, rows_of([5, 6, 19]), np.full((3, 2), 7, np.float32)).wait(DEADLINE_S)
        job.workers[0].store_rows(0, 1, rows_of([5]), np.zeros((1, 2), np.float32)).wait(DEADLINE_S)
        job.round([gradient, gradient])
        assert (job.landings[1][5] == 6).all()
        assert job.fetch([6, 19, 7], value, 1)[:, 0].tolist() == [7, 7, 0]
        with pytest.raises(ValueError, match="must ascend"):
            job.workers[0].store_rows(0, 0, rows_of([6, 5]), np.zeros((2, 2), np.float32))


def test_init_again_gives_every_row_another_value():
    value = np.zeros((7, 2), np.float32)
    with RowsJob(value, 3, 2, 3, optimizer=SGD) as job:
        for number in (1, 2):
            job.init_rows(np.full((7, 2), number, np.float32))
            np.testing.assert_array_equal(job.landings, np.full((3, 7, 2), number))
            job.round([(rows_of([6]), np.ones((1, 2), np.float32))] * 3)
            assert (job.landings[2][6] == number - 1.5).all()


@pytest.mark.parametrize("partitions", [1, 4])
def test_both_routes_and_two_runs_give_the_same_bits(partitions):
    results = []
    for as_slices in (False, True, False):
        random = np.random.RandomState(11)
        value = random.randn(40, 3).astype(np.float32)
        with RowsJob(value, 4, 2, partitions, optimizer=ADAM, slice_elements=16) as job:
            for worker in job.workers:
                worker.choose_route(0, 0, as_slices)
            for _ in range(6):
                job.round([random_gradient(random, value.shape) for _ in range(4)])
            results.append(job.landings[3].tobytes())
            sent = job.workers[0].counters()["slices_sent"]
    assert results[0] == results[1] == results[2]
    assert sent > 0


def test_a_route_costs_what_it_says():
    value = np.zeros((1000, 10), np.float32)
    gradient = rows_of([1, 500]), np.ones((2, 10), np.float32)
    with RowsJob(value, 1, 1, 2, optimizer=SGD, slice_elements=1000) as job:
        sizes = []
        for as_slices in (False, True):
            before = job.workers[0].key_counters(0)["row_bytes_sent"]
            job.workers[0].choose_route(0, 0, as_slices)
            job.round([gradient])
            sizes.append(job.workers[0].key_counters(0)["row_bytes_sent"] - before)
    assert sizes[0] == 2 * (32 + 40)
    assert sizes[1] == 10 * (32 + 16 + 100 * 40)


def test_the_cheaper_route_is_chosen_after_the_round_that_shows_it():
    """And by all workers at the same round: their own densities differ, the route does not."""
    value = np.zeros((100, 1), np.float32)
    few, half, everything = (rows_of(range(count)) for count in (5, 50, 100))
    with RowsJob(value, 2, 1, 2, optimizer=SGD, slice_elements=1000) as job:
        for worker in job.workers:
            worker.choose_route(0, 2)
        routes = []
        for ids in [(few, few), (everything, half), (everything, everything), (everything, everything), (few, few)]:
            job.round([(rows, np.ones((len(rows), 1), np.float32)) for rows in ids])
            one, other = (worker.key_counters(0)["as_slices"] for worker in job.workers)
            assert one == other
            routes.append(one)
    assert routes == [False, True, True, True, False]


@pytest.mark.parametrize("wrong", [-1, 8, 2**62])
def test_a_row_that_the_key_does_not_have_fails_the_job(wrong):
    with RowsJob(np.zeros((8, 2), np.float32), 2, 2, 3, optimizer=SGD) as job:
        text = "worker 1 \\(here\\): key 'emb' has no row %d: it has 8 rows" % wrong
        operation = job.workers[1].push_rows(0, rows_of([3, wrong]), np.ones((2, 2), np.float32), job.landings[1])
        other = job.workers[0].push_rows(0, rows_of([3]), np.ones((1, 2), np.float32), job.landings[0])
        for one in (operation, other):
            with pytest.raises(P3Error, match=text):
                one.wait(DEADLINE_S)


def test_scalars_that_differ_name_both_workers():
    with RowsJob(np.zeros((8, 2), np.float32), optimizer=SGD) as job:
        operations = [
            worker.push_rows(0, rows_of([1]), np.ones((1, 2), np.float32), landing, 0, (lr, 0.0, 1.0, 0.0, 1.0))
            for worker, landing, lr in zip(job.workers, job.landings, (0.1, 0.2))
        ]
        with pytest.raises(P3Error, match="lr 0.[12].*disagree in round 1 of key 'emb'"):
            wait_all(operations)


def test_a_worker_that_leaves_a_round_undone_fails_the_others():
    with RowsJob(np.zeros((8, 2), np.float32), optimizer=SGD) as job:
        waiting = job.workers[0].push_rows(0, rows_of([1]), np.ones((1, 2), np.float32), job.landings[0])
        job.workers[1].close(DEADLINE_S)
        with pytest.raises(P3Error, match="worker 1 .* ended, but others still push round 1 of key 'emb'"):
            waiting.wait(DEADLINE_S)


def test_wrong_arrays_are_refused():
    with RowsJob(np.zeros((8, 2), np.float32)) as job:
        worker, landing = job.workers[0], job.landings[0]
        two = np.ones((2, 2), np.float32)
        for ids in (np.array([0, 1], np.int32), np.array([0.0, 1.0]), np.arange(4)[::2]):
            with pytest.raises((ValueError, BufferError)):
                worker.push_rows(0, ids, two, landing)
        with pytest.raises(ValueError, match="has 16 bytes; 3 rows have 24"):
            worker.push_rows(0, rows_of([1, 2, 3]), two, landing)
        with pytest.raises(ValueError, match="is a key of rows"):
            worker.push(0, np.zeros((8, 2), np.float32), landing)
        dense = worker.declare("dense", 2, DTYPES["float32"])
        with pytest.raises(ValueError, match="is no key of rows"):
            worker.push_rows(dense, rows_of([1]), two[:1], None)
        with pytest.raises(ValueError, match="'dense' is dense, so it needs a landing array"):
            worker.skip_rows(dense, None)


def test_the_arrays_of_a_refused_call_are_let_go():
    with RowsJob(np.zeros((8, 2), np.float32)) as job:
        ids, values = rows_of([6, 5]), np.ones((2, 2), np.float32)
        with pytest.raises(ValueError, match="must ascend"):
            job.workers[0].store_rows(0, 0, ids, values)
        dense = np.zeros((8, 2), np.float32)
        with pytest.raises(ValueError, match="is a key of rows"):
            job.workers[0].push(0, dense, dense)
        known = [weakref.ref(array) for array in (ids, values, dense)]
        del ids, values, dense
        assert all(one() is None for one in known)


def test_an_empty_key_and_one_row_have_their_rounds():
    for rows in (0, 1):
        with RowsJob(np.ones((rows, 2), np.float32), 2, 2, 1, optimizer=SGD) as job:
            ids = rows_of(range(rows))
            assert job.round([(ids, np.ones((rows, 2), np.float32))] * 2) == list(range(rows))
            np.testing.assert_array_equal(job.landings, np.zeros((2, rows, 2)))


# Sessions


@pytest.fixture
def session():
    with Session.open(Settings(partitions=3)) as opened:
        yield opened


def test_an_embedded_session_has_keys_of_rows(session):
    session.set_optimizer(0, ADAM)
    key = session.declare("emb", (10, 2, 3), "float32", sparse=True)
    assert session.declare("emb", (10, 2, 3), "float32", sparse=True) is key
    value = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    landing = np.zeros_like(value)
    session.init(key, value, landing).wait(30)
    np.testing.assert_array_equal(landing, value)
    session.core.choose_route(key.handle, 0, True)
    operation = session.pushpull(key, (rows_of([9, 0, 9]), np.ones((3, 2, 3), np.float32)), landing, lr=0.5)
    operation.wait(30)
    assert operation.changed.tolist() == [0, 9]
    assert (landing != value).any(axis=(1, 2)).tolist() == [True] + [False] * 8 + [True]
    rows = np.zeros((2, 2, 3), np.float32)
    session.fetch(key, rows, ids=rows_of([9, 8])).wait(30)
    np.testing.assert_array_equal(rows, landing[[9, 8]])
    session.fetch(key, rows, part=1, ids=rows_of([9, 8])).wait(30)
    assert np.allclose(rows[0], 0.1 * 2) and (rows[1] == 0).all()
    session.store(key, np.full((1, 2, 3), 5, np.float32), ids=rows_of([8])).wait(30)
    session.fetch(key, rows, ids=rows_of([9, 8])).wait(30)
    assert (rows[1] == 5).all()
    operation = session.skip(key, landing)
    operation.wait(30)
    assert not operation.updated
    counters = session.key_counters(key)
    assert (counters["own_rows"], counters["touched_rows"], counters["rounds"]) == (0, 0, 1)


def test_a_key_is_sparse_or_dense(session):
    session.declare("w", (4, 2), "float32")
    session.declare("emb", (4, 2), "float32", sparse=True)
    with pytest.raises(ValueError, match="key 'w' was declared dense; it cannot become sparse"):
        session.declare("w", (4, 2), "float32", sparse=True)
    with pytest.raises(ValueError, match="key 'emb' was declared sparse; it cannot become dense"):
        session.declare("emb", (4, 2), "float32")
    for shape in ((), (3, 0)):
        with pytest.raises(ValueError, match="has no rows to be sparse in"):
            session.declare("none", shape, "float32", sparse=True)


@pytest.mark.parametrize("partitions", ["auto", "1", "9"])
def test_rows_are_synchronised_in_a_real_job(run_job, partitions):
    finished = run_job(
        """
        import numpy as np
        from p3.worker.session import Session

        sgd = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}
        with Session.open() as session:
            rank, n = session.rank, session.num_workers
            session.set_optimizer(0, sgd)
            dense = session.declare("w", (300,), "float32")
            key = session.declare("emb", (1000, 40), "float32", sparse=True)
            first = np.random.RandomState(1).randn(1000, 40).astype(np.float32)
            landing, dense_landing = np.zeros_like(first), np.zeros(300, np.float32)
            waiting = [session.init(key, first if rank == 0 else None, landing, -1),
                       session.init(dense, np.zeros(300, np.float32) if rank == 0 else None, dense_landing)]
            session.wait(waiting)
            assert (landing == first).all()
            expected = first.copy()
            for turn in range(6):
                session.core.choose_route(key.handle, 0, turn % 3 == 1)
                pushed = []
                for other in range(n):
                    random = np.random.RandomState(100 * turn + other)
                    ids = random.randint(0, 1000, 0 if turn == 2 else 50 + other)
                    pushed.append((ids, random.randn(len(ids), 40).astype(np.float32)))
                session.wait([session.pushpull(key, pushed[rank], landing, priority=-1, lr=0.5),
                              session.pushpull(dense, np.ones(300, np.float32), dense_landing, lr=1.0)])
                totals = {}
                for ids, values in pushed:
                    own = {}
                    for row, value in zip(ids.tolist(), values):
                        own[row] = own[row] + value if row in own else value
                    for row, value in own.items():
                        totals[row] = totals[row] + value if row in totals else value
                for row, value in totals.items():
                    expected[row] -= np.float32(0.5) * value
                assert (landing == expected).all()
                assert session.key_counters(key)["touched_rows"] == len(totals)
            assert (dense_landing == -6 * n).all()
            wanted = np.array([999, 3, 3, 500])
            rows = np.zeros((4, 40), np.float32)
            session.fetch(key, rows, ids=wanted).wait(30)
            assert (rows == expected[wanted]).all()
            print("fine")
        """,
        workers=3,
        servers=2,
        env={"P3_PARTITIONS": partitions, "P3_SLICE_ELEMENTS": "400"},
    )
    assert finished.code == 0, finished.err
    assert sorted(finished.out.splitlines()) == ["[worker %d] fine" % rank for rank in range(3)]


def test_a_row_that_is_not_there_is_told_on_every_worker(make_cluster):
    script = """
        import numpy as np
        from p3.worker.session import Session

        session = Session.open()
        key = session.declare("emb", (8, 2), "float32", sparse=True)
        value, landing = np.zeros((8, 2), np.float32), np.zeros((8, 2), np.float32)
        session.init(key, value if session.rank == 0 else None, landing).wait(30)
        session.pushpull(key, (np.array([7 + session.rank]), value[:1]), landing).wait(30)
        """
    cluster = make_cluster(2, 1)
    nodes = [cluster.start(role) for role in ("scheduler", "server")]
    workers = [cluster.start("worker", script, P3_RANK=str(rank)) for rank in range(2)]
    text = "worker 1 (127.0.0.1): key 'emb' has no row 8: it has 8 rows, which count from 0."
    for worker in workers:
        finished = worker.wait(60)
        assert finished.code != 0 and text in finished.err, finished
    for node in nodes:
        assert node.wait(60).code != 0


SOURCE_OF_KILLED_ROWS = (jobs.SCRIPTS / "killed_rows.py").read_text()


@pytest.mark.parametrize(
    "case, victim",
    [
        ("session", "worker 0"),
        ("session", "server 1"),
        ("session-on-servers", "worker 2"),
        ("gluon", "worker 1"),
        ("gluon-on-servers", "worker 0"),
    ],
)
def test_whoever_is_killed_in_a_sparse_round_is_named_on_all_others(make_cluster, case, victim):
    if case.startswith("gluon"):
        pytest.importorskip("mxnet")
    shared_memory = os.listdir("/dev/shm")
    cluster = make_cluster(3, 2)
    script = SOURCE_OF_KILLED_ROWS.replace("sys.argv[1]", '"%s"' % case)
    quick = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    started = {"scheduler": cluster.start("scheduler")}
    started.update(("server %d" % rank, cluster.start("server", P3_RANK=str(rank))) for rank in range(2))
    workers = ["worker %d" % rank for rank in range(3)]
    started.update((name, cluster.start("worker", script, P3_RANK=name[-1], **quick)) for name in workers)
    assert [started[name].read_line() for name in workers] == ["under way"] * 3
    started[victim].signal(signal.SIGKILL)
    ended = {name: process.wait(DEADLINE_S) for name, process in started.items()}
    assert ended.pop(victim).code == -signal.SIGKILL
    for name, end in ended.items():
        assert victim + " (127.0.0.1)" in end.out + end.err, (name, end)
        assert name in workers or end.code == 1
    assert os.listdir("/dev/shm") == shared_memory
