"""`p3 bench memory`: a line for each way, of real jobs, and a job that fails is no figure."""

import pytest

from p3 import cli
from p3.measure.micro import memory

pytestmark = pytest.mark.torch


def test_command_compares_a_worker_with_ddp(capsys, monkeypatch):
    monkeypatch.setattr(memory, "OPTIMIZERS", ["SGD"])
    arguments = ["--megabytes", "4", "--layers", "2", "--steps", "1", "--repeats", "1", "--ways", "ddp,p3"]
    assert cli.main(["bench", "memory", *arguments]) == 0
    title, header, ddp, p3 = capsys.readouterr().out.splitlines()
    assert "4 MB in 2 layers" in title and "worker over DDP" in header
    assert ddp.split()[:2] == ["SGD", "ddp"] and float(ddp.split()[2]) >= 1  # the weights alone
    assert p3.split()[:2] == ["SGD", "p3"] and p3.endswith("%") and float(p3.split()[2]) >= 1


def test_a_job_that_fails_ends_the_benchmark_with_its_words(monkeypatch):
    monkeypatch.setattr(memory, "OPTIMIZERS", ["NoSuchOptimizer"])
    with pytest.raises(SystemExit, match="p3 with NoSuchOptimizer failed(.|\n)*NoSuchOptimizer"):
        memory.main(["--megabytes", "1", "--layers", "1", "--repeats", "1", "--ways", "p3"])
