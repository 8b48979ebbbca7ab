"""p3.torch's jobs that come back from a snapshot with another number of workers, as torchrun starts them."""

import re
import socket
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")


def said(output, when):
    """{rank: (weights, statistics)}"""
    found = re.findall(r"worker (\d) %s: weights (\w+) statistics (\w+)" % when, output)
    return {int(rank): (weights, statistics) for rank, weights, statistics in found}


def run(directory, workers, kill_at):
    """Of more than one worker by torchrun, else alone."""
    command = jobs.python("torch_regrouped.py", 6, kill_at)
    if workers > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            options = ["--master-port", str(free.getsockname()[1]), "--nproc-per-node", str(workers)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *command[1:]]
    return jobs.run(command, timeout_s=100, P3_SNAPSHOT_DIR=str(directory), P3_SNAPSHOT_EVERY="2")


def test_a_job_comes_back_with_more_processes_and_then_with_one(tmp_path):
    status, output = run(tmp_path / "whole", 1, 0)
    assert status == 0, output
    whole = said(output, "behind 6")[0]
    status, output = run(tmp_path / "snapshots", 2, 2)
    assert status != 0, output
    two = said(output, "behind 2")
    assert two[0][0] == two[1][0] and two[0][1] != two[1][1], output
    status, output = run(tmp_path / "snapshots", 4, 4)
    assert status != 0, output
    assert said(output, "at 2 of 2") == {0: two[0], 1: two[1], 2: two[0], 3: two[0]}, output
    four = said(output, "behind 4")
    status, output = run(tmp_path / "snapshots", 1, 0)
    assert status == 0, output
    assert said(output, "at 4 of 4") == {0: four[0]}, output
    assert said(output, "behind 6") == {0: whole}, output
