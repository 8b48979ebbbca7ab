"""Orders that can be foreseen are, and are seldom announced: for each way in which a model may use its layers in
another order in each step, the share of pairs of layers in the order in force, and in the first step's order.

Nothing is timed: what is drawn by chance is the same on every machine.
"""

import itertools
import random

import pytest

from p3.settings import Settings

pytest.importorskip("p3._core", reason="the extension is not built")
from p3.frontend.order import Order
from p3.worker.session import Session

LAYERS, STEPS, SEED = 20, 200, 1
NAMES = ["layer%d" % layer for layer in range(LAYERS)]


def same(_draw):
    return itertools.repeat(NAMES)


def left_out(draw):
    """As with stochastic depth."""
    while True:
        yield [name for name in NAMES if draw.random() < 0.5]


def of_changing_depth(draw):
    """An encoder and a decoder of 2 to 10 layers each, which mirror each other."""
    while True:
        depth = range(draw.randint(2, LAYERS // 2))
        yield [*("encoder%d" % one for one in depth), *("decoder%d" % one for one in reversed(depth)), "output"]


def kept_for_a_while(draw):
    while True:
        yield from itertools.repeat(draw.sample(NAMES, LAYERS), 20)


def drifting(draw):
    """In each step five pairs of neighbours change places."""
    names = list(NAMES)
    while True:
        for _ in range(5):
            one = draw.randrange(LAYERS - 1)
            names[one : one + 2] = names[one + 1], names[one]
        yield list(names)


def at_random(draw):
    while True:
        yield draw.sample(NAMES, LAYERS)


@pytest.mark.parametrize("route, least, most_of_first, most_orders", [
    (same, 1.0, 1.0, 1),
    (left_out, 0.98, 0.75, 8),
    (of_changing_depth, 0.98, 0.85, 8),
    (kept_for_a_while, 0.94, 0.6, 10),
    (drifting, 0.9, 0.8, 25),
    (at_random, 0.45, 0.55, 8),
])  # fmt: skip
def test_orders_follow_routes_that_can_be_foreseen_and_are_announced_seldom(route, least, most_of_first, most_orders):
    with Session.open(Settings()) as session:
        order = Order(session, session.new_store())
        for used in itertools.islice(route(random.Random(SEED)), STEPS):
            order.follow(used)
        found = order.stats()
    assert found["followed"] >= least and found["first"] <= most_of_first and found["orders"] <= most_orders, found
