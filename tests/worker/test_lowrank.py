"""Low-rank gradients: jobs of real processes, whose workers hold what they get against NumPy."""

import re
import threading
import time

import numpy as np
import plugin_jobs as jobs
import pytest

from p3._core import multiply_thin, orthonormalise
from p3.settings import Settings
from p3.worker.session import Session

LOW_RANK = {"type": "lowrank", "rank": 2}


def run(workers, *arguments, **settings):
    status, output = jobs.run_p3(workers, min(workers, 2), jobs.python("lowrank.py", *arguments), **settings)
    assert status == 0, output
    assert output.count("is right") == workers, output


@pytest.mark.parametrize("workers, reduction, aggregates", [
    (1, "sum", "0"), (2, "mean", "0"), (2, "average", "1"), (4, "sum", "1"), (4, "mean", "0"),
])  # fmt: skip
def test_rounds_are_those_of_a_reference(workers, reduction, aggregates):
    run(workers, "follows", reduction, P3_LOCAL_AGGREGATION=aggregates)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_was_decoded_and_what_is_kept_is_what_was_given(workers):
    run(workers, "loses_nothing")


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_of_low_rank_are_exact(workers):
    run(workers, "exact")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_gradient_that_is_not_finite_makes_its_key_nan_everywhere_and_changes_nothing_else(workers):
    run(workers, "overflows")


def test_a_step_of_zeros_loses_no_column():
    run(2, "zeros")


def test_keys_for_which_it_saves_nothing_are_exact():
    run(2, "plain")


def test_as_many_bytes_travel_as_the_formula_says():
    run(2, "counts", P3_LOCAL_AGGREGATION="0")


def test_with_tls():
    run(2, "follows", "mean", P3_TLS="1")


def test_nothing_waits_for_a_round():
    run(2, "overlaps")


def test_a_dead_worker_ends_the_wait_for_a_round():
    status, output = jobs.run_p3(2, 1, jobs.python("lowrank.py", "dies"))
    assert status != 0
    assert re.search(r"worker 0 was told: P3Error .*worker 1", output), output


def test_a_worker_that_has_not_seen_the_failure_says_it_at_its_end():
    _, output = jobs.run_p3(2, 1, jobs.python("lowrank.py", "dies_unseen"))
    # Whoever notices it first names it: the server ("lost worker 1"), or the scheduler ("worker 1 closed ...").
    assert re.search(r"\[worker 0\] p3: the job failed: .*worker 1 ", output), output


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_worker_that_ends_without_waiting_takes_its_part_in_the_round(workers):
    run(workers, "leaves")


def test_a_worker_that_ends_in_a_round_that_others_never_push_says_so():
    status, output = jobs.run_p3(2, 1, jobs.python("lowrank.py", "waits_in_vain"), P3_WAIT_TIMEOUT_S="2")
    assert status != 0
    said = r"worker 0 .*: waited 2 s for the round of key 'wide', compressed by lowrank, to end before the session"
    assert re.search(said, output), output


# In this process


@pytest.fixture(scope="module")
def session():
    with Session.open(Settings()) as opened:
        yield opened


def declared(session, options=None, **store_options):
    store = session.new_store()
    for name, value in store_options.items():
        session.set_option(store, name, value)
    return session.declare("w", (20, 30), "float32", store, options=options)


def test_a_key_may_have_a_compression_of_its_own(session):
    assert declared(session, {"compression": LOW_RANK}).rank == 2
    assert declared(session, {"compression": {}}, compression=LOW_RANK).rank == 0
    assert declared(session, compression=LOW_RANK).rank == 2


