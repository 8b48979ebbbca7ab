"""`p3 bench deaths`: processes are killed, and iterations in which one is missing and others are told apart."""

import importlib.util
import re

import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.chaos.matrix import Victim
from p3.measure.micro import deaths

SILENCE_S = 10  # P3_TIMEOUT_S: a death that is heard of is known before

# Workers import PyTorch.
pytestmark = [pytest.mark.usefixtures("forked_imports"), pytest.mark.timeout(300)]


def told(capsys, *options):
    """What it prints of a small job, and how many iterations of each kind there were."""
    store = "p3_torch" if importlib.util.find_spec("torch") else "p3_sync"
    if store == "p3_sync":
        pytest.importorskip("mxnet")
    tiny = ["--model", "resnet50", "--size", "0.01", "--compute", "1", "--rate", "200", "--store", store]
    assert cli.main(["bench", "deaths", *tiny, *options]) == 0
    out = capsys.readouterr().out
    return out, {what: int(count) for what, count in re.findall(r"^((?:with|in).*?)  +(\d+) ", out, re.MULTILINE)}


@needs_lab
def test_iterations_go_on_while_there_is_no_scheduler(capsys):
    out, counts = told(capsys, "--hosts", "2", "--kills", "2")
    assert "resnet50, 2 hosts: 2 schedulers were killed" in out
    assert sum(counts.values()) == 2 * 3 + 2 and counts["without one for a while"] >= 2


@needs_lab
@pytest.mark.parametrize("role", ["worker", "server"])
def test_one_after_the_other_dies_until_one_is_left(role, capsys):
    out, counts = told(capsys, "--hosts", "3", "--kill", role)
    assert "| losses" not in out and f"resnet50, 3 hosts: 2 {role}s were killed" in out
    found = [(int(rank), float(pause_s), float(missed_s)) for rank, pause_s, missed_s in re.findall(
        rf"^{role} (\d): a pause of (-?\d+\.\d+) s, missed for (\d+\.\d+) s$", out, re.MULTILINE)]  # fmt: skip
    assert len({rank for rank, _, _ in found}) == 2 and all(0.2 < missed_s < SILENCE_S for _, _, missed_s in found), out
    greatest = max(pause_s for _, pause_s, _ in found)
    assert "greatest %.3f\n" % greatest in out and greatest < SILENCE_S, out
    assert counts["in which one was missed"] >= 2 + 1 and counts["with all who are left"] >= 5, out


@needs_lab
def test_of_several_runs_there_is_a_table(capsys):
    out, _ = told(capsys, "--hosts", "2", "--kill", "server", "--how", "kill,stop", "--seed", "3")
    row = r" 1 \| -?\d+\.\d+ \| -?\d+\.\d+ \| -?\d+\.\d+ \| \d+\.\d+ \| \d+\.\d+ \|$"
    assert "2 hosts: 1 servers were stopped" in out
    for how in ("killed", "stopped"):
        assert re.search(rf"^\| {how}, seed 3 \|" + row, out, re.MULTILINE), out


def test_the_pause_is_that_of_who_waits_longest():
    def iterations(*lengths):
        ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        return list(zip(ends, ends[1:]))

    of = {0: iterations(3, 3, 5, 3, 2, 2, 4, 2), 1: iterations(3, 3, 3, 6, 2, 2), 2: iterations(3, 3)}
    first, second = deaths.Death(Victim("worker", 2), (6.5, 6.8)), deaths.Death(Victim("worker", 1), (19.5, 19.8))
    assert deaths._pause_s(first, [first, second], of) == 3  # worker 1 waits in the iteration behind
    assert deaths._pause_s(second, [first, second], of) == 2  # of iterations that two workers take less for
    told = (deaths._told_apart(of[1], [first.span], behind) for behind in (True, False))
    assert [list(map(deaths._seconds, spans)) for spans in told] == [[[3, 6], [3, 3, 2, 2]], [[3], [3, 3, 6, 2, 2]]]


def test_the_pause_for_a_server_is_held_against_the_iterations_behind():
    lengths = (3, 3, 6, 4, 4, 4, 7, 5, 5)
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    of = {0: list(zip(ends, ends[1:]))}
    first, second = (deaths.Death(Victim("server", rank), span) for rank, span in ((1, (7, 8)), (0, (25, 26))))
    assert [deaths._pause_s(one, [first, second], of) for one in (first, second)] == [2, 2]


@pytest.mark.parametrize("options", [["--kill", "worker", "--kills", "4"], ["--kill", "server", "--kills", "4"],
                                     ["--how", "stop"]])  # fmt: skip
def test_what_cannot_be_is_refused(options, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "deaths", *options])
    assert caught.value.code == 2 and options[-2] in capsys.readouterr().err


def test_spans_that_touch_are_those_of_iterations_without_a_scheduler():
    assert deaths._is_any((1, 2), [(1.9, 3)]) and deaths._is_any((1, 9), [(3, 4)])
    assert not deaths._is_any((1, 2), [(2, 3), (0, 1)])
