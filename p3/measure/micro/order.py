"""`p3 bench order`: whether priorities follow forward passes that use their layers in another order in each step.

For each way in which the order may change: the share of pairs of layers that a step uses in the order that was
foreseen, by the first step's order (with what came later behind it) and by the order in force (p3/frontend/order.py),
and how many orders rank 0 has announced. Nothing is timed: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Callable, Dict, Iterator, List, Optional, Sequence

from p3.frontend.order import Order
from p3.measure.arguments import number
from p3.settings import Settings
from p3.worker.session import Session

LAYERS = 20
SEED = 1

Route = Iterator[List[str]]  # the layers of each step, as they are used


def _names() -> List[str]:
    return ["layer%d" % layer for layer in range(LAYERS)]


def _same(_draw: random.Random) -> Route:
    return itertools.repeat(_names())


def _left_out(draw: random.Random) -> Route:
    """As with stochastic depth."""
    while True:
        yield [name for name in _names() if draw.random() < 0.5]


def _of_changing_depth(draw: random.Random) -> Route:
    """An encoder and a decoder of 2 to 10 layers each, which mirror each other."""
    while True:
        depth = range(draw.randint(2, LAYERS // 2))
        yield [*("encoder%d" % one for one in depth), *("decoder%d" % one for one in reversed(depth)), "output"]


def _kept_for_a_while(draw: random.Random) -> Route:
    while True:
        yield from itertools.repeat(draw.sample(_names(), LAYERS), 20)


def _drifting(draw: random.Random) -> Route:
    """In each step five pairs of neighbours change places."""
    names = _names()
    while True:
        for _ in range(5):
            one = draw.randrange(LAYERS - 1)
            names[one : one + 2] = names[one + 1], names[one]
        yield list(names)


def _random(draw: random.Random) -> Route:
    while True:
        yield draw.sample(_names(), LAYERS)


ROUTES: Dict[str, Callable[[random.Random], Route]] = {
    "the same in each step": _same,
    "each layer in half of the steps": _left_out,
    "a recurrent net of changing depth": _of_changing_depth,
    "another route every 20 steps": _kept_for_a_while,
    "a route that drifts": _drifting,
    "a random route in each step": _random,
}


def stats_of(session: Session, route: Callable[[random.Random], Route], steps: int) -> Dict[str, float]:
    """Order.stats() after so many steps."""
    order = Order(session, session.new_store())
    for used in itertools.islice(route(random.Random(SEED)), steps):
        order.follow(used)
    return order.stats()


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="p3 bench order", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=number(2, 1e6, int), default=200, help="of each route (default 200)")
    options = parser.parse_args(argv)
    print("pairs of %d layers in the order foreseen, %d steps" % (LAYERS, options.steps))
    print("%-36s%20s%20s%10s" % ("route", "first step's order", "order in force", "orders"))
    with Session.open(Settings()) as session:
        for name, route in ROUTES.items():
            found = stats_of(session, route, options.steps)
            print("%-36s%19.1f%%%19.1f%%%10d" % (name, 100 * found["first"], 100 * found["followed"], found["orders"]))
    return 0
