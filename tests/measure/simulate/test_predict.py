"""Predictions: what the model of a job must never break, whatever is simulated, and what the options mean in it."""

import dataclasses
import random
import subprocess
import sys

import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
from processes import ROOT

from p3.errors import ConfigError
from p3.measure.compressions import Compression
from p3.measure.replay import gpu_clock, models
from p3.measure.simulate import setting as settings
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Network, Setting, links
from p3.plan.strategy import Cut, Strategy


def model_of(*layers):
    """Layers as (elements, share of the time); backward takes twice as long as forward."""
    total = 3 * sum(share for _, share in layers)
    return models.Model("made", 1.0, tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight", (1, elements)),), share / total, 2 * share / total)
        for number, (elements, share) in enumerate(layers)
    ))


def random_setting(seed):
    draw = random.Random(seed)
    sizes = [10, 5000, 40000, 150000]
    model = model_of(*((draw.choice(sizes), draw.uniform(0.1, 3)) for _ in range(draw.randint(1, 8))))
    hosts = draw.randint(1, 6)
    rates = [tuple(draw.uniform(5, 50) for _ in range(hosts)) for _ in range(2)]
    # A burst may undercut the bound by as much as it holds.
    network = Network(*rates, delay_ms=draw.uniform(0, 2), burst_kib=0, queue_ms=draw.uniform(40, 100),
                      lossless=draw.random() < 0.3, congestion=draw.choice(settings.CONGESTION),
                      segment_kib=draw.choice([2, 4, 8]))
    return Setting(
        model, draw.uniform(0, 0.5), network, priorities=draw.random() < 0.8, window_kib=draw.choice([0, 16, 100]),
        workers_per_host=draw.randint(1, 2), servers=draw.randint(1, 2 * hosts),
        slice_elements=draw.choice([3000, 20000, 200000]), local_aggregation=draw.random() < 0.5, iterations=16,
        warmup=0, release=draw.choice(models.RELEASES), **random_ways(draw),
    )  # fmt: skip


CODECS = ("int8", "bf16-1bit", "exact-fp16", "lowrank:1")


def random_ways(draw):
    """A compression, or a strategy with codecs; and servers that every job above has, in some turn."""
    compression = draw.choice([None, None, *map(Compression.of, CODECS)])
    if draw.random() < 0.5:
        return {"compression": compression}
    own = {"weight": Cut(slice=5000)} if draw.random() < 0.3 else {}
    strategy = Strategy(Cut((0,), draw.choice([None, 7000])), own)
    if compression is None and draw.random() < 0.5:
        ways = [Compression.of(draw.choice(CODECS)).ways for _ in range(2)]
        strategy = strategy._replace(default=strategy.default._replace(codec=ways[0]),
                                     keys={**own, "layer1": Cut(codec=ways[1])})  # fmt: skip
    return {"compression": compression, "strategy": strategy}


SHAPES = {"bias": (300,), "weight": (500, 400), "other": (200, 100)}


@hypothesis_settings(max_examples=60, derandomize=True)
@given(strategies.fixed_dictionaries({
    name: strategies.sampled_from([None, *CODECS, "topk:0.1:4", "dgc:0.01"]) for name in SHAPES
}))  # fmt: skip
def test_each_key_travels_as_a_strategy_says_and_as_if_all_did(codecs):
    """A codec that a strategy has for a key takes the bytes that the same one of all keys takes of it."""
    tensors = tuple(models.Tensor(name, shape) for name, shape in SHAPES.items())
    model = models.Model("made", 1.0, (models.Layer("layer", tensors, 1 / 3, 2 / 3),))
    plain = Setting(model, 0.1, links(2, 50.0), slice_elements=30000)
    own = {name: Cut(codec=Compression.of(text).ways) for name, text in codecs.items() if text}
    made = settings.job(dataclasses.replace(plain, strategy=Strategy(keys=own)))["slices"]
    for number, text in enumerate(codecs[name] for name in SHAPES):
        of_all = dataclasses.replace(plain, compression=text and Compression.of(text))
        expected = [one for one in settings.job(of_all)["slices"] if one["key"] == number]
        told = ("push_bytes", "value_bytes", "layer")
        assert [[one[field] for field in told] for one in made if one["key"] == number] == [
            [one[field] for field in told] for one in expected
        ]  # fmt: skip
    if len(set(codecs.values())) == 1 and codecs["bias"]:
        of_all = dataclasses.replace(plain, compression=Compression.of(codecs["bias"]))
        by_default = dataclasses.replace(plain, strategy=Strategy(Cut(codec=of_all.compression.ways)))
        assert predict(of_all) == predict(by_default)


