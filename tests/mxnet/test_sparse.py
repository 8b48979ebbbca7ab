"""row_sparse gradients and weights: the store's contract in one process, and jobs that follow MXNet's own training."""

import sys

import numpy as np
import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
from mxnet import gluon  # noqa: E402
from mxnet.base import MXNetError  # noqa: E402

import p3  # noqa: E402, F401

sys.path.insert(0, str(jobs.SCRIPTS))
import sparse_training  # noqa: E402

TOLERANCE = 1e-6  # of sums that MXNet adds up in another order, after 20 steps of weights around 1
LAZY = ("sgd", "momentum", "adam", "adagrad")


@pytest.fixture
def kv():
    return mx.kv.create("p3_sync")


def rows(ids, values, shape):
    """A row_sparse array; `ids` may be unsorted and repeat."""
    values = np.asarray(values, "float32").reshape(len(ids), *shape[1:])
    return mx.nd.sparse.row_sparse_array((values, np.asarray(ids, "int64")), shape=shape)


def no_rows(*shape):
    return mx.nd.sparse.zeros("row_sparse", shape)


def sgd(rate=1.0, **settings):
    return mx.optimizer.SGD(learning_rate=rate, **settings)


# Dense weights


def test_without_an_optimizer_the_sums_land_and_zeros_elsewhere(kv):
    out = mx.nd.zeros((5, 2))
    kv.broadcast("key", mx.nd.ones((5, 2)), out)
    for gradient, expected in (
        (rows([1, 3], [[1, 2], [3, 4]], (5, 2)), [[0, 0], [1, 2], [0, 0], [3, 4], [0, 0]]),
        (rows([4, 0, 4], [[1, 1], [2, 2], [3, 3]], (5, 2)), [[2, 2], [0, 0], [0, 0], [0, 0], [4, 4]]),
        (no_rows(5, 2), np.zeros((5, 2))),
        (rows(range(5), np.arange(10), (5, 2)), np.arange(10).reshape(5, 2)),
        (rows([0], [[1, 1]], (5, 2)), [[1, 1], [0, 0], [0, 0], [0, 0], [0, 0]]),
    ):
        kv.push("key", gradient)
        kv.pull("key", out)
        assert np.array_equal(out.asnumpy(), expected)
    assert kv.stats()["keys"]["key"]["route"] == "rows"
    kv.store.expect_new_values()
    kv.broadcast("key", mx.nd.ones((5, 2)), out)
    kv.push("key", rows([1], [[5, 6]], (5, 2)))
    kv.pull("key", out)
    assert out.asnumpy().tolist() == [[0, 0], [5, 6], [0, 0], [0, 0], [0, 0]]


def test_stats_tell_how_dense_the_gradients_are(kv):
    kv.init("key", mx.nd.zeros((8, 1)))
    kv.push("key", rows([1, 5], [1, 1], (8, 1)))
    kv.pull("key", mx.nd.zeros((8, 1)))
    mx.nd.waitall()
    stats = kv.stats()["keys"]["key"]
    assert (stats["alpha"], stats["union_density"], stats["pushed_rows"]) == (0.25, 0.25, 2)


@pytest.mark.parametrize("shape", [(1, 3), (7,), (4, 2, 3)])
def test_keys_of_any_shape(kv, shape):
    kv.set_optimizer(sgd())
    out = mx.nd.zeros(shape)
    kv.broadcast("key", mx.nd.zeros(shape), out)
    kv.push("key", rows([0], np.full(shape[1:], -2.0), shape))
    kv.pull("key", out)
    expected = np.zeros(shape)
    expected[0] = 2
    assert np.array_equal(out.asnumpy(), expected)


