"""Weights that no optimizer has: on every worker, and nowhere else."""

import re
import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("torch")


def script(*arguments):
    return jobs.python("torch_frozen.py", *arguments)


def test_frozen_weights_come_piece_by_piece_and_nobody_keeps_them(tmp_path):
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "1", "--restarts", "1"]
    folder = tmp_path / "snapshots"
    status, output = jobs.run([*launcher, *script("streamed", folder)], timeout_s=100, P3_SNAPSHOT_DIR=str(folder),
                              P3_SNAPSHOT_EVERY="1")  # fmt: skip
    assert status == 0, output
    for round in (0, 1):  # whose frozen weights are others, as this script makes them so
        found = re.findall(r"worker (\d) began at %d, .* and has ([0-9a-f]{8})" % round, output)
        assert sorted(rank for rank, _ in found) == ["0", "1"] and len({digest for _, digest in found}) == 1, output


def test_what_was_frozen_may_be_trained_and_given_back():
    status, output = jobs.run_p3(2, 2, script("thawed"))
    assert status == 0, output
    for word in ("has", "then"):
        found = re.findall(r"worker \d %s ([0-9a-f]{8})" % word, output)
        assert len(found) == 2 and len(set(found)) == 1, output


def test_workers_with_other_frozen_weights_are_both_named():
    status, output = jobs.run_p3(2, 1, script("differing"))
    assert status != 0 and re.search(r"worker 0 .* and worker 1 .* disagree about key 'frozen': shape", output), output