def test_a_strategy_has_partitions_of_rows_and_what_does_not_fit_a_key_is_refused():
    tensors = (models.Tensor("table", (1000, 10)), )
    model = models.Model("made", 1.0, (models.Layer("words", tensors, 1 / 3, 2 / 3),))
    setting = Setting(model, 0.1, links(2, 50.0), sparse={"words": 0.1})

    def of(**cut):
        return dataclasses.replace(setting, strategy=Strategy(keys={"table": Cut(**cut)}))

    whole, parts = (settings.job(one)["slices"] for one in (setting, of(partitions=5)))
    assert len(whole) == 2 and len(parts) == 5
    payload = [sum(one["push_bytes"] for one in made) - len(made) * settings._OVERHEAD.slice_bytes
               for made in (whole, parts)]  # fmt: skip
    assert payload[0] == pytest.approx(payload[1]) == 4000
    with pytest.raises(ValueError, match="a slice for key 'table', whose gradients are sparse"):
        predict(of(slice=10))


@pytest.mark.parametrize("changes, codec, words", [
    ({"clip": "norm"}, "lowrank:2", "'table' has lowrank:2, with which the servers cannot tell the norm"),
    ({"workers_per_host": 2}, "dgc:0.01", "'table' has dgc:0.01, which the workers of a host do not add up"),
    ({"groups": (2,)}, "int8", "'table' has int8, and groups of 2 are not simulated with that"),
    ({"compression": Compression.of("int4")}, "int8", "the script has the compression .*int4"),
])  # fmt: skip
def test_a_codec_of_a_key_that_does_not_go_with_the_job_is_refused(changes, codec, words):
    tensors = (models.Tensor("table", (1000, 10)),)
    model = models.Model("made", 1.0, (models.Layer("words", tensors, 1 / 3, 2 / 3),))
    strategy = Strategy(keys={"table": Cut(codec=Compression.of(codec).ways)})
    with pytest.raises((ValueError, ConfigError), match=words):
        predict(dataclasses.replace(Setting(model, 0.1, links(2, 50.0), strategy=strategy), **changes))


@pytest.mark.parametrize("seed", range(120))
def test_no_simulation_is_faster_than_the_bound(seed):
    setting = random_setting(seed)
    prediction = predict(setting)
    # The traffic of the last iteration may still be under way when the last worker has ended.
    least_s = (setting.iterations - 1) * prediction.bound_s
    assert setting.iterations * prediction.mean_s >= least_s * (1 - 1e-9), setting


@strategies.composite
def clipped_settings(draw):
    """Of any shape, without bursts, by which a simulation may undercut the bound; half of them on networks that take
    little more than the bytes, so that a bound that is too high is found."""
    ideal = draw(strategies.booleans())
    some = draw(strategies.lists(
        strategies.tuples(strategies.sampled_from([0, 10, 5000, 40000, 150000]), strategies.integers(0, 9),
                          strategies.integers(0, 9)),
        min_size=1, max_size=5,
    ).filter(lambda layers: any(size for size, _, _ in layers)))  # fmt: skip
    total = sum(forward + backward for _, forward, backward in some)
    model = models.Model("drawn", 1.0, tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight", (size,)),) if size else (),
                     forward / max(1, total), backward / max(1, total))
        for number, (size, forward, backward) in enumerate(some)
    ))  # fmt: skip
    hosts = draw(strategies.integers(1, 5))
    rates = strategies.lists(strategies.floats(5, 50), min_size=hosts, max_size=hosts)
    if ideal:
        network = links(hosts, 20.0, burst_kib=0, lossless=True, congestion="none", ack_bytes=0, segment_kib=2)
    else:
        network = Network(tuple(draw(rates)), tuple(draw(rates)), delay_ms=draw(strategies.integers(0, 20)),
                          burst_kib=0, queue_ms=100, lossless=draw(strategies.booleans()),
                          congestion=draw(strategies.sampled_from(settings.CONGESTION)))  # fmt: skip
    compute_s = draw(strategies.sampled_from([0.0, 0.05, 0.2, 0.5])) if total else 0.0
    return Setting(
        model, compute_s, network, clip="norm" if ideal else draw(strategies.sampled_from(["norm", "wait"])),
        pushes_first=ideal or draw(strategies.booleans()), servers=draw(strategies.integers(1, 2 * hosts)),
        workers_per_host=draw(strategies.integers(1, 2)), local_aggregation=draw(strategies.booleans()),
        slice_elements=draw(strategies.sampled_from([3000, 20000, 200000])), iterations=20, warmup=0,
        release=draw(strategies.sampled_from(models.RELEASES)),
    )  # fmt: skip


