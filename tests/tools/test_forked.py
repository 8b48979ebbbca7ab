"""What a fork server runs is, for a test and for the script, as any other process."""

import json
import os
import signal
import sys
import textwrap

import forked
import pytest
from lab_traces import needs_lab
from processes import Process, is_running, wait_until

from p3.measure.lab import hosts as lab

TELLS = """
    import json, os, sys, threading
    sys.stdout.write(json.dumps({  # at once: workers of torchrun have one output
        "name": __name__, "file": __file__, "arguments": sys.argv, "folder": os.getcwd(),
        "first": sys.path[0], "of": os.environ["P3_OF"], "main": sys.modules["__main__"].__file__,
        "threads": threading.active_count(), "command": open("/proc/self/cmdline").read(), "host": os.uname().nodename,
    }) + "\\n")
    sys.stdout.flush()
"""


@pytest.fixture(params=sorted(forked.LIBRARIES))
def start(request, tmp_path, processes):
    """start(text, *arguments, by, **variables) -> Process of a script that imports a library. `by`: what Python and the
    script are told to, instead of asking a server."""
    pytest.importorskip(request.param)

    def begin(text, *arguments, by=None, **variables):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent("    import %s\n" % request.param + text))
        command = forked.command(str(path), *arguments) if by is None else [*by, str(path), *arguments]
        processes.append(Process(command, {**forked.environment(), **variables}, tmp_path))
        return processes[-1]

    return begin


def test_a_script_is_as_one_that_was_started(start, tmp_path):
    told = json.loads(start(TELLS, "a", "b c", P3_OF="a test").wait().out)
    script = str(tmp_path / "script.py")
    assert told["name"] == "__main__" and told["file"] == told["main"] == script
    assert told["arguments"] == [script, "a", "b c"] and told["of"] == "a test"
    assert told["folder"] == told["first"] == str(tmp_path) and told["threads"] == 1
    assert "serve.py" in told["command"]


@pytest.mark.parametrize("library", sorted(forked.LIBRARIES))
def test_the_library_is_there_before_anything_is_timed(library, tmp_path):
    pytest.importorskip(library)
    (tmp_path / "script.py").write_text("import %s\n" % library)
    forked.command(str(tmp_path / "script.py"))
    (server,) = (server for _, server in forked._kept if server.args[2].endswith("/" + library))
    with open("/proc/%d/maps" % server.pid) as file:
        assert "lib%s" % library in file.read()


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_script_that_something_else_starts_is_forked_all_the_same(start, tmp_path, options):
    told = json.loads(start(TELLS, "a", by=[sys.executable, *options], P3_OF="a launcher").wait().out)
    assert "serve.py" in told["command"] and told["first"] == str(tmp_path) and told["of"] == "a launcher"
    assert told["arguments"] == [str(tmp_path / "script.py"), "a"]


def test_where_there_is_no_server_a_script_is_started(start):
    finished = start("    print(open('/proc/self/cmdline').read())\n", by=[sys.executable], P3S_FORK_SERVERS="").wait()
    assert "serve.py" not in finished.out and "script.py" in finished.out


@needs_lab
def test_a_script_on_a_host_of_a_lab_is_there(start):
    with lab.lab(2) as hosts:
        for host in hosts:
            command = host.command("setpriv", "--pdeathsig", "KILL", sys.executable)
            told = json.loads(start(TELLS, by=command, P3_OF="a lab").wait().out)
            assert "serve.py" in told["command"] and told["host"] == host.name


@pytest.mark.torch
def test_torchrun_and_its_workers_are_forked(start):
    text = TELLS + "    import time\n    time.sleep(100 if os.environ['RANK'] == '1' else 0)\n"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(text, by=command, P3_OF="a job")
    assert "serve.py" in json.loads(process.read_line())["command"]
    with open("/proc/%d/status" % process.popen.pid) as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert resident < 60_000, "kB: the process that stands for torchrun has no torch"


@pytest.mark.parametrize("name, value", [
    ("OMP_NUM_THREADS", "2"),
    ("MXNET_CPU_WORKER_NTHREADS", "2"),
    ("LD_BIND_NOW", "2"),
    ("PYTHONPATH", forked.environment()["PYTHONPATH"] + ":/nowhere"),
])  # fmt: skip
def test_one_whose_libraries_would_read_something_else_is_started(start, name, value):
    text = "    import os\n    print(open('/proc/self/cmdline').read(), os.environ[%r])\n" % name
    finished = start(text, **{name: value}).wait()
    assert finished.code == 0 and "serve.py" not in finished.out and "script.py" in finished.out


@pytest.mark.parametrize("end, code", [
    ("sys.exit(3)", 3),
    ("sys.exit('a reason')", 1),
    ("raise ValueError('a reason')", 1),
    ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ("os.abort()", -signal.SIGABRT),
    ("atexit.register(print, 'a reason', file=sys.stderr)", 0),
    ("class A:\n        __del__ = lambda self, out=sys.stderr: out.write('a reason')\n    a = A()", 0),
    ("threading.Timer(0.1, print, ['a reason'], {'file': sys.stderr}).start()", 0),
])  # fmt: skip
def test_it_ends_as_the_script_does(start, end, code):
    finished = start("    import atexit, os, signal, sys, threading\n    %s\n" % end).wait()
    assert finished.code == code and ("a reason" in finished.err) == ("a reason" in end), finished


def test_signals_reach_the_script(start):
    text = """
        import os, signal, sys
        def end(*_):
            print("ends", flush=True)
            sys.exit(4)
        signal.signal(signal.SIGTERM, end)
        print(os.getpid(), flush=True)
        signal.pause()
    """
    process = start(textwrap.dedent(text).replace("\n", "\n    "))
    assert int(process.read_line()) != process.popen.pid
    process.signal(signal.SIGTERM)
    finished = process.wait()
    assert finished.code == 4 and finished.out == "ends\n"


def test_a_script_dies_with_the_process_that_stands_for_it(start):
    process = start("    import os, signal\n    print(os.getpid(), flush=True)\n    signal.pause()\n")
    script = int(process.read_line())
    process.end()
    wait_until(lambda: not is_running(script), "the script runs on")


def test_nothing_runs_on_when_the_tests_have_ended(tmp_path):
    library = next((name for name in sorted(forked.LIBRARIES) if forked.find_spec(name)), None)
    if library is None:
        pytest.skip("neither MXNet nor torch is here")
    text = "import %s, os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n" % library
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "tests.py").write_text(
        "import forked, os, subprocess\n"
        "process = subprocess.Popen(forked.command('script.py'), env=forked.environment(), stdout=subprocess.PIPE)\n"
        "print(forked._kept[0][1].pid, int(process.stdout.readline()), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    tests = Process([sys.executable, "tests.py"], forked.environment(), tmp_path)
    try:
        for process in map(int, tests.read_line().split()):
            wait_until(lambda process=process: not is_running(process), "process %d runs on" % process)
    finally:
        tests.end()


def test_a_server_survives_all_ends_of_processes(start):
    """One that has died is missed by nobody: the scripts are started as any other."""
    for number in range(20):
        process = start("    import os, signal\n    print(os.getpid(), flush=True)\n    signal.pause()\n")
        script = int(process.read_line())
        if number % 2:
            os.kill(script, signal.SIGKILL)
        process.signal(signal.SIGTERM)
        process.end()
    assert all(server.poll() is None for _, server in forked._kept)
