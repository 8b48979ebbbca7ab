"""What a step needs of memory, in PyTorch: P3's workers and servers beside DistributedDataParallel's processes.

    p3 bench memory [--megabytes 200] [--layers 25] [--steps 5] [--repeats 3]

Two workers of this machine, each as if it were alone there (P3_LOCAL_AGGREGATION=0), train a model of equal square
layers, with a batch so small that activations weigh nothing; P3 has two servers, DDP is on Gloo, with buckets of 25 MB
and gradient_as_bucket_view. Given is by how much a process's peak resident size exceeds what it had before its model
was made, in sizes of the model: of the larger worker in the steps that count, two come before them, and of the larger
server ever; medians (least..greatest) of runs. Where servers update, each has the optimizer's state of its half of the
model; where workers update, as with clipping, they have it. Shared memory counts in each process that touches it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import uuid
from typing import Dict, List, Sequence, Tuple

from p3.launch.placement import module_path
from p3.measure import arguments as given
from p3.measure.chaos.strike import MARK
from p3.measure.jobs import machine
from p3.measure.micro.processes.memory_worker import OPTIMIZERS, WAYS

TIMEOUT_S = 300
WORKERS = 2


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("memory", __doc__)
    parser.add_argument("--megabytes", type=given.number(0.01, 1e5), default=200.0,
                        help="of the model, in float32 (default %(default)s)")  # fmt: skip
    parser.add_argument("--layers", type=given.number(1, 1e4, int), default=25, help="default %(default)s")
    parser.add_argument("--steps", type=given.number(1, 1e6, int), default=5, help="that count (default %(default)s)")
    parser.add_argument("--repeats", type=given.number(1, 1e4, int), default=3, help="default %(default)s")
    parser.add_argument("--ways", type=given.names_among(list(WAYS)), default=list(WAYS),
                        help="default: %s" % ",".join(WAYS))  # fmt: skip
    options = parser.parse_args(arguments)
    cells = [(optimizer, way) for optimizer in OPTIMIZERS for way in options.ways]
    found: Dict[Tuple[str, str], List[Tuple[float, float]]] = {cell: [] for cell in cells}
    for _ in range(options.repeats):
        for cell in cells:
            found[cell].append(_run(*cell, options))
    print("%s; %g MB in %d layers, %d workers" % (machine.in_a_line(), options.megabytes, options.layers, WORKERS))
    print("%-12s%-20s%-24s%-24s%s" % ("", "sizes of the model", "a worker", "a server", "worker over DDP"))
    for optimizer, way in cells:
        workers, servers = zip(*found[optimizer, way])
        reference = found.get((optimizer, WAYS[way].beside), [])
        over = statistics.median(workers) / statistics.median(one for one, _ in reference) if reference else 1.0
        print("%-12s%-20s%-24s%-24s%s" % (
            optimizer, way, _in_words(workers), "" if WAYS[way].is_ddp else _in_words(servers),
            "" if WAYS[way].is_ddp or not reference else "%+.0f%%" % (100 * over - 100),
        ))  # fmt: skip
    return 0


def _run(optimizer: str, way: str, options) -> Tuple[float, float]:
    """Of the larger worker and the larger server, in sizes of the model."""
    command = [sys.executable, "-m", "p3", "run", "-n", str(WORKERS), "-s", str(WORKERS)]
    command += [sys.executable, "-m", "p3.measure.micro.processes.memory_worker", optimizer, way]
    command += [str(options.megabytes), str(options.layers), str(options.steps)]
    as_on_two_machines = {"P3_LOCAL_AGGREGATION": "0"}
    environment = {**os.environ, **module_path(os.environ), MARK: uuid.uuid4().hex, **as_on_two_machines}
    environment["OMP_NUM_THREADS"] = "1"
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S)
    said = [line[line.index('{"memory"') :] for line in finished.stdout.splitlines() if '{"memory"' in line]
    if finished.returncode != 0 or len(said) != WORKERS:
        output = (finished.stdout + finished.stderr)[-3000:]
        raise SystemExit("p3 bench memory: %s with %s failed (exit status %d):\n%s"
                         % (way, optimizer, finished.returncode, output))  # fmt: skip
    reports = [json.loads(line)["memory"] for line in said]
    model = options.megabytes * 1e6
    return max(one["worker"] for one in reports) / model, max(one["server"] for one in reports) / model


def _in_words(values: Sequence[float]) -> str:
    return "%.2f (%.2f..%.2f)" % (statistics.median(values), min(values), max(values))
