"""`p3 bench control`: real nodes join, agree on all keys, and hear of a loss."""

import pytest

from p3 import cli
from p3.measure.micro import control


def test_many_nodes_join_agree_and_hear_of_a_loss(capsys):
    assert cli.main(["bench", "control", "--nodes", "6,3", "--model", "vgg19", "--processes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vgg19: 38 keys"
    rows = [line.split() for line in lines[2:]]
    assert [row[:3] for row in rows] == [["6", "+", "6"], ["3", "+", "3"]]
    assert all(float(value) >= 0 for row in rows for value in row[3:]) and all(float(row[6]) > 10 for row in rows)


def test_what_a_scheduler_has_died_of_is_told(monkeypatch):
    monkeypatch.setenv("P3_STRATEGY", "/nowhere/strategy.json")
    monkeypatch.setattr(control, "_REST_S", 1.0)
    with pytest.raises(SystemExit, match=r"the scheduler's last line: .*/nowhere/strategy.json"):
        control.measure(1, "vgg19", 2)


def test_nodes_that_never_come_to_it_are_given_up(monkeypatch):
    def start(*arguments, start=control._start):
        job = start(*arguments)  # whose nodes have the usual time to join
        monkeypatch.setattr(control, "_WAIT_S", 1.0)
        return job

    monkeypatch.setattr(control, "_start", start)
    monkeypatch.setattr(control, "_read", lambda process, phase, read=control._read: read(process, phase + " never"))
    with pytest.raises(SystemExit, match="ended with -9 before 'started never'"):
        control.measure(1, "vgg19", 2)
