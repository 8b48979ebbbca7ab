"""Does a job stay as it is? A million slices of integers, with random delays and reconnects; sums must be exact and
memory flat.

    p3 bench soak                                   # 1,000,000 slices, 4 workers, 2 servers
    p3 bench soak --slices 20000 --reconnects 0 --set P3_LOCAL_AGGREGATION=1 --set P3_CHECKSUM=1

Real processes under `p3 run`. Workers push dense keys and one of rows (processes/soak_worker.py) and hesitate now and
then; at each tenth of the way this program stops a process of the job, drawn by chance, for up to a second. In each of
`--reconnects` rounds, drawn by chance as well, a worker kills itself in the midst of its pushes, and `p3 run` starts it
anew (`--on-worker-loss wait`); 0 leaves that out.

Gradients are small integers, so that float32 sums are exact and every worker can tell every element of each: a sum is
that of all workers, but for slices of a round in which one was lost, which may lack that one's gradient as a whole.

Printed at each tenth: slices pushed by all workers; reconnects so far, and slices that lack a gradient therefore; the
largest resident size of any worker and any server; and of the servers, bytes of incomplete rounds, bytes held for peers
and slices queued. The exit status is 1 if a sum was wrong, or if the memory of the last quarter exceeds that of the
second quarter by more than 5 % and 2 MB: then it grows.
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
import uuid
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from p3.launch.placement import module_path
from p3.measure import arguments as given
from p3.measure.chaos.strike import MARK, marked
from p3.measure.micro.processes.soak_worker import TENTHS

SLACK_BYTES = 2 << 20


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
    samples: List[dict] = []
    lacking: List[int] = []  # slices, of each reconnect
    rng = random.Random(options.seed)
    said = []
    try:
        for line in job.stdout:
            start_of_json = line.find('{"soak"')
            if start_of_json < 0:
                said.append(line)
                continue
            report = json.loads(line[start_of_json:])["soak"]
            if "lacking" in report:
                lacking.append(report["lacking"])
                continue
            report.update(reconnects=len(lacking), lacking=sum(lacking))
            report["worker_bytes"], report["server_bytes"] = largest_sizes(mark)
            samples.append(report)
            print_sample(report, header=len(samples) == 1)
            disturb(mark, rng)
            os.write(go_on, b"+")
        code = job.wait()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        os.close(go_on)
    if code != 0 or len(samples) < TENTHS or len(lacking) != options.reconnects:
        print("the job failed (exit status %d):\n%s" % (code, "".join(said[-30:])), file=sys.stderr)
        return 1
    grown = growth(samples)
    for what, (before, after) in grown.items():
        print("%s grew from %.1f MB in the second quarter to %.1f MB in the last" % (what, before / 1e6, after / 1e6))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "samples": samples}, indent=1) + "\n")
    print("%d slices: sums exact, memory %s" % (samples[-1]["slices"], "grows" if grown else "flat"))
    return 1 if grown else 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = given.parser("soak", __doc__)
    parser.add_argument("--slices", type=int, default=1_000_000, help="pushed by all workers (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--reconnects", type=int, default=5, help="of workers that are killed (%(default)s)")
    parser.add_argument("--delay", type=float, default=2.0, metavar="MS", help="mean of a hesitation (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn by chance (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the job")
    parser.add_argument("--json", metavar="FILE", help="write the samples there as well")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace, sampled: str, mark: str) -> subprocess.Popen:
    settings = {"P3_LOCAL_AGGREGATION": "0", "P3_SLICE_ELEMENTS": "1000", "OMP_NUM_THREADS": "1"}
    settings.update(setting.split("=", 1) for setting in options.set)
    command = [sys.executable, "-m", "p3", "run", "-n", str(options.workers), "-s", str(options.servers)]
    if options.reconnects:
        command += ["--on-worker-loss", "wait", "--worker-restarts", str(options.reconnects)]
    command += [sys.executable, "-m", "p3.measure.micro.processes.soak_worker"]
    command += [str(options.slices), str(options.delay), str(options.seed), str(options.reconnects)]
    environment = {**os.environ, **module_path(os.environ), MARK: mark, "SOAK_SAMPLED": sampled, **settings}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, start_new_session=True
    )


def disturb(mark: str, rng: random.Random) -> None:
    """Stops one process of the job for a while that is shorter than P3_TIMEOUT_S."""
    chosen = rng.choice(sorted(pid for pid, role in processes_of(mark).items() if role in ("worker", "server")))
    send(chosen, signal.SIGSTOP)
    threading.Timer(rng.random(), send, [chosen, signal.SIGCONT]).start()


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def largest_sizes(mark: str) -> Tuple[int, int]:
    """Resident bytes of the largest worker and the largest server."""
    sizes: Dict[str, int] = {"worker": 0, "server": 0}
    for pid, role in processes_of(mark).items():
        with contextlib.suppress(OSError):  # it ended meanwhile
            pages = int(Path("/proc/%d/statm" % pid).read_text().split()[1])
            sizes[role] = max(sizes.get(role, 0), pages * os.sysconf("SC_PAGE_SIZE"))
    return sizes["worker"], sizes["server"]


def processes_of(mark: str) -> Dict[int, str]:
    """The role of each process of the job that has one."""
    return {pid: env["DMLC_ROLE"] for pid, env in marked(mark).items() if "DMLC_ROLE" in env}


def growth(samples: List[dict]) -> Dict[str, Tuple[int, int]]:
    """What the last quarter has more of than the second: name -> largest values of both."""
    quarter = len(samples) // 4
    grown = {}
    for what in ("worker_bytes", "server_bytes", "buffer_bytes", "held_bytes"):
        before = max(sample[what] for sample in samples[quarter : 2 * quarter + 1])
        after = max(sample[what] for sample in samples[-quarter:])
        if after > before * 1.05 + SLACK_BYTES:
            grown[what] = before, after
    return grown


def print_sample(sample: dict, header: bool) -> None:
    columns = ("slices", "reconnects", "lacking", "worker_bytes", "server_bytes")
    columns += ("buffer_bytes", "held_bytes", "queued_slices")
    if header:
        print("".join("%14s" % name.replace("_bytes", " MB").replace("_", " ") for name in columns))
    shown = ["%14.2f" % (sample[name] / 1e6) if name.endswith("_bytes") else "%14d" % sample[name] for name in columns]
    print("".join(shown), flush=True)
