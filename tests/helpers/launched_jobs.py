"""Jobs of `p3 exec` under a launcher: what tests/jobs/launched.py tells of itself, and what of a job is still alive."""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time

from plugin_jobs import SCRIPTS
from processes import clean_environment

MARK = "P3S_TESTS"  # a variable of all processes of a job: the test's folder
ALL_IN_ONE = ["sh", "-c", 'exec "$@" 2>&1', "sh"]  # before a command: what it says, in the order in which it does


def command(folder, *arguments, options=()):
    """What a launcher is asked to start."""
    script = [sys.executable, str(SCRIPTS / "launched.py"), str(folder), *map(str, arguments)]
    return [sys.executable, "-m", "p3", "exec", *options, *script]


def doctor(folder, seconds="0.1"):
    """What a launcher is asked to start. The doctor's errors go to a file: a launcher may have something to say of
    itself, such as Open MPI, when a child of it has called exec() before its parent could put it into a group."""
    command = [sys.executable, "-m", "p3", "doctor", "--json", "--seconds", seconds]
    return ["sh", "-c", 'exec "$@" 2>>"$0"', str(folder / "doctor.err"), *command]


def examined(folder, ended):
    """The ranks by which the doctor, to whom nothing was wrong, names the hosts."""
    err = (folder / "doctor.err").read_text()
    assert (ended.code, err) == (0, ""), (ended, err)
    found = json.loads(ended.out)
    assert {row["state"] for row in found["rows"]} <= {"ok", "note"}, found["rows"]
    return sorted(int(host["name"].split()[1]) for host in found["hosts"])


def shell(words):
    return " ".join(map(shlex.quote, words))


def environment(folder, **variables):
    """Of the launcher. The home is the test's own, and no route to a real network is needed."""
    for_test = {MARK: str(folder), "HOME": str(folder), "DMLC_NODE_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env = clean_environment(**{**for_test, **variables})
    launchers = ("SLURM_", "OMPI_", "PMI", "MPI_", "HYD")
    return {name: value for name, value in env.items() if not name.startswith(launchers) or name in variables}


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within %g s" % timeout_s
        time.sleep(0.05)


def workers(folder, number, launcher=None):
    """What each worker has told of itself, by rank; waits until the job runs. `launcher`: a Process, whose end before
    that fails the test with what it has said."""
    paths = [folder / str(rank) for rank in range(number)]

    def all_have_told():
        told = all(path.exists() for path in paths)
        if not told and launcher is not None and launcher.popen.poll() is not None:
            raise AssertionError(launcher.wait(10))
        return told

    wait_until(all_have_told)
    return [json.loads(path.read_text()) for path in paths]


def living(folder):
    """{process: command line} of all that have the test's folder in their environment."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % process, "rb") as file:
                marked = b"%s=%s" % (MARK.encode(), os.fsencode(folder)) in file.read().split(b"\0")
            if marked:
                with open("/proc/%s/cmdline" % process, "rb") as file:
                    found[int(process)] = file.read().replace(b"\0", b" ").decode()
        except OSError:
            pass
    return found


def children_with(process, **variables):
    """Its children that have these in their environment; what has ended has none, also before its end was noticed."""
    found, wanted = [], {os.fsencode("%s=%s" % pair) for pair in variables.items()}
    for child in map(int, children(process)):
        with contextlib.suppress(OSError), open("/proc/%d/environ" % child, "rb") as file:
            if wanted <= set(file.read().split(b"\0")):
                found.append(child)
    return found


def node_of(process, role, default=None):
    """The child of a supervisor, or of `p3 run`, that has that role."""
    found = children_with(process, DMLC_ROLE=role)
    if not found and default is None:
        raise LookupError("process %d has no %s" % (process, role))
    return found[0] if found else default


def parent(process):
    with open("/proc/%d/stat" % process) as file:
        return int(file.read().rpartition(")")[2].split()[1])


def children(process):
    with open("/proc/%d/task/%d/children" % (process, process)) as file:
        return file.read().split()


def scheduler_of(run):
    """The scheduler that the launcher of that Process has started, None while it has none."""
    for child in children(run.popen.pid):
        # It may have ended, also between open() and read().
        with contextlib.suppress(OSError), open("/proc/%s/cmdline" % child, "rb") as file:
            if b"--journal-fd" in file.read():
                return int(child)
    return None


def kill_scheduler(run):
    """And waits for another one."""
    wait_until(lambda: scheduler_of(run) is not None, 20)
    scheduler = scheduler_of(run)
    os.kill(scheduler, signal.SIGKILL)
    wait_until(lambda: scheduler_of(run) not in (None, scheduler), 20)


def digests(text):
    """Of what the workers print at their end: (number of lines, the digests, where they began)."""
    found = re.findall(r"servers began at (\d+) and has ([0-9a-f]{8})", text)
    return len(found), {digest for _, digest in found}, {int(began) for began, _ in found}