def test_a_name_that_a_thin_matrix_has_is_taken(session):
    store = session.new_store()
    low_rank = {"compression": LOW_RANK}
    key = session.declare("w", (20, 30), "float32", store, options=low_rank)
    for shape in ((20, 30), (20, 2)):  # the latter is the matrix's own
        with pytest.raises(ValueError, match=r"key 'w \(P\)': the name is taken by lowrank's key of 'w'; give one of"):
            session.declare("w (P)", shape, "float32", store, options={"compression": {}, "value_compression": {}})
    assert session.declare("w", (20, 30), "float32", store, options=low_rank) == key
    session.declare(1, (20, 30), "float32", store, options=low_rank)
    with pytest.raises(ValueError, match=r"key '1 \(P\)': the name is taken by lowrank's key of 1"):
        session.declare("1", (20, 30), "float32", store, options=low_rank)
    session.release(store)
    assert session.declare("w (P)", (20, 30), "float32", session.new_store()).rank == 0


def test_a_key_whose_thin_matrix_would_have_anothers_name_is_not_made(session):
    store = session.new_store()
    session.declare("w (R)", (3,), "float32", store)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"key 'w': lowrank's key of it would be called 'w \(R\)', and that name"):
            session.declare("w", (20, 30), "float32", store, options={"compression": LOW_RANK})
    assert [key.name for key in session.keys.of(store)] == ["w (R)"]
    key, value = session.declare("w", (20, 30), "float32", store), np.ones((20, 30), "float32")
    session.wait([session.init(key, value, value.copy())])


SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}


@pytest.mark.parametrize("other, said", [
    ({"value_compression": {"type": "int8"}}, r"lowrank and compression of what comes back \(int8\) exclude"),
    ({"optimizer": SGD}, "lowrank and plain SGD on the servers exclude each other: thin matrices come back"),
    ({"optimizer": {"name": "adagrad", "epsilon": 0.1, "clip_gradient": -1.0, "multi_precision": False}},
     r"lowrank and another optimizer on the servers \(adagrad\) exclude each other"),
])  # fmt: skip
def test_a_store_cannot_have_both(session, other, said):
    with pytest.raises(ValueError, match=said):
        declared(session, compression=LOW_RANK, **other)


def test_with_staleness_it_is_refused(session):
    store = session.new_store()
    session.set_option(store, "compression", LOW_RANK)
    with pytest.raises(ValueError, match="lowrank and staleness exclude each other"):
        session.declare("w", (20, 30), "float32", store, staleness=1)


def test_where_a_job_goes_on_without_lost_workers_it_is_refused(session, monkeypatch):
    monkeypatch.setattr(type(session._link), "on_worker_loss", "continue")
    refused = r"going on without lost workers \(P3_ON_WORKER_LOSS=continue is set\) and lowrank exclude each other"
    with pytest.raises(ValueError, match="key 'w': " + refused):
        declared(session, compression=LOW_RANK)
    with pytest.raises(ValueError, match=refused):
        declared(session, {"compression": LOW_RANK})
    assert declared(session).rank == 0


def test_in_a_store_with_norms_it_is_refused(session):
    store = session.new_store()
    session.declare_norm(store)
    with pytest.raises(ValueError, match="lowrank and the norm of a store's sums exclude each other"):
        session.declare("w", (20, 30), "float32", store, options={"compression": LOW_RANK})
    with pytest.raises(ValueError, match="lowrank and the norm of a store's sums exclude each other"):
        session.set_option(store, "compression", LOW_RANK)


def test_a_key_of_a_store_with_an_optimizer_is_refused_when_it_is_pushed(session):
    store = session.new_store()
    key = session.declare("w", (20, 30), "float32", store, options={"compression": LOW_RANK})
    session.set_option(store, "optimizer", SGD)
    value = np.zeros((20, 30), "float32")
    session.wait([session.init(key, value, value.copy())])
    with pytest.raises(ValueError, match="key 'w': lowrank and plain SGD on the servers exclude each other"):
        session.pushpull(key, value, value.copy())


