"""The replay drives every store by name alone, says what it has emulated, and notices wrong weights."""

import json
import sys

import numpy as np
import pytest
from plugin_jobs import python, run, run_dist_sync, run_p3

from p3 import codecs
from p3.measure.replay import gpu_clock, models, mxnet_replay, probes
from p3.measure.replay import worker as replay
from p3.measure.replay.compressed import EncodedReplay
from p3.measure.replay.gpu_clock import Clock, factors

MXNET_P3 = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}
TINY = ["--compute", "0.02", "--iterations", "3", "--warmup", "1"]


def arguments_of(folder, store, *options, model="sockeye", size="0.005"):
    return ["--store", store, "--model", model, "--size", size, *TINY, "--out", str(folder / "worker{rank}.jsonl"),
            *options]  # fmt: skip


def command(folder, store, *options, **size):
    arguments = arguments_of(folder, store, *options, **size)
    if store.startswith("p3_"):
        return python("replay.py", *arguments)
    return [sys.executable, "-m", "p3.replay", *arguments]  # in an MXNet that P3 has not touched


def lines_of(folder, rank=0):
    header, *iterations, result = map(json.loads, (folder / ("worker%d.jsonl" % rank)).read_text().splitlines())
    return header, iterations, result


def assert_replayed(folder, workers, updates):
    for rank in range(workers):
        header, iterations, result = lines_of(folder, rank)
        assert header["computation"] == result["computation"] == "emulated"
        assert (header["rank"], header["workers"], header["updates"]) == (rank, workers, updates)
        assert [one["warmup"] for one in iterations] == [True, False, False, False]
        assert (result["result"], result["wrong_keys"]) == ("right", [])


@pytest.mark.parametrize("optimizer, updates", [("none", "none"), ("sgd", "server")])
def test_p3_sync_alone_and_embedded(tmp_path, optimizer, updates):
    arguments = arguments_of(tmp_path, "p3_sync", "--optimizer", optimizer)
    status, output = run([sys.executable, "-m", "p3.replay", *arguments])
    assert status == 0, output
    assert_replayed(tmp_path, 1, updates)


@pytest.mark.parametrize("optimizer, updates", [("none", "none"), ("sgd", "server")])
def test_p3_sync_of_two_workers(tmp_path, optimizer, updates):
    status, output = run_p3(2, 2, command(tmp_path, "p3_sync", "--optimizer", optimizer))
    assert status == 0, output
    assert_replayed(tmp_path, 2, updates)


@pytest.mark.parametrize("store", ["p3_sync", pytest.param("p3_torch", marks=pytest.mark.torch)])
def test_weights_that_nobody_can_know_are_told_by_their_digest(tmp_path, store):
    status, output = run_p3(2, 1, command(tmp_path, store, "--departing"))
    assert status == 0 and "weights told by a digest" in output, output
    first, second = (lines_of(tmp_path, rank)[2]["digest"] for rank in range(2))
    assert first == second and len(first) == 64


@pytest.mark.parametrize("optimizer, updates", [("none", "none"), ("sgd", "server")])
def test_dist_sync_of_two_workers(tmp_path, optimizer, updates):
    for status, output in run_dist_sync(2, 2, command(tmp_path, "dist_sync", "--optimizer", optimizer)):
        assert status == 0, output
    assert_replayed(tmp_path, 2, updates)


@pytest.mark.parametrize("optimizer, updates", [("none", "none"), ("sgd", "worker")])
def test_mxnets_p3_of_two_workers(tmp_path, optimizer, updates):
    for status, output in run_dist_sync(2, 2, command(tmp_path, "dist_sync", "--optimizer", optimizer), **MXNET_P3):
        assert status == 0, output
    assert_replayed(tmp_path, 2, updates)
    assert lines_of(tmp_path)[0]["van"] == "p3"


@pytest.mark.parametrize("store", ["p3_ssp", "p3_async", "dist_async"])
def test_workers_that_are_rounds_apart_meet_at_the_end(tmp_path, store):
    arguments = command(tmp_path, store, "--optimizer", "sgd", "--jitter", "0.5")
    run_job = run_dist_sync if store == "dist_async" else lambda *job: [run_p3(*job)]
    for status, output in run_job(2, 2, arguments):
        assert status == 0, output
    assert_replayed(tmp_path, 2, "server")