@hypothesis_settings(max_examples=150, derandomize=True)
@given(clipped_settings())
def test_no_simulation_with_clipping_is_faster_than_its_bound(setting):
    prediction = predict(setting)
    plain = predict(dataclasses.replace(setting, clip="none"))
    assert prediction.bound_s >= plain.bound_s
    least_s = (setting.iterations - 1) * prediction.bound_s
    assert setting.iterations * prediction.mean_s >= least_s * (1 - 1e-9)


def test_clipping_costs_nothing_if_pushes_go_first_and_else_as_much_as_a_wait_for_all_values():
    setting = Setting(models.load("vgg19", 0.03), 4.0, links(2, 40.0))

    def seconds(**changes):
        return predict(dataclasses.replace(setting, **changes)).mean_s

    plain, wait = seconds(), seconds(clip="wait")
    assert wait > 1.15 * plain
    assert seconds(clip="norm", pushes_first=False) == pytest.approx(wait, rel=0.02), "they share the links evenly"
    assert seconds(clip="norm", pushes_first=True) == seconds(clip="norm") <= 1.005 * plain
    assert seconds(clip="wait", pushes_first=True) > 1.1 * plain


def test_table_of_the_documentation_is_what_the_simulator_gives():
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- clipping -->\n")[2].partition("\n<!-- /clipping -->")[0].splitlines()[2:]
    assert len(rows) == 4
    for row in rows:
        name, hosts, *told, bound_s = (cell.strip() for cell in row.strip("|").split("|"))
        setting = Setting(models.load(name.strip("`")), 4.0, links(int(hosts), 200.0))
        found = [
            predict(dataclasses.replace(setting, clip=clip, pushes_first=pushes_first))
            for pushes_first in (False, True)
            for clip in settings.CLIPPING
        ]
        assert told == ["%.3f" % one.mean_s for one in found]
        assert {"%.3f" % one.bound_s for one in found} == {bound_s}


def test_clipping_without_a_network_takes_no_time():
    setting = Setting(model_of((40000, 1), (10, 2)), 0.5, links(1, 10.0))
    assert {predict(dataclasses.replace(setting, clip=clip)).mean_s for clip in settings.CLIPPING} == {
        predict(setting).mean_s
    }


def test_a_servers_part_of_the_norm_has_a_header_and_16_bytes():
    job = settings.job(Setting(model_of((10, 1)), 1.0, links(2, 10.0), clip="norm"))
    assert (job["clipping"], job["norm_bytes"], job["pushes_first"]) == ("norm", 96, True)


def test_same_setting_gives_the_same_bits():
    setting = dataclasses.replace(random_setting(7), jitter=0.2)
    assert predict(setting) == predict(setting)
    assert predict(setting).mean_s != predict(dataclasses.replace(setting, seed=2)).mean_s


def test_jitter_is_that_of_the_replay():
    setting = Setting(model_of((10, 1)), 1.0, links(2, 10.0), jitter=0.3, seed=5, iterations=3, warmup=1)
    factors = gpu_clock.factors(0.3, 5, 1)
    assert settings.job(setting)["factors"][1] == [next(factors) for _ in range(4)]


def test_straggler_holds_up_all():
    setting = Setting(model_of((10, 1)), 1.0, links(3, 100.0), stragglers={1: 2.0})
    assert predict(setting).mean_s == pytest.approx(2.0, rel=0.01)


def test_a_slow_link_is_slow_for_all():
    model = model_of((1000000, 1))
    equal = predict(Setting(model, 0.1, links(3, 100.0)))
    slow = predict(Setting(model, 0.1, links(3, 100.0, 100.0, 50.0)))
    assert slow.mean_s > 1.5 * equal.mean_s


