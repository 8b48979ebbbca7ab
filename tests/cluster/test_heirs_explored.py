"""docs/replicated-servers.md, explored: a server is lost at any point, or comes back at a mark, and whatever may follow
in any order. Each worker has the same sum of each round, made of one gradient of each of them, has updated by the same
sums and numbers, and nobody waits for ever."""

import random

import pytest
from heirs_model import FAULTS, FAULTS_OF_JOINS, FAULTS_OF_RETURNS, World, Wrong

FAR_TOO_MANY = 2_000_000
MAY_BE = ("kill server", "suspect server", "lose worker", "come back")  # which is no way to go on


def explore(world):
    """All that may follow. How many different worlds that are."""
    known, open_worlds = {world.key()}, [world]
    while open_worlds:
        world = open_worlds.pop()
        steps = world.steps()
        if not any(step[0] not in MAY_BE for step in steps):
            world.require()
        for step in steps:
            after = world.clone()
            after.do(step)
            key = after.key()
            if key not in known:
                known.add(key)
                open_worlds.append(after)
        assert len(known) < FAR_TOO_MANY
    return len(known)


def wander(world, random):
    """One way through."""
    while True:
        steps = world.steps()
        losses = [step for step in steps if step[0] in MAY_BE]
        others = [step for step in steps if step not in losses]
        if not others:
            world.require()
        if not steps or (not others and random.random() < 0.5):
            return
        world.do(random.choice(losses if losses and (not others or random.random() < 0.04) else others))


@pytest.mark.parametrize(
    "shape",
    [
        dict(workers=2, slices=1, rounds=2),
        dict(workers=1, slices=2, rounds=1),
        dict(workers=2, slices=1, rounds=1, worker_losses=1),
        dict(workers=2, slices=1, rounds=2, ends_early=True),
        dict(workers=2, slices=1, rounds=1, server_losses=2, returns=1),
        dict(workers=2, slices=1, rounds=1, heir_returns=True),
        dict(workers=2, slices=1, rounds=2, worker_losses=1, joins=1),
        dict(workers=2, slices=1, rounds=1, worker_losses=2, joins=1),
    ],
    ids=str,
)
def test_whenever_a_server_is_lost_all_have_the_same_sums(shape):
    assert explore(World(**shape)) > 100


@pytest.mark.parametrize(
    "shape",
    [
        dict(workers=2, slices=2, rounds=2),
        dict(workers=3, slices=2, rounds=2),
        dict(workers=3, slices=2, rounds=2, worker_losses=1),
        dict(workers=4, slices=1, rounds=3, worker_losses=2),
        dict(workers=3, slices=2, rounds=2, worker_losses=1, ends_early=True),
        dict(workers=3, slices=2, rounds=3, server_losses=3, returns=2, worker_losses=1),
        dict(workers=3, slices=2, rounds=2, heir_returns=True, worker_losses=1),
        dict(workers=3, slices=2, rounds=3, server_losses=3, returns=2, worker_losses=3, joins=2),
    ],
    ids=str,
)
def test_it_is_so_with_more_of_them(shape):
    for seed in range(700):
        wander(World(**shape), random.Random(seed))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_explorer_finds(fault):
    """Within what the tests above do."""
    with pytest.raises(Wrong) as found:
        for seed in range(700):
            for shape in (dict(slices=2), dict(workers=3, slices=2, worker_losses=1), dict(slices=2, ends_early=True)):
                wander(World(rounds=2, **{"workers": 2, **shape}, faults=[fault]), random.Random(seed))
    print(found.value)


@pytest.mark.parametrize("fault", FAULTS_OF_RETURNS)
def test_the_explorer_finds_where_servers_come_back(fault):
    with pytest.raises(Wrong) as found:
        returns = dict(server_losses=2, returns=1)
        for shape in (dict(heir_returns=True), returns, dict(returns, worker_losses=1)):
            explore(World(workers=2, slices=1, rounds=1, **shape, faults=[fault]))
    print(found.value)


@pytest.mark.parametrize("fault", FAULTS_OF_JOINS)
def test_the_explorer_finds_where_workers_join(fault):
    with pytest.raises(Wrong) as found:
        explore(World(workers=2, slices=1, rounds=1, worker_losses=2, joins=1, faults=[fault]))
    print(found.value)
