"""Jobs whose workers are in groups (P3_GROUPS): the bits of a job without, through fewer pushes to each server."""

import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("p3._core", reason="the extension is not built")

from aggregated_results import exact, results
from lab_traces import needs_lab
from processes import PYTHONPATH, ROOT

from p3.measure.jobs.job import Job, JobError
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab

SLICES = {"P3_SLICE_ELEMENTS": "5000"}
STEPS = ("2", "4", "1", "3")
APART = {"P3_LOCAL_AGGREGATION": "0", **SLICES}
DEADLINE_S = 100


def landed(status, output, workers):
    assert status == 0, output
    found = results(output)
    assert [result["rank"] for result in found] == list(range(workers)), output
    assert all(result["landed"] == found[0]["landed"] for result in found)
    # Of float16 the sum of each group is rounded, as that of a machine is.
    return {what: digest for what, digest in exact(found[0]["landed"]).items() if not what.startswith("halves")}


def run(servers, **variables):
    return landed(*jobs.run_p3(4, servers, jobs.python("aggregated.py", *STEPS), **APART, **variables), 4)


@pytest.mark.parametrize("servers", [1, 4])
def test_groups_of_a_power_of_two_change_no_bit(servers):
    """Of sums, averages and an optimizer's values, of workers that take as many steps and of others; beside keys that
    add up in no groups."""
    assert run(servers) == run(servers, P3_GROUPS="2") == run(servers, P3_GROUPS="4") == run(servers, P3_GROUPS="2x2")


@pytest.mark.parametrize("variables", [
    {"P3_CHECKSUM": "1", "P3_SERVER_THREADS": "2"}, {"P3_SUM_ORDER": "arrival"}, {"P3_LOCAL": "unix"},
])  # fmt: skip
def test_groups_of_three_give_all_workers_the_same_bits(variables):
    """The last one has a single worker."""
    assert run(3, P3_GROUPS="3", **variables)


def test_workers_of_one_machine_have_its_leader_or_a_group():
    status, output = jobs.run_p3(2, 1, jobs.python("aggregated.py"), P3_GROUPS="2")
    assert status != 0
    assert "P3_GROUPS=2: workers 0 and 1 are on one machine, whose workers have a leader" in output, output


@needs_lab
@pytest.mark.parametrize("tls", "01")
def test_hosts_of_a_group_reach_each_other_over_the_network(tmp_path, monkeypatch, tls):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "aggregated.py"), *STEPS]
    outputs = []
    for groups in ("1", "4", "2x2"):
        folder = tmp_path / groups
        folder.mkdir()
        with lab(4, 1000.0) as hosts, Job(
            STORES["p3_sync"], hosts, command, root=hosts[0], port=9100, folder=folder, omp_threads=1,
            environment={**SLICES, "P3_GROUPS": groups, "P3_TLS": tls},
        ) as job:  # fmt: skip
            job.start()
            job.wait(DEADLINE_S)
            told = [job.lines(f"worker {number}") for number in range(4)]
        outputs.append({what: value for what, value in exact(told[0][-1]["landed"]).items() if "halves" not in what})
        assert all(one[-1]["landed"] == told[0][-1]["landed"] for one in told)
        assert all(one[-1]["local"] == [0, 1] for one in told)
    assert outputs[0] == outputs[1] == outputs[2]


LATE = """
import time
import numpy as np
from p3.worker.session import Session
with Session.open() as session:
    landing = np.zeros(40_000, np.float32)
    key = session.declare("w", landing.shape, "float32")
    session.init(key, landing if session.rank == 0 else None, landing).wait(60)
    while session.rank == 1 and session.core.error is None:
        time.sleep(0.05)  # lives, but takes no step
    session.pushpull(key, landing.copy(), landing).wait(60)
"""


@needs_lab
def test_who_keeps_a_group_waiting_is_named_by_its_leaders(tmp_path, monkeypatch):
    """They are on other hosts."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    settings = {**SLICES, "P3_GROUPS": "3", "P3_TIMEOUT_S": "2", "P3_STRAGGLER_S": "0.3", "P3_STUCK_S": "3"}
    with lab(3, 1000.0) as hosts, Job(
        STORES["p3_sync"], hosts, [sys.executable, "-c", LATE], root=hosts[0], port=9100, folder=tmp_path,
        omp_threads=1, environment=settings,
    ) as job:  # fmt: skip
        job.start()
        named = r"worker 1 \(.*\) is \d+ s behind in round 1, key 'w', for which [12] other.*P3_STUCK_S=3"
        with pytest.raises(JobError, match=named):
            job.wait(DEADLINE_S)
