"""Strategies that choose more than servers and slices: the bits of the script's own options, and refusals by name."""

import json

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.errors import ConfigError  # noqa: E402
from torch_steps import sgd, step  # noqa: E402

INT8 = {"type": "int8"}
SOME = {"up": {"type": "2bit", "threshold": 0.01}, "down": "bf16"}


def lossy(default=None, **keys):
    return {"version": 2, "allow_lossy": True, "default": default or {}, "keys": keys}


def run(tmp_path, *options, of_job=None, check="1", **variables):
    if of_job is not None:
        (tmp_path / "job.json").write_text(json.dumps(of_job))
        variables["P3_STRATEGY"] = str(tmp_path / "job.json")
    command = jobs.python("torch_planned.py", *map(json.dumps, options))
    return jobs.run_p3(2, 2, command, P3_CHECK=check, **variables)


def result(status, output):
    assert status == 0, output
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"digest"' in line))


@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])  # updated by the servers, and by the workers
def test_a_codec_in_a_strategy_is_that_of_the_script(tmp_path, optimizer):
    plain, encoded, own = (result(*run(tmp_path, {"optimizer": optimizer, **options})) for options in (
        {}, {"compression": "int8"}, {"groups": [{"compression": SOME}, {}], "compression": None},
    ))  # fmt: skip
    by_job = result(*run(tmp_path, {"optimizer": optimizer}, of_job=lossy({"codec": "int8"})))
    assert by_job == encoded and by_job["digest"] != plain["digest"]
    assert by_job["axes"]["0.weight"][:2] == [INT8, INT8]
    assert by_job["axes"]["values"][:2] == [{}, {}], "of P3's own keys none is compressed"
    one = lossy(None, **{"0.weight": {"codec": SOME}, "0.bias": {"codec": SOME}})
    by_script = result(*run(tmp_path, {"optimizer": optimizer, "strategy": one}))
    assert by_script == own and by_script["digest"] not in (plain["digest"], encoded["digest"])


def test_an_entry_takes_a_key_out_of_what_the_default_says(tmp_path):
    exact = lossy({"codec": "int8"}, **{"1.weight": {"codec": None}})
    axes = result(*run(tmp_path, {}, of_job=exact))["axes"]
    assert (axes["0.weight"][0], axes["1.weight"][:2]) == (INT8, [{}, {}])


def test_what_the_script_says_as_well_is_said_once(tmp_path):
    both = result(*run(tmp_path, {"compression": "int8", "strategy": lossy({"codec": "int8"})}))
    assert both == result(*run(tmp_path, {"compression": "int8"}))


def test_a_contradiction_names_both(tmp_path):
    of_job = lossy(None, **{"1.weight": {"codec": "bf16"}})
    status, output = run(tmp_path, {"compression": "int8"}, of_job=of_job)
    assert status != 0
    assert 'job.json: the script has the compression {"up": {"type": "int8"}, "down": {"type": "int8"}} for' in output
    assert "key '1.weight', and the strategy the codec {\"up\": {\"type\": \"bf16\"}" in output


