"""Real jobs, watched: the line of `p3 run`, `p3 top`, and what Prometheus gets."""

import os
import pty
import re
import signal
import sys
import time
import urllib.request

import forked
import pytest
from plugin_jobs import SCRIPTS
from processes import PYTHONPATH, SECRET, Process, clean_environment, wait_until

LINE = re.compile(
    r"p3 run: round \d+, [\d.]+ steps/s, workers waited \d+% of the time, longest for (encoder|decoder)\.\d, "
    r"links not used: one host(, slowest worker 1 \(127\.0\.0\.1\), [\d.]+ m?s behind the first)?"
    r"(, slowest server \d \(127\.0\.0\.1\), slices queue [\d.]+ m?s for it)? \(over the last \d+ s\)"
)


@pytest.fixture
def watched(tmp_path, processes):
    """watched(seconds, options of p3 run, settings) -> the Process of `p3 run`, when it takes steps; `end()` ends it in
    order and gives what it has said."""

    def start(seconds=0.05, workers=2, servers=2, **env):
        process = begin(seconds, workers, servers, **env)
        while (line := process.read_line()) != "[worker 0] steps":
            assert process.popen.poll() is None, process.wait()
            process.lines.append(line)
        return process

    def begin(seconds, workers=2, servers=2, **env):
        command = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers)]
        command += forked.command(str(SCRIPTS / "watched.py"), str(tmp_path / "stop"), str(seconds))
        process = Process(command, clean_environment(**{"P3_LOCAL_AGGREGATION": "0", **env}), tmp_path)
        processes.append(process)
        process.lines = []

        def end():
            (tmp_path / "stop").touch()
            return process.wait()

        process.end_in_order = end
        return process

    start.begin = begin
    return start


@pytest.fixture
def top(tmp_path, processes):
    """top(arguments, environment) -> the Process of `p3 top`."""

    def start(*arguments, env=None, **streams):
        command = [sys.executable, "-m", "p3", "top", *map(str, arguments)]
        processes.append(Process(command, env or clean_environment(), tmp_path))
        return processes[-1]

    return start


def error_line(process):
    """The next line of standard error; pytest's own time-out is the deadline."""
    return process.popen.stderr.readline().decode().rstrip("\n")


def test_p3_run_says_every_so_often_how_the_job_does(watched):
    job = watched(P3_WATCH_S="1")
    lines = [error_line(job) for _ in range(2)]
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert "slowest worker 1" in lines[1], "it takes five times as long"
    finished = job.end_in_order()
    assert finished.code == 0, finished
    assert all(LINE.fullmatch(line) for line in finished.err.splitlines()), finished.err


def test_a_signal_brings_a_line_and_a_short_job_has_no_other(watched):
    job, deadline = watched(), time.monotonic() + 30
    while True:
        job.signal(signal.SIGUSR2)
        line = error_line(job)
        if LINE.fullmatch(line):
            break
        # Before its workers have told of their waits.
        assert "waited 0% of the time, links" in line and time.monotonic() < deadline, line
    finished = job.end_in_order()
    assert (finished.code, finished.err) == (0, "")


def test_before_the_job_has_begun_a_signal_tells_who_is_missing(start_job):
    job = start_job("import sys, time; print('waits', flush=True); time.sleep(60)")
    assert job.read_line().endswith("waits")
    job.signal(signal.SIGUSR2)
    assert re.fullmatch(r"p3 run: the job has not begun: 2 of 2 workers \(rank 0, 1\).* missing", error_line(job))


def test_top_shows_all_processes_of_a_job_on_this_host(watched, top):
    job = watched()
    finished = top("--once", "--pid", job.popen.pid).wait()
    assert (finished.code, finished.err) == (0, ""), finished
    tables = [table.splitlines() for table in finished.out.split("\n\n")]
    head, workers, servers, links = tables
    assert re.match(r"round \d+, [\d.]+ steps/s; running for 0 min \d\d s; rates over the last \d+ s", head[0])
    assert [line.split()[0] for line in workers] == ["worker", "0", "1"], finished.out
    assert [line.split()[0] for line in servers] == ["server", "0", "1"]
    assert [line.split()[:2] for line in links[1:]] == [["127.0.0.1", "4"]]
    _, _, rounds, steps_per_s, waited = workers[1].split()[:5]
    assert int(rounds) >= 10 and float(steps_per_s) > 1 and 0 < int(waited.rstrip("%")) <= 100
    assert re.search(r"(encoder|decoder)\.\d \d+%", workers[1])
    assert job.end_in_order().code == 0


def test_top_over_a_pipe_prints_table_after_table_to_the_jobs_end(watched, top):
    job = watched()
    shown = top("--every", "0.5", "--pid", job.popen.pid)
    heads = []
    while len(heads) < 3:
        line = shown.read_line()
        assert line or shown.popen.poll() is None, shown.wait()
        heads += [line] if line.startswith("round ") else []
    assert job.end_in_order().code == 0
    finished = shown.wait()
    assert (finished.code, finished.err) == (0, "p3 top: the job has ended\n"), finished
    rounds = [int(re.match(r"round (\d+)", head).group(1)) for head in heads]
    assert rounds == sorted(rounds) and rounds[0] < rounds[2]


