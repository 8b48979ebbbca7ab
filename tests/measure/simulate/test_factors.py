"""Weights whose gradients travel as factors: what the simulator sends is what the rule that chooses them counts."""

import dataclasses
import json

import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

from p3 import cli
from p3.frontend.factors import Rule
from p3.measure.replay import models
from p3.measure.simulate import setting as settings
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Setting, links
from p3.placement import Placement
from p3.plan.factor_shape import FactorShape
from p3.plan.key_plan import SliceSize
from p3.plan.strategy import given as given_strategy

OUTPUTS, INPUTS = 300, 400
PACKETS = (1448 + 66) / 1448  # content and headers


def strategy_of(**entries):
    return given_strategy({"version": 2, "keys": entries})


FACTORS = strategy_of(fc={"route": "factors"})


def model_of(*tensors):
    return models.Model("made", 1.0, tuple(
        models.Layer(tensor.name, (tensor,), 1 / 3 / len(tensors), 2 / 3 / len(tensors)) for tensor in tensors
    ))  # fmt: skip


def setting_of(**changed):
    model = model_of(models.Tensor("fc", (OUTPUTS, INPUTS)))
    network = links(3, 50.0, burst_kib=0.0, ack_bytes=0.0, lossless=True)
    return dataclasses.replace(
        Setting(model, 0.3, network, strategy=FACTORS, batch=20, slice_elements=2000, iterations=6), **changed
    )


@hypothesis_settings(max_examples=40)
@given(
    workers=strategies.lists(strategies.integers(0, 2), min_size=1, max_size=5),
    servers=strategies.lists(strategies.integers(0, 2), min_size=1, max_size=4),
    adds_up=strategies.booleans(),
    batch=strategies.integers(1, 100),
)
def test_each_card_carries_what_the_placement_says(workers, servers, adds_up, batch):
    setting = setting_of(placed=(tuple(workers), tuple(servers)), local_aggregation=adds_up, batch=batch)
    placement = Placement.of(workers, servers, adds_up)
    shape = FactorShape(batch, OUTPUTS, INPUTS)
    cards = placement.cards(Rule(placement, SliceSize(2000, 3)).plan(shape, as_factors=True))
    machines = dict(zip([*workers, *servers], [*placement.workers, *placement.servers]))
    prediction = predict(setting)
    for host, (up, down) in enumerate(zip(prediction.up, prediction.down)):
        card = cards.get(machines.get(host), (0, 0))
        # Slices go to the servers in turn, not evenly; and who ends early has begun with another round.
        some = (1.5 * 2000 * 4 + 2 * shape.elements * 4) * len(workers) * PACKETS
        for link, wanted in zip((up, down), card):
            assert link["bytes"] / setting.iterations <= wanted * PACKETS + some, (host, card)
            assert link["bytes"] / setting.iterations >= wanted - some, (host, card)


def test_with_one_server_its_card_carries_exactly_that():
    prediction = predict(setting_of(servers=1))
    shape = FactorShape(20, OUTPUTS, INPUTS)
    placement = Placement.of([0, 1, 2], [0], True)
    card = placement.cards(Rule(placement, SliceSize(2000, 3)).plan(shape, as_factors=True))[0]
    for link, wanted in zip((prediction.up[0], prediction.down[0]), card):
        assert link["bytes"] / 6 == pytest.approx(wanted * PACKETS, rel=0.02)


def test_they_are_faster_where_the_rule_takes_them_and_slower_where_not():
    rule = Rule(Placement.one_of_each(3), SliceSize(2000, 3))
    most = rule.most_rows(OUTPUTS, INPUTS)
    for batch, pays in ((most // 2, True), (most * 7 // 5, False)):
        assert rule.pays(FactorShape(batch, OUTPUTS, INPUTS)) == pays
        slow = setting_of(batch=batch, network=links(3, 5.0), compute_s=0.03)
        dense = predict(dataclasses.replace(slow, strategy=strategy_of()))
        assert (predict(slow).mean_s < dense.mean_s) == pays


def test_the_bound_is_not_known():
    assert predict(setting_of()).bound_s is None


@pytest.mark.parametrize("changed, said", [
    ({"batch": None}, "'fc' has the route 'factors', of as many rows as a worker's batch: say how many"),
    ({"batch": 200}, "'fc' has factors that are larger than its gradient, with batches of 200 rows"),
    ({"clip": "norm"}, "'fc' has factors, of which the servers cannot tell the norm: 'wait' for them"),
    ({"strategy": given_strategy({"version": 2, "default": {"route": "factors"}})}, "for all keys: name the weights"),
    ({"model": model_of(models.Tensor("fc", (3, 3, 3)))}, "'fc' is no weight of a fully connected layer"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(changed, said):
    with pytest.raises(ValueError, match=said):
        settings.job(setting_of(**changed))


def test_the_commands_take_them(tmp_path, capsys):
    path, out = tmp_path / "s.json", tmp_path / "out.jsonl"
    model = ["--models", "vgg19", "--size", "0.001", "--compute", "1", "--hosts", "4", "--rate", "10mbit"]
    names = [tensor.name for layer in models.load("vgg19", 0.001).layers for tensor in layer.tensors
             if len(tensor.shape) == 2]  # fmt: skip
    assert names
    path.write_text(json.dumps({"version": 2, "keys": {names[0]: {"route": "factors"}}}))
    command = ["simulate", *model, "--strategy", str(path), "--out", str(out)]
    assert cli.main([*command, "--batch", "2"]) == 0
    assert json.loads(out.read_text().splitlines()[0])["batch"] == 2
    assert cli.main(command) == 1
    assert "of as many rows as a worker's batch: say how many" in capsys.readouterr().err
