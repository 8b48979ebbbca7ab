"""What deaths cost a training: how much of its throughput is left if now and then a process of it dies.

    sudo p3 bench outages [--ways continue,restarts,torchrun,torchft] [--every 20] [--kills 6] [--plot FILE]
    sudo p3 bench outages --ways continue --kill worker,server,scheduler --every 60 --kills 30 --steps 1750

Four hosts of a lab train, by SGD, a model whose computation is emulated, for a number of steps. From when all have
begun, one process is killed in each `--every` seconds, at a random moment and on a random host: by default a worker,
with `--kill worker,server,scheduler` these in turn. Ways without P3 have workers alone: nothing dies there when it is
the others' turn. Ways:

    undisturbed  P3, and nothing dies: what the others are held against
    continue     P3 with --on-worker-loss continue --rejoin --on-server-loss continue: the others go on. Another worker
                 joins, or another server comes back, at the next fifth step; another scheduler comes at once. With
                 --restarts and snapshots, for what this does not help against: if the last server dies, the job starts
                 again, with all servers
    workers      if asked for: the same without --on-server-loss, so that servers update; only workers may die
    restarts     P3 with --restarts: starts again from a snapshot, which it takes every 20 steps
    torchrun     DDP on Gloo, which torchrun starts again; from a checkpoint, which it takes every 20 steps
    torchft      DDP of torchft on Gloo (pip install torchft): the others go on, another process joins

Given are the steps of single workers that stand at the end, a second, and their share of those of `undisturbed`; the
seconds of a step; how often the job started again from what it had saved; and the pauses: by how much the longest step
from one death to the next exceeds the median step; where others join, mostly the one at which they do. `--calm` lets
`undisturbed` take fewer steps. `--plot` draws throughput over time, and each death by its kind, in an SVG or PNG. Close
other programs first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Callable, List, Sequence

from p3.measure import arguments as given
from p3.measure.chaos import strike
from p3.measure.jobs import machine
from p3.measure.lab import hosts
from p3.measure.outages.story import Line, Story
from p3.measure.outages.ways import WAYS, Job, Way, alive

_PATIENCE_S, _PATIENCE = 600.0, 3.0  # for a training: so long, and so many times what it computes
_FAREWELL_S = 15.0  # behind its last step
_POLL_S = 0.1
_ROLES = ("worker", "server", "scheduler")


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("outages", __doc__)
    parser.add_argument("--ways", type=given.names_among(list(WAYS)), default=[way for way in WAYS if way != "workers"],
                        help="default: all but workers; undisturbed always runs")  # fmt: skip
    parser.add_argument("--hosts", type=given.number(2, 64, int), default=4, metavar="N", help="default 4")
    parser.add_argument("--rate", type=given.number(0.1, 1e6), default=200.0, metavar="MBIT", help="default 200")
    parser.add_argument("--steps", type=given.number(10, 1e6, int), default=150, help="default 150")
    parser.add_argument("--calm", type=given.number(10, 1e6, int), metavar="STEPS",
                        help="of undisturbed (default: as many)")  # fmt: skip
    parser.add_argument("--compute", type=given.number(0.01, 1e4), default=1.0, metavar="SECONDS", help="default 1")
    parser.add_argument("--megabytes", type=given.number(0.001, 1e5), default=8.0, help="of the model (default 8)")
    parser.add_argument("--every", type=given.number(0.5, 1e5), default=20.0, metavar="SECONDS", help="default 20")
    parser.add_argument("--kills", type=given.number(0, 1e5, int), default=6, metavar="N", help="default 6")
    parser.add_argument("--kill", type=given.names_among(_ROLES), default=["worker"], metavar="ROLE[,ROLE]",
                        help="of %s, in turn (default worker)" % ", ".join(_ROLES))
    parser.add_argument("--seed", type=given.number(0, 1 << 30, int), default=1, help="default 1")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args(arguments)
    if "workers" in options.ways and options.kill != ["worker"]:
        parser.error("--ways workers outlives workers alone: leave --kill out")
    if importlib.util.find_spec("torch") is None:
        parser.error("all ways need PyTorch: pip install torch")
    told = [WAYS["undisturbed"]]
    for name in options.ways:
        reason = WAYS[name].lacks()
        if reason:
            print(f"p3 bench outages: without {name}: {reason}", file=sys.stderr)
        elif WAYS[name] not in told:
            told.append(WAYS[name])
    stories = []
    for way in told:
        print(f"p3 bench outages: {way.label}", file=sys.stderr)
        stories.append(_train(way, options, options.steps if way.dies else options.calm or options.steps))
    for line in _table(stories, options):
        print(line)
    if options.plot:
        from p3.measure.outages import plot

        title = f"Throughput of {options.hosts} workers over time, in which processes are killed"
        plot.save(stories, title, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _table(stories: Sequence[Story], options) -> List[str]:
    reference = stories[0]
    lines = [machine.in_a_line(),
             f"{options.hosts} hosts, {options.rate:g} Mbit/s, {options.megabytes:g} MB, {options.steps} steps",
             "%-13s %7s %10s %9s %8s %6s %22s" % (
                 "way", "deaths", "steps/s", "share", "step s", "again", "pause s: median, most")]  # fmt: skip
    for story in stories:
        lines.append("%-13s %7d %10.3f %8.1f%% %8.3f %6d %22s" % (
            story.way, len(story.deaths), story.rate, 100 * story.rate / reference.rate, story.step_s, story.restarts,
            _paused(story.pauses()),
        ))  # fmt: skip
        by_role = [(role, story.pauses(role)) for role in options.kill]
        lines += ["  %-11s %7d %60s" % (role, len(pauses), _paused(pauses)) for role, pauses in by_role if pauses]
    return lines


def _paused(pauses: Sequence[float]) -> str:
    return "%.2f, %.2f" % (statistics.median(pauses), max(pauses)) if pauses else ""


def _train(way: Way, options, steps: int) -> Story:
    mark, rng = uuid.uuid4().hex, random.Random(options.seed)
    moments = [options.every * (number + rng.random()) for number in range(options.kills if way.dies else 0)]
    with hosts.lab(1 + options.hosts, options.rate) as lab, tempfile.TemporaryDirectory(prefix="p3-outages-") as name:
        folder = Path(name)
        training = [str(steps), repr(options.compute), repr(options.megabytes), name]
        processes, deaths = [], []
        try:
            processes = way.start(Job(lab, folder, mark, training))
            deadline = time.monotonic() + _PATIENCE_S + _PATIENCE * steps * options.compute
            _wait(lambda: len({one.rank for one in _lines(folder, last=1)}) == options.hosts, processes, deadline)
            begin = time.monotonic()
            for number, moment in enumerate(moments):
                if _wait(lambda moment=moment: time.monotonic() >= begin + moment, processes, deadline):
                    role = options.kill[number % len(options.kill)]
                    deaths.append((time.monotonic(), _kill(role, mark, rng)))
            _wait(lambda: _last_step(folder) == steps - 1, processes, deadline)
            _wait(lambda: False, processes, time.monotonic() + _FAREWELL_S)
        finally:
            _end(processes, mark)
        lines = _lines(folder)
        if _last_step(folder) < steps - 1:
            _give_up(way, folder, "has not come to its last step, and " + (
                "goes on" if time.monotonic() > deadline else "has ended"))  # fmt: skip
    return Story(way.name, options.hosts, lines, [death for death in deaths if death[1]])


def _wait(until: Callable[[], bool], processes, deadline: float) -> bool:
    """False if the training has ended before, or it is too late."""
    while processes[-1].poll() is None and time.monotonic() < deadline:
        if until():
            return True
        time.sleep(_POLL_S)
    return False


def _kill(role: str, mark: str, rng: random.Random) -> str:
    """Who was killed; "": there is nobody of that role now."""
    those = alive(role, mark)
    if not those:
        return ""
    rank = rng.choice(sorted(those))
    with contextlib.suppress(ProcessLookupError):
        os.kill(those[rank], signal.SIGKILL)
    return f"{role} {rank}"


def _lines(folder: Path, last: int = 0) -> List[Line]:
    """In the order of their times. `last`: only so many of each worker's."""
    found: List[Line] = []
    for path in folder.glob("worker-*.jsonl"):
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found += [Line(**json.loads(line)) for line in whole[-last:]]
    return sorted(found)


def _last_step(folder: Path) -> int:
    return max((one.step for one in _lines(folder, last=1)), default=-1)


def _end(processes, mark: str) -> None:
    """All that was started, and what that has started."""
    for pid in strike.marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()


def _give_up(way: Way, folder: Path, what: str) -> None:
    logs = [path.read_text(errors="replace").splitlines()[-15:] for path in sorted(folder.glob("output-*.log"))]
    raise SystemExit(f"p3 bench outages: {way.name} {what}. The last lines of its processes:\n"
                     + "\n".join(line for log in logs for line in log))  # fmt: skip
