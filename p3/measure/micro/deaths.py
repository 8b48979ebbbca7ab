"""What it costs a running job that one of its processes dies: how long the iterations are in which one does.

    sudo p3 bench deaths [--hosts 4] [--rate 200] [--model vgg19] [--compute 4.0] [--kills 5]
    sudo p3 bench deaths --kill worker [--how stop] [--seed 2]
    sudo p3 bench deaths --kill server [--how kill,stop] [--seed 1,2,3]

A job of the replay (docs/replay.md) runs under `p3 run` on hosts of a lab, and now and then, at a random moment, a
process of it dies.

By default that is the scheduler, in every third iteration, and `p3 run` starts another one. Given are the iterations
with a scheduler and those that were without one for a while, and how long that was: from the kill until all nodes had
come back.

With `--kill worker` it is one worker after the other, in every fifth iteration, of random ranks, until one is left,
under `--on-worker-loss continue`. Given are the iterations of who lives: those in which one was missed, which is from
its loss until the scheduler let it go, with the next, which awaits what these have pushed; and the others. The pause of
a loss is by how much the longest of the former exceeds the median of the latter since the loss before, on the worker
where that is the most: with fewer workers, iterations are shorter.

With `--kill server` it is one server after the other, under `--on-server-loss continue`, until one is left. The pause
of a loss is by how much the longest iteration in which a server was missed, or the one behind, exceeds the median of
those that follow until the next loss: with fewer servers, iterations are longer.

`--how stop` freezes workers or servers instead, which then fall silent. All workers who are left must have the same
weights. Of several ways and seeds each pair is a run, and at the end there is a table of all pauses.

Close other programs first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

from p3.measure import arguments as given
from p3.measure.chaos import lab_ssh, strike
from p3.measure.chaos.matrix import Victim
from p3.measure.lab import hosts
from p3.measure.replay import models

_PATIENCE_S = 600.0
_PAST = {"kill": "killed", "stop": "stopped"}
_HEAD = "| | losses | pause, s: median | least | greatest | missed for, s: median | greatest |"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

Span = Tuple[float, float]


class Death(NamedTuple):
    victim: Victim
    span: Span  # from it until it was made up for, or nobody waited for the victim any more


class _Kind(NamedTuple):
    """Of what dies."""

    every: int  # iterations, of which the first is struck
    behind: bool  # whether it may also hold up the iteration behind
    over: str  # is said when the job is as it was, or nobody waits for the dead any more
    share: float  # of an iteration, in which the moment is
    names: Tuple[str, str]  # of iterations in which nothing happens, and of the others
    absence: str
    run: Tuple[str, ...] = ()  # options of `p3 run`


_OF_OTHERS = ("with all who are left", "in which one was missed")
_KINDS = {
    "scheduler": _Kind(3, False, "all nodes have come back", 0.5, ("with a scheduler", "without one for a while"),
                       "without one"),
    "worker": _Kind(5, True, "The others go on without it", 1.0, _OF_OTHERS, _OF_OTHERS[1],
                    ("--on-worker-loss", "continue")),
    "server": _Kind(5, True, "Another server takes over from it", 1.0, _OF_OTHERS, _OF_OTHERS[1],
                    ("--on-server-loss", "continue")),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("deaths", __doc__)
    parser.add_argument("--kill", choices=tuple(_KINDS), default="scheduler", help="(default %(default)s)")
    parser.add_argument("--how", type=given.names_among(tuple(_SIGNALS)), default=["kill"], metavar="kill[,stop]",
                        help="workers and servers: SIGKILL, or SIGSTOP (default kill)")  # fmt: skip
    parser.add_argument("--hosts", type=given.number(1, 64, int), default=4, metavar="N", help="(default %(default)s)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="MBIT", help="of each link (default %(default)g)")
    parser.add_argument("--model", choices=models.NAMES, default="vgg19", help="(default %(default)s)")
    parser.add_argument("--size", type=given.number(1e-6, 1), default=0.2, metavar="SHARE",
                        help="of the model's parameters (default %(default)s)")
    parser.add_argument("--compute", type=given.number(0, 1e4), default=4.0, metavar="SECONDS",
                        help="of an iteration (default %(default)s)")
    parser.add_argument("--store", choices=("p3_torch", "p3_sync"), default="p3_torch",
                        help="with PyTorch or MXNet (default %(default)s)")
    parser.add_argument("--kills", type=given.number(1, 1000, int), metavar="N",
                        help="of schedulers (default 5), or of others (default: all but one)")
    parser.add_argument("--seed", type=given.list_of(given.number(0, 1 << 30, int)), default=[1], metavar="N[,N]",
                        help="of the moments, and of the order (default 1)")  # fmt: skip
    options = parser.parse_args(arguments)
    come_back = options.kill == "scheduler"
    if options.kills is None:
        options.kills = 5 if come_back else options.hosts - 1
    if not come_back and not 1 <= options.kills < options.hosts:
        parser.error("one %s has to be left, and one to be lost: --kills %d, --hosts %d" % (
            options.kill, options.kills, options.hosts))  # fmt: skip
    if options.how != ["kill"] and come_back:
        parser.error(f"--how {','.join(options.how)} is for --kill worker and --kill server")
    runs, rows = [(how, seed) for how in options.how for seed in options.seed], []
    for how, seed in runs:
        row = _run(argparse.Namespace(**{**vars(options), "how": how, "seed": seed}))
        rows.append(f"| {_PAST[how]}, seed {seed} | {row}")
    if len(runs) > 1 and not come_back:
        print("\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *rows]))
    return 0


def _run(options: argparse.Namespace) -> str:
    """Says what came of one run; what of that is in a table of several."""
    come_back, kind = options.kill == "scheduler", _KINDS[options.kill]
    with hosts.lab(1 + options.hosts, options.rate) as lab:
        iterations, deaths = measure(lab, options)
    absences = [death.span for death in deaths]
    apart = [_told_apart(spans, absences, kind.behind) for spans in iterations.values()]
    without, others = (_seconds(sum(spans, [])) for spans in zip(*apart))
    print(f"{options.model}, {options.hosts} hosts: {len(deaths)} {options.kill}s were {_PAST[options.how]}")
    print("iterations                  number  median s  least s  greatest s")
    for what, seconds in zip(kind.names, (others, without)):
        print("%-27s %6d %9.3f %8.3f %11.3f" % (
            what, len(seconds), statistics.median(seconds), min(seconds), max(seconds)
        ))  # fmt: skip
    gone, row = [end - begin for begin, end in absences], ""
    if not come_back:
        pauses = [_pause_s(death, deaths, iterations) for death in deaths]
        for death, pause_s, gone_s in zip(deaths, pauses, gone):
            print(f"{death.victim}: a pause of {pause_s:.3f} s, missed for {gone_s:.2f} s")
        print("pauses, s: median %.3f, least %.3f, greatest %.3f" % (
            statistics.median(pauses), min(pauses), max(pauses)))  # fmt: skip
        row = "%d | %.3f | %.3f | %.3f | %.2f | %.2f |" % (
            len(deaths), statistics.median(pauses), min(pauses), max(pauses), statistics.median(gone), max(gone)
        )  # fmt: skip
    else:
        print(f"the longest without one is {max(without) / statistics.median(others):.3f} of the median with one")
    print(f"seconds {kind.absence}: median {statistics.median(gone):.2f}, greatest {max(gone):.2f}")
    return row


def _is_any(span: Span, others: Sequence[Span]) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in others)


def _told_apart(iterations: Sequence[Span], absences: Sequence[Span], behind: bool) -> Tuple[List[Span], List[Span]]:
    """One worker's iterations in which an absence falls or, if `behind`, fell in the one before; and the others."""
    apart: Tuple[List[Span], List[Span]] = ([], [])
    was_struck = False
    for span in iterations:
        is_struck = _is_any(span, absences)
        apart[not (is_struck or behind and was_struck)].append(span)
        was_struck = is_struck
    return apart