def test_slices_go_round_robin_to_the_servers_in_forward_order():
    setting = Setting(model_of((100, 1), (250, 1)), 1.0, links(2, 10.0), slice_elements=100, servers=3)
    slices = settings.job(setting)["slices"]
    assert [(one["layer"], one["server"], one["push_bytes"]) for one in slices] == [
        (0, 0, 480), (1, 1, 480), (1, 2, 480), (1, 0, 280)
    ]  # fmt: skip


def test_sparse_layer_sends_the_rows_that_a_step_touches_and_their_union_comes_back():
    setting = Setting(model_of((100000, 1)), 1.0, links(4, 10.0), sparse={"layer0": 0.1})
    slices = settings.job(setting)["slices"]
    assert [one["server"] for one in slices] == [0, 1, 2, 3]
    assert sum(one["push_bytes"] - 80 for one in slices) == pytest.approx(0.1 * 400000)
    assert sum(one["value_bytes"] - 80 for one in slices) == pytest.approx((1 - 0.9**4) * 400000)
    prediction = predict(setting)
    assert prediction.bound_s is None and prediction.mean_s < predict(dataclasses.replace(setting, sparse={})).mean_s


def test_ddp_waits_for_the_ring_after_the_backward_pass():
    # Two hosts: each sends the whole model, at 12.5 MB/s less headers; computation hides nothing of one layer.
    setting = Setting(model_of((1000000, 1)), 1.0, links(2, 100.0, delay_ms=0.0), scheme="ddp")
    expected = 1.0 + (4000000 + 20 * 80) * (1 + 66 / 1448) / 12.5e6
    assert predict(setting).mean_s == pytest.approx(expected, rel=1e-9)


def test_slices_of_a_codec_have_its_bytes_both_ways():
    tensors = (models.Tensor("weight", (100, 300)), models.Tensor("bias", (100,)))
    model = models.Model("made", 1.0, (models.Layer("layer", tensors, 1 / 3, 2 / 3),))
    setting = Setting(model, 1.0, links(2, 10.0), slice_elements=20_000)

    def sent(text):
        slices = settings.job(dataclasses.replace(setting, compression=Compression.of(text)))["slices"]
        return [(one["push_bytes"] - 80, one["value_bytes"] - 80) for one in slices]

    # Blocks of 128 elements, with a bfloat16 each. What comes back of a vector is whole.
    assert sent("int8") == [(20_000 + 157 * 2,) * 2, (10_000 + 79 * 2,) * 2, (102, 400)]
    assert sent("bf16-exact") == [(40_000, 80_000), (20_000, 40_000), (200, 400)]
    # Two thin matrices, of 100 x 4 and 300 x 4 elements.
    assert sent("lowrank") == [(1600,) * 2, (4800,) * 2, (400,) * 2]
    assert sent("exact") == [(80_000,) * 2, (40_000,) * 2, (400,) * 2]


def test_with_half_the_bytes_an_iteration_that_only_sends_takes_half_as_long():
    model = models.Model("made", 1.0, (models.Layer("layer", (models.Tensor("weight", (1000, 1000)),), 1 / 3, 2 / 3),))
    setting = Setting(model, 0.0, links(2, 100.0, burst_kib=0, delay_ms=0.0), slice_elements=10_000)
    half = dataclasses.replace(setting, compression=Compression.of("bf16"))
    assert predict(half).mean_s == pytest.approx(predict(setting).mean_s / 2, rel=0.02)
    assert predict(half).bound_s == pytest.approx(predict(setting).bound_s / 2, rel=0.02)
    assert predict(half).mean_s >= predict(half).bound_s


def test_ddp_with_its_half_precision_hook_sends_half_the_bytes_in_as_many_buckets():
    setting = Setting(model_of((500000, 1), (500000, 1)), 1.0, links(2, 100.0, delay_ms=0.0), scheme="ddp", bucket_mb=1)
    half = dataclasses.replace(setting, compression=Compression.of("fp16"))
    exact, halved = predict(setting), predict(half)
    assert [link["segments"] for link in halved.up] == [link["segments"] for link in exact.up]
    assert halved.up[0]["bytes"] == pytest.approx(exact.up[0]["bytes"] / 2, rel=0.01) and halved.mean_s < exact.mean_s


