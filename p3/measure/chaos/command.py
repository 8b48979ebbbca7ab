"""`p3 chaos`: faults at chosen moments of real jobs, and a table of what became of each.

    sudo p3 chaos --repeats 3 --jobs 4 --out chaos.jsonl
    p3 chaos --markdown chaos.jsonl

docs/reliability.md describes the matrix and shows its results. matrix.py lists its cells, run.py makes one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import List

from p3.measure.arguments import names_among, number
from p3.measure.chaos import matrix
from p3.errors import ConfigError
from p3.settings import Settings

INTERRUPTED = 130
_count = number(1, 1_000_000, int)


def add_parser(commands) -> None:
    """Adds `chaos` to the subparsers of `p3`."""
    parser = commands.add_parser(
        "chaos",
        help="kill, stop and cut off processes of real jobs, and judge how the others end",
        description="Each run is a fresh job under p3 run, with root in a lab of its own; without, none is cut off.",
    )
    for option, known, what in (
        ("--roles", matrix.ROLES, "whom the faults hit"),
        ("--faults", tuple(matrix.FAULTS), "which"),
        ("--moments", tuple(matrix.MOMENTS), "when"),
        ("--trainings", tuple(matrix.TRAININGS), "what the jobs train"),
    ):
        parser.add_argument(option, type=names_among(known), default=list(known), metavar="NAME[,...]",
                            help=f"{what} (default: {','.join(known)})")  # fmt: skip
    parser.add_argument("--repeats", type=_count, default=1, metavar="N", help="runs of each cell (default 1)")
    parser.add_argument("--seed", type=_count, default=1, metavar="N", help="of the moments' exact times (default 1)")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="run nothing: print the tables of what --out has written")
    parser.set_defaults(handler=_chaos)


def _chaos(options: argparse.Namespace, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.chaos import tables

    if options.markdown:
        try:
            with open(options.markdown, encoding="utf-8") as file:
                print(tables.markdown([json.loads(line) for line in file]))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--markdown {options.markdown}: {error}") from None
        return 0
    return campaign(options)


def campaign(options: argparse.Namespace) -> int:
    """0 if every run ended as it should."""
    from tqdm import tqdm

    from p3.measure.chaos import run, tables
    from p3.measure.lab.hosts import why_unavailable

    cells = list(matrix.cells(options.roles, options.faults, options.moments, options.trainings)) * options.repeats
    if any(cell.is_cut for cell in cells) and why_unavailable() is not None:
        print(f"p3 chaos: no process and no machine is cut off: {why_unavailable()}", file=sys.stderr)
        cells = [cell for cell in cells if not cell.is_cut]
    seeds = [options.seed * 1000 + number for number in range(len(cells))]
    order = list(zip(cells, seeds))
    random.Random(options.seed).shuffle(order)  # so that runs of a kind do not all meet the same load
    records = []
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(options.out, "a", encoding="utf-8")) if options.out else None
        progress = stack.enter_context(tqdm(total=len(order), unit="run", disable=None))
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        waiting = [pool.submit(run.run, cell, seed) for cell, seed in order]
        try:
            for finished in as_completed(waiting):
                record = finished.result()
                records.append(record)
                if out is not None:
                    out.write(json.dumps(record) + "\n")
                    out.flush()
                if record["outcome"] not in run.GOOD:
                    text = "%(training)s, %(role)s %(rank)d, %(fault)s, %(moment)s (seed %(seed)d): %(outcome)s"
                    tqdm.write(text % record, file=sys.stderr)
                progress.update()
        except KeyboardInterrupt:
            for one in waiting:
                one.cancel()
            print("p3 chaos: interrupted; what had ended:", file=sys.stderr)
            print(tables.markdown(records))
            return INTERRUPTED
    print(tables.markdown(records))
    return 0 if all(record["outcome"] in run.GOOD for record in records) else 1
