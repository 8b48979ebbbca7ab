"""A worker is lost in the middle of a key that it alone has a gradient of: cores in one process."""

import numpy as np
import pytest
from core_jobs import SGD, Job, wait_all
from processes import wait_until

from p3._core import NO_SCALARS

SLICE = 1000
LR = (0.5, 0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("optimizer", [None, SGD], ids=["sum", "servers update"])
def test_what_has_not_come_counts_as_no_gradient(optimizer):
    """A sum is zero there, and not that of the round before; a weight stays."""
    scalars = NO_SCALARS if optimizer is None else LR
    with Job(3, 1, SLICE, local_aggregation=False, outlives_workers=True) as job:
        if optimizer is not None:
            job.set_optimizer(optimizer)
        key = job.key(2 * SLICE)
        job.init(key, np.zeros(2 * SLICE, "float32"))
        landings = job.push(key, [np.ones(2 * SLICE, "float32") for _ in job.workers], scalars)
        before = landings[0].copy()
        lost = job.workers.pop()
        skips = [worker.skip(key, landing) for worker, landing in zip(job.workers, landings)]
        lost.push(key, np.full(2 * SLICE, 8, "float32"), np.empty(2 * SLICE, "float32"), 0, scalars, gated=True)
        lost.ready(key, SLICE)
        wait_until(lambda: job.servers[0].counters()["rounds"] == 3, "a round of one slice of two")
        job.servers[0].dismiss_worker(2)
        wait_all(skips)
        first, second = (8, 0) if optimizer is None else (before[0] - 4, before[-1])
        for skip, landing in zip(skips, landings):
            assert skip.updated
            np.testing.assert_array_equal(landing[:SLICE], first)
            np.testing.assert_array_equal(landing[SLICE:], second)
        lost.close(0)
