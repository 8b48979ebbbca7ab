"""`p3 bench deaths`: schedulers are killed, and iterations with and without one are told apart."""

import importlib.util
import re

import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.micro import deaths


@needs_lab
def test_iterations_go_on_while_there_is_no_scheduler(capsys):
    tiny = ["--model", "resnet50", "--size", "0.01", "--compute", "0.5", "--hosts", "2", "--rate", "200"]
    store = "p3_torch" if importlib.util.find_spec("torch") else "p3_sync"
    if store == "p3_sync":
        pytest.importorskip("mxnet")
    assert cli.main(["bench", "deaths", *tiny, "--kills", "2", "--store", store]) == 0
    out = capsys.readouterr().out
    assert "resnet50, 2 hosts: 2 schedulers were killed" in out
    counts = {what: int(count) for what, count in re.findall(r"^(with.*?)  +(\d+) ", out, re.MULTILINE)}
    assert sum(counts.values()) == 2 * deaths.EVERY + 2 and counts["without one for a while"] >= 2


def test_spans_that_touch_are_those_of_iterations_without_a_scheduler():
    assert deaths._is_any((1, 2), [(1.9, 3)]) and deaths._is_any((1, 9), [(3, 4)])
    assert not deaths._is_any((1, 2), [(2, 3), (0, 1)])
