"""`p3 run` and `p3 exec`: what they start, what they show, and that nothing survives them."""

import contextlib
import fcntl
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pytest
from processes import ROOT, Process, clean_environment, is_running, wait_until, write_script

from p3 import cli
from p3.errors import ConfigError
from p3.launch.engines import root_address
from p3.launch.execute import worker_environment
from p3.launch.output import Output
from p3.launch.placement import Host, place, read_hostfile, remote_command
from p3.mxnet import hooks
from p3.settings import Settings

JOIN = """
    import os, sys, time
    from p3.worker.session import Session
    session = Session.open()
"""

UNTIL_MISSING = """
    import asyncio, os, sys, time
    from p3.cluster.watching import watcher
    from p3.settings import Settings

    def until_missing(which):
        "Returns when these have not joined the job, and all others have."
        deadline = time.monotonic() + 30
        while asyncio.run(watcher.look(Settings.from_env(os.environ), 10))["missing"] != which:
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


def run_here(command, env, folder):
    return subprocess.run(command, env=env, cwd=str(folder), capture_output=True, text=True, timeout=60)


def descendants(pid):
    """All processes below `pid`, whatever their group."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    found = {pid}
    for _ in parents:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            break
        found |= more
    return found - {pid}


# Placement


def test_workers_and_servers_go_round_robin():
    tasks = place(3, 2, [Host("a"), Host("b")])
    assert [(task.name, task.host.name) for task in tasks] == [
        ("server 0", "a"),
        ("server 1", "b"),
        ("worker 0", "a"),
        ("worker 1", "b"),
        ("worker 2", "a"),
    ]
    assert [task.env["P3_LOCAL_RANK"] for task in tasks[2:]] == ["0", "0", "1"]
    assert [task.env["P3_LOCAL_SIZE"] for task in tasks[2:]] == ["2", "1", "2"]


def test_a_host_takes_no_more_workers_than_its_slots():
    tasks = place(4, 1, [Host("a", 1), Host("b"), Host("c", 1)])
    assert [task.host.name for task in tasks[1:]] == ["a", "b", "c", "b"]
    with pytest.raises(ConfigError, match="the hosts have 2 slots; 3 workers do not fit"):
        place(3, 1, [Host("a", 1), Host("b", 1)])


def test_a_hostfile_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("\ufeffa slots=2  # the big one\n# others\n\nuser@b\n[fd00::3] slots=1\nuser@[fd00::4]\nfd00::5\n")
    assert read_hostfile(str(path)) == [
        Host("a", 2), Host("user@b"), Host("fd00::3", 1), Host("user@fd00::4"), Host("fd00::5")
    ]  # fmt: skip