def test_whole_layers_go_to_one_server_and_large_ones_to_all_evenly():
    setting = Setting(model_of((999_999, 1), (1_000_001, 1)), 1.0, links(2, 100.0), scheme="layers")
    slices = settings.job(setting)["slices"]
    assert [(one["layer"], one["server"], one["push_bytes"] - 80) for one in slices] == [
        (0, 0, 4 * 999_999), (1, 1, 4 * 500_001), (1, 0, 4 * 500_000)
    ]  # fmt: skip


def test_whole_layers_first_come_first_served_hide_less():
    # The large layer's 4 MB take 0.33 s on each link, in front of the small one's, which the forward pass needs first.
    setting = Setting(model_of((20000, 1), (20000, 1), (1000000, 1)), 0.5, links(2, 100.0))
    assert predict(dataclasses.replace(setting, scheme="layers")).mean_s > 1.1 * predict(setting).mean_s


def test_late_gradients_hide_behind_the_forward_pass_alone():
    # All 4 MB cross each link once, in 1.68 s, of which the first forward step hides 1 s.
    network = links(2, 20.0, burst_kib=0, congestion="none", lossless=True)
    setting = Setting(model_of((1000, 1), (1000000, 1)), 6.0, network, slice_elements=10000)
    in_turn, late = predict(setting), predict(dataclasses.replace(setting, release="end"))
    assert in_turn.mean_s == pytest.approx(6.0, rel=0.01)
    assert late.bound_s <= late.mean_s < 1.1 * late.bound_s and late.bound_s == pytest.approx(5.0 + 1.68, rel=0.01)


def test_ddp_reduces_late_gradients_behind_the_backward_pass():
    setting = Setting(model_of((500000, 1), (500000, 1)), 1.0, links(2, 100.0), scheme="ddp", bucket_mb=1)
    in_turn, late = predict(setting), predict(dataclasses.replace(setting, release="end"))
    assert late.mean_s == pytest.approx(in_turn.mean_s + 0.168, abs=0.01)


def test_priorities_hide_what_a_queue_in_order_of_arrival_does_not():
    setting = Setting(models.load("vgg19", 0.03), 1.0, links(2, 140.0))
    without = predict(dataclasses.replace(setting, priorities=False)).mean_s
    assert predict(setting).mean_s < 0.95 * without


def test_1024_hosts_come_to_an_end():
    setting = Setting(models.load("vgg19", 0.001), 1.0, links(1024, 100.0), iterations=1, warmup=1)
    prediction = predict(setting)
    assert len(prediction.up) == 1024 and prediction.mean_s >= prediction.bound_s


@pytest.mark.parametrize("changes, words", [
    ({"scheme": "allreduce"}, "no scheme is called 'allreduce'"),
    ({"sparse": {"layer9": 0.1}}, "made has no layer 'layer9'; its layers are layer0"),
    ({"sparse": {"layer0": 2.0}}, "a step touches 2.0 of 'layer0'"),
    ({"stragglers": {4: 2.0}}, "worker 4 is a straggler, but the workers are 0 to 1"),
    ({"network": Network((1.0,), ())}, "1 rates up and 0 down"),
    ({"network": Network((1.0, 0.0), (1.0, 1.0))}, "the uplink of host 1 has a rate of 0"),
    ({"slice_elements": 0}, "a slice has at least one element"),
    ({"scheme": "layers", "compression": Compression.of("fp16")}, "'layers' is not known with compression fp16"),
    ({"scheme": "ddp", "compression": Compression.of("int8")}, "'ddp' is not known with compression int8"),
    ({"compression": Compression.of("powersgd")}, "'p3' is not known with compression powersgd"),
    ({"clip": "norm", "compression": Compression.of("lowrank")}, "with lowrank the servers cannot tell the norm"),
    ({"clip": "value"}, "clip is 'value'; it must be one of none, norm, wait"),
    ({"release": "late"}, "release is 'late'; it must be one of layer, end"),
    ({"warmup": 1, "iterations": 0}, "no iteration is left after the warm-up"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, words):
    setting = Setting(model_of((10, 1)), 1.0, links(2, 10.0))
    with pytest.raises(ValueError, match=words):
        predict(dataclasses.replace(setting, **changes))


def test_training_does_not_load_the_simulator():
    code = (
        "import sys, p3, p3.cli, p3.worker.session, p3.server.process\n"
        "p3.cli.parser(['run', 'exec', 'join'])\n"
        "assert not [name for name in sys.modules if 'simulat' in name], sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
    assert b"simulator" not in (ROOT / "p3" / "libp3core.so").read_bytes()