def test_compressed_replay_of_two_workers(tmp_path):
    arguments = command(tmp_path, "p3_sync", "--optimizer", "sgd", "--dgc", "0.02")
    status, output = run_p3(2, 2, arguments, P3_SLICE_ELEMENTS="500")
    assert status == 0, output
    assert_replayed(tmp_path, 2, "server")
    results = [lines_of(tmp_path, rank)[2] for rank in range(2)]
    assert results[0]["digest"] == results[1]["digest"] and lines_of(tmp_path)[0]["dgc"] == 0.02


@pytest.mark.parametrize("aggregates", "01")
@pytest.mark.parametrize("kind", codecs.of_gradients())
def test_encoded_replay_of_two_workers(tmp_path, kind, aggregates):
    arguments = command(tmp_path, "p3_sync", "--optimizer", "sgd", "--compression", kind)
    status, output = run_p3(2, 2, arguments, P3_SLICE_ELEMENTS="501", P3_LOCAL_AGGREGATION=aggregates)
    assert status == 0, output
    assert_replayed(tmp_path, 2, "server")
    assert lines_of(tmp_path)[0]["compression"] == kind


@pytest.mark.parametrize("kind", codecs.of_gradients())
def test_an_encoded_weight_that_lacks_a_round_or_an_element_is_wrong(kind):
    ended = EncodedReplay.__new__(EncodedReplay)
    ended.iterations, ended._pushers, ended._compression = 3, [0, 1], codecs.codecs()[kind].complete()
    rounds = {}
    for ended.iterations in (2, 3):
        first, odd, last = (ended._expected(5, elements, True) for elements in (7, 7, 4))
        rounds[ended.iterations] = np.concatenate([first, -odd, last]).reshape(2, 9)
    assert ended.is_right(5, rounds[3], 7)
    assert not ended.is_right(5, rounds[2], 7) and not ended.is_right(5, -rounds[3], 7)
    for place in range(18):
        wrong = rounds[3].copy()
        wrong.flat[place] += 0.01
        assert not ended.is_right(5, wrong, 7)


@pytest.mark.parametrize("route", ["factors", "dense"])
def test_fully_connected_layers_may_be_real(tmp_path, route):
    options = ["--optimizer", "sgd", "--factors", route, "--batch", "4"]
    status, output = run_p3(2, 2, command(tmp_path, "p3_sync", *options, model="vgg19", size="0.001"))
    assert status == 0, output
    assert_replayed(tmp_path, 2, "server")
    header, _, result = lines_of(tmp_path)
    assert (header["factors"], header["batch"]) == (route, 4)
    assert result["digest"] == lines_of(tmp_path, 1)[2]["digest"]


def test_compressed_replay_notices_a_wrong_weight(tmp_path):
    program = """
import mxnet as mx
from p3.measure.replay import models
from p3.measure.replay.compressed import CompressedReplay
from p3.measure.replay.gpu_clock import Clock

tensors = (models.Tensor("weight", (3, 50_000)), models.Tensor("bias", (3,)))
model = models.Model("small", 1.0, (models.Layer("layer", tensors, 0.1, 0.2),))
replay = CompressedReplay(mx, "p3_sync", model, 0.001)
for _ in range(4):
    replay.iterate(model, 0.001, Clock())
assert replay.wrong_keys() == []
digest = replay.digest
replay._weights[0][2, 49_999] += 1  # of a slice that only the digest tells
assert replay.wrong_keys() == [] and replay.digest != digest
replay._weights[0][0, 7] += 1
replay._weights[1][2] += 1
assert replay.wrong_keys() == [0, 1]
print("noticed")
"""
    status, output = run([sys.executable, "-c", program])
    assert status == 0 and "noticed" in output, output


@pytest.mark.parametrize("store, launch", [
    ("p3_sync", lambda command: [run_p3(2, 2, command)]), ("dist_sync", lambda command: run_dist_sync(2, 2, command)),
])  # fmt: skip
def test_late_gradients_of_two_workers(tmp_path, store, launch):
    for status, output in launch(command(tmp_path, store, "--release", "end")):
        assert status == 0, output
    assert_replayed(tmp_path, 2, "none")
    assert lines_of(tmp_path)[0]["release"] == "end"


@pytest.mark.parametrize("model", [name for name in models.NAMES if name != "sockeye"])
def test_other_models(tmp_path, model):
    status, output = run(command(tmp_path, "p3_sync", model=model, size="0.002"))
    assert status == 0, output
    assert_replayed(tmp_path, 1, "none")