@pytest.mark.parametrize("text", [
    "", "a slots=0", "a slots", "a b", "a\na", "-oProxyCommand=x", "a\nubuntu@A", "a:4", "[a]:4", "slots=2",
    "me@", "[fd00::1]:22",
])  # fmt: skip
def test_a_wrong_hostfile_is_refused(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        read_hostfile(str(path))


def test_a_remote_command_is_quoted_and_holds_no_secret():
    (_, task) = place(1, 1, [Host("far")])
    own = {"P3_SECRET": "swordfish-swordfish", "P3_SLICE_ELEMENTS": "5", "HOME": "/home/me"}
    line = remote_command(
        task, {"DMLC_PS_ROOT_PORT": "77"}, own, Settings(), "/a dir", ["echo", "$HOME", "it's"]
    )
    assert line[:4] == ["ssh", "-o", "BatchMode=yes", "far"]
    assert "swordfish" not in line[4] and "HOME=" not in line[4]
    assert "P3_SLICE_ELEMENTS=5" in line[4] and "DMLC_PS_ROOT_PORT=77" in line[4]
    assert line[4].startswith("cd '/a dir' && exec env ")
    shell = subprocess.run(["sh", "-c", "set -- " + line[4].partition("exec env ")[2] + '; printf "%s\n" "$@"'],
                           capture_output=True, text=True, timeout=10).stdout.splitlines()
    assert shell[shell.index("exec"):] == ["exec", "--secret-stdin", "--silence=600", "--", "echo", "$HOME", "it's"]


def test_cores_are_shared_out_among_a_hosts_workers_unless_told_otherwise():
    cores = len(os.sched_getaffinity(0))
    for workers, threads in ((cores, 1), (1, cores), (10 * cores, 1)):
        assert worker_environment({"P3_LOCAL_SIZE": str(workers)})["OMP_NUM_THREADS"] == str(threads)
    assert worker_environment({"P3_LOCAL_SIZE": "1", "OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in worker_environment({})


# Output


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_by(stream, *steps, name="worker 0"):
    output = Output(stream)
    sources = {}
    for source, data in steps:
        sources.setdefault(source, output.source(source)).feed(data)
    for source in sources.values():
        source.end()
    return stream.getvalue()


def test_lines_are_prefixed_however_they_arrive():
    steps = [("worker 0", b"on"), ("server 1", b"x\ny\n"), ("worker 0", b"e\ntw"), ("worker 0", b"o")]
    assert shown_by(io.StringIO(), *steps) == "[server 1] x\n[server 1] y\n[worker 0] one\n[worker 0] two\n"


def test_a_character_cut_in_two_and_broken_bytes_survive():
    assert shown_by(io.StringIO(), ("a", b"\xc3"), ("a", b"\xa9\xff\n")) == "[a] \u00e9\ufffd\n"


def test_of_a_progress_bar_a_log_gets_the_last_state():
    steps = [("worker 0", b"\r 10%"), ("worker 0", b"\r 50%"), ("worker 0", b"\r100%\n"), ("worker 0", b"done\r\n")]
    assert shown_by(io.StringIO(), *steps) == "[worker 0] 100%\n[worker 0] done\n"


def test_on_a_terminal_worker_0s_bar_is_live_below_the_lines():
    shown = shown_by(Terminal(), ("worker 0", b"\r 10%"), ("worker 1", b"\r 9%"), ("worker 1", b"\rhello\n"))
    screen = [""]
    for character in shown.replace("\r\x1b[K", "\r"):
        if character == "\n":
            screen.append("")
        else:
            screen[-1] = "" if character == "\r" else screen[-1] + character
    plain = [line.replace("\x1b[36m", "").replace("\x1b[32m", "").replace("\x1b[0m", "") for line in screen]
    assert plain == ["[worker 1] hello", "[worker 0]  10%", ""]


def test_the_last_line_is_a_processs_own_and_not_that_the_job_failed():
    source = Output(io.StringIO()).source("worker 1")
    source.feed(b"no data\n\np3: the job failed: worker 0 has lost us\n")
    assert source.last_line == "no data"


# Jobs


def test_output_and_arguments_pass_through(run_job):
    script = JOIN + "    print(sys.argv[1:]); print('oops', file=sys.stderr)"
    finished = run_job(script, workers=1, arguments=("a b", "--flag", "$HOME"))
    assert (finished.code, finished.err) == (0, "")
    assert sorted(finished.out.splitlines()) == ["[worker 0] ['a b', '--flag', '$HOME']", "[worker 0] oops"]


def test_the_environment_of_a_worker(run_job):
    finished = run_job(
        JOIN + """
    names = ["DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "P3_RANK", "P3_LOCAL_RANK", "OMP_NUM_THREADS"]
    names += ["MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"]
    print(*[os.environ[name] for name in names], "p3" in sys.modules)
    """,
        env={"OMP_NUM_THREADS": "3"},
        servers=2,
    )
    assert sorted(finished.out.splitlines()) == [
        "[worker 0] worker 2 2 0 0 3 1 True",
        "[worker 1] worker 2 2 1 1 3 1 True",
    ]


def test_a_secret_that_is_no_line_is_refused(run_job):
    finished = run_job("pass", env={"P3_SECRET": "a secret\nof several lines"})
    assert finished.code == 1 and "the secret has a line break in it" in finished.err, finished


def test_no_command_line_holds_the_secret(start_job):
    process = start_job(JOIN + "    print(os.environ['P3_SECRET']); session.barrier(); time.sleep(60)")
    secret = process.read_line().split()[-1]
    assert len(secret) == 64
    for pid in descendants(process.popen.pid):
        try:
            assert secret.encode() not in Path("/proc/%d/cmdline" % pid).read_bytes()
        except OSError:  # it has just ended
            pass


@pytest.mark.parametrize("how, code", [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)])
def test_when_one_worker_fails_all_end_and_the_cause_comes_last(run_job, how, code):
    script = JOIN + """
    if session.rank == 1:
        %s
    session.barrier()
    """
    finished = run_job(script % how, servers=2)
    assert finished.code == code, finished
    assert "worker 1 (127.0.0.1)" in finished.err.splitlines()[-1] or "worker 1 ended" in finished.err.splitlines()[-1]
    assert "p3 run: the job failed: " in finished.err


def test_a_worker_that_fails_before_it_joins_ends_the_job(run_job):
    check = """
    if os.environ["P3_RANK"] == "1":
        sys.exit("no data here")
    """
    finished = run_job(JOIN.replace("    from p3", check + "from p3"))
    assert finished.code == 1
    assert finished.err.splitlines()[-1] == "p3 run: worker 1 ended with exit code 1; its last line: no data here"


@pytest.mark.parametrize("worker, code, told", [
    ("sys.exit('no data here')", 1, "worker 1 ended with exit code 1; its last line: no data here"),
    ("sys.exit(7)", 7, "worker 1 ended with exit code 7"),
])  # fmt: skip
def test_what_comes_of_ending_those_that_have_joined_is_not_taken_for_the_cause(run_job, worker, code, told):
    script = UNTIL_MISSING + """
    if os.environ["P3_RANK"] == "1":
        until_missing("1 of 2 workers (rank 1)")
        %s
    from p3.worker.session import Session
    Session.open()
    """
    finished = run_job(script % worker)
    assert (finished.code, finished.err) == (code, "p3 run: %s\n" % told), finished


def test_a_command_that_does_not_exist(tmp_path):
    command = [sys.executable, "-m", "p3", "run", "-n", "1", "-s", "1", "no-such-program"]
    finished = run_here(command, clean_environment(), tmp_path)
    assert finished.returncode == 1 and "cannot run 'no-such-program': No such file or directory" in finished.stderr


def test_a_script_without_python_before_it_is_told_so(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    command = [sys.executable, "-m", "p3", "run", "-n", "1", "-s", "1", "train.py"]
    finished = run_here(command, clean_environment(), tmp_path)
    assert finished.returncode == 1 and "It is a file here: write `python train.py`" in finished.stderr


def test_workers_that_never_join_end_with_a_warning(run_job):
    finished = run_job(UNTIL_MISSING + "    until_missing('2 of 2 workers (rank 0, 1)')", workers=2)
    assert finished.code == 0, finished
    (told,) = finished.err.splitlines()
    assert told.startswith("p3 run: all workers ended without ever joining the job")


def test_workers_that_train_alone_for_long_are_told_of_the_store(run_job):
    finished = run_job("import time; time.sleep(60)", env={"P3_RENDEZVOUS_TIMEOUT_S": "2"})
    assert finished.code == 1
    assert "2 of 2 workers (rank 0, 1)" in finished.err and "do the workers join the job (p3.torch." in finished.err


FAILS = """
    import os, sys, types
    sys.modules["mxnet"] = types.ModuleType("mxnet")  # stands for MXNet, which takes seconds to load
    %s
"""


@pytest.mark.parametrize("how, code, last", [
    ("import argparse; p = argparse.ArgumentParser(prog='train.py'); p.add_argument('--data', required=True); "
     "p.parse_args()", 2, "train.py: error: the following arguments are required: --data"),
    ("raise SystemExit('no data here')", 1, "no data here"),
    ("import json; json.loads('{')", 1,
     "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
])  # fmt: skip
def test_a_script_that_fails_by_itself_is_reported_by_its_own_last_line(run_job, how, code, last):
    finished = run_job(FAILS % how, workers=1)
    assert finished.code == code
    assert finished.err.splitlines() == ["p3 run: worker 0 ended with exit code %d; its last line: %s" % (code, last)]
    assert "P3 store" not in finished.out and finished.out.splitlines()[-1] == "[worker 0] " + last


def test_an_exception_that_the_job_has_taken_for_its_failure_is_not_reported_twice(run_job):
    script = JOIN + "    if session.rank == 1: import json; json.loads('{')\n    session.barrier()"
    (only,) = run_job(script).err.splitlines()
    worker = "worker 1 (127.0.0.1)"
    assert only.startswith("p3 run: the job failed: %s: the script ended with JSONDecodeError: Expecting" % worker)


@pytest.mark.parametrize("how, last", [("sys.exit('no data')", "; its last line: no data"), ("sys.exit(1)", "")])
def test_a_script_that_gives_up_while_others_train_is_named_before_what_it_did_to_them(run_job, how, last):
    script = JOIN + """
    import numpy as np
    key, landing = session.declare("w", (3,), "float32"), np.zeros(3, np.float32)
    session.init(key, np.ones(3, np.float32), landing).wait(30)
    if session.rank == 1:
        %s
    session.pushpull(key, np.ones(3, np.float32), landing).wait(30)
    """
    finished = run_job(script % how)
    cause, consequence = finished.err.splitlines()
    assert finished.code == 1 and cause == "p3 run: worker 1 ended with exit code 1" + last
    assert consequence.startswith("p3 run: the job failed: ") and "worker 1 (127.0.0.1) ended" in consequence


@pytest.mark.parametrize("options, text", [
    (["-n", "2", "-s", "0"], "'0' is not a whole number from 1"),
    (["-n", "0"], "'0' is not a whole number from 1"),
    (["-s", "1"], "the following arguments are required: -n"),
])
def test_wrong_options_are_refused(capsys, options, text):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run"] + options + ["true"])
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_a_port_in_use_is_named(run_job):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        finished = run_job(JOIN, env={"DMLC_PS_ROOT_PORT": port})
    assert finished.code == 1
    assert "p3: cannot listen on 127.0.0.1, DMLC_PS_ROOT_PORT=%s: Address already in use" % port in finished.err


SLEEP = JOIN + """
    print("pid", os.getpid(), flush=True)
    time.sleep(300)
"""


def pids_of_a_sleeping_job(process, workers):
    for _ in range(workers):
        assert " pid " in process.read_line()
    pids = descendants(process.popen.pid)
    assert len(pids) >= workers + 2
    return pids


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everything(start_job, number, code):
    process = start_job(SLEEP)
    pids = pids_of_a_sleeping_job(process, 2)
    process.signal(number)
    finished = process.wait(20)
    assert finished.code == code and "interrupted by" in finished.err
    wait_until(lambda: not any(map(is_running, pids)), "processes are left")


def test_one_that_ignores_sighup_as_with_nohup_goes_on(start_job):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which children inherit
    try:
        process = start_job(SLEEP)
    finally:
        signal.signal(signal.SIGHUP, before)
    pids_of_a_sleeping_job(process, 2)
    process.signal(signal.SIGHUP)
    process.signal(signal.SIGINT)
    assert process.wait(20).err == "p3 run: interrupted by SIGINT; all processes have been stopped\n"


def test_what_a_worker_leaves_behind_holds_nobody_up(start_job):
    """It has the worker's output open, as a TensorBoard would that a script has started."""
    process = start_job(JOIN + """
    import subprocess, sys
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print("left", left.pid, flush=True)
    session.close()
    """)
    finished = process.wait(30)
    assert finished.code == 0, finished
    left = [int(pid) for pid in re.findall(r"left (\d+)", finished.out)]
    assert len(left) == 2
    wait_until(lambda: not any(map(is_running, left)), "processes are left")


def test_a_worker_that_is_told_to_end_can_still_finish_its_step(start_job):
    """Servers end after the workers, and nobody reports the others' end as a loss."""
    process = start_job(JOIN + """
    import signal, numpy as np
    key, landing = session.declare("w", (3,), "float32"), np.zeros(3, np.float32)
    session.init(key, np.ones(3, np.float32), landing).wait(30)
    def finish(*ignored):
        session.pushpull(key, np.ones(3, np.float32), landing).wait(30)
        print("finished a step")
        os._exit(0)
    signal.signal(signal.SIGTERM, finish)
    print("pid", os.getpid(), flush=True)
    while True:
        signal.pause()
    """, workers=1, servers=2)
    pids_of_a_sleeping_job(process, 1)
    process.signal(signal.SIGINT)
    finished = process.wait(30)
    assert finished.out == "[worker 0] finished a step\n"
    assert (finished.code, finished.err) == (130, "p3 run: interrupted by SIGINT; all processes have been stopped\n")


def test_everything_dies_with_a_launcher_that_is_killed(start_job):
    process = start_job(SLEEP)
    pids = pids_of_a_sleeping_job(process, 2)
    process.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), "processes are left")


def test_what_ignores_sigterm_is_killed_with_what_it_started(start_job):
    ignore = """
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits this
    subprocess.Popen(["sleep", "300"])
    """
    process = start_job(ignore + SLEEP.lstrip("\n").replace("    import", "import", 1), workers=1)
    pids = pids_of_a_sleeping_job(process, 1)
    process.signal(signal.SIGTERM)
    assert process.wait(20).code == 143
    wait_until(lambda: not any(map(is_running, pids)), "processes are left")


def test_a_timeout_ends_the_job(run_job):
    finished = run_job(SLEEP, options=("--timeout", "5"), workers=1)
    assert finished.code == 124 and "still running after --timeout 5 s" in finished.err


# Ports


def test_servers_listen_at_the_ports_that_they_are_given_and_say_so_where_these_do_not_suffice(run_job):
    script = JOIN + "    print([server['port'] for server in session._link._member.servers]); session.barrier()"
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [one.getsockname()[1] for one in found]
        for free in found[1:]:
            free.close()
        given = {"P3_SERVER_PORTS": ",".join(map(str, ports))}
        finished = run_job(script, workers=1, servers=2, env=given)
        assert (finished.code, finished.err) == (0, ""), finished
        (told,) = re.findall(r"^\[worker 0\] \[.*\]$", finished.out, re.MULTILINE)  # others may have warned of a delay
        assert sorted(map(int, re.findall(r"\d{4,}", told))) == sorted(ports[1:])
        failed = run_job(script, workers=1, servers=3, env=given)
    text = "server (127.0.0.1): none of P3_SERVER_PORTS is free here: %d, %d, %d" % tuple(ports)
    assert failed.code == 1 and text in failed.err and "give more ports" in failed.err, failed


# Open files


def job_with_limits(tmp_path, processes, soft, hard, *, workers, env=None):
    """`p3 run` where a process may have so few open files."""
    script = write_script(tmp_path, JOIN + """
    import resource
    session.barrier()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    """)
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (%d, %d)); " % (soft, hard)
    limited += "os.execv(sys.executable, [sys.executable, '-m', 'p3', 'run', *sys.argv[1:]])"
    command = [sys.executable, "-c", limited, "-n", str(workers), "-s", "2", sys.executable, script]
    processes.append(Process(command, clean_environment(**(env or {})), tmp_path))
    return processes[-1].wait()


def test_a_soft_limit_on_open_files_is_raised_in_every_process(tmp_path, processes):
    """20 are too few for each: for the pipes of 6 processes, for 5 nodes' connections, for vans in shared memory."""
    finished = job_with_limits(tmp_path, processes, 20, 4096, workers=3)
    assert (finished.code, finished.err) == (0, ""), finished
    assert sorted(finished.out.splitlines()) == ["[worker %d] 4096" % rank for rank in range(3)]


def test_a_hard_limit_on_open_files_that_does_not_suffice_is_named_with_what_would(tmp_path, processes):
    finished = job_with_limits(tmp_path, processes, 40, 40, workers=12)
    (said,) = finished.err.splitlines()
    assert finished.code == 1 and finished.out == "", finished
    assert re.fullmatch(
        r"p3: p3 run: \d\d open files are needed for 15 processes, and this process may have 40\. Raise the hard limit "
        r"where it is started: ulimit -Hn \d+ as root; .*", said), said  # fmt: skip


def test_a_scheduler_with_too_few_open_files_says_how_many_it_needs(make_cluster, tmp_path):
    """Each node of a TLS job takes ten."""
    cluster = make_cluster(300, 20)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    (tmp_path / "sitecustomize.py").write_text(limit)
    path = os.pathsep.join([str(tmp_path), cluster.env()["PYTHONPATH"]])
    scheduler = cluster.start("scheduler", P3_TLS="1", PYTHONPATH=path).wait()
    assert scheduler.code == 1 and "scheduler (127.0.0.1): 32" in scheduler.err
    assert "open files are needed for 320 nodes, and this process may have 1024" in scheduler.err


# What a worker's Python finds


def autoload(text, tmp_path, **settings):
    env = worker_environment(clean_environment(DMLC_ROLE="worker", **settings))
    return run_here([sys.executable, "-c", text], env, tmp_path)


def test_the_plugin_is_registered_before_the_script(tmp_path):
    finished = autoload("import sys; print('p3' in sys.modules, 'mxnet' in sys.modules)", tmp_path)
    assert (finished.stdout, finished.stderr) == ("True False\n", "")


def test_another_sitecustomize_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the site runs')")
    path = os.pathsep.join([clean_environment()["PYTHONPATH"], str(tmp_path)])
    finished = autoload("import p3", tmp_path, PYTHONPATH=path)
    assert (finished.stdout, finished.stderr) == ("the site runs\n", "")


def test_a_python_of_another_installation_below_a_worker_is_left_alone(tmp_path):
    """As of a tool that the script calls: it gets neither P3 nor the packages beside it."""
    packages = tmp_path / "lib" / "python3" / "site-packages"
    shutil.copytree(str(ROOT / "p3"), str(packages / "p3"), ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = clean_environment(DMLC_ROLE="worker", PYTHONPATH=str(packages / "p3" / "_autoload"))
    script = "import sys; print('p3' in sys.modules, %r in sys.path)" % str(packages)
    # -I -S would leave all of it out; a Python of no environment finds what its own site-packages have.
    finished = run_here([sys._base_executable, "-S", "-c", "import sitecustomize; " + script], env, tmp_path)
    assert (finished.stdout, finished.stderr) == ("False False\n", "")


def test_a_numpy_that_mxnet_cannot_bear_is_named_with_the_remedy(tmp_path, run_job):
    # Stand-ins: the real ones take minutes to install. MXNet fails so with NumPy 1.24 and later.
    for name, text in {"numpy": "__version__ = '1.24.0'", "mxnet": "import numpy; numpy.bool"}.items():
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path / "site"), clean_environment()["PYTHONPATH"]])
    finished = run_job("import mxnet", workers=1, env={"PYTHONPATH": path})
    said = finished.err.splitlines()
    assert finished.code == 1 and len(said) == 1, finished
    assert "ImportError: NumPy 1.24.0 is installed, and MXNet 1.9.1 fails to import with 1.24 and later" in said[0]
    assert said[0].endswith("Run: %s -m pip install 'numpy<1.24'" % sys.executable)


