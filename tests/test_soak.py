"""The soak itself, briefly: exact sums and flat memory under delays; and that it notices what grows or is wrong."""

import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

sys.path.insert(0, str(ROOT / "benchmarks"))

import soak  # noqa: E402


def run_soak(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--slices", "8000", *arguments]
    return subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, timeout=100, text=True)


@pytest.mark.parametrize("aggregated", "01")
def test_a_short_soak_has_exact_sums_and_flat_memory(aggregated):
    finished = run_soak("--set", "P3_LOCAL_AGGREGATION=" + aggregated, "--set", "P3_CHECKSUM=1", "--delay", "0.5")
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.rstrip().endswith("slices: sums exact, memory flat")


def sample(megabytes):
    return dict(worker_bytes=megabytes << 20, server_bytes=0, buffer_bytes=0, held_bytes=0)


def test_memory_that_rises_to_the_end_is_noticed_and_a_warm_up_is_not():
    assert not soak.growth([sample(size) for size in (10, 20, 50, 50, 50, 50, 50, 50, 50, 50)])
    assert "worker_bytes" in soak.growth([sample(size) for size in range(50, 100, 5)])