def test_output_has_a_stall_for_each_layer_and_iterations_that_join(tmp_path):
    status, output = run(command(tmp_path, "p3_sync"))
    assert status == 0 and "emulated computation of 0.02 s" in output
    header, iterations, _ = lines_of(tmp_path)
    assert header["bytes"] == sum(size for _, size in header["layers"]) == models.load("sockeye", 0.005).bytes
    for one in iterations:
        assert len(one["stalls"]) == len(header["layers"])
        assert one["stall_s"] == pytest.approx(sum(one["stalls"]), abs=1e-4)
    for one, following in zip(iterations, iterations[1:]):
        assert one["start"] + one["seconds"] == pytest.approx(following["start"])


def test_other_stores_run_in_an_mxnet_that_p3_has_not_touched(tmp_path):
    program = """
import sys
from p3.measure.replay import worker as replay
status = replay.main(sys.argv[1:])
import mxnet
print(status, "p3_sync" in mxnet.kvstore.KVStoreBase.kv_registry, "p3.mxnet.kvstore" in sys.modules)
"""
    arguments = arguments_of(tmp_path, "local")
    assert "0 False False" in run([sys.executable, "-c", program, *arguments])[1]
    arguments = arguments_of(tmp_path, "p3_sync")
    assert "0 True True" in run([sys.executable, "-c", program, *arguments])[1]