def test_the_most_urgent_key_of_the_oldest_step_is_computed_first(session):
    store, shape, begun, computed = session.new_store(), (20, 30), threading.Event(), []
    session.set_option(store, "compression", LOW_RANK)
    keys = {name: session.declare(name, shape, "float32", store) for name in ("first", "a", "b", "c")}
    keys["late"] = declared(session, compression=LOW_RANK)  # of another optimizer
    landings = {name: np.zeros(shape, "float32") for name in keys}
    session.wait([session.init(key, landings[name].copy(), landings[name]) for name, key in keys.items()])
    for name, key in keys.items():
        matrix = session.low_rank._matrices[key.handle]
        project = matrix._project
        matrix._project = lambda name=name, project=project: (computed.append(name), begun.wait(30), project())

    def begin(name, priority):
        return session.pushpull(keys[name], np.ones(shape, "float32"), landings[name], priority)

    begun.set()
    session.wait([begin("c", 0)])  # the others' rounds are of the same step, until it begins the next one
    begun.clear()
    operations = [begin("first", 0)]
    while computed[-1] != "first":
        time.sleep(0.01)
    operations += [begin("a", 1), begin("b", 5), begin("c", 9), begin("late", 0)]
    begun.set()
    session.wait(operations)
    assert computed == ["c", "first", "b", "a", "c", "late"]


# Resumed with another compression

SHAPE = (20, 30)
INT8, OF_RANK_20 = {"type": "int8"}, {"type": "lowrank", "rank": 20}  # the latter saves nothing
DGC = {"type": "dgc", "ratio": 0.1, "warmup_steps": 0, "clip_norm": 0, "masking": True}


def open_again(directory, compression, optimizer=None):
    """A session with a key, restored if there is a snapshot."""
    opened = Session.open(Settings(snapshot_dir=str(directory), snapshot_every=1))
    round, _ = opened.resume()
    if optimizer is not None:
        opened.set_option(0, "optimizer", optimizer)
    key = opened.declare("w", SHAPE, "float32", options={"compression": compression})
    opened.wait([opened.init(key, np.zeros(SHAPE, "float32"), np.zeros(SHAPE, "float32"))])
    return opened, key, round


def taken(directory, compression, optimizer=None):
    """What a session with a snapshot of one step had left out."""
    opened, key, _ = open_again(directory, compression, optimizer)
    with opened:
        gradient = np.random.RandomState(3).standard_normal(SHAPE).astype("float32")
        landing = np.zeros(SHAPE, "float32")
        opened.wait([opened.pushpull(key, gradient, landing, lr=1.0, updates=1.0)])
        opened.snapshot(1, [key])
        opened.snapshots.finish()
        return gradient - landing


@pytest.mark.parametrize("then, now", [(LOW_RANK, INT8), (INT8, LOW_RANK), (LOW_RANK, {"type": "lowrank", "rank": 3})])
def test_what_was_left_out_goes_on_with_another_compression(tmp_path, then, now):
    left_out = taken(tmp_path, then)
    opened, key, round = open_again(tmp_path, now)
    with opened:
        assert round == 1
        opened.restore(key)
        landing, total = np.zeros(SHAPE, "float32"), np.zeros(SHAPE)
        for _ in range(60):
            opened.wait([opened.pushpull(key, np.zeros(SHAPE, "float32"), landing)])
            total += landing
        np.testing.assert_allclose(total, left_out, atol=0.02)


@pytest.mark.parametrize("then, now, said", [
    (LOW_RANK, {}, "was compressed by lowrank in the snapshot of round 1, .* now it travels as it is, which keeps"),
    (INT8, {}, "was compressed by a type that keeps what it leaves out in .*; now it travels as it is"),
    (LOW_RANK, OF_RANK_20, "was compressed by lowrank .* or with one that keeps what it leaves out, as lowrank"),
    (LOW_RANK, {"type": "bf16"}, "was compressed by lowrank .*; now it is compressed by bf16, which keeps nothing"),
])  # fmt: skip
def test_what_was_left_out_is_not_lost_unsaid(tmp_path, then, now, said):
    taken(tmp_path, then)
    opened, key, _ = open_again(tmp_path, now)
    with opened, pytest.raises(ValueError, match="key 'w' " + said):
        opened.restore(key)


