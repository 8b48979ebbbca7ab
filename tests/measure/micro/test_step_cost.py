"""`p3 bench step_cost`: a line for each way to take a step, of real steps."""

import pytest

from p3 import cli
from p3.measure.micro import step_cost

pytestmark = pytest.mark.torch


def test_command_prints_a_line_for_each_way(capsys):
    assert cli.main(["bench", "step_cost", "--parameters", "3", "--steps", "2", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 parameters" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == list(step_cost.WAYS)