@pytest.mark.parametrize("arguments, words", [
    (["--size", "0"], "size is 0.0"),
    (["--store", "p3_async"], "p3_async updates at each push: it needs --optimizer sgd"),
    (["--compute", "-1"], "--compute -1.0: must be seconds"),
    (["--store", "p3_sync", "--dgc", "0.01"], "needs --optimizer sgd"),
    (["--store", "dist_sync", "--optimizer", "sgd", "--dgc", "0.01"], "--dgc is for stores of P3's"),
    (["--store", "p3_sync", "--factors", "auto"], "needs --optimizer sgd"),
    (["--store", "p3_sync", "--optimizer", "sgd", "--factors", "auto", "--release", "end"], "--factors is for vgg19"),
    (["--store", "p3_sync", "--optimizer", "sgd", "--dgc", "0.1", "--compression", "2bit"], "only one of --dgc"),
    (["--clip", "1"], "--clip is for p3_torch and ddp; the replay of --store p3_sync cannot clip"),
    (["--jitter", "-0.1"], "--jitter -0.1: must be from 0 to 2"),
    (["--iterations", "0"], "--iterations must be at least 1"),
])
def test_wrong_options_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        replay.main(["--store", "p3_sync", "--model", "vgg19", "--compute", "1", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_jitter_is_the_same_in_every_run_and_differs_by_worker():
    def some(seed, rank, jitter=0.3):
        made = factors(jitter, seed, rank)
        return [next(made) for _ in range(2000)]

    assert some(1, 0) == some(1, 0)
    assert some(1, 0) != some(1, 1) != some(2, 1)
    assert sum(some(1, 0)) / 2000 == pytest.approx(1, abs=0.03)
    assert set(some(1, 0, jitter=0.0)) == {1.0}


# Two tensors over several probes, in a store of this process alone.
SMALL = models.Model("small", 1.0, (
    models.Layer("first", (models.Tensor("weight", (3, 50000)), models.Tensor("bias", (3,))), 0.1, 0.2),
    models.Layer("second", (models.Tensor("weight", (90000,)),), 0.2, 0.5),
))  # fmt: skip


@pytest.fixture(params=["none", "sgd"])
def replayed(request):
    import mxnet as mx

    made = mxnet_replay.Replay(mx, "local", SMALL, request.param)
    clock = Clock()
    for _ in range(3):
        made.iterate(SMALL, 0.001, clock)
    assert made.wrong_keys() == []
    return made


class Clipped(probes.Probed):
    """Two workers have trained two keys of one and two slices for two steps, with gradients of norms above 2."""

    updates, num_workers, max_norm, iterations = "worker", 2, 2.0, 2
    elements = (10, probes.STRIDE + 1)


@pytest.mark.parametrize("changes, is_right", [
    ({}, True),
    ({"factor": 1 + 1e-7}, True),
    ({"factor": 1 + 2e-5}, False),
    ({"lacks_second_slice": True}, False),
    ({"elsewhere": 1e-6}, False),
])  # fmt: skip
def test_clipped_weights_are_right_but_for_rounding(changes, is_right):
    weight, replayed = np.zeros(probes.STRIDE + 1, "float32"), Clipped()
    for iteration in range(2):
        means = [probes.probe(key, iteration) + 0.5 for key in range(2)]
        squares = means[0] ** 2 + (1 if changes.get("lacks_second_slice") else 2) * means[1] ** 2
        factor = 2.0 / squares**0.5 * changes.get("factor", 1)
        assert factor < 1
        weight[:: probes.STRIDE] -= 2 * factor * means[1]
    weight[1] = changes.get("elsewhere", 0)
    assert replayed.is_right(1, weight) is is_right


def test_a_norm_that_is_not_reached_clips_nothing():
    replayed = Clipped()
    replayed.max_norm = 100.0
    total = -2 * sum(probes.probe(0, iteration) + 0.5 for iteration in range(2))
    assert replayed.is_right(0, np.array([total] + [0] * 9))


def test_lost_gradient_is_noticed(replayed):
    replayed._weights[1][0] = 0
    assert replayed.wrong_keys() == [1]


def test_shifted_value_is_noticed(replayed):
    values = replayed._weights[0].asnumpy()
    replayed._weights[0][:] = values.reshape(-1)[::-1].reshape(values.shape)
    assert replayed.wrong_keys() == [0]


def test_value_of_another_key_is_noticed(replayed):
    replayed._weights[2][:] = replayed._weights[0].reshape(-1)[:90000]
    assert replayed.wrong_keys() == [2]


def test_value_of_another_iteration_is_noticed(replayed):
    replayed.iterations += 1
    assert replayed.wrong_keys() == [0, 1, 2]


def test_nan_is_noticed(replayed):
    replayed._weights[2][5] = float("nan")
    assert replayed.wrong_keys() == [2]


class RecordingReplay:
    """Stands for a Replay whose weights are always there."""

    def __init__(self, release):
        self._release, self.calls = release, []

    def __getattr__(self, name):
        return lambda *layer: self.calls.append((name, *layer))


def test_iteration_walks_forward_then_backward_and_pushes_each_gradient_after_its_time():
    recorded = RecordingReplay("layer")
    assert mxnet_replay.Replay.iterate(recorded, SMALL, 0.0, Clock()) != []
    assert recorded.calls == [
        ("wait_for_weights", 0), ("wait_for_weights", 1),
        ("make_gradients", 1), ("push_gradients", 1), ("make_gradients", 0), ("push_gradients", 0),
        ("finish_iteration",),
    ]  # fmt: skip


def test_late_gradients_are_pushed_when_the_backward_pass_has_ended_in_forward_order():
    recorded = RecordingReplay("end")
    mxnet_replay.Replay.iterate(recorded, SMALL, 0.0, Clock())
    assert recorded.calls[2:] == [
        ("make_gradients", 1), ("make_gradients", 0), ("push_gradients", 0), ("push_gradients", 1),
        ("finish_iteration",),
    ]  # fmt: skip


class FakeTime:
    """A clock that moves only by sleeping, and oversleeps."""

    def __init__(self, oversleep):
        self.now, self._oversleep = 0.0, oversleep

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds + self._oversleep


def test_late_wake_ups_do_not_add_up_and_stalls_do(monkeypatch):
    fake = FakeTime(oversleep=0.01)
    monkeypatch.setattr(gpu_clock, "time", fake)
    clock = Clock()
    for _ in range(100):
        clock.compute(0.05)
    assert fake.now == pytest.approx(100 * 0.05 + 0.01)

    assert clock.stall(lambda: fake.sleep(1.0)) == pytest.approx(1.01)
    stalled_until = fake.now
    clock.compute(0.05)
    assert fake.now == pytest.approx(stalled_until + 0.05 + 0.01)
    assert clock.stall(lambda: None) == 0


def test_a_late_wake_up_is_not_what_the_caller_has_held_up(monkeypatch):
    fake = FakeTime(oversleep=0.01)
    monkeypatch.setattr(gpu_clock, "time", fake)
    clock = Clock()
    clock.compute(0.05)
    assert clock.hold_up() == 0
    fake.now += 1.0
    assert clock.hold_up() == pytest.approx(1.0)
    held_until = fake.now
    clock.compute(0.05)
    assert fake.now == pytest.approx(held_until - 0.01 + 0.05 + 0.01)