@pytest.mark.parametrize("then, now, said", [
    (INT8, DGC, "by a type that keeps what it leaves out in .*; now it is compressed by dgc, which cannot take it"),
    (DGC, INT8, "by dgc in .*; now it is compressed by int8, which cannot take it. Resume with the compression of"),
    (DGC, {}, "by dgc in .*; now it travels as it is, which keeps nothing. Resume with the compression of that job$"),
])  # fmt: skip
def test_of_steps_only_steps_go_on(tmp_path, then, now, said):
    taken(tmp_path, then, SGD)
    opened, key, _ = open_again(tmp_path, now, SGD)
    with opened, pytest.raises(ValueError, match="key 'w' was compressed " + said):
        opened.restore(key)


def test_an_error_says_who_updated(tmp_path):
    taken(tmp_path, LOW_RANK)
    opened, key, _ = open_again(tmp_path, INT8, SGD)
    said = r"key 'w' was updated by the workers in the snapshot of round 1, and is by the servers with \{.*\} now"
    with opened, pytest.raises(ValueError, match=said):
        opened.restore(key)


def test_rows_travel_as_they_are(session):
    store = session.new_store()
    session.set_option(store, "compression", LOW_RANK)
    assert session.declare("rows", (100, 30), "float32", store, sparse=True).rank == 0


def test_what_no_thin_matrix_is_made_of_is_refused(session):
    key = declared(session, {"compression": LOW_RANK})
    value = np.zeros((20, 30), "float32")
    session.wait([session.init(key, value, value.copy())])
    with pytest.raises(ValueError, match=r"key 'w': the gradient has shape \(20, 30\) and type float64; it must have"):
        session.pushpull(key, value.astype("float64"), value.copy())
    with pytest.raises(ValueError, match="key 'w': the gradient array is not contiguous"):
        session.pushpull(key, np.asfortranarray(value), value.copy())
    with pytest.raises(ValueError, match="compressed by lowrank; its gradient leaves at once"):
        session.pushpull(key, value, value.copy(), gated=True)


def test_a_keys_counters_are_of_its_own_rounds(session):
    key = declared(session, {"compression": LOW_RANK})
    value = np.zeros((20, 30), "float32")
    session.wait([session.init(key, value, value.copy())])
    assert session.key_counters(key) == dict(rounds=0, waited_s=0, longest_wait_s=0, compression="lowrank")
    for _ in range(3):
        session.wait([session.pushpull(key, value, value.copy())])
    counters = session.key_counters(key)
    assert counters["rounds"] == 3 and counters["waited_s"] > counters["longest_wait_s"] > 0, counters


def test_a_snapshot_has_the_first_value(tmp_path):
    opened, key, _ = open_again(tmp_path, LOW_RANK)
    first = np.ones(SHAPE, "float32")
    with opened:
        opened.wait([opened.init(key, first, first.copy())])
        opened.wait([opened.pushpull(key, first * 5, first.copy())])
        opened.snapshot(1, [key])
        opened.snapshots.finish()
    opened, key, _ = open_again(tmp_path, LOW_RANK)
    with opened:
        np.testing.assert_array_equal(opened.resumed_value(key), first)


@pytest.mark.parametrize("rank", [0, 1025, 2.0, True])
def test_a_rank_is_a_whole_number(session, rank):
    with pytest.raises(ValueError, match="rank .* whole number from 1 to 1024"):
        session.set_option(session.new_store(), "compression", {"type": "lowrank", "rank": rank})


def test_the_cores_arithmetic_takes_matrices_of_their_shape():
    matrix = np.random.RandomState(1).standard_normal((7, 2)).astype("float32")
    whole = np.empty((7, 7), "float32")
    orthonormalise(matrix, 7, 2)
    multiply_thin(matrix, matrix, whole, 2)
    np.testing.assert_allclose(whole @ whole, whole, atol=1e-6)
    for wrong in (matrix[:6], matrix.astype("float64")):
        with pytest.raises(ValueError, match="bytes; its shape has"):
            orthonormalise(wrong, 7, 2)
    with pytest.raises(ValueError, match="the product has"):
        multiply_thin(matrix, matrix, whole[:5], 2)
