"""Random programs until the time is over, or one that is given; exit status 1 if P3 and plain torch do not agree.

    export PYTHONPATH=.:tests/torch:tests/helpers
    python -m programs --seconds 3600
    python -m programs --workers 2 --replay program.json

What is found is printed with the smallest program that shows it, to be replayed so. `--without load,zeros,
staleness` (operations, arguments of any, fields of programs) and `--letters abc` leave out what is known already.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from programs.machine import Finding, Machine
from programs.search import search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--workers", type=int, help="default: 1 and 2 by turns")
    parser.add_argument("--findings", type=int, default=1, help="end after so many; default: %(default)s")
    parser.add_argument("--without", default="", metavar="NAMES", help="what to leave out")
    parser.add_argument("--letters", metavar="LETTERS", help="layers to use (model.py); default: all")
    parser.add_argument("--replay", metavar="FILE", help="a program as JSON; - is the standard input")
    options = parser.parse_args()
    sizes = [options.workers] if options.workers else [1, 2]
    with Machine(sizes) as machine:
        return _replay(machine, sizes, options.replay) if options.replay else _search(machine, sizes, options)


def _replay(machine, sizes, path):
    with sys.stdin if path == "-" else open(path) as file:
        program = json.load(file)
    for workers in sizes:
        try:
            met = machine.check(program, workers)
        except Finding as finding:
            print(finding)
            return 1
        print("%d workers: as in plain torch; refused on the way: %s" % (workers, ", ".join(met) or "nothing"))
    return 0


def _search(machine, sizes, options):
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    found = turn = 0
    end = time.monotonic() + options.seconds
    while time.monotonic() < end and found < options.findings:
        began, before, workers = time.monotonic(), machine.programs, sizes[turn % len(sizes)]
        try:
            search(machine, workers, min(300, end - began), seed + turn, options.without.split(","), options.letters)
        except Finding as finding:
            found += 1
            spent = time.monotonic() - began, machine.programs - before
            print("after %.0f s and %d programs, those of shrinking among them, from seed %d, " % (*spent, seed + turn),
                  finding, sep="", flush=True)  # fmt: skip
        turn += 1
    print(machine.summary())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
