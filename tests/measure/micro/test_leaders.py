"""`p3 bench leaders`: a real job is measured, and adds up rightly."""

import re

from lab_traces import needs_lab

from p3 import cli


@needs_lab
def test_both_sizes_are_measured(capsys):
    assert cli.main(["bench", "leaders", "--size", "0.05", "--servers", "1", "--workers", "2", "--repeats", "2"]) == 0
    output = capsys.readouterr().out
    for name in ("tenth", "whole", "whole / tenth"):
        assert re.search(rf"(?m)^{name} +[\d.]+ \([\d.]+\.\.[\d.]+\) +[\d.]+ \([\d.]+\.\.[\d.]+\)$", output), output