def test_a_pull_leaves_rows_alone_that_no_round_has_changed(kv):
    kv.set_optimizer(sgd())
    out, other = mx.nd.zeros((4, 1)), mx.nd.zeros((4, 1))
    kv.init("key", mx.nd.zeros((4, 1)))
    for row in (0, 1):  # the first pull into an array copies all of it
        kv.push("key", rows([row], [-1], (4, 1)))
        kv.pull("key", out)
    out[3] = 7
    kv.push("key", rows([1], [-1], (4, 1)))
    kv.push("key", rows([2], [-1], (4, 1)))
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [1, 2, 1, 7]
    kv.pull("key", other)
    assert other.asnumpy().ravel().tolist() == [1, 2, 1, 0]
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [1, 2, 1, 0]


def test_rows_changed_long_before_a_pull_are_copied_too(kv):
    kv.set_optimizer(sgd())
    out = mx.nd.zeros((3, 1))
    kv.broadcast("key", mx.nd.zeros((3, 1)), out)
    kv.push("key", rows([2], [-1], (3, 1)))
    kv.pull("key", out)
    for _ in range(4):
        kv.push("key", rows([0, 1], [-1, -1], (3, 1)))
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [4, 4, 1]


def test_a_dense_gradient_pushes_all_rows(kv):
    kv.set_optimizer(sgd())
    out = mx.nd.zeros((3, 1))
    kv.broadcast("key", mx.nd.zeros((3, 1)), out)
    kv.push("key", rows([1], [-1], (3, 1)))
    kv.pushpull("key", mx.nd.array([[-1], [-2], [-3]]), out=out)
    assert out.asnumpy().ravel().tolist() == [1, 3, 3]


def test_a_key_that_began_with_dense_gradients_stays_dense(kv, caplog):
    kv.set_optimizer(sgd())
    out = mx.nd.zeros((3, 1))
    kv.broadcast("key", mx.nd.zeros((3, 1)), out)
    kv.push("key", mx.nd.full((3, 1), -1))
    kv.push("key", rows([1], [-1], (3, 1)))
    kv.push("key", rows([1], [-1], (3, 1)))
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [1, 3, 1]
    assert kv.stats()["keys"]["key"]["route"] == "dense"
    assert caplog.text.count("'key': its row_sparse gradients are made dense") == 1


def test_devices_are_summed_first(kv):
    kv.set_optimizer(sgd())
    outs = [mx.nd.zeros((4, 1), ctx=mx.cpu(i)) for i in range(2)]
    kv.broadcast("key", mx.nd.zeros((4, 1)), outs)
    kv.push("key", [rows([0, 2], [-1, -2], (4, 1)), rows([2, 3], [-3, -4], (4, 1)).as_in_context(mx.cpu(1))])
    kv.pull("key", outs)
    for out in outs:
        assert out.asnumpy().ravel().tolist() == [1, 0, 5, 4]


def test_an_optimizer_set_after_a_push_goes_on_from_the_sums(kv):
    out = mx.nd.zeros((4, 1))
    kv.broadcast("key", mx.nd.ones((4, 1)), out)
    for _ in range(2):  # the second pull brings changed rows only
        kv.push("key", rows([1], [5], (4, 1)))
        kv.pull("key", out)
    kv.set_optimizer(sgd())
    for row, expected in ((1, [0, 6, 0, 0]), (2, [0, 6, 1, 0])):
        kv.push("key", rows([row], [-1], (4, 1)))
        kv.pull("key", out)
        assert out.asnumpy().ravel().tolist() == expected


def test_a_key_that_a_call_repeats_is_pushed_once(kv):
    kv.set_optimizer(sgd())
    outs = [mx.nd.zeros((4, 1)), mx.nd.zeros((4, 1))]
    kv.init("key", mx.nd.zeros((4, 1)))
    for step in (1, 2):
        kv.push(["key", "key"], [rows([0, 2], [-1, -2], (4, 1)), rows([2, 3], [-3, -4], (4, 1))])
        kv.pull(["key", "key"], outs)
        for out in outs:
            assert out.asnumpy().ravel().tolist() == [step, 0, 5 * step, 4 * step]
    assert kv.stats()["keys"]["key"]["rounds"] == 2


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_changed_rows_are_cast_to_the_type_of_the_array_that_takes_them(kv, dtype):
    kv.set_optimizer(sgd())
    out, same = mx.nd.zeros((4, 1), dtype=dtype), mx.nd.zeros((4, 1))
    kv.broadcast("key", mx.nd.full((4, 1), 0.5), [out, same])
    for step in (1, 2, 3):
        kv.push("key", rows([1], [-2], (4, 1)))
        kv.pull("key", [out, same])
        expected = [0.5, 0.5 + 2 * step, 0.5, 0.5]
        assert same.asnumpy().ravel().tolist() == expected
        assert out.asnumpy().ravel().tolist() == np.array(expected, dtype).tolist()
    sparse = mx.nd.sparse.zeros("row_sparse", (4, 1), dtype=dtype)
    kv.pull("key", sparse, ignore_sparse=False)
    assert sparse.asnumpy().ravel().tolist() == np.array(expected, dtype).tolist()


