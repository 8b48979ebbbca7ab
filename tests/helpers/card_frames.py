"""What crosses the cards, counted frame by frame, as docs/protocol.md has the slices of dense keys and keys of factors
travel."""

import functools
from collections import Counter
from typing import Tuple

import numpy as np

from p3.plan.key_plan import KeyPlan
from p3.placement import Placement


def counted(plan: KeyPlan, placement: Placement):
    """Machine -> bytes that it sends, and receives, in a round of a key with this `first_slice`."""
    sizes = np.array(plan.sizes())
    parts = max(1, plan.parts)
    server = (plan.first_slice + np.arange(len(sizes))) % len(placement.servers)
    part = np.arange(len(sizes)) * parts // len(sizes)
    content, frames = np.zeros((2, len(placement.servers), parts), int)  # of each server and part
    np.add.at(content, (server, part), 4 * sizes)
    np.add.at(frames, (server, part), 1)
    lowest = {machine: placement.workers.index(machine) for machine in placement.workers}
    pusher_of = [lowest[machine] if placement.aggregates else rank for rank, machine in enumerate(placement.workers)]
    cards = {machine: [0, 0] for machine in {*placement.workers, *placement.servers}}

    def send(origin, to, bytes_):
        if origin != to:
            cards[origin][0] += bytes_
            cards[to][1] += bytes_

    for number, home in enumerate(placement.servers):
        headers = 80 * int(frames[number].sum())
        for pusher in set(pusher_of):
            there = placement.workers[pusher]
            if plan.parts == 0:  # up, and back
                up = down = int(content[number].sum())
            else:
                up = int(sum(content[number, rank] for rank in range(parts) if pusher_of[rank] == pusher))
                down = int(content[number].sum()) - up
            send(there, home, up + headers)
            send(home, there, down + headers)
    return cards


@functools.lru_cache(maxsize=64)
def busiest(plans: Tuple[KeyPlan, ...], placement: Placement) -> int:
    """The most that a card sends or receives in a round of these keys, which are agreed on one after the other."""
    total, first = Counter(), 0
    for plan in plans:
        for machine, card in counted(plan._replace(first_slice=first), placement).items():
            for way, bytes_ in enumerate(card):
                total[machine, way] += bytes_
        first += plan.slices
    return max(total.values())
