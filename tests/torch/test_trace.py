"""`p3 trace` of a torch job names parameters, in the order of the forward pass, and shows where modules waited."""

import json

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")
from p3.trace import chrome, lives, report, waits

STEPS = 4
IN_ORDER = ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]  # of the forward pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    settings = {"P3_TRACE": str(folder), "P3_LOCAL_AGGREGATION": "0"}  # a wait for the other worker is shown as such
    status, output = jobs.run_p3(2, 2, jobs.python("torch_jobs.py", "traced", STEPS), **settings)
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def trace(folder):
    return lives.load(str(folder))


def test_keys_are_parameters_and_priorities_the_order_of_the_forward_pass(trace):
    names = {number: key.name for number, key in trace.keys.items()}
    assert set(IN_ORDER) < set(names.values())
    for number in range(2, STEPS + 1):  # the first step learns the order
        priorities = {}
        for life in trace.lives[trace.lives["round"] == number]:
            priorities.setdefault(names[int(life["key"])], set()).add(int(life["priority"]))
        assert [priorities[name] for name in IN_ORDER] == [{0}, {-1}, {-2}, {-3}]
        assert max(priorities["steps"]) < -3


def test_the_waits_are_those_of_modules_before_they_run(trace):
    of_parameters = [trace.keys[stall.key].name for stall in trace.stalls]
    assert set(of_parameters) <= set(IN_ORDER)
    longest = {(wait.worker, wait.round): wait for wait in waits.waits(trace)}
    for number in range(2, STEPS + 1):  # worker 1 is late with the gradients of "encoder"
        wait = longest[0, number]
        assert wait.marked and trace.keys[wait.key].name.startswith("encoder.")
        assert max(wait.stages, key=wait.stages.get) == waits.OTHERS


def test_the_report_and_the_timeline_name_them(trace, folder):
    text = "\n".join(report.lines(trace))
    assert "the value that the forward pass waited for longest" in text and "waited" in text
    assert "for encoder." in text and "worker 1's came last" in text
    chrome.write(trace, str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    shown = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert any("encoder." in name for name in shown), shown