def test_rows_of_several_types_are_summed_in_that_of_the_first(kv):
    kv.set_optimizer(sgd())
    kv.broadcast("key", mx.nd.zeros((3, 1)), out := mx.nd.zeros((3, 1)))
    kv.push("key", [rows([1], [-1], (3, 1)), rows([2], [-2], (3, 1)).astype("float64")])
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [0, 1, 2]


def test_rows_may_be_pulled_from_a_dense_weight(kv):
    kv.init("key", mx.nd.arange(6).reshape((3, 2)))
    out = no_rows(3, 2)
    kv.row_sparse_pull("key", out=out, row_ids=mx.nd.array([2]))
    assert out.indices.asnumpy().tolist() == [2] and out.data.asnumpy().tolist() == [[4, 5]]


def test_initialised_again_all_rows_are_copied(kv):
    out = mx.nd.zeros((3, 1))
    kv.set_optimizer(sgd())
    kv.broadcast("key", mx.nd.zeros((3, 1)), out)
    kv.push("key", rows([1], [-1], (3, 1)))
    kv.pull("key", out)
    kv.store.expect_new_values()
    kv.broadcast("key", mx.nd.full((3, 1), 5), out)
    assert out.asnumpy().ravel().tolist() == [5, 5, 5]
    kv.push("key", rows([1], [-1], (3, 1)))
    kv.pull("key", out)
    assert out.asnumpy().ravel().tolist() == [5, 6, 5]


# row_sparse weights


@pytest.fixture
def weight(kv):
    """A store with the row_sparse weight "key" of 6 rows, each of which holds its number."""
    kv.set_optimizer(sgd())
    kv.init("key", mx.nd.array([[i, i] for i in range(6)]).tostype("row_sparse"))
    return kv


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
@pytest.mark.parametrize("ids", [[5, 1, 1, 3], [], [2], list(range(6))])
def test_row_sparse_pull_gets_the_rows_that_it_asks_for(weight, ids, dtype):
    out = no_rows(6, 2)
    weight.row_sparse_pull("key", out=out, row_ids=mx.nd.array(np.array(ids, dtype), dtype=dtype))
    wanted = sorted(set(ids))
    assert out.indices.asnumpy().tolist() == wanted
    assert out.data.asnumpy().tolist() == [[i, i] for i in wanted]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_row_sparse_pull_casts_to_the_type_of_the_array_that_takes_the_rows(weight, dtype):
    out = mx.nd.sparse.zeros("row_sparse", (6, 2), dtype=dtype)
    for ids in ([1, 5], []):
        weight.row_sparse_pull("key", out=out, row_ids=mx.nd.array(ids))
        assert out.dtype == np.dtype(dtype) and out.indices.asnumpy().tolist() == ids
        assert out.data.asnumpy().tolist() == [[i, i] for i in ids]
    dense = mx.nd.zeros((6, 2), dtype=dtype)
    weight.pull("key", dense)
    assert dense.asnumpy()[:, 0].tolist() == list(range(6))


def test_row_sparse_pull_sees_the_pushes_before_it(weight):
    out, ids = no_rows(6, 2), mx.nd.array([0, 4])
    for step in range(1, 4):
        weight.push("key", rows([4], [[-1, -1]], (6, 2)))
        weight.row_sparse_pull("key", out=out, row_ids=ids)
        assert out.data.asnumpy().tolist() == [[0, 0], [4 + step, 4 + step]]


