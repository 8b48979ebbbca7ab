"""Groups of workers with shared leaders (P3_GROUPS): who is in which group, and who leads it for which server.

Neighbours by rank are a group, and groups may be in greater ones. For the slices of a server one member of each group
leads: it adds up what the group pushes, pushes the sum on, and passes the value back. With ranks written in digits, the
first modulo the first size, the next modulo the second, and so on, that is the member whose digit is that of the
server's home: the worker on the server's machine, of several in turn, or else the server's rank. So each member leads
its share (include/p3/groups.h). All processes of a job compute the same. Pure functions.
"""

from __future__ import annotations

import itertools
import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from p3.errors import ConfigError
from p3.placement import Placement


class Groups(NamedTuple):
    sizes: Tuple[int, ...]  # of groups, of groups of these, ...
    workers: int
    homes: Tuple[int, ...]  # by server

    @classmethod
    def of(cls, placement: Placement, sizes: Sequence[int]) -> Optional[Groups]:
        """None if there are none. ConfigError if the workers of a machine have a leader already, or of their number no
        groups of groups can be made."""
        workers, count = placement.workers, len(placement.workers)
        if not sizes or count == 1:
            return None
        told = "P3_GROUPS=%s" % "x".join(map(str, sizes))
        on_machine: Dict[int, List[int]] = {}
        for rank, machine in enumerate(workers):
            on_machine.setdefault(machine, []).append(rank)
        ranks = next((ranks for ranks in on_machine.values() if len(ranks) > 1), None)
        if placement.aggregates and ranks is not None:
            raise ConfigError(
                "%s: workers %d and %d are on one machine, whose workers have a leader of their own. Leave P3_GROUPS "
                "unset, or set P3_LOCAL_AGGREGATION=0: then groups take the place of machines"
                % (told, ranks[0], ranks[1])
            )
        if len(sizes) > 1 and count % math.prod(sizes):
            raise ConfigError(
                "%s: groups of groups need a multiple of %d workers; there are %d" % (told, math.prod(sizes), count)
            )
        turns = {machine: itertools.cycle(ranks) for machine, ranks in on_machine.items()}
        homes = (next(turns.get(machine, iter((rank,)))) for rank, machine in enumerate(placement.servers))
        return cls(tuple(min(size, count) for size in sizes), count, tuple(homes))

    @property
    def of_workers(self) -> List[int]:
        """By rank: which of the greatest groups each is in, of which one member pushes to a server."""
        return greatest_groups(self.workers, self.sizes)

    @property
    def places(self) -> List[int]:
        """By server: of that member in its group; of a smaller one, modulo its size."""
        return [home % math.prod(self.sizes) for home in self.homes]

    def members(self, worker: int) -> List[int]:
        """Of that one's groups, without itself, by rank: those that differ from it in one digit."""
        found, weight = [], 1
        for size in self.sizes:
            first = worker - worker // weight % size * weight
            found += [rank for rank in range(first, first + size * weight, weight) if rank < self.workers]
            weight *= size
        return sorted(set(found) - {worker})


def greatest_groups(workers: int, sizes: Sequence[int]) -> List[int]:
    """By rank: which of them each worker is in."""
    return [rank // math.prod(sizes) for rank in range(workers)]
