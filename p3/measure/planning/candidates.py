"""Strategies of all kinds for one setting, on which a planner is judged (verdict.py): those of rules, that of `p3
plan`, and such as chance makes. The same ones each time."""

from __future__ import annotations

import random
from typing import Dict, Iterator, List, Sequence, Tuple

from p3.measure.planning import builders
from p3.measure.planning.search import SLICES, Tried
from p3.measure.replay.models import Model
from p3.measure.simulate.setting import Setting
from p3.plan.strategy import Cut, Strategy

NONE, FOUND = "none", "found"  # names of two that are always there
_SEED = 1


def candidates(setting: Setting, found: Tried, count: int) -> Dict[str, Strategy]:
    """`count` different ones, by name. `found`: what the planner that is judged would take."""
    made: Dict[str, Strategy] = {NONE: Strategy(), FOUND: found.strategy}
    rules = [(name, one) for name, one in _by_rules(setting, found) if one not in made.values()]
    by_chance = _by_chance(setting)
    while len(made) < count:
        name, strategy = rules.pop(0) if rules else next(by_chance)
        if strategy not in made.values():
            made[name] = strategy
    return made


def _by_rules(setting: Setting, found: Tried) -> Iterator[Tuple[str, Strategy]]:
    equal, proportional = builders.equal(setting), builders.proportional(setting)
    usual = setting.slice_size.most
    yield "proportional", builders.strategy(setting, proportional, usual)
    for server in reversed(range(len(equal))):
        yield f"without server {server}", builders.strategy(setting, _but(equal, server), usual)
    yield "server 0 alone", builders.strategy(setting, [1] + [0] * (len(equal) - 1), usual)
    for name, shares in (("equal", equal), ("proportional", proportional), (FOUND, list(found.shares))):
        yield f"whole keys, {name}", whole_keys(setting.model, shares)
    for slice_elements in SLICES:
        yield f"equal, slices of {slice_elements}", builders.strategy(setting, equal, slice_elements)
        yield f"proportional, slices of {slice_elements}", builders.strategy(setting, proportional, slice_elements)


def whole_keys(model: Model, shares: Sequence[int]) -> Strategy:
    """Each key on one server, the longest first, where most is left of the server's share (thesis, Algorithm 9)."""
    total, elements = sum(shares), sum(tensor.elements for tensor in model.tensors)
    left = [elements * share / total for share in shares]
    keys = {}
    for tensor in sorted(model.tensors, key=lambda one: -one.elements):
        server = max(range(len(left)), key=lambda one: (left[one], -one))
        left[server] -= tensor.elements
        keys[tensor.name] = Cut((server,))
    return Strategy(keys={tensor.name: keys[tensor.name] for tensor in model.tensors})


def _by_chance(setting: Setting) -> Iterator[Tuple[str, Strategy]]:
    """In turn: random shares with a random size of slices, and a random server for each key."""
    chance, servers, number = random.Random(_SEED), len(setting.server_hosts), 0
    while True:
        number += 1
        units = chance.choices(range(servers), [chance.random() for _ in range(servers)], k=builders.units(servers))
        shares = [units.count(server) for server in range(servers)]
        yield f"shares by chance, {number}", builders.strategy(setting, shares, chance.choice(SLICES))
        of_keys = {tensor.name: Cut((chance.randrange(servers),)) for tensor in setting.model.tensors}
        yield f"keys by chance, {number}", Strategy(keys=of_keys)


def _but(shares: Sequence[int], server: int) -> List[int]:
    """The others' alike."""
    return [0 if number == server else 1 for number in range(len(shares))]