@pytest.mark.parametrize("version, suits", [("1.23.5", True), ("1.24.0rc1", False), ("2.4.6", False), ("", True)])
def test_which_numpy_suits(version, suits):
    problem = hooks.numpy_problem(version)
    assert problem is None if suits else version in problem[0] and problem[1].endswith("pip install 'numpy<1.24'")


def test_without_the_core_every_process_says_how_to_build_it(tmp_path):
    """In a source tree that was never built."""
    shutil.copytree(str(ROOT / "p3"), str(tmp_path / "p3"), ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "Makefile").touch()
    env = clean_environment(PYTHONPATH=str(tmp_path))
    remedy = "P3's C++ core is not built in %s for Python %d.%d. Run: make -C %s " % (
        tmp_path, *sys.version_info[:2], tmp_path)  # fmt: skip
    run = [sys.executable, "-m", "p3", "run", "-n", "1", "true"]
    for command in (run, run[:4] + ["--tls"] + run[4:], [sys.executable, "-m", "p3", "exec"]):
        finished = run_here(command, dict(env, DMLC_ROLE="server"), tmp_path)
        assert finished.returncode == 1 and finished.stderr.startswith("p3: " + remedy), finished
        assert len(finished.stderr.splitlines()) == 1
    for script in ("import p3; p3.P3Worker", "from p3 import _core", "import p3.mxnet.kvstore"):
        finished = run_here([sys.executable, "-c", script], env, tmp_path)  # the store imports MXNet, then the core
        assert finished.returncode == 1 and remedy in finished.stderr.splitlines()[-1], finished
    for command in (["--help"], ["bench", "dgc", "--help"]):
        assert run_here([sys.executable, "-m", "p3", *command], env, tmp_path).returncode == 0
    doctor = run_here([sys.executable, "-m", "p3", "doctor"], env, tmp_path)
    assert doctor.returncode == 1 and "MISSING  C++ core               " + remedy in doctor.stdout


