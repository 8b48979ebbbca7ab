"""What P3_TRACE costs: rounds of a job with and without it, in turns.

    p3 bench trace_cost [--elements 5000000] [--slice-elements 50000] [--blocks 12] [--rounds 50]

One process holds three embedded jobs, each a worker and a server joined by a socket pair: one traced, two not. They
take turns, round by round, in every order. There is no network to hide behind: a round is only copies, sums and the
protocol, so it shows more of the cost than a real job. Each block begins with new jobs, made in another order, because
where an array happens to lie changes a round by some percent.

`cost` is what a traced round takes beyond an untraced one, `noise` the same of the two untraced jobs, which is what the
machine makes of nothing: medians of the blocks, with the quartiles. Processor time is that of all threads of both
halves; it is the figure to trust where other programs run. Small slices show the cost of a slice more clearly.
"""

import itertools
import platform
import statistics
import tempfile
import time
from typing import Sequence

import numpy as np

from p3.measure import arguments as given
from p3.settings import Settings
from p3.worker.session import Session


class Job:
    def __init__(self, settings, elements):
        self._session = Session.open(settings)
        self._key = self._session.declare("w", (elements,), "float32")
        self._gradient, self._landing = np.ones(elements, "float32"), np.zeros(elements, "float32")
        self._session.init(self._key, self._gradient, self._landing).wait(60)

    def round(self):
        """(wall, processor) seconds."""
        wall, processor = time.perf_counter(), time.process_time()
        self._session.pushpull(self._key, self._gradient, self._landing).wait(60)
        return time.perf_counter() - wall, time.process_time() - processor

    def close(self):
        self._session.close()


def block(settings, order, rounds, elements):
    """Median wall and processor seconds of a round of each job; `order` is that in which they are made."""
    jobs = {name: Job(settings[name], elements) for name in order}
    turns = list(itertools.permutations(jobs))
    times = {name: [] for name in jobs}
    for number in range(-5, rounds):
        for name in turns[number % len(turns)]:
            seconds = jobs[name].round()
            if number >= 0:
                times[name].append(seconds)
    for job in jobs.values():
        job.close()
    return {name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()}


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("trace_cost", __doc__)
    parser.add_argument("--elements", type=int, default=5000000, help="float32 in a round (default 5000000)")
    parser.add_argument("--slice-elements", type=int, default=50000, help="of a slice (default 50000)")
    parser.add_argument("--blocks", type=given.number(2, 1e6, int), default=12, help="each with new jobs (default 12)")
    parser.add_argument("--rounds", type=given.number(1, 1e6, int), default=50,
                        help="of each job in a block (default 50)")  # fmt: skip
    options = parser.parse_args(arguments)
    slices = -(-options.elements // options.slice_elements)
    print("%s, Python %s; %d slices of %d bytes in a round, %d blocks of %d rounds" % (
        platform.platform(), platform.python_version(), slices, 4 * options.slice_elements, options.blocks,
        options.rounds,
    ))  # fmt: skip
    blocks, orders = [], itertools.cycle(itertools.permutations(("off", "off again", "on")))
    with tempfile.TemporaryDirectory() as folder:
        for number, order in zip(range(options.blocks), orders):
            off = Settings(slice_elements=options.slice_elements)
            on = Settings(slice_elements=options.slice_elements, trace="%s/%d" % (folder, number))
            settings = {"off": off, "off again": off, "on": on}
            blocks.append(block(settings, order, options.rounds, options.elements))

    for index, name in enumerate(("wall", "processor")):
        base = statistics.median(one["off"][index] for one in blocks)
        print("%-9s  off %.3f ms" % (name, base * 1e3), end="")
        for what, job in (("cost", "on"), ("noise", "off again")):
            low, middle, high = statistics.quantiles((one[job][index] - one["off"][index] for one in blocks), n=4)
            print("; %s %+.2f%% (%+.2f..%+.2f), %+.0f ns for each slice" % (
                what, 100 * middle / base, 100 * low / base, 100 * high / base, middle / slices * 1e9
            ), end="")  # fmt: skip
        print()
    return 0
