"""`p3 bench what_if`: a run is recorded, and its changes are predicted and run."""

import re

import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.micro import what_if

pytestmark = pytest.mark.torch

SMALL = ["--models", "vgg19", "--size", "0.001", "--compute", "0.1", "--repeats", "1", "--iterations", "5"]


@needs_lab
def test_each_change_is_predicted_and_run(capsys, forked_imports):
    change = "servers=1,rate=8mbit,slice=5000,codec=fp16-exact"
    assert cli.main(["bench", "what_if", "--hosts", "2", *SMALL, "--change", change]) == 0
    output = capsys.readouterr().out
    rows = {name: tuple(map(float, seconds)) for name, *seconds in re.findall(
        r"^(none|\S+=\S+) +([\d.]+) +([\d.]+) \(", output, re.M)}  # fmt: skip
    assert list(rows) == ["none", change]
    # From one server to the other host 0.66 MB at 8 Mbit/s take 0.66 s; without the change, near 0.1 s of computation.
    for slow, fast in zip(rows[change], rows["none"]):
        assert slow > 0.6 and fast < 0.6, output
    assert re.search(r"^changes: off by [\d.]+% in the mean, by [\d.]+% at most$", output, re.M)


def test_links_that_are_not_alike_are_no_run_to_begin_with(capsys):
    with pytest.raises(SystemExit):
        what_if.main(["--rate", "100mbit,200mbit"])
    assert "--rate is one rate" in capsys.readouterr().err