def test_the_doctor_finds_what_is_here(tmp_path):
    finished = run_here([sys.executable, "-m", "p3", "doctor"], clean_environment(), tmp_path)
    assert finished.returncode == 0, finished
    for subject in ("p3 ", "python", "C++ core", "numpy", "mxnet", "cpu", "interface lo", "ssh", "DMLC_*"):
        assert " %s" % subject in finished.stdout


def test_the_doctor_says_what_is_wrong_with_the_environment(tmp_path):
    env = clean_environment(DMLC_ROLE="worker", DMLC_PS_ROOT_URI="127.0.0.1")
    finished = run_here([sys.executable, "-m", "p3", "doctor"], env, tmp_path)
    assert finished.returncode == 1
    assert "MISSING  DMLC_*" in finished.stdout and "DMLC_PS_ROOT_PORT" in finished.stdout


def test_the_version_is_printed(capsys):
    import p3

    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == "p3 %s\n" % p3.__version__


@pytest.fixture
def beside_an_unbuilt_p3(tmp_path):
    """A working directory that has a folder p3, as a clone has that was never built; and a `p3` command, whose own
    folder comes first instead, as pip installs it."""
    (tmp_path / "p3").mkdir()
    (tmp_path / "p3" / "__init__.py").write_text("raise SystemExit('the p3 of the working directory')")
    for name, text in (("bin/p3", "from p3.cli import main; raise SystemExit(main())"),
                       ("examples/who.py", JOIN + "    session.barrier(); print(sys.executable, sys.path[0])")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(textwrap.dedent(text))
    return [sys.executable, str(tmp_path / "bin" / "p3")]


def test_a_clone_as_working_directory_hides_no_installed_p3(tmp_path, processes, beside_an_unbuilt_p3):
    """Servers, scheduler and worker under another launcher; the script's own imports stay as they are."""
    env = clean_environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0",
                            OMPI_COMM_WORLD_LOCAL_SIZE="1", PMIX_NAMESPACE="1", HOME=str(tmp_path))  # fmt: skip
    command = [*beside_an_unbuilt_p3, "exec", sys.executable, "examples/who.py"]
    processes.append(Process(command, env, tmp_path))
    finished = processes[-1].wait()
    assert (finished.code, finished.err) == (0, ""), finished
    assert finished.out == "%s %s\n" % (sys.executable, tmp_path / "examples")


