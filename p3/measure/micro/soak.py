"""Does a job stay as it is while its processes die? Sums must be exact, and memory, descriptors and threads flat.

    p3 bench soak                                        # three minutes, with a death every five seconds
    p3 bench soak --seconds 7200 --every 30 --delay 60   # two hours
    p3 bench soak --seconds 30 --kill none --set P3_LOCAL_AGGREGATION=1 --set P3_CHECKSUM=1

Real processes under `p3 run`, with `--on-worker-loss continue --on-server-loss continue --rejoin`. Workers push dense
keys, and one of rows where no server dies (processes/soak_worker.py), and hesitate now and then. In each `--every`
seconds this program kills a process of the job at a random moment: a worker, a server and the scheduler in turn, of
random ranks, but not worker 0 and server 0, whose memory is compared. Others come in the places of those. At each tenth
of the time it also stops one process for up to a second.

Gradients are such that a sum tells whose are in it, and each worker looks at every element of every sum: it has the
gradients of all who are members, whole, but for slices of the round in which one was lost, which may lack that one's,
and later rounds, which must, until another process is a member in its place.

Printed behind each tenth, as soon as all are there: rounds; deaths so far, and slices that lack a gradient in the round
of a loss; the resident size of worker 0, server 0 and `p3 run`, and the descriptors, threads and shared memory of these
three together; and of the servers, bytes of incomplete rounds and bytes held for peers. The exit status is 1 if a sum
was wrong, if the job did not end with all of its workers and servers, or if one of these numbers is greater in the last
quarter than in the second by more than 5 % and 2 MB, or 4 descriptors or threads: then it grows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Deque, Dict, List, Sequence, Tuple

from p3.launch.placement import module_path
from p3.measure import arguments as given
from p3.measure.chaos.matrix import ROLES
from p3.measure.chaos.strike import MARK, alive
from p3.measure.jobs import usage
from p3.measure.micro.processes.soak_worker import TENTHS

SLACK_BYTES, SLACK = 2 << 20, 4
_ALWAYS = "10000"  # restarts: more than there are deaths
BYTES = ("worker_bytes", "server_bytes", "launcher_bytes", "shared_bytes", "buffer_bytes", "held_bytes")
COUNTS = ("descriptors", "threads")
_LOOK_S = 0.02


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory(prefix="p3-soak-") as folder:
        sampled = os.path.join(folder, "sampled")
        os.mkfifo(sampled)
        return soak(options, sampled)


def soak(options: argparse.Namespace, sampled: str) -> int:
    """`sampled`: a FIFO from which worker 0 reads a byte at each tenth; until then the job waits to be looked at."""
    go_on = os.open(sampled, os.O_RDWR)  # reading too, so that nobody waits in open()
    mark = uuid.uuid4().hex
    job = start(options, sampled, mark)
    deaths = Deaths(options, mark)
    samples: List[dict] = []
    rng = random.Random(options.seed)
    said: Deque[str] = deque(maxlen=60)
    try:
        for line in job.stdout:
            start_of_json = line.find('{"soak"')
            if start_of_json < 0:
                said.append(line)
                continue
            report = json.loads(line[start_of_json:])["soak"]
            if report["tenth"] == 0:
                deaths.begin()
            else:
                samples.append({**report, "deaths": deaths.count, **sizes(job.pid, mark)})
                print_sample(samples[-1], header=len(samples) == 1)
                disturb(mark, rng)
            os.write(go_on, b"+")
        code = job.wait()
    finally:
        deaths.end()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        os.close(go_on)
    if code != 0 or len(samples) < TENTHS:
        print("the job failed (exit status %d):\n%s" % (code, "".join(said)), file=sys.stderr)
        return 1
    grown = growth(samples)
    for what, (before, after) in grown.items():
        print("%s grew from %d in the second quarter to %d in the last" % (what, before, after))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "samples": samples}, indent=1) + "\n")
    last = samples[-1]
    flat = "all but that flat" if grown else "all flat"
    print("%d rounds, %d deaths: sums exact, %s" % (last["rounds"], last["deaths"], flat))
    return 1 if grown else 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = given.parser("soak", __doc__)
    positive = given.number(0.1, 1e6)
    parser.add_argument("--seconds", type=positive, default=180.0, help="default: %(default)g")
    parser.add_argument("--every", type=positive, default=5.0, metavar="SECONDS", help="a death (%(default)g)")
    parser.add_argument("--kill", type=given.names_among((*ROLES, "none")), default=list(ROLES), metavar="ROLE[,ROLE]",
                        help="who dies, in turn, or none (default: %s)" % ",".join(ROLES))  # fmt: skip
    parser.add_argument("--workers", type=given.number(1, 24, int), default=4, help="default: %(default)s")
    parser.add_argument("--servers", type=given.number(1, 64, int), default=3, help="default: %(default)s")
    parser.add_argument("--delay", type=float, default=2.0, metavar="MS", help="mean of a hesitation (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn by chance (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the job")
    parser.add_argument("--json", metavar="FILE", help="write the samples there as well")
    options = parser.parse_args(arguments)
    if "none" in options.kill:
        options.kill = []
    for role, count in (("worker", options.workers), ("server", options.servers)):
        if role in options.kill and count < 2:
            parser.error("one %s has to be left, and one to be lost: --%ss %d" % (role, role, count))
    return options


def start(options: argparse.Namespace, sampled: str, mark: str) -> subprocess.Popen:
    settings = {"P3_LOCAL_AGGREGATION": "0", "P3_SLICE_ELEMENTS": "1000", "OMP_NUM_THREADS": "1", "P3_WATCH_S": "0"}
    settings.update(setting.split("=", 1) for setting in options.set)
    command = [sys.executable, "-m", "p3", "run", "-n", str(options.workers), "-s", str(options.servers)]
    if options.kill:
        command += ["--on-worker-loss", "continue", "--rejoin", "--worker-restarts", _ALWAYS, "--restart-pause", "0.2"]
    if "server" in options.kill:
        command += ["--on-server-loss", "continue"]
    command += [sys.executable, "-m", "p3.measure.micro.processes.soak_worker"]
    command += [repr(options.seconds), str(options.delay), str(options.seed), str(int("server" not in options.kill))]
    environment = {**os.environ, **module_path(os.environ), MARK: mark, "SOAK_SAMPLED": sampled, **settings}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, start_new_session=True
    )


class Deaths:
    """In a thread of its own: from begin() on, as long as the job trains by its clock."""

    def __init__(self, options: argparse.Namespace, mark: str) -> None:
        self.count = 0
        self._options, self._mark = options, mark
        self._rng = random.Random(options.seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._kill_all)

    def begin(self) -> None:
        if self._options.kill:
            self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _kill_all(self) -> None:
        options, begin = self._options, time.monotonic()
        for number in range(int(options.seconds / options.every)):
            moment = begin + options.every * (number + self._rng.random())
            if self._is_over.wait(max(0.0, moment - time.monotonic())):
                return
            self._kill(options.kill[number % len(options.kill)], begin + options.seconds)

    def _kill(self, role: str, deadline: float) -> None:
        """One of that role, as soon as there is one that may die. With two servers away there may be none."""
        while time.monotonic() < deadline and not self._is_over.is_set():
            those = {rank: pid for rank, pid in alive(role, self._mark).items() if rank > 0 or role == "scheduler"}
            if those:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(those[self._rng.choice(sorted(those))], signal.SIGKILL)
                    self.count += 1
                return
            self._is_over.wait(_LOOK_S)


def disturb(mark: str, rng: random.Random) -> None:
    """Stops one process of the job for a while that is shorter than P3_TIMEOUT_S."""
    those = [pid for role in ("worker", "server") for _, pid in sorted(alive(role, mark).items())]
    chosen = rng.choice(those)
    send(chosen, signal.SIGSTOP)
    threading.Timer(rng.random(), send, [chosen, signal.SIGCONT]).start()


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sizes(launcher: int, mark: str) -> Dict[str, int]:
    """Of those that live as long as the job."""
    those = {"worker": alive("worker", mark)[0], "server": alive("server", mark)[0], "launcher": launcher}
    found = {f"{name}_bytes": usage.process_rss(pid) for name, pid in those.items()}
    found["shared_bytes"] = sum(map(usage.process_shared, those.values()))
    found["threads"] = sum(map(usage.process_threads, those.values()))
    found["descriptors"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in those.values())
    return found


def growth(samples: List[dict]) -> Dict[str, Tuple[int, int]]:
    """What the last quarter has more of than the second: name -> largest values of both."""
    quarter = len(samples) // 4
    grown = {}
    for what in (*BYTES, *COUNTS):
        before = max(sample[what] for sample in samples[quarter : 2 * quarter + 1])
        after = max(sample[what] for sample in samples[-quarter:])
        if after > before * 1.05 + (SLACK_BYTES if what in BYTES else SLACK):
            grown[what] = before, after
    return grown


def print_sample(sample: dict, header: bool) -> None:
    columns = ("rounds", "deaths", "lacking", *BYTES, *COUNTS)
    names = [name.replace("_bytes", " MB") for name in columns]
    widths = [max(8, len(name) + 2) for name in names]
    if header:
        print("".join("%*s" % pair for pair in zip(widths, names)))
    shown = ["%.2f" % (sample[name] / 1e6) if name in BYTES else "%d" % sample[name] for name in columns]
    print("".join("%*s" % pair for pair in zip(widths, shown)), flush=True)
