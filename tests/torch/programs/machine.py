"""Jobs that run programs, and what is to be made of their answers.

A job of one worker and one of two, which live for many programs: `p3 run`, or a process alone. One that misses a
deadline or dies is ended; that is a finding, and the next program gets another one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from processes import HELPERS, QUICK_IMPORT, ROOT, Process, clean_environment
from programs import refusals
from programs.operations import shown

HERE = Path(__file__).resolve().parent
DEADLINE_S = 60  # of one program: the first one with torch.compile imports a lot
LIVES = 300  # programs of one job, whose servers keep what each has declared
ROUNDS = 6  # remedies of one program


class Finding(AssertionError):
    """P3 and plain torch do not agree, and P3 has not said so."""


class Job:
    def __init__(self, workers: int, folder: Path) -> None:
        self.workers, self._folder, self._process = workers, folder, None
        self._workers: List[socket.socket] = []
        self._programs = 0
        self._has_refused = False  # the last program, of which rounds may still be under way: they may not agree

    def run(self, program: Dict[str, Any]) -> Dict[str, Any]:
        """The answer of all workers, or of one that has met a difference or an error, which ends the job of all."""
        answer = self._run(program)
        if answer["outcome"] == "failed" and self._has_refused and answer["at"] <= _first(program, "distribute"):
            self.end()  # the job, before the program has done anything with P3
            answer = self._run(program)
        self._has_refused = answer["outcome"] == "refused"
        return answer

    def _run(self, program: Dict[str, Any]) -> Dict[str, Any]:
        if self._process is None or self._programs >= LIVES:
            self.end()
            self._start()
        self._programs += 1
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead one does not answer
                worker.sendall(json.dumps(program).encode() + b"\n")
        answers = [_answer(worker) for worker in self._workers]
        if any(answer is None for answer in answers):
            said = self.end()
            raise Finding("%s\n%s" % (self._without_answer(answers), said[-3000:]))
        if all((one["outcome"], one["at"]) == (answers[0]["outcome"], answers[0]["at"]) for one in answers):
            return answers[0]
        # One worker has stopped and another gone on, perhaps to wait in vain: what is left of it is in nobody's way.
        # What comes behind an error of another worker is its consequence: of a script, that ends the job.
        self.end()
        ended = [one for one in answers if one["outcome"] in ("differs", "refused", "failed")]
        if ended:
            return min(ended, key=lambda one: (one["outcome"] == "failed", one["at"], one["outcome"] != "differs"))
        raise Finding("the workers do not agree: %s" % [(one["outcome"], one["text"]) for one in answers])

    def _without_answer(self, answers) -> str:
        has_died = self._process.popen.poll() is not None
        what = "the job has died with status %s" % self._process.popen.returncode if has_died else "no answer in time"
        return "%s; answers: %s" % (what, answers)

    def _start(self) -> None:
        path = str(self._folder / ("workers-%d" % self.workers))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        launcher = [sys.executable, "-m", "p3", "run", "-n", str(self.workers), "-s", "2"]
        command = [*(launcher if self.workers > 1 else []), sys.executable, "-m", "programs.worker", path]
        paths = os.pathsep.join([QUICK_IMPORT, str(HELPERS), str(HERE.parent), str(ROOT)])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(DEADLINE_S)
            self._process = Process(
                command,
                clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=paths, P3_SLICE_ELEMENTS="7", P3_WAIT_TIMEOUT_S="5"),
                self._folder,
            )
            self._workers = [listener.accept()[0] for _ in range(self.workers)]
        self._workers.sort(key=lambda worker: _answer(worker)["rank"])
        self._programs = 0

    def end(self) -> str:
        """What it has said."""
        process, self._process = self._process, None
        if process is None:
            return ""
        for worker in self._workers:
            worker.close()
        process.end()
        return b"".join(process.popen.communicate()).decode(errors="replace")


class Machine:
    """Judges programs, and counts what became of them."""

    def __init__(self, workers) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="p3-programs-")
        self._jobs = {number: Job(number, Path(self._folder.name)) for number in workers}
        self.outcomes = collections.Counter()
        self.programs = self.operations = self.compared = 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        for job in self._jobs.values():
            job.end()
        self._folder.cleanup()

    def check(self, program: Dict[str, Any], workers: int) -> List[str]:
        """Finding, unless P3 does as plain torch, or names what to do, which then helps. The refusals on the way."""
        met: List[str] = []
        try:
            return self._check(program, workers, met)
        except Finding as finding:
            after = ", after the remedies of %s" % ", ".join(met) if met else ""
            text = "with %d workers%s:\n%s\nprogram:\n%s" % (workers, after, finding, shown(program))
            raise Finding(text) from None

    def summary(self) -> str:
        became = ", ".join("%s %d" % one for one in self.outcomes.most_common())
        return "%d runs of programs: %s; %d of %d operations compared" % (
            self.programs, became, self.compared, self.operations)  # fmt: skip

    def _check(self, program, workers, met) -> List[str]:
        for _ in range(ROUNDS):
            answer = self._jobs[workers].run(program)
            self.programs += 1
            self.operations += len(program["operations"]) + 1
            self.compared += answer["at"]
            what = answer["outcome"]
            if what in ("same", "undefined"):
                self.outcomes[what] += 1
                return met
            at = answer["at"]
            where = "%s at operation %d, %s: %s" % (what, at, _named(program, at), answer["text"])
            refusal = refusals.find(answer["text"]) if what == "refused" else None
            if refusal is None:
                raise Finding("%s\n%s%s" % (where, answer["trace"], _run(program, met)))
            if not refusal.because(program, at):
                raise Finding("nothing in the program is a reason: %s%s" % (where, _run(program, met)))
            remedied = refusals.remedied(refusal, program, at)
            if remedied == program:
                raise Finding("the remedy does not help: %s%s" % (where, _run(program, met)))
            met.append(refusal.name)
            self.outcomes["refused: " + refusal.name] += 1
            program = remedied
        self.outcomes["refused in the end"] += 1
        return met


def _first(program, name):
    return next((at for at, (operation, _) in enumerate(program["operations"]) if operation == name), -1)


def _run(program, met):
    """What has run, where that is not the program itself."""
    return "\nwhich remedies have made to\n" + shown(program) if met else ""


def _answer(worker: socket.socket):
    """None if there is none in time."""
    worker.settimeout(DEADLINE_S)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            received = worker.recv(1 << 16)
            if not received:
                return None
            line += received
    return json.loads(line) if line.endswith(b"\n") else None


def _named(program, at):
    return json.dumps(program["operations"][at]) if at < len(program["operations"]) else "the end"