def _seconds(spans: Sequence[Span]) -> List[float]:
    return [end - begin for begin, end in spans]


def _pause_s(death: Death, deaths: Sequence[Death], iterations: Dict[int, List[Span]]) -> float:
    """Of the worker that it held up most. Who was dead by then has no iteration in it."""
    absences, (begin, end) = [one.span for one in deaths], death.span
    if death.victim.role == "worker":  # held against what was before
        since, until = max((over for _, over in absences if over < begin), default=-math.inf), begin
    else:  # what was behind
        since, until = end, min((one for one, _ in absences if one > end), default=math.inf)
    pauses = []
    for spans in iterations.values():
        struck, _ = _told_apart(spans, [death.span], True)
        usual = [span for span in _told_apart(spans, absences, True)[1] if since < span[0] < until]
        if struck:
            pauses.append(max(_seconds(struck)) - statistics.median(_seconds(usual)))
    return max(pauses)


def measure(lab: Sequence[hosts.Host], options) -> Tuple[Dict[int, List[Span]], List[Death]]:
    """The workers' iterations by rank, or rank 0's alone if it is schedulers that die; by the clock that all hosts of a
    lab share. The first host is the scheduler's and `p3 run`'s alone."""
    kind, mark, rng = _KINDS[options.kill], uuid.uuid4().hex, random.Random(options.seed)
    victims, watched = [Victim("scheduler", 0)] * options.kills, [0]
    if options.kill != "scheduler":
        watched = rng.sample(range(options.hosts), options.hosts)
        victims = [Victim(options.kill, rank) for rank in watched[: options.kills]]
    count, last = kind.every * options.kills + 2, watched[-1]  # who lives longest
    with tempfile.TemporaryDirectory(prefix="p3-deaths-") as name:
        folder = Path(name)
        process = _start(lab, folder, mark, count, options)
        overs, said = [], []

        def read() -> None:
            for line in process.stdout:
                said.append(line)
                if kind.over in line:
                    overs.append(time.monotonic())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        begins: List[float] = []
        try:
            for number, victim in zip(range(kind.every - 2, count, kind.every), victims):
                done = _wait(folder, last, number, process, said)
                time.sleep(rng.uniform(0, kind.share) * done[-1]["seconds"])
                pid = strike.find(victim, mark)
                begins.append(time.monotonic())
                os.kill(pid, _SIGNALS[options.how])
            _wait(folder, last, count, process, said)
            if process.wait(_PATIENCE_S) != 0 or len(overs) != len(begins):
                _give_up(said)
        finally:
            process.kill()
            process.wait()
            reader.join(10)
        told = {rank: _read(folder, rank) for rank in watched}
    dead = [victim.rank for victim in victims if victim.role == "worker"]
    results = {rank: one["digest"] for rank, lines in told.items() for one in lines if one["kind"] == "result"}
    if results.keys() != told.keys() - dead or len(set(results.values())) != 1:
        raise SystemExit("p3 bench deaths: those who were left have not ended with the same weights")
    spans = {rank: [(one["start"], one["start"] + one["seconds"]) for one in _counted(lines)]
             for rank, lines in told.items()}  # fmt: skip
    return spans, [Death(*one) for one in zip(victims, zip(begins, overs))]