def test_row_sparse_pull_to_several_devices(weight):
    outs = [no_rows(6, 2), no_rows(6, 2).as_in_context(mx.cpu(1))]
    weight.row_sparse_pull("key", out=outs, row_ids=[mx.nd.array([0]), mx.nd.array([1, 2])])
    assert [out.indices.asnumpy().tolist() for out in outs] == [[0], [1, 2]]
    weight.row_sparse_pull("key", out=outs, row_ids=mx.nd.array([3]))
    assert [out.indices.asnumpy().tolist() for out in outs] == [[3], [3]]


def test_row_sparse_pull_of_several_keys(weight):
    weight.init(7, mx.nd.ones((2, 1)).tostype("row_sparse"))
    outs = [no_rows(6, 2), no_rows(2, 1)]
    weight.row_sparse_pull(["key", 7], out=outs, row_ids=[mx.nd.array([5]), mx.nd.array([0])])
    assert [out.indices.asnumpy().tolist() for out in outs] == [[5], [0]]
    outs[1] = no_rows(6, 2)
    weight.row_sparse_pull(["key", "key"], out=outs, row_ids=[mx.nd.array([4]), mx.nd.array([0, 2])])
    assert [out.indices.asnumpy().tolist() for out in outs] == [[4], [0, 2]]


def test_pull_leaves_row_sparse_arrays_alone_or_gets_all_rows(weight):
    out = no_rows(6, 2)
    weight.pull("key", out)
    assert out.indices.shape == (0,)
    weight.pull("key", out, ignore_sparse=False)
    assert out.asnumpy()[:, 0].tolist() == list(range(6))


def test_without_an_optimizer_a_row_sparse_weight_is_replaced_by_sums(kv):
    kv.init("key", mx.nd.ones((3, 1)).tostype("row_sparse"))
    kv.push("key", rows([1], [5], (3, 1)))
    out = no_rows(3, 1)
    kv.row_sparse_pull("key", out=out, row_ids=mx.nd.array([0, 1]))
    assert out.asnumpy().ravel().tolist() == [0, 5, 0]


def test_a_number_and_its_digits_are_two_keys_of_rows(kv):
    shapes = {3: (2, 3), "3": (6, 1)}
    for key, shape in shapes.items():
        kv.init(key, no_rows(*shape))
    for key, shape in shapes.items():  # which declares them anew, as rows whose sums go to the workers
        kv.push(key, rows([1], [[1] * shape[1]], shape))
    for key, shape in shapes.items():
        out = no_rows(*shape)
        kv.row_sparse_pull(key, out=out, row_ids=mx.nd.array([0, 1]))
        assert np.array_equal(out.asnumpy()[:2], [[0] * shape[1], [1] * shape[1]])


def test_wrong_use_is_an_error_that_says_what_and_where(weight):
    out = no_rows(6, 2)
    pull = weight.row_sparse_pull
    wrong = {
        "'key': row id 6 is out of range; the key has 6 rows": lambda: pull("key", out, row_ids=mx.nd.array([1, 6])),
        "'key': row id -1 is out of range": lambda: pull("key", out, row_ids=mx.nd.array([-1])),
        "'key': row id nan is out of range": lambda: pull("key", out, row_ids=mx.nd.array([np.nan])),
        "'key' needs `out` and `row_ids`": lambda: pull("key", out),
        "'key': 2 row_ids for 1 arrays": lambda: pull("key", out, row_ids=[mx.nd.array([1])] * 2),
        "'key': `out` must be row_sparse": lambda: pull("key", mx.nd.zeros((6, 2)), row_ids=mx.nd.array([1])),
        "'key' has shape .6, 2.": lambda: pull("key", no_rows(5, 2), row_ids=mx.nd.array([1])),
        "'key'.*row_sparse gradients, not dense": lambda: weight.push("key", mx.nd.ones((6, 2))),
        "csr array": lambda: weight.push("key", mx.nd.ones((6, 2)).tostype("csr")),
    }
    for text, call in wrong.items():
        with pytest.raises(MXNetError, match=text):
            call()
    pull("key", out, row_ids=mx.nd.array([1]))
    assert out.asnumpy()[1].tolist() == [1, 1]


