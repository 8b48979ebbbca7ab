"""Snapshots that take far longer to write and to bring back than anyone waits for something that does not move."""

import re
import sys

import plugin_jobs as jobs
import pytest
from lab_traces import needs_lab
from processes import PYTHONPATH, Process, clean_environment

from p3.measure.lab import hosts as lab
from p3.snapshots.pace import Pace

TIMEOUT_S = 5  # longer than a machine pauses


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_no_more_is_written_than_the_rate_and_others_hear_of_it_all_the_time():
    clock, told = Clock(), []
    pace = Pace(8.0, lambda: told.append(clock.now), 0.5, clock, clock.sleep)
    for _ in range(20):
        assert pace.step_bytes == 500_000
        clock.now += 0.25  # the disk's own time is part of it
        pace.wrote(500_000)
    assert 19 <= clock.now - 100 <= 20.25  # ten MB
    assert max(after - before for before, after in zip(told, told[1:])) <= 8.0 / 2


def test_without_a_rate_nobody_sleeps():
    clock, told = Clock(), []
    pace = Pace(8.0, lambda: told.append(clock.now), 0, clock, clock.sleep)
    for _ in range(20):
        pace.wrote(1 << 30)
    assert (pace.step_bytes, clock.now, len(told)) == (None, 100.0, 1)


@pytest.mark.timeout(320)
@needs_lab
def test_a_snapshot_is_written_and_resumed_in_many_times_the_time_out(tmp_path, processes):
    """Two hosts at 1 Mbit/s, each with a worker and a server; values and momentum, 0.6 MB of each."""
    settings = {"P3_WAIT_TIMEOUT_S": str(TIMEOUT_S), "P3_SNAPSHOT_RATE": "0.1", "P3_SNAPSHOT_DIR": "snapshots",
                "P3_SNAPSHOT_EVERY": "2", "P3_SSH": "%s -m p3.measure.lab.ssh" % sys.executable}  # fmt: skip

    def run(pair, steps):
        (tmp_path / "hosts").write_text("localhost\n%s\n" % pair[1].name)
        command = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--hostfile", "hosts"]
        command += [sys.executable, str(jobs.SCRIPTS / "slow_link.py"), "150000", str(steps)]
        env = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=PYTHONPATH, **settings)
        processes.append(Process(pair[0].command(*command), env, tmp_path))
        finished = processes[-1].wait(150)
        assert finished.code == 0, finished
        found = re.findall(
            r"from (\d): (\w+) \{'taken': (\d), 'failed': 0\} ([\d.]+) s to begin, ([\d.]+) s to", finished.out
        )
        assert len(found) == 2 and len({digest for _, digest, *_ in found}) == 1, finished
        begun, digest, taken, *_ = found[0]
        return int(begun), digest, int(taken), max(float(one[3]) for one in found), max(float(one[4]) for one in found)

    with lab.lab(2, rate_mbit=1) as pair:
        begun, _, taken, _, written_s = run(pair, 2)
        assert (begun, taken) == (0, 1) and written_s > 2 * TIMEOUT_S
        begun, digest, _, resumed_s, _ = run(pair, 3)
        assert begun == 2 and resumed_s > TIMEOUT_S
