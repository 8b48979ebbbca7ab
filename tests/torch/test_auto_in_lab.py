"""strategy="auto" on links that differ, and that change: what a slow host holds goes elsewhere."""

import sys
import time

import pytest

torch = pytest.importorskip("torch")

from lab_traces import needs_lab  # noqa: E402
from processes import ROOT  # noqa: E402

from p3.measure.jobs.job import POLL_S, Job  # noqa: E402
from p3.measure.jobs.stores import STORES  # noqa: E402
from p3.measure.lab import hosts as lab  # noqa: E402

FAST, SLOW = 60.0, 15.0  # Mbit/s
DEADLINE_S = 240.0
LESS = 0.3  # than an equal share; the planner may leave a fast host without any, too


def shares(line):
    """Of the three servers; without a strategy none has turns of its own."""
    turns = line["servers"] or [0, 1, 2]
    return [turns.count(rank) / len(turns) for rank in range(3)]


@pytest.mark.timeout(DEADLINE_S + 90)
@needs_lab
def test_a_slow_hosts_shares_go_elsewhere_and_come_back(tmp_path, forked_imports):
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "torch_auto.py"), str(tmp_path)]
    deadline = time.monotonic() + DEADLINE_S
    with lab.lab(3, (FAST, FAST, SLOW)) as hosts:
        with Job(STORES["p3_auto"], hosts, command, root=hosts[0], port=9100, folder=tmp_path, omp_threads=1) as job:
            job.start()

            def until(is_so, what):
                while True:
                    lines = job.lines("worker 0")
                    if lines and is_so(lines[-1]):
                        return
                    job.check()
                    assert time.monotonic() < deadline, job.error("no %s: %s" % (what, lines[-3:]), *job.names())
                    time.sleep(POLL_S)

            until(lambda line: shares(line)[2] < LESS, "plan for the slow host 2")
            lab.change(hosts, (SLOW, FAST, FAST))
            until(lambda line: shares(line)[0] < LESS, "plan for the slow host 0")
            (tmp_path / "stop").touch()
            job.wait(60)
            assert job.lines("worker 0")[-1] == {"alike": True}
