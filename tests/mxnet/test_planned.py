"""Strategies that choose more than servers and slices: the bits of the script's own options, and refusals by name."""

import json

import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
import p3  # noqa: E402, F401
from mxnet.base import MXNetError  # noqa: E402

INT8 = {"type": "int8"}


def lossy(default=None, **keys):
    return {"version": 2, "allow_lossy": True, "default": default or {}, "keys": keys}


def run(tmp_path, of_job=None, **options):
    variables = {}
    if of_job is not None:
        (tmp_path / "job.json").write_text(json.dumps(of_job))
        variables["P3_STRATEGY"] = str(tmp_path / "job.json")
    return jobs.run_p3(2, 2, jobs.python("mxnet_planned.py", json.dumps(options)), **variables)


def result(status, output):
    assert status == 0, output
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"digest"' in line))


@pytest.mark.parametrize("here", [False, True])
def test_a_codec_in_a_strategy_is_that_of_the_script(tmp_path, here):
    plain, own = (result(*run(tmp_path, here=here, **options)) for options in (
        {}, {"compression": {"type": "int8", "down": "bf16"}},
    ))  # fmt: skip
    codec = lossy({"codec": {"up": "int8", "down": "bf16"}})
    assert result(*run(tmp_path, of_job=codec, here=here)) == own and own["digest"] != plain["digest"]
    assert result(*run(tmp_path, here=here, strategy=codec)) == own
    of_key = result(*run(tmp_path, here=here, strategy=lossy(**{"3": {"codec": {"type": "int8"}}})))
    assert of_key["digest"] not in (own["digest"], plain["digest"])
    assert (of_key["axes"]["3"][:2], of_key["axes"]["1"][0]) == ([INT8, {}], {})


def test_a_route_in_a_strategy_is_that_of_the_script(tmp_path):
    dense, own = (result(*run(tmp_path, factors={"route": route})) for route in ("auto", "factors"))
    assert any(parts == 2 for *_, parts in own["axes"].values()), own
    by_job = result(*run(tmp_path, {"version": 2, "default": {"route": "factors"}}, factors={}))
    assert by_job == own and by_job["digest"] != dense["digest"]
    status, output = run(tmp_path, factors={}, strategy={"version": 2, "keys": {"1": {"route": "factors"}}})
    assert status != 0 and "1: its gradients leave dense by now (for route see the strategy in the script)" in output


def test_a_contradiction_names_both_on_all(tmp_path):
    of_job = lossy(**{"2": {"codec": "bf16"}})
    status, output = run(tmp_path, of_job=of_job, compression={"type": "int8"})
    assert status != 0
    assert 'job.json: the script has the compression {"up": {"type": "int8"}, "down": null} for key 2' in output, output


@pytest.mark.parametrize("strategy, problem", [
    (lossy(w={"codec": "lowrank"}), "'w' .for codec see the strategy in the script.: lowrank and a store of MXNet"),
    ({"version": 2, "default": {"codec": "int8"}}, "codec of \"default\" is 'int8', with which training differs"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(strategy, problem):
    kv = mx.kv.create("p3_sync")
    with pytest.raises(MXNetError, match=problem):
        kv.set_strategy(strategy)
        kv.init("w", mx.nd.zeros((20, 20)))


def test_what_only_shows_at_the_first_push_names_the_strategy_as_well():
    kv = mx.kv.create("p3_sync")
    kv.set_strategy(lossy(w={"codec": "dgc"}))
    kv.init("w", mx.nd.zeros((20, 20)))
    with pytest.raises(MXNetError, match="key 'w' .for codec see the strategy in the script.: dgc and sums handed to"):
        kv.push("w", mx.nd.ones((20, 20)))


def test_staleness_in_a_strategy_fills_in_what_the_script_leaves_open():
    kv = mx.kv.create("p3_ssp")
    kv.set_strategy(lossy({"staleness": 3}, w={"staleness": 0}, v={"staleness": 5}))
    kv.set_staleness(4, keys=["v"])
    kv.set_optimizer(mx.optimizer.SGD())
    kv.init(["w", "other"], [mx.nd.zeros(3)] * 2)
    assert [kv.store.keys[key].declared.staleness for key in ("w", "other")] == [0, 3]
    with pytest.raises(MXNetError, match="the script has staleness 4 for key 'v', and the strategy 5. Leave one"):
        kv.init("v", mx.nd.zeros(3))


def test_an_updater_knows_of_the_strategys_staleness_before_there_is_a_key(monkeypatch):
    monkeypatch.setenv("P3_STALENESS", "0")
    mx.kv.create("p3_ssp")._set_updater(lambda *_: None)
    planned = mx.kv.create("p3_ssp")
    planned.set_strategy(lossy({"staleness": 3}))
    with pytest.raises(MXNetError, match="an updater runs on the workers"):
        planned._set_updater(lambda *_: None)


def test_a_synchronous_store_takes_no_staleness_from_a_strategy():
    kv = mx.kv.create("p3_sync")
    kv.set_strategy(lossy({"staleness": "inf"}, w={"staleness": 0}))
    kv.init("w", mx.nd.zeros(3))
    with pytest.raises(MXNetError, match="staleness .inf rounds of key 'v', see .* in the script.: .*p3_sync"):
        kv.init("v", mx.nd.zeros(3))
