"""How many more batches training needs if updates arrive late: Zhang's thesis, chapter 5, on a small scale.

    p3 bench late_updates [--studies depth,rules,workers] [--seeds 3]

A simulation in one process, as the thesis has it (p3/measure/late_updates/simulation.py), so no figure depends on how
busy the machine is. An update arrives up to `s` iterations later than the next one. Given is the mean number of batches
until the target, of that with s = 0 beside it; "never" if any of the seeds needs more than --most.

    depth    dense networks with 0 (logistic regression) to 4 hidden layers, 8 workers: to 92% of handwritten digits
             of the test, with SGD (0.01) and Adam (0.001). The thesis: Fig. 5.1 (e, f) and 5.6, on MNIST
    rules    five rules, on 1 and 8 workers, 2 hidden layers, each with the best for it of the rates 0.001, 0.01 and
             0.1. The thesis: Fig. 5.2, with ResNet-8 on CIFAR-10, and 5.5
    workers  factors of a matrix by SGD (0.005), on 4 and 8 workers. The thesis: Fig. 5.3 (a, b), on MovieLens
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

from p3.measure import arguments as given
from p3.measure.jobs import machine
from p3.measure.late_updates import rules
from p3.measure.late_updates.problems import Digits, Ratings
from p3.measure.late_updates.simulation import Problem, Rule, batches_to_target

STALENESS = (0, 4, 8, 16)
OF_FACTORS = (0, 5, 10, 15, 20)
DEPTHS = (0, 1, 2, 4)
RATES = (0.001, 0.01, 0.1)
FACTORS_RATE = 0.005

Mean = Optional[float]  # batches; None: never


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("late_updates", __doc__)
    parser.add_argument("--studies", type=given.names_among(list(STUDIES)), default=list(STUDIES),
                        help="some of depth, rules, workers (default: all)")  # fmt: skip
    parser.add_argument("--seeds", type=given.number(1, 1000, int), default=3, help="default %(default)s")
    parser.add_argument("--most", type=given.number(1, 1e9, int), default=20_000,
                        help="batches of all workers together (default %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)

    def batches(problem: Problem, rule: Callable[[], Rule], workers: int, staleness: int) -> Mean:
        seen = [batches_to_target(problem, rule(), workers=workers, staleness=staleness, most=options.most, seed=seed)
                for seed in range(options.seeds)]  # fmt: skip
        return None if None in seen else statistics.fmean(seen)

    print("%s; NumPy, %d seeds, at most %d batches" % (machine.in_a_line(), options.seeds, options.most))
    for study in options.studies:
        levels, lines = STUDIES[study]
        print("\n%-34s%s" % (study, "".join("%-18s" % ("s = %d" % level) for level in levels)))
        for name, of_level in lines(batches):
            print("%-34s%s" % (name, "".join(_cells([of_level(level) for level in levels]))), flush=True)
    return 0


def _cells(means: Sequence[Mean]) -> Iterator[str]:
    for mean in means:
        share = "" if mean is None or not means[0] else " (%.2f)" % (mean / means[0])
        yield "%-18s" % ("never" if mean is None else "%.0f%s" % (mean, share))


Lines = Iterator[Tuple[str, Callable[[int], Mean]]]


def _depth(batches: Callable[..., Mean]) -> Lines:
    for name, rule in (("SGD", lambda: rules.Sgd(0.01)), ("Adam", lambda: rules.Adam(0.001))):
        for hidden in DEPTHS:
            yield f"{name}, {hidden} hidden layers", partial(batches, Digits(hidden), rule, 8)


def _rules(batches: Callable[..., Mean]) -> Lines:
    problem = Digits(2)

    def best(rule: Callable[[float], Rule], workers: int, level: int) -> Mean:
        means = [batches(problem, partial(rule, rate), workers, level) for rate in RATES]
        return min((mean for mean in means if mean is not None), default=None)

    for workers in (1, 8):
        for name, rule in rules.ALL.items():
            yield f"{name}, workers: {workers}", partial(best, rule, workers)


def _workers(batches: Callable[..., Mean]) -> Lines:
    problem = Ratings()
    for workers in (4, 8):
        yield f"factors, workers: {workers}", partial(batches, problem, lambda: rules.Sgd(FACTORS_RATE), workers)


STUDIES: Dict[str, Tuple[Sequence[int], Callable[..., Lines]]] = {
    "depth": (STALENESS, _depth),
    "rules": (STALENESS, _rules),
    "workers": (OF_FACTORS, _workers),
}
