"""The formula of the bytes on cards, and the rule that goes by it, against every frame of every slice."""

import itertools

import card_frames
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3.plan.key_plan import Axes, KeyPlan, SliceSize, even_slices
from p3.placement import Placement
from p3.frontend.factors import Rule
from p3.plan.factor_shape import FactorShape

machines = st.integers(0, 6)
placements = st.builds(
    lambda workers, servers, aggregates: Placement.of(workers, servers, aggregates),
    st.lists(machines, min_size=1, max_size=8), st.lists(machines, min_size=1, max_size=8), st.booleans(),
)  # fmt: skip


@settings(max_examples=300, derandomize=True)
@given(placements, st.integers(1, 3000), st.integers(1, 400), st.booleans())
def test_cards_carry_what_the_frames_add_up_to(placement, elements, whole, is_gathered):
    """In the mean over the servers at which a key may begin."""
    plan = KeyPlan(0, "float32", elements, 0, whole, parts=len(placement.workers) if is_gathered else 0)
    servers = len(placement.servers)
    everywhere = [card_frames.counted(plan._replace(first_slice=first), placement) for first in range(servers)]
    for machine, card in placement.cards(plan).items():
        for way in (0, 1):
            assert card[way] * servers == pytest.approx(sum(cards[machine][way] for cards in everywhere), rel=1e-9)


@settings(derandomize=True)
@given(st.integers(1, 10**5), st.integers(1, 5000))
def test_even_slices_are_as_many_as_whole_ones_and_differ_by_their_number_at_most(elements, most):
    plan = KeyPlan(0, "float32", elements, 0, even_slices(elements, most))
    assert plan.slices <= -(-elements // most)
    assert max(plan.sizes()) <= most and max(plan.sizes()) - min(plan.sizes()) < max(2, -(-elements // most))


def test_a_machines_workers_and_servers_are_known_by_its_name():
    placement = Placement.of(["b", "a", "b"], ["c", "a"], True)
    assert placement == Placement((0, 1, 0), (2, 1), True) and placement.pushes(Axes()) == 2
    assert placement._replace(aggregates=False).pushes(Axes()) == 3


DGC = {"type": "dgc", "ratio": 0.1, "warmup_steps": 0, "clip_norm": 0.0, "masking": True}


@pytest.mark.parametrize("apart", [Axes(staleness=1), Axes(codec=DGC, update="steps")])
def test_of_keys_that_do_not_add_up_on_their_machine_each_worker_pushes(apart):
    placement = Placement((0, 0, 1), (1, 0))
    assert placement.pushes(apart) == 3 and placement.pushes(Axes()) == 2
    assert [placement.pushed_by(rank, apart) for rank in range(3)] == [(0,), (1,), (2,)]
    stale = KeyPlan(0, "float32", 1000, 0, 100, staleness=1)
    assert placement.cards(stale) == placement._replace(aggregates=False).cards(stale)
    assert placement.cards(stale) != placement.cards(stale._replace(staleness=0))


def jobs():
    """2 to 8 workers, 1 to 4 of them on a machine, and 1 to 8 servers on the same machines in turn, or on others."""
    for each, workers, servers in itertools.product(range(1, 5), range(2, 9), range(1, 9)):
        of_workers = tuple(rank // each for rank in range(workers))
        count = of_workers[-1] + 1
        yield Placement(of_workers, tuple(number % count for number in range(servers)))
        yield Placement(of_workers, tuple(count + number for number in range(servers)))


def test_of_others_the_lowest_rank_of_a_machine_pushes_for_all_there():
    for axes in (Axes(), Axes(codec={"type": "int8"})):
        placement = Placement((1, 0, 1, 2, 0), (0,))
        assert [placement.pushed_by(rank, axes) for rank in range(5)] == [(0, 2), (1, 4), (), (3,), ()]
        assert placement.pushes(axes) == 3
        assert placement._replace(aggregates=False).pushed_by(2, axes) == (2,)


VGG = ((710, 4345), (710, 710), (173, 710))  # as `p3 bench factors` has its layers
WIDE = ((4096, 4096),)


@pytest.mark.parametrize("layers", [VGG, WIDE])
def test_the_choice_is_at_most_2_percent_slower_than_the_better_of_both(layers):
    """By the busiest card, either way, around the batch where the first layer's gradient and factors cost as much."""
    checked, worst = 0, (0.0, None)
    for placement in jobs():
        rule = Rule(placement, SliceSize("auto", len(placement.servers)))
        most = rule.most_rows(*layers[0])
        for rows in sorted({most * percent // 100 for percent in (97, 100, 103)} | {most + 1}):
            shapes = [FactorShape(rows, *layer) for layer in layers]
            if rows == 0 or not shapes[0].fits_gradient:
                continue
            dense, factors, chosen = (
                card_frames.busiest(tuple(rule.plan(shape, which(shape)) for shape in shapes), placement)
                for which in (lambda _: False, lambda shape: shape.fits_gradient, rule.pays)
            )
            checked += 1
            worst = max(worst, (chosen / max(1, min(dense, factors)), (placement, rows)))
    assert checked > 1000 and worst[0] <= 1.02, worst
