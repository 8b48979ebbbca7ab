"""Runs the scripts of tests/jobs as jobs: real processes, a deadline, and nothing left behind."""

import socket
import sys

import forked
from processes import ROOT, Process

SCRIPTS = ROOT / "tests" / "jobs"


def python(script, *arguments):
    return forked.command(str(SCRIPTS / script), *map(str, arguments))


def script(name, *arguments):
    """For a launcher that starts Python itself."""
    return [str(SCRIPTS / name), *map(str, arguments)]


def run(command, timeout_s=60, **variables):
    """(exit status, output) of a command. The test fails, with the output, if it misses its deadline."""
    process = _start(command, **variables)
    try:
        return _status_and_output(process, timeout_s)
    finally:
        process.end()


def run_p3(workers, servers, command, timeout_s=100, **variables):
    """As run(), of a job that `p3 run` starts on this machine."""
    launcher = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers)]
    return run([*launcher, *command], timeout_s, **variables)


def run_dist_sync(workers, servers, command, timeout_s=100, **variables):
    """(exit status, output) of each worker of a job of MXNet's own; `variables` are set in all its processes."""
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": "127.0.0.1",
        **variables,
    }
    started = []
    try:
        for role in ["scheduler"] + ["server"] * servers:
            started.append(_start([sys.executable, "-c", "import mxnet"], DMLC_ROLE=role, **job))
        for _ in range(workers):
            started.append(_start(command, DMLC_ROLE="worker", **job))
        return [_status_and_output(process, timeout_s) for process in started[-workers:]]
    finally:
        for process in started:
            process.end()


def _start(command, **variables):
    return Process(command, {**forked.environment(), **variables}, SCRIPTS)


def _status_and_output(process, timeout_s):
    finished = process.wait(timeout_s)
    return finished.code, finished.out + finished.err


def _free_port():
    # MXNet's scheduler wants a number; the kernel does not hand this one out again soon.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