# Training


@pytest.fixture(scope="module")
def references():
    """Weights of MXNet's own training in one process on the joined batch, made when first asked for."""
    made = {}

    def reference(name):
        if name not in made:
            made[name] = sparse_training.train(mx, dict(sparse_training.CASES[name], devices=1), None)
        return made[name]

    return reference


def assert_follows(weights, reference, tolerance=TOLERANCE):
    for name, value in reference.items():
        assert np.abs(weights[name] - value).max() <= tolerance, name


@pytest.mark.parametrize("name", sparse_training.CASES)
def test_one_process_follows_mxnet(kv, references, name):
    assert_follows(sparse_training.train(mx, sparse_training.CASES[name], kv), references(name))


def test_training_changes_the_weights(references):
    """Or following would be no feat."""
    for name in sparse_training.CASES:
        assert np.abs(references(name)["table"] - sparse_training.first_weights()[0]).max() > 0.01


def job(directory, workers, servers, names, **variables):
    """{case: [arrays of each worker]} of one job."""
    command = jobs.python("sparse_training.py", directory, *names)
    status, output = jobs.run_p3(workers, servers, command, **variables)
    assert status == 0, output
    return {name: [dict(np.load(directory / f"{name}-{rank}.npz")) for rank in range(workers)] for name in names}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers, names", [(2, tuple(sparse_training.CASES)), (4, LAZY + ("rows-on-servers",))])
def test_workers_follow_one_process_and_hold_the_same_bits(tmp_path, references, workers, names):
    for name, results in job(tmp_path, workers, 2, names).items():
        for weights in results:
            assert_follows(weights, references(name))
            assert np.array_equal(weights["table"], results[0]["table"]), name
        dense = name in ("not-lazy", "densified", "on-workers", "rows-on-servers-densified")
        assert sorted(results[0]["routes"]) == (["dense", "dense"] if dense else ["dense", "rows"]), name


@pytest.mark.timeout(100)
def test_the_naive_engine_trains_too(tmp_path, references):
    names = ("adam", "rows-on-servers")
    for name, results in job(tmp_path, 1, 1, names, MXNET_ENGINE_TYPE="NaiveEngine").items():
        assert_follows(results[0], references(name))


# Optimizer states


@pytest.mark.parametrize("sparse_weight", [False, True])
def test_states_are_saved_and_loaded(tmp_path, sparse_weight):
    gradients = [rows([i % 4, 4], [[i + 1, 1], [1, -i - 1]], (5, 2)) for i in range(6)]

    def begin(value):
        kv = mx.kv.create("p3_sync")
        kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.1))
        kv.init(0, value.tostype("row_sparse") if sparse_weight else value)
        return kv

    def value_of(kv):
        out = no_rows(5, 2)
        kv.row_sparse_pull(0, out=out, row_ids=mx.nd.arange(5))
        return out.tostype("default")

    whole = begin(mx.nd.ones((5, 2)))  # a dense weight's key becomes one of rows at its first push
    for gradient in gradients[:3]:
        whole.push(0, gradient)
    path = str(tmp_path / "states")
    whole.save_optimizer_states(path, dump_optimizer=True)
    resumed = begin(value_of(whole))
    resumed.load_optimizer_states(path)
    for gradient in gradients[3:]:
        whole.push(0, gradient)
        resumed.push(0, gradient)
    assert np.array_equal(value_of(resumed).asnumpy(), value_of(whole).asnumpy())

    updater = mx.optimizer.get_updater(mx.optimizer.Adam(learning_rate=0.1))
    weight = mx.nd.ones((5, 2))
    for gradient in gradients[:3]:
        updater(0, gradient, weight)
    with open(path, "rb") as file:
        loaded = mx.optimizer.get_updater(mx.optimizer.Adam())
        loaded.set_states(file.read())
    for ours, theirs in zip(loaded.states[0], updater.states[0]):
        assert ours.stype == ("row_sparse" if sparse_weight else "default")
        assert np.allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-6, atol=0)