def _start(lab: Sequence[hosts.Host], folder: Path, mark: str, count: int, options) -> subprocess.Popen:
    (folder / "hosts").write_text("".join(f"{host.address} slots=1\n" for host in lab[1:]))
    replay = ["--store", options.store, "--model", options.model, "--size", str(options.size), "--compute",
              str(options.compute), "--warmup", "1", "--iterations", str(count), "--out",
              str(folder / "worker{rank}.jsonl")]  # fmt: skip
    python, number = [sys.executable, "-m"], str(options.hosts)
    run = ["p3", "run", "-n", number, "-s", number, "--hostfile", str(folder / "hosts")]
    run += _KINDS[options.kill].run
    if options.kill == "worker":
        replay.append("--departing")
    command = lab[0].command(*python, *run, *python, "p3.replay", *replay)
    env = {**strike.environment(mark), **lab_ssh.environment(lab[0]), "P3_WATCH_S": "0"}
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def _read(folder: Path, rank: int) -> List[Dict]:
    """What a worker has written by now."""
    path = folder / f"worker{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _counted(lines: Sequence[Dict]) -> List[Dict]:
    return [one for one in lines if one["kind"] == "iteration" and not one["warmup"]]


def _wait(folder: Path, rank: int, number: int, process: subprocess.Popen, said: List[str]) -> List[Dict]:
    """Until so many iterations that count are over on this rank; those."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        done = _counted(_read(folder, rank))
        if len(done) >= number:
            return done
        if process.poll() or time.monotonic() > deadline:
            _give_up(said)
        time.sleep(0.02)


def _give_up(said: List[str]) -> None:
    raise SystemExit("p3 bench deaths: the job did not go on. Its last lines:\n" + "".join(said[-20:]))
