"""`p3 bench outages`: a worker of a real job dies, and another one joins."""

import importlib.util
import re

import pytest

pytest.importorskip("torch")
from lab_traces import needs_lab

from p3 import cli
from p3.measure.outages.ways import WAYS

SMALL = ["--hosts", "2", "--compute", "0.2", "--megabytes", "0.1"]


def rows(text):
    return {way: (int(deaths), float(rate)) for way, deaths, rate in re.findall(
        r"^([a-z]+) +(\d+) +([\d.]+) +[\d.]+%", text, re.M)}  # fmt: skip


@needs_lab
def test_deaths_take_throughput_and_are_drawn(capsys, tmp_path):
    picture = tmp_path / "outages.png"
    more = ["--steps", "40", "--kills", "1", "--every", "4", "--ways", "continue", "--plot", str(picture)]
    assert cli.main(["bench", "outages", *SMALL, *more]) == 0
    told = rows(capsys.readouterr().out)
    assert list(told) == ["undisturbed", "continue"]
    assert [deaths for deaths, _ in told.values()] == [0, 1] and picture.stat().st_size > 0


def test_what_is_not_installed_is_left_out():
    reason = WAYS["torchft"].lacks()
    assert (reason is None) == (importlib.util.find_spec("torchft") is not None)
    assert reason is None or "pip install torchft" in reason