# Over ssh


def test_python_is_p3s_on_every_host_and_a_clone_as_working_directory_hides_no_installed_p3(
    tmp_path, processes, sshd, beside_an_unbuilt_p3
):
    """Over ssh, with sshd's own PATH; the launcher's has the virtual environment's folder first."""
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.2 slots=1\n")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = clean_environment(P3_SSH=sshd, DMLC_NODE_HOST="127.0.0.1", PATH=path)
    job = ["run", "-n", "2", "-s", "2", "--hostfile", "hosts", "python", "examples/who.py"]
    processes.append(Process([*beside_an_unbuilt_p3, *job], env, tmp_path))
    finished = processes[-1].wait()
    assert (finished.code, finished.err) == (0, ""), finished
    assert sorted(finished.out.splitlines()) == [
        "[worker %d] %s %s" % (rank, sys.executable, tmp_path / "examples") for rank in (0, 1)
    ]


def hostfile_job(start_job, tmp_path, sshd, script, *options, workers=2):
    """Two hosts: this one, and this one again by another name, over ssh."""
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.2\n")
    env, options = {"P3_SSH": sshd, "DMLC_NODE_HOST": "127.0.0.1"}, ("--hostfile", str(tmp_path / "hosts")) + options
    return start_job(script, workers=workers, servers=2, env=env, options=options)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_job_over_ssh_trains_and_reports_the_first_failure(start_job, tmp_path, sshd, worker):
    script = JOIN + """
    session.barrier()
    print("over ssh:", "SSH_CONNECTION" in os.environ)
    sys.exit(3 * (session.rank == %d))
    """
    finished = hostfile_job(start_job, tmp_path, sshd, script % worker).wait()
    assert "[worker 0] over ssh: False" in finished.out and "[worker 1] over ssh: True" in finished.out, finished
    assert finished.code == 3, finished