@pytest.mark.parametrize("strategy, more, problem", [
    (lossy(None, **{"0.weight": {"codec": "dgc"}}), {"max_grad_norm": 1.0},
     r"parameter 0.weight \(for codec see the strategy in the script\): dgc and .* exclude each other"),
    (lossy({"codec": "int9"}), {}, "codec of \"default\" is 'int9'; compression"),
    ({"version": 2, "default": {"codec": "int8"}}, {}, "codec of \"default\" is 'int8', with which training differs"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name_and_leaves_everything_as_it_was(model, strategy, more, problem):
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=problem):
        p3.torch.DistributedOptimizer(optimizer, model, strategy=strategy, **more)
    p3.torch.DistributedOptimizer(optimizer, model, **more)
    step(model, optimizer)
    optimizer.release()


FACTORS = {"version": 2, "default": {"route": "factors"}}


def test_a_route_in_a_strategy_is_that_of_the_script(tmp_path):
    dense, own = (result(*run(tmp_path, {"factors": {"route": route}})) for route in ("auto", "factors"))
    names = {name for name in own["axes"] if own["axes"][name][3] == 2}
    assert names == {"%d.weight (factors)" % layer for layer in (0, 1)}, own["axes"]  # the last one's are no smaller
    by_job = result(*run(tmp_path, {"factors": {"batch_size": 4}}, of_job=FACTORS))
    assert by_job == own and by_job["digest"] != dense["digest"]


def test_an_entry_takes_a_layer_out_of_factors():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    p3.torch.factors(model)
    optimizer = sgd(model)
    strategy = {**FACTORS, "keys": {"1.weight": {"route": "dense"}}}
    p3.torch.DistributedOptimizer(optimizer, model, strategy=strategy)
    model(torch.ones(2, 8)).sum().backward()
    assert [layer.weight._p3_layer.has_factors for layer in model] == [True, False]
    optimizer.step()
    optimizer.release()


@pytest.mark.parametrize("asked, own, problem", [
    ({"route": "dense"}, "factors", "the script has the route 'dense' for key '0.weight', and the strategy 'factors'"),
    ({"batch_size": 1}, "factors", "0.weight: its gradients leave dense by now .for route see .*Say route='factors'"),
    (None, "factors", "the route 'factors' for key '0.weight', which is of no layer that may send them"),
])  # fmt: skip
def test_a_route_that_cannot_be_is_refused_by_name(model, asked, own, problem):
    if asked is not None:
        p3.torch.factors(model, **asked)
    strategy = {"version": 2, "keys": {"0.weight": {"route": own}}}
    with pytest.raises(ConfigError if "by now" not in problem else ValueError, match=problem):
        p3.torch.DistributedOptimizer(sgd(model), model, strategy=strategy)


def test_factors_of_a_strategy_and_staleness_exclude_each_other(model):
    p3.torch.factors(model)
    with pytest.raises(ValueError, match="staleness and factors .0.weight. exclude each other"):
        p3.torch.DistributedOptimizer(sgd(model), model, staleness=1, strategy=FACTORS)


def test_staleness_in_a_strategy_is_that_of_the_script(tmp_path):
    of_job = lossy({"staleness": 2}, **{"0.weight": {"staleness": 0}})
    status, output = run(tmp_path, {}, of_job=of_job, check="0")
    axes = result(status, output)["axes"]
    assert {name: rounds for name, (_, _, rounds, _) in axes.items() if name[0] in "012"} == {
        "0.weight": 0, "0.bias": 2, "1.weight": 2, "1.bias": 2, "2.weight": 2, "2.bias": 2}  # fmt: skip
    assert axes["steps"][2] == 0 and "staleness 0 or 2: each gradient updates the weights at once" in output


@pytest.mark.parametrize("more, problem", [
    ({"staleness": 1}, "in the script: the script has staleness 1 for key '0.weight', and the strategy 3"),
    ({"synchronous": True}, r"0.weight \(for staleness see the strategy in the script\): staleness and sums handed to"),
    ({"staleness": -1}, "staleness is -1; it must be"),
])  # fmt: skip
def test_staleness_that_cannot_be_is_refused_by_name(model, more, problem):
    strategy = lossy(None, **{"0.weight": {"staleness": 3}})
    with pytest.raises(ValueError, match=problem):
        p3.torch.DistributedOptimizer(sgd(model), model, strategy=strategy, **more)


def test_local_steps_have_their_own_codec(model):
    with pytest.raises(ValueError, match="local steps and what a strategy chooses .*.codec of in the script. exclude"):
        p3.torch.LocalSteps(sgd(model), model, every=2, strategy=lossy({"codec": "int8"}))


def test_only_servers_and_slices_change_while_a_job_trains(model):
    optimizer = sgd(model)
    p3.torch.DistributedOptimizer(optimizer, model, synchronous=True, strategy=lossy({"codec": "bf16"}))
    step(model, optimizer)
    with pytest.raises(ConfigError, match="in the script, key '0.weight': codec cannot change while the job trains"):
        optimizer.change_strategy(lossy(None, **{"0.weight": {"codec": "fp16"}}))
    for same in (lossy({"codec": "bf16", "slice": 7}), {"version": 1, "default": {"slice": 5}}):
        optimizer.change_strategy(same)
        step(model, optimizer)
    optimizer.release()
