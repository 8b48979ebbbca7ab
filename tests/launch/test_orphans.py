"""What runs on another host ends when `p3 run` is not there any more, also when nobody tells that host so."""

import signal
import sys

from lab_traces import needs_lab
from processes import Process, clean_environment, is_running, wait_until, write_script
from reached_by_ssh import ReachedBySsh

from p3.measure.lab.hosts import lab

# Notices nothing of the others, as what it calls does not.
SCRIPT = """
    import os, subprocess, sys, time
    from p3.worker.session import Session
    session = Session.open()
    child = subprocess.Popen(["sleep", "300"])
    time.sleep(3)
    print("worker", session.rank, "alive", os.getpid(), os.getppid(), child.pid, flush=True)
    time.sleep(300)
"""


@needs_lab
def test_processes_on_a_host_that_is_cut_off_end_there_and_not_before(tmp_path, processes, sshd):
    with lab(2) as hosts:
        far = ReachedBySsh(hosts[1], tmp_path, sshd, processes)
        far.boot()
        (tmp_path / "hosts").write_text("localhost slots=1\n%s slots=1\n" % far.name)
        command = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "1", "--hostfile", str(tmp_path / "hosts")]
        command = hosts[0].command(*command, sys.executable, write_script(tmp_path, SCRIPT))
        env = clean_environment(P3_SSH=far.ssh, P3_WAIT_TIMEOUT_S="2")  # which the script outlives by a second
        processes.append(Process(command, env, tmp_path))
        job = processes[-1]
        lines = sorted(job.read_line() for _ in range(2))
        assert all("worker %d alive" % rank in lines[rank] for rank in (0, 1)), (lines, job.wait())
        remote = [int(word) for word in lines[1].split()[-3:]]
        assert set(remote) <= set(far.processes()) and all(map(is_running, remote))
        far.cut_off()
        job.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, remote)), "processes are left")
