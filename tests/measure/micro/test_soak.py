"""The soak itself, briefly: exact sums, flat memory under delays and reconnects; and that it notices what is wrong."""

import subprocess
import sys

import numpy as np
import pytest
from processes import clean_environment

from p3.measure.micro import soak
from p3.measure.micro.processes import soak_worker


def run_soak(*arguments):
    command = [sys.executable, "-m", "p3", "bench", "soak", "--slices", "8000", *arguments]
    return subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, timeout=100, text=True)


# Local aggregation excludes reconnects.
@pytest.mark.parametrize("aggregated, reconnects", [("0", 2), ("1", 0)])
def test_a_short_soak_has_exact_sums_and_flat_memory(aggregated, reconnects):
    settings = ["--set", "P3_LOCAL_AGGREGATION=" + aggregated, "--set", "P3_CHECKSUM=1"]
    finished = run_soak("--reconnects", str(reconnects), *settings, "--delay", "0.5")
    assert finished.returncode == 0, finished.stdout
    table, conclusion = finished.stdout.splitlines()[:-1], finished.stdout.splitlines()[-1]
    assert conclusion.endswith("slices: sums exact, memory flat")
    assert int(table[-1].split()[1]) == reconnects


def sample(megabytes):
    return dict(worker_bytes=megabytes << 20, server_bytes=0, buffer_bytes=0, held_bytes=0)


def test_memory_that_rises_to_the_end_is_noticed_and_a_warm_up_is_not():
    assert not soak.growth([sample(size) for size in (10, 20, 50, 50, 50, 50, 50, 50, 50, 50)])
    assert "worker_bytes" in soak.growth([sample(size) for size in range(50, 100, 5)])


def test_a_sum_may_lack_whole_slices_of_the_worker_that_was_lost_and_nothing_else():
    gradients = [np.full(10, value, np.float32) for value in (1, 2, 4)]
    whole = sum(gradients)
    check = lambda total, lost: soak_worker.check(total, gradients, lost, [4, 8], 7, "w")  # noqa: E731
    assert check(whole, None) == check(whole, 1) == 0
    lacking = whole.copy()
    lacking[4:] -= 2
    assert check(lacking, 1) == 2
    for lost in (None, 0):  # nobody's, another's
        with pytest.raises(AssertionError, match="key 'w' is wrong in round 7"):
            check(lacking, lost)
    lacking[5] += 2  # half a slice
    with pytest.raises(AssertionError, match="key 'w' is wrong in round 7"):
        check(lacking, 1)