@pytest.fixture
def listening_sshd(tmp_path, processes, sshd):
    """With its own MaxStartups: of more than ten connections that have not logged in yet, it drops some unheard. In
    inetd mode, it counts none."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [program, "-D", "-e", "-f", str(tmp_path / "config"), "-p", port, "-o", "ListenAddress=127.0.0.1"]
    processes.append(Process(command, clean_environment(), tmp_path))
    while b"Server listening" not in processes[-1].popen.stderr.readline():
        assert processes[-1].popen.poll() is None
    return re.sub(r"-p \d+", "-p " + port, sshd)


def test_many_processes_of_one_host_do_not_overrun_its_sshd(start_job, tmp_path, listening_sshd):
    finished = hostfile_job(start_job, tmp_path, listening_sshd, "print('here')", workers=14).wait()
    assert finished.out.count("here") == 14, finished
    assert "ended with exit code 255" not in finished.err


def test_a_remote_process_dies_with_the_launcher(start_job, tmp_path, sshd):
    process = hostfile_job(start_job, tmp_path, sshd, SLEEP)
    pids = [int(process.read_line().split()[-1]) for _ in range(2)]
    process.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), "processes are left")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here; install it with: apt-get install openssh-client")
def test_a_host_that_ssh_cannot_reach_is_named(start_job, tmp_path):
    unreachable = "ssh -F none -o BatchMode=yes -o HostName=127.0.0.1 -p 1"
    finished = hostfile_job(start_job, tmp_path, unreachable, SLEEP).wait()
    assert finished.code == 255 and "127.0.0.2 ended with exit code 255" in finished.err


def bytes_in(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.fixture
def unread(tmp_path):
    """unread(script, ...) -> `p3 run`, whose standard output nobody reads, and the end where it could be read. The pipe
    is full when it returns."""
    started = []

    def start(script, *options, blocking=True):
        reading, writing = os.pipe()
        os.set_blocking(writing, blocking)
        command = [sys.executable, "-m", "p3", "run", *options, sys.executable, write_script(tmp_path, script)]
        launcher = subprocess.Popen(
            command, env=clean_environment(), cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True
        )
        os.close(writing)
        started.append((launcher, open(reading, "rb")))
        wait_until(lambda: bytes_in(reading) > 65000, "the pipe is full")
        return started[-1]

    yield start
    for launcher, pipe in started:
        launcher.kill()
        launcher.wait()
        launcher.stderr.close()
        pipe.close()


def numbers_of_lines(pipe, name="worker 0"):
    """Of the whole lines that this process has written."""
    return [int(number) for number in re.findall(r"(?m)^\[%s\] line (\d+)\n" % name, pipe.read().decode())]


@pytest.mark.parametrize("blocking", [True, False])
def test_no_output_is_lost_while_nobody_reads_it_and_the_end_of_processes_is_noticed(unread, blocking):
    """More than the launcher takes ahead, and less than with that fits into the pipes."""
    launcher, pipe = unread("for number in range(12000): print('line', number)", "-n", "1", blocking=blocking)
    wait_until(lambda: not descendants(launcher.pid), "all processes are ended")
    assert numbers_of_lines(pipe) == list(range(12000))
    assert launcher.wait(30) == 0


FLOOD = JOIN + """
    if session.rank == 0:
        for number in range(10**7):
            print("line", number)
    while not os.path.exists("now"):
        time.sleep(0.05)
    sys.exit(7)
"""


def test_a_worker_that_fails_while_nobody_reads_ends_the_job_and_little_is_kept_in_memory(unread, tmp_path):
    launcher, pipe = unread(FLOOD, "-n", "2")
    (tmp_path / "now").touch()
    wait_until(lambda: not descendants(launcher.pid), "all processes are ended")
    assert launcher.poll() is None  # it has more to say
    numbers = numbers_of_lines(pipe)
    assert numbers == list(range(len(numbers))) and 5000 < len(numbers) < 100000
    assert launcher.wait(30) == 7 and "p3 run: worker 1 ended with exit code 7\n" in launcher.stderr.read()


def test_an_interrupt_ends_a_job_while_nobody_reads(unread):
    launcher, pipe = unread(FLOOD, "-n", "2")
    pids = descendants(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 130
    assert not any(map(is_running, pids))


def test_a_host_whose_name_does_not_resolve_hides_no_other():
    hosts = [Host("localhost"), Host("nowhere.invalid"), Host("127.0.0.2")]
    assert root_address(Settings(), hosts) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"nowhere\.invalid reaches. Set DMLC_NODE_HOST"):
        root_address(Settings(), hosts[:2])