def test_top_on_a_terminal_draws_in_place_and_leaves_it_as_it_was(watched, tmp_path):
    job = watched()
    ours, theirs = pty.openpty()
    import subprocess

    command = [sys.executable, "-m", "p3", "top", "--every", "0.5", "--pid", str(job.popen.pid)]
    shown = subprocess.Popen(command, env=clean_environment(), cwd=str(tmp_path), stdin=theirs, stdout=theirs,
                             stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    os.close(theirs)
    try:
        drawn = b""
        while drawn.count(b"\x1b[H") < 2:
            drawn += os.read(ours, 1 << 16)
        shown.send_signal(signal.SIGINT)
        _, errors = shown.communicate(timeout=30)
        while not drawn.endswith(b"\x1b[?1049l"):
            drawn += os.read(ours, 1 << 16)
    finally:
        shown.kill()
        shown.wait()
        os.close(ours)
    assert drawn.startswith(b"\x1b[?1049h\x1b[?25l\x1b[H\x1b[1mround ")
    assert (shown.returncode, errors) == (0, b"")
    assert job.end_in_order().code == 0


def test_a_top_that_is_stopped_does_not_hold_up_the_job(watched, top):
    job = watched()
    shown = top("--every", "0.5", "--pid", job.popen.pid)
    assert shown.read_line().startswith("round ")
    shown.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert job.end_in_order().code == 0
    assert time.monotonic() - began < 30
    shown.signal(signal.SIGCONT)
    finished = shown.wait()
    assert (finished.code, finished.err) == (0, "p3 top: the job has ended\n"), finished


def test_top_in_the_environment_of_a_node(make_cluster, top, tmp_path):
    cluster = make_cluster(workers=1, servers=1)
    nodes = [cluster.start("scheduler")]
    env = cluster.env()
    finished = top("--once", env=env).wait()
    missing = "the job has not begun: 1 of 1 worker (rank 0) and 1 of 1 server (rank 0) missing\n"
    assert (finished.code, finished.out) == (0, missing)

    script = (SCRIPTS / "watched.py").read_text().replace("sys.argv[1]", repr(str(tmp_path / "stop")))
    nodes += [cluster.start("server"), cluster.start("worker", script)]
    assert nodes[-1].read_line() == "steps"
    finished = top("--once", env=env).wait()
    assert (finished.code, finished.err) == (0, "") and "\nworker " in finished.out

    finished = top("--once", env=dict(env, P3_SECRET="x" + SECRET)).wait()
    assert finished.code == 1 and len(finished.err.splitlines()) == 1, finished
    assert re.match(r"p3: the scheduler at 127.0.0.1:\d+: it refused our proof.*P3_SECRET", finished.err)

    (tmp_path / "stop").touch()
    assert [node.wait().code for node in nodes] == [0, 0, 0]
    finished = top("--once", env=env).wait()
    assert (finished.code, finished.err) == (1, "p3: no job at 127.0.0.1:%d: connection refused\n" % cluster.port)


def test_a_process_that_is_of_no_job_is_an_error(top):
    finished = top("--once", "--pid", os.getpid()).wait()
    assert finished.code == 1 and "is no process of a job" in finished.err and len(finished.err.splitlines()) == 1


def test_a_table_becomes_a_picture_for_light_and_dark_pages(watched, top, tmp_path):
    from xml.etree import ElementTree

    job = watched()
    finished = top("--pid", job.popen.pid, "--svg", tmp_path / "top").wait()
    assert (finished.code, finished.err) == (0, ""), finished
    for name in ("light", "dark"):
        root = ElementTree.parse(str(tmp_path / ("top-%s.svg" % name))).getroot()
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[0] == "$ p3 top" and any(text.startswith("worker") for text in texts)
    assert job.end_in_order().code == 0


# Prometheus


def test_prometheus_gets_the_numbers_of_all_processes(watched):
    pytest.importorskip("prometheus_client", reason="P3_METRICS_PORT needs prometheus_client: pip install '.[metrics]'")
    job = watched(P3_METRICS_PORT="0")
    (address,) = [line.split()[-1] for line in job.lines if "p3: metrics at " in line]

    def scraped():
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.read().decode()

    def sent(node):
        found = re.search(re.escape("p3_sent_bytes_total{%s} " % node) + r"(\S+)", scraped())
        return float(found.group(1)) if found else 0.0

    nodes = ['host="127.0.0.1",rank="%d",role="%s"' % (rank, role) for role in ("worker", "server") for rank in (0, 1)]
    wait_until(lambda: all(sent(node) > 0 for node in nodes), "nothing sent", 30)
    text = scraped()
    assert all("p3_up{%s} 1.0" % node in text and "p3_rounds_total{%s} " % node in text for node in nodes), text
    assert re.search(r'p3_waited_group_seconds_total\{group="(en|de)coder.\d",host="127.0.0.1",rank="0"', text)
    assert "# TYPE p3_waited_seconds_total counter" in text or "# TYPE p3_waited_seconds counter" in text
    assert job.end_in_order().code == 0


def test_without_its_package_the_port_is_an_error_that_says_what_to_install(watched, tmp_path):
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')")
    job = watched.begin(0, P3_METRICS_PORT="0", PYTHONPATH="%s:%s" % (tmp_path, PYTHONPATH))
    finished = job.wait()
    assert finished.code == 1
    assert "[scheduler] p3: P3_METRICS_PORT=0: the package prometheus_client is not installed. Run: pip install " in (
        finished.out
    )
