"""`p3 bench outages`: processes of real jobs die. Another worker joins, or scheduler comes, or a server takes over."""

import importlib.util
import re

import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.outages.ways import WAYS

pytestmark = pytest.mark.torch

SMALL = ["--hosts", "2", "--compute", "0.2", "--megabytes", "0.1"]


def rows(text):
    return {way: (int(deaths), float(rate)) for way, deaths, rate in re.findall(
        r"^([a-z]+) +(\d+) +([\d.]+) +[\d.]+%", text, re.M)}  # fmt: skip


@needs_lab
def test_deaths_take_throughput_and_are_drawn(capsys, tmp_path, forked_imports):
    picture = tmp_path / "outages.png"
    more = ["--steps", "40", "--kills", "1", "--every", "4", "--ways", "continue", "--plot", str(picture)]
    assert cli.main(["bench", "outages", *SMALL, *more]) == 0
    told = rows(capsys.readouterr().out)
    assert list(told) == ["undisturbed", "continue"]
    assert [deaths for deaths, _ in told.values()] == [0, 1] and picture.stat().st_size > 0


@needs_lab
def test_servers_may_update_where_workers_alone_die(capsys, forked_imports):
    more = ["--steps", "40", "--calm", "10", "--kills", "1", "--every", "4", "--ways", "workers"]
    assert cli.main(["bench", "outages", *SMALL, *more]) == 0
    out = capsys.readouterr().out
    assert [deaths for deaths, _ in rows(out).values()] == [0, 1] and re.search(r"^  worker +1 ", out, re.M), out
    with pytest.raises(SystemExit):
        cli.main(["bench", "outages", *more, "--kill", "worker,server"])
    assert "outlives workers alone" in capsys.readouterr().err


@needs_lab
def test_each_kind_dies_in_turn(capsys, tmp_path, forked_imports):
    picture = tmp_path / "outages.svg"
    roles = ["worker", "server", "scheduler"]
    more = ["--kill", ",".join(roles), "--kills", "3", "--every", "4", "--ways", "continue", "--plot", str(picture)]
    assert cli.main(["bench", "outages", *SMALL, "--steps", "70", "--calm", "10", *more]) == 0
    out = capsys.readouterr().out
    told = rows(out)
    assert [deaths for deaths, _ in told.values()] == [0, 3], out
    assert re.findall(r"^  ([a-z]+) +1 ", out, re.M) == roles, out
    drawn = picture.read_text()
    assert all(f"a {role} is killed" in drawn for role in roles)


def test_what_is_not_installed_is_left_out():
    reason = WAYS["torchft"].lacks()
    assert (reason is None) == (importlib.util.find_spec("torchft") is not None)
    assert reason is None or "pip install torchft" in reason
