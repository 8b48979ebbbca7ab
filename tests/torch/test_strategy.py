"""DistributedOptimizer(strategy=...): what servers hold, the same bits, and what does not fit is refused by name."""

import json

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.errors import ConfigError  # noqa: E402
from p3.torch.start import job  # noqa: E402
from torch_steps import sgd, step  # noqa: E402

BETWEEN_TWO = {"version": 1, "default": {"servers": [0, 2]}, "keys": {"0.weight": {"servers": [2], "slice": 500}}}


def run(*given):
    return jobs.run_p3(2, 3, jobs.python("torch_jobs.py", "placed", *map(json.dumps, given)), P3_CHECK="2")


def result(status, output):
    assert status == 0, output
    return json.loads(next(line[line.index("{"):] for line in output.splitlines() if '"held"' in line))


def test_servers_hold_what_the_script_says_and_bits_stay(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(BETWEEN_TWO))
    usual, placed = result(*run()), result(*run(BETWEEN_TWO, str(tmp_path / "s.json")))
    assert placed["digest"] == usual["digest"]
    assert min(usual["held"]) > 0
    assert placed["held"][1] == 0, "of no store, those of P3's own small keys included"
    assert placed["held"][2] > 4 * 2 * 1200, "0.weight, with its momentum"
    assert {"1.weight", "steps", "values", "digests", "piece 0"} < placed["servers"].keys()
    assert placed["servers"].pop("0.weight") == [2]
    assert all(servers == [0, 2] for servers in placed["servers"].values()), placed


def test_workers_that_give_other_strategies_are_named_on_all():
    status, output = run(BETWEEN_TWO, {**BETWEEN_TWO, "keys": {}})
    assert status != 0
    for rank in (0, 1):
        said = [line for line in output.splitlines() if line.startswith("[worker %d]" % rank)]
        text = "worker 0 (127.0.0.1) and worker 1 (127.0.0.1) disagree about the strategy of store 0"
        assert any(text in line for line in said), output


@pytest.mark.parametrize("strategy, problem", [
    ({"version": 1, "keys": {"0.wieght": {"slice": 7}}}, "in the script has an entry for key '0.wieght', but the keys"),
    ({"version": 1, "keys": {"0.weight": {"servers": [1]}}}, "key '0.weight': server 1 is named, but the job has 1"),
    ({"version": 1, "default": {"slice": "all"}}, "slice of \"default\" is 'all'; it must be a whole number"),
    ("/nowhere/s.json", "/nowhere/s.json cannot be read: No such file"),
    (7, "strategy is 7; it must be the path of a file that `p3 plan` has written, or a dict"),
])  # fmt: skip
@pytest.mark.parametrize("distribute", [p3.torch.DistributedOptimizer, p3.torch.LocalSteps])
def test_what_does_not_fit_is_refused_and_leaves_everything_as_it_was(model, distribute, strategy, problem):
    optimizer, more = sgd(model), {} if distribute is p3.torch.DistributedOptimizer else {"every": 2}
    with pytest.raises(ConfigError, match=problem):
        distribute(optimizer, model, strategy=strategy, **more)
    distribute(optimizer, model, strategy={"version": 1, "keys": {"0.weight": {"slice": 2}}}, **more)
    step(model, optimizer)
    cut = {name: agreed.plan.slice_elements for (_, name), agreed in job.current().keys.agreed.items()}
    assert (cut["0.weight"], cut["2.weight"]) == (2, 50000)
    optimizer.release()
