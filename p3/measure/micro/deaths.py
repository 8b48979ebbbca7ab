"""What it costs a running job that its scheduler dies: how long the iterations are in which there is none.

    sudo p3 bench deaths [--hosts 4] [--rate 200] [--model vgg19] [--compute 4.0] [--kills 5]

A job of the replay (docs/replay.md) runs under `p3 run` on hosts of a lab. In every third iteration, at a random
moment, the scheduler is killed, and `p3 run` starts another one. Given are the iterations with a scheduler and those
that were without one for a while, and how long that was: from the kill until all nodes had come back.
Close other programs first.
"""

from __future__ import annotations

import json
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
from typing import Dict, List, Sequence, Tuple

from p3.measure import arguments as given
from p3.measure.chaos import lab_ssh, strike
from p3.measure.chaos.matrix import Victim
from p3.measure.lab import hosts
from p3.measure.replay import models

EVERY = 3  # iterations, of which the first is struck
_BACK = "all nodes have come back"
_PATIENCE_S = 600.0

Span = Tuple[float, float]


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("deaths", __doc__)
    parser.add_argument("--hosts", type=given.number(1, 64, int), default=4, metavar="N", help="(default %(default)s)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="MBIT", help="of each link (default %(default)g)")
    parser.add_argument("--model", choices=models.NAMES, default="vgg19", help="(default %(default)s)")
    parser.add_argument("--size", type=given.number(1e-6, 1), default=0.2, metavar="SHARE",
                        help="of the model's parameters (default %(default)s)")
    parser.add_argument("--compute", type=given.number(0, 1e4), default=4.0, metavar="SECONDS",
                        help="of an iteration (default %(default)s)")
    parser.add_argument("--store", choices=("p3_torch", "p3_sync"), default="p3_torch",
                        help="with PyTorch or MXNet (default %(default)s)")
    parser.add_argument("--kills", type=given.number(1, 1000, int), default=5, metavar="N",
                        help="of schedulers (default %(default)s)")
    options = parser.parse_args(arguments)
    with hosts.lab(1 + options.hosts, options.rate) as lab:
        iterations, absences = measure(lab, options)
    without = [end - begin for begin, end in iterations if _is_any((begin, end), absences)]
    others = [end - begin for begin, end in iterations if not _is_any((begin, end), absences)]
    print(f"{options.model}, {options.hosts} hosts: {len(absences)} schedulers were killed")
    print("iterations                  number  median s  least s  greatest s")
    for what, seconds in (("with a scheduler", others), ("without one for a while", without)):
        print("%-27s %6d %9.3f %8.3f %11.3f" % (
            what, len(seconds), statistics.median(seconds), min(seconds), max(seconds)
        ))  # fmt: skip
    gone = [end - begin for begin, end in absences]
    print(f"the longest without one is {max(without) / statistics.median(others):.3f} of the median with one")
    print(f"seconds without one: median {statistics.median(gone):.2f}, greatest {max(gone):.2f}")
    return 0


def _is_any(span: Span, others: Sequence[Span]) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in others)


def measure(lab: Sequence[hosts.Host], options) -> Tuple[List[Span], List[Span]]:
    """Rank 0's iterations, and when there was no scheduler; by the clock that all hosts of a lab share. The first host
    is the scheduler's and `p3 run`'s alone."""
    count, mark, rng = EVERY * options.kills + 2, uuid.uuid4().hex, random.Random(1)
    with tempfile.TemporaryDirectory(prefix="p3-deaths-") as name:
        folder = Path(name)
        process = _start(lab, folder, mark, count, options)
        backs, said = [], []

        def read() -> None:
            for line in process.stdout:
                said.append(line)
                if _BACK in line:
                    backs.append(time.monotonic())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        kills: List[float] = []
        try:
            for number in range(1, EVERY * options.kills, EVERY):
                done = _wait(folder, number, process, said)
                time.sleep(rng.uniform(0, 0.5) * done[-1]["seconds"])
                os.kill(strike.find(Victim("scheduler", 0), mark), signal.SIGKILL)
                kills.append(time.monotonic())
            done = _wait(folder, count, process, said)
            if process.wait(_PATIENCE_S) != 0 or len(backs) != len(kills):
                _give_up(said)
        finally:
            process.kill()
            process.wait()
            reader.join(10)
    return [(one["start"], one["start"] + one["seconds"]) for one in done], list(zip(kills, backs))


def _start(lab: Sequence[hosts.Host], folder: Path, mark: str, count: int, options) -> subprocess.Popen:
    (folder / "hosts").write_text("".join(f"{host.address} slots=1\n" for host in lab[1:]))
    replay = ["--store", options.store, "--model", options.model, "--size", str(options.size), "--compute",
              str(options.compute), "--warmup", "1", "--iterations", str(count), "--out",
              str(folder / "worker{rank}.jsonl")]  # fmt: skip
    python, number = [sys.executable, "-m"], str(options.hosts)
    run = ["p3", "run", "-n", number, "-s", number, "--hostfile", str(folder / "hosts")]
    command = lab[0].command(*python, *run, *python, "p3.replay", *replay)
    env = {**strike.environment(mark), **lab_ssh.environment(lab[0]), "P3_WATCH_S": "0"}
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def _wait(folder: Path, number: int, process: subprocess.Popen, said: List[str]) -> List[Dict]:
    """Until so many iterations that count are over on rank 0; those."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        path = folder / "worker0.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        done = [one for one in told if one["kind"] == "iteration" and not one["warmup"]]
        if len(done) >= number:
            return done
        if process.poll() or time.monotonic() > deadline:
            _give_up(said)
        time.sleep(0.02)


def _give_up(said: List[str]) -> None:
    raise SystemExit("p3 bench deaths: the job did not go on. Its last lines:\n" + "".join(said[-20:]))