# Failure and uneven steps


def test_whether_rows_are_updated_alone_cannot_change(kv, tmp_path):
    """It is decided when the key begins; MXNet would decide anew in each update."""
    shape, other = (3, 2), mx.kv.create("p3_sync")
    for store, is_lazy in ((kv, True), (other, False)):
        store.set_optimizer(sgd(momentum=0.5, lazy_update=is_lazy))
        store.init(3, mx.nd.ones(shape))
        store.push(3, rows([0], [[1, 1]], shape))
    file = str(tmp_path / "states")
    other.save_optimizer_states(file, dump_optimizer=True)
    with pytest.raises(MXNetError, match="holds the state of a SGD that updates all rows, .* those of key 3 alone"):
        kv.load_optimizer_states(file)
    with pytest.raises(MXNetError, match="key 3: so far its rows have been updated alone"):
        kv.set_optimizer(sgd(momentum=0.5, lazy_update=False))
    kv.push(3, rows([0], [[1, 1]], shape))
    kv._updater.optimizer.lazy_update = False
    with pytest.raises(MXNetError, match="leave lazy_update as it was"):
        kv.push(3, rows([0], [[1, 1]], shape))


@pytest.mark.timeout(100)
def test_a_pushed_row_out_of_range_fails_the_job_and_names_key_and_row(run_job):
    finished = run_job(
        """
        import mxnet as mx, p3
        kv = mx.kv.create("p3_sync")
        out = mx.nd.zeros((4, 1))
        kv.broadcast("table", mx.nd.zeros((4, 1)), out)
        ids = [0, 4] if kv.rank == 1 else [0, 1]
        kv.push("table", mx.nd.sparse.row_sparse_array(([[1], [1]], ids), shape=(4, 1)))
        kv.pull("table", out)
        out.asnumpy()
        """
    )
    assert finished.code != 0
    output = finished.out + finished.err
    assert "[worker 0]" in output and "[worker 1]" in output
    for words in ("'table", "row 4", "4 rows"):
        assert words in output


@pytest.mark.timeout(100)
def test_a_worker_that_has_joined_follows_the_rows_of_the_others(run_job):
    finished = run_job(
        """
        import mxnet as mx, p3
        kv = mx.kv.create("p3_sync")
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=1))
        out, table = mx.nd.zeros((4, 1)), mx.nd.sparse.zeros("row_sparse", (4, 1))
        kv.broadcast("dense", mx.nd.zeros((4, 1)), out)
        kv.init("sparse", mx.nd.zeros((4, 1)).tostype("row_sparse"))
        for step in range(3 - kv.rank):
            for key in ("dense", "sparse"):
                kv.push(key, mx.nd.sparse.row_sparse_array(([[-1], [-1]], [kv.rank, 3]), shape=(4, 1)))
            kv.pull("dense", out)
        kv.join()
        kv.row_sparse_pull("sparse", out=table, row_ids=mx.nd.arange(4))
        print(out.asnumpy().ravel().tolist(), table.asnumpy().ravel().tolist())
        """
    )
    assert finished.code == 0, finished.out + finished.err
    assert finished.out.count("[3.0, 2.0, 0.0, 5.0] [3.0, 2.0, 0.0, 5.0]") == 2


def test_parameters_are_recognised_before_the_first_gradient(kv):
    net = gluon.nn.Embedding(5, 2, sparse_grad=True)
    net.initialize()
    with mx.autograd.record():
        loss = net(mx.nd.array([1, 2])).sum()
    loss.backward()
    gluon.Trainer(net.collect_params(), "sgd", kvstore=kv).step(1)
    net.weight.data().wait_to_read()
    (entry,) = kv.stats()["keys"].values()
    assert entry["route"] == "rows" and entry["rounds"] == 1
