"""Random programs, each run by P3 and by a reference side by side: what is the same whatever the front end.

A program is plain data that JSON can carry. A script of the front end runs it, in one process or in every worker of a
job of `p3 run`, and says what it found: serve(). A Runner keeps such a job alive from program to program. search() has
hypothesis draw programs until one fails or time is up, and makes that one small; replay() runs programs again.
"""

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forked
import hypothesis

START_S = 60  # until all workers of a job are there
PROGRAM_S = 30  # for one program
PROGRAMS_PER_JOB = 300  # servers keep the values of every store until the job ends


class Finding(AssertionError):
    """What a program has shown. The text says how to run it again."""


# In a worker


def serve(path, rank, run):
    """Runs programs until there are no more. `run(program)` returns an Answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")

        def say(message):
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        say(rank)
        for line in lines:
            say(vars(run(json.loads(line))))


class Answer:
    """What a worker says of a program: how often what happened, and the first thing that was wrong."""

    def __init__(self):
        self.counts = {}
        self.finding = None
        self.alike = []  # [what, digest] of all that the workers must have alike, bit for bit
        self.is_broken = False  # the job can run no other program

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def wrong(self, text):
        if self.finding is None:
            self.finding = text

    def note_alike(self, what, content):
        """`content`: bytes that every worker must have at this place of the program."""
        self.alike.append([what, hashlib.blake2b(content, digest_size=8).hexdigest()])


# Where programs come from


class Runner:
    """runner(program) -> Counter, or Finding. With servers the job is of `p3 run`, else one process on its own.

    `command`: of a worker, which calls serve() with the path that comes as its last argument.
    """

    def __init__(self, command, workers=1, servers=0, **variables):
        self._command, self._workers, self._servers, self._variables = command, workers, servers, variables
        self._job = None
        self.history = []  # the programs that the job in use has had

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def start(self):
        """Else the first program does."""
        if self._job is None:
            self.history = []
            self._job = _Job(self._command, self._workers, self._servers, self._variables)

    def end(self):
        if self._job is not None:
            self._job.end()
        self._job, self.history = None, []

    def __call__(self, program):
        if len(self.history) >= PROGRAMS_PER_JOB:
            self.end()
        self.start()
        self.history.append(program)
        try:
            answers = self._job.run(program)
            is_broken = any(one["is_broken"] for one in answers)
            findings = ["worker %d: %s" % (rank, one["finding"]) for rank, one in enumerate(answers) if one["finding"]]
            for one in answers[1:] if not findings else ():
                pairs = itertools.zip_longest(answers[0]["alike"], one["alike"])
                findings += ["workers have different bits: %s, %s" % pair for pair in pairs if pair[0] != pair[1]][:1]
        except _Broken as broken:
            findings, is_broken = [str(broken)], True
        if is_broken:
            self._job.end()
            self._job = None  # the history stays until another job is there
        if findings:
            raise Finding("\n".join(findings))
        return collections.Counter(answers[0]["counts"])


class _Broken(Exception):
    pass


class _Job:
    def __init__(self, command, workers, servers, variables):
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._output = Path(self._folder.name, "output")
        path = str(Path(self._folder.name, "socket"))
        launcher = [sys.executable, "-m", "p3", "run", "-n", str(workers), "-s", str(servers)] if servers else []
        with socket.socket(socket.AF_UNIX) as listener, open(self._output, "w") as output:
            listener.bind(path)
            listener.listen(workers)
            self._process = subprocess.Popen(
                [*launcher, *command, path], env={**forked.environment(), **variables}, cwd=self._folder.name,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            self._connections = {}  # rank -> (socket, its lines)
            try:
                self._accept(listener, workers)
            except BaseException:
                self.end()
                raise

    def _accept(self, listener, workers):
        deadline = time.monotonic() + START_S
        listener.settimeout(0.1)
        while len(self._connections) < workers:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the job did not start:\n" + self._said())
            with contextlib.suppress(socket.timeout):
                connection, _ = listener.accept()
                connection.settimeout(START_S)
                lines = connection.makefile("r", encoding="utf-8")
                self._connections[json.loads(lines.readline())] = connection, lines

    def run(self, program):
        """The answers of all workers, by rank."""
        answers, deadline = {}, time.monotonic() + PROGRAM_S
        with selectors.DefaultSelector() as selector:
            for rank, (connection, lines) in self._connections.items():
                with contextlib.suppress(OSError):  # one that has died shows below
                    connection.sendall(json.dumps(program).encode() + b"\n")
                selector.register(connection, selectors.EVENT_READ, (rank, lines))
            while len(answers) < len(self._connections):
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    silent = sorted(self._connections.keys() - answers.keys())
                    raise _Broken("no answer of workers %s after %d s:\n%s" % (silent, PROGRAM_S, self._said()))
                for key, _ in ready:
                    rank, lines = key.data
                    line = self._read(lines)
                    if not line:
                        raise _Broken("worker %d has died:\n%s" % (rank, self._said()))
                    answers[rank] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

    @staticmethod
    def _read(lines):
        try:
            return lines.readline()
        except OSError:
            return ""

    def _said(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)  # of a job that fails, all may have more to say
        return self._output.read_text(encoding="utf-8", errors="replace")[-5000:]

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for connection, lines in self._connections.values():
            lines.close()
            connection.close()
        self._folder.cleanup()


# Searching


def search(programs, runner, again, seconds, seed=None, shrink_seconds=60):
    """Counter of what happened in the programs that `programs`, a strategy of hypothesis, drew in that time.

    Finding names the smallest program that fails, with the command that runs it `again`, but for its last word, a file.
    Without a seed the programs are always the same, as many of them as there is time for.
    """
    runner.start()  # not in the programs' time
    search = _Search(runner, seconds, shrink_seconds)
    settings = hypothesis.settings(
        derandomize=seed is None, database=None, deadline=None, max_examples=10**6, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), print_blob=False,
    )  # fmt: skip

    @settings
    @hypothesis.given(programs)
    def look(program):
        search.look(program)

    try:
        (look if seed is None else hypothesis.seed(seed)(look))()
    except _Stop:
        if search.error is not None:
            raise search.error from None
        return search.counts
    except Finding as finding:
        raise Finding(search.describe(finding, again)) from None
    return search.counts


class _Stop(BaseException):
    """Passes through hypothesis, which would go on drawing: time is up, or no program is at fault."""


class _Search:
    def __init__(self, runner, seconds, shrink_seconds):
        self._runner, self._shrink_seconds = runner, shrink_seconds
        self._end = time.monotonic() + seconds
        self._failed = {}  # program as JSON -> text: hypothesis runs what failed again, and it must fail again
        self._last = self.error = None
        self.began, self.counts = time.monotonic(), collections.Counter()

    def look(self, program):
        text = json.dumps(program)
        if text not in self._failed:
            if time.monotonic() > self._end:
                if self._failed:
                    return  # small enough
                raise _Stop
            self._run(program, text)
        if text in self._failed:
            self._last = text
            raise Finding(self._failed[text])  # here alone: hypothesis tells failures apart by where they come from

    def _run(self, program, text):
        try:
            self.counts += self._runner(program)
            self.counts["programs"] += 1
        except Finding as finding:
            if not self._failed:
                after = self.counts["programs"], time.monotonic() - self.began
                self._after = "found after %d programs and %.1f s" % after
                self._end = time.monotonic() + self._shrink_seconds
            self._failed[text] = str(finding)
        except Exception as error:
            self.error = error
            raise _Stop from None

    def describe(self, finding, again):
        """And whether a fresh job finds it, too."""
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="program-", delete=False) as file:
            file.write(self._last + "\n")
        text = "%s\n%s; the smallest:\n%s\nto run it again: %s %s\n" % (
            finding, self._after, pretty(json.loads(self._last)), again, file.name,
        )  # fmt: skip
        history = list(self._runner.history)
        self._runner.end()
        try:
            self._runner(json.loads(self._last))
        except Finding:
            return text
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="programs-", delete=False) as file:
            file.writelines(json.dumps(program) + "\n" for program in history)
        return text + "A fresh job does not find it; all that its job had run are in %s\n" % file.name


def pretty(program):
    """A program on several lines, one for each of its operations."""
    parts = []
    for name, value in program.items():
        shown = json.dumps(value)
        if isinstance(value, list):
            shown = "[\n" + ",\n".join("    " + json.dumps(one) for one in value) + "\n  ]"
        parts.append("  %s: %s" % (json.dumps(name), shown))
    return "{\n" + ",\n".join(parts) + "\n}"


def main(description, programs, make_runner, jobs, command):
    """The command line of a front end: searches for a time with random seeds, or runs given programs again.

    `make_runner(job)`: for each of the names in `jobs`. `command`: what was started, as a user would.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=jobs, action="append", help="of this kind only; may be repeated")
    parser.add_argument("--seconds", type=float, default=60, help="for all searches together (default 60)")
    parser.add_argument("--seed", type=int, help="of the first search (default: another each time)")
    parser.add_argument("--shrink-seconds", type=float, default=60, help="for making a program that fails small")
    parser.add_argument("--replay", metavar="FILE", help="runs the programs in this file, one in each line")
    options = parser.parse_args()
    chosen = options.job or list(jobs)
    if options.replay:
        given = [json.loads(line) for line in Path(options.replay).read_text(encoding="utf-8").splitlines()]
        for job in chosen:
            with make_runner(job) as runner:
                counts = sum((runner(program) for program in given), collections.Counter())
            print("%s: nothing found; %s" % (job, dict(sorted(counts.items()))))
        return
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    for job in chosen:
        end, total = time.monotonic() + options.seconds / len(chosen), collections.Counter()
        again = command + " --job %s --replay" % job
        with make_runner(job) as runner:
            while time.monotonic() < end:
                print("%s: seed %d" % (job, seed), flush=True)
                # Anew from time to time: one search keeps all that it has drawn.
                seconds = min(300, end - time.monotonic())
                total += search(programs, runner, again, seconds, seed, options.shrink_seconds)
                seed += 1
        print("%s: nothing found; %s" % (job, dict(sorted(total.items()))), flush=True)
