"""Groups of hosts with shared leaders, simulated: what crosses each card, and how near the bound it is."""

import dataclasses
import random
from collections import Counter

import pytest

from p3.measure._simulator import SPANS
from p3.measure.compressions import Compression
from p3.measure.replay import models
from p3.measure.simulate import setting as settings
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Network, Setting, links
from p3.plan.strategy import Cut, Strategy

PUSH, VALUE = SPANS.index("push"), SPANS.index("value")


def model_of(*layers):
    """Layers as (elements, share of the time); backward takes twice as long as forward."""
    total = 3 * sum(share for _, share in layers)
    return models.Model("made", 1.0, tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight", (elements,)),), share / total, 2 * share / total)
        for number, (elements, share) in enumerate(layers)
    ))


def small(hosts, *groups, **changes):
    return Setting(model_of((5000, 1), (70_000, 2), (30_000, 1)), 0.2, links(hosts, 40.0), slice_elements=3000,
                   groups=groups, **changes)


def random_setting(seed):
    draw = random.Random(seed)
    groups = draw.choice([(2,), (3,), (4,), (2, 2), (2, 3), (3, 1, 2)])
    hosts = draw.randint(1, 2)
    for size in groups:
        hosts *= size
    model = model_of(*((draw.choice([10, 5000, 40000]), draw.uniform(0.1, 3)) for _ in range(draw.randint(1, 6))))
    rates = [tuple(draw.uniform(5, 50) for _ in range(hosts)) for _ in range(2)]
    # A burst may undercut the bound by as much as it holds.
    network = Network(*rates, delay_ms=draw.uniform(0, 2), burst_kib=0, queue_ms=draw.uniform(40, 100),
                      lossless=draw.random() < 0.3, congestion=draw.choice(settings.CONGESTION))
    return Setting(
        model, draw.uniform(0, 0.5), network, groups=groups, priorities=draw.random() < 0.8,
        workers_per_host=draw.randint(1, 2), servers=draw.randint(1, 2 * hosts), clip=draw.choice(settings.CLIPPING),
        slice_elements=draw.choice([3000, 20000, 200000]), iterations=12, warmup=0,
        release=draw.choice(models.RELEASES), jitter=draw.choice([0, 0.2]),
        strategy=Strategy(Cut((0,))) if draw.random() < 0.2 else Strategy(),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_no_simulation_is_faster_than_the_bound(seed):
    setting = dataclasses.replace(random_setting(seed), jitter=0)
    prediction = predict(setting)
    least_s = (setting.iterations - 1) * prediction.bound_s
    assert setting.iterations * prediction.mean_s >= least_s * (1 - 1e-9), setting


@pytest.mark.parametrize("hosts, groups", [(5, (1,)), (6, (1, 1)), (6, (6,)), (6, (1, 6))])
def test_groups_of_one_or_of_all_change_no_bit(hosts, groups):
    for seed in range(10):
        setting = random_setting(seed)
        rates = tuple(random.Random(seed).uniform(5, 50) for _ in range(hosts))
        network = dataclasses.replace(setting.network, up_mbit=rates, down_mbit=rates)
        # The norm comes from the server, and the values behind it from who leads all, on another connection.
        clip = "wait" if setting.clip == "norm" and hosts in groups else setting.clip
        setting = dataclasses.replace(setting, network=network, servers=hosts, groups=(), clip=clip)
        assert predict(dataclasses.replace(setting, groups=groups)) == predict(setting), seed


def test_same_setting_gives_the_same_bits():
    setting = random_setting(5)
    assert predict(setting) == predict(setting)


def sent_by_formula(setting):
    """(pushes, values) of each host in bytes: from the digits of its number and of the server's host's."""
    hosts = setting.network.hosts
    sizes, weight = [], 1
    for size in setting.groups:
        sizes.append((weight, size))
        weight *= size
    sizes.append((weight, hosts // weight))
    pushes, values = [0.0] * hosts, [0.0] * hosts
    for one in settings.job(setting)["slices"]:
        home = setting.server_hosts[one["server"]]
        for host in range(hosts):
            pushes[host] += one["push_bytes"] if host != home else 0
            for weight, size in sizes:  # it leads those that share all digits but this, and lower ones
                if (weight, size) == sizes[-1] and host != home:
                    break
                if host // weight % size != home // weight % size:
                    break
                values[host] += (size - 1) * one["value_bytes"]
    return pushes, values


@pytest.mark.parametrize("hosts, groups", [(6, (2,)), (9, (3,)), (12, (2, 3)), (16, (4,)), (24, (2, 3, 2)), (8, (8,))])
def test_cards_carry_what_the_formula_says(hosts, groups):
    setting = small(hosts, *groups, traced_iterations=2, warmup=1, iterations=1)
    prediction = predict(setting)
    slices = settings.job(setting)["slices"]
    pushes, values = [0.0] * hosts, [0.0] * hosts
    pushed, told = Counter(), Counter()
    for span in prediction.spans:
        if span["round"] > 0:
            continue  # of which not all need have arrived at the end
        if span["kind"] == PUSH:
            pushes[span["node"]] += slices[span["item"]]["push_bytes"]
            pushed[span["item"], span["node"]] += 1
        elif span["kind"] == VALUE:
            values[span["node"]] += slices[span["item"]]["value_bytes"]
            told[span["item"], span["peer"]] += 1
    assert (pushes, values) == tuple(map(pytest.approx, sent_by_formula(setting)))
    # Nothing is lost or sent twice: every host but the server's pushes each slice once, and gets it once.
    elsewhere = {(number, host): 1 for number, one in enumerate(slices) for host in range(hosts)
                 if host != setting.server_hosts[one["server"]]}  # fmt: skip
    assert pushed == told == elsewhere


def test_what_leaves_all_cards_comes_to_them():
    network = links(12, 40.0, lossless=True, congestion="none")
    prediction = predict(small(12, 2, 3, iterations=6, warmup=1))
    lossless = predict(dataclasses.replace(small(12, 2, 3, iterations=6, warmup=1), network=network))
    for one in (prediction, lossless):
        up, down = (sum(link["bytes"] for link in links) for links in (one.up, one.down))
        assert down == pytest.approx(up, rel=0.02), "but for what is under way when the warm-up ends, and at the end"


def test_a_straggler_holds_up_all_whatever_its_place():
    for worker in range(6):
        assert predict(small(6, 2, stragglers={worker: 4.0})).mean_s == pytest.approx(0.8, rel=0.05)


def test_groups_come_near_the_bound():
    setting = Setting(models.load("vgg19", 0.03), 4.0, links(32, 40.0), groups=(8,), iterations=3)
    prediction = predict(setting)
    assert 0 <= prediction.above_bound < 0.05
    assert prediction.bound_s == pytest.approx(predict(dataclasses.replace(setting, groups=())).bound_s, rel=0.03)


@pytest.mark.parametrize("changes, words", [
    ({"groups": (4,)}, "groups of 4 need a multiple of 4 hosts; there are 6"),
    ({"groups": (0,)}, "a group has at least one host"),
    ({"scheme": "layers"}, "groups of 2 are not simulated with scheme 'layers'"),
    ({"scheme": "ddp"}, "groups of 2 are not simulated with scheme 'ddp'"),
    ({"compression": Compression.of("fp16")}, "groups of 2 are not simulated with compression fp16"),
    ({"sparse": {"layer0": 0.1}}, "groups of 2 are not simulated with sparse layers"),
    ({"workers_per_host": 2, "local_aggregation": False}, "not simulated with hosts that push several times, or never"),
    ({"placed": ((0, 1, 2), (0, 1))}, "not simulated with hosts that push several times, or never"),
])  # fmt: skip
def test_what_is_not_simulated_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        predict(dataclasses.replace(small(6, 2), **changes))


def test_workers_of_a_host_push_as_one_and_wait_for_clipping():
    prediction = predict(small(6, 2, 3, workers_per_host=2, clip="wait"))
    assert prediction.mean_s >= prediction.bound_s * (1 - 1e-9)
