"""Which machine each node of a job is on, and what crosses the machines' network cards in a round of a key: the formula
that the rule of factors (p3/frontend/factors.py), benchmarks and tests share.

What processes of one machine say to each other crosses no card. The slices of the whole job, not of each key, go round
robin over the servers, so each server is taken to own the same share of every key: that is exact in the mean over where
a key may begin. Frames alone are counted, without what carries them.
"""

from __future__ import annotations

from typing import Dict, Hashable, NamedTuple, Sequence, Tuple

from p3.plan.key_plan import Axes, KeyPlan

FRAME_BYTES = 80  # of a header
PACKET_BYTES = 66  # of a packet's headers: Ethernet, IPv4 and TCP with time stamps
SHORT_ROUND_TRIP_S = 0.010  # longer ones are SocketStream's long paths
_ELEMENT_BYTES = 4


class Card(NamedTuple):
    """Bytes of one round."""

    sent: float
    received: float


class Placement(NamedTuple):
    """The machine of each worker and of each server, by rank. `aggregates`: what a machine's workers have for the
    servers, and the servers for them, goes through one of them (P3_LOCAL_AGGREGATION), of keys that add up there."""

    workers: Tuple[int, ...]
    servers: Tuple[int, ...]
    aggregates: bool = True

    @classmethod
    def of(cls, workers: Sequence[Hashable], servers: Sequence[Hashable], aggregates: bool) -> Placement:
        """Of machines by any names."""
        numbers: Dict[Hashable, int] = {}
        of_workers, of_servers = (
            tuple(numbers.setdefault(machine, len(numbers)) for machine in machines) for machines in (workers, servers)
        )
        return cls(of_workers, of_servers, aggregates)

    @classmethod
    def one_of_each(cls, machines: int) -> Placement:
        """A worker and a server on each machine."""
        return cls(tuple(range(machines)), tuple(range(machines)))

    def pushes(self, axes: Axes) -> int:
        """That reach a slice's server in a round of such a key: one of each worker, or of each machine with any."""
        return len(set(self.workers)) if self._adds_up(axes) else len(self.workers)

    def pushed_by(self, rank: int, axes: Axes) -> Tuple[int, ...]:
        """The workers whose gradients that one encodes and pushes, of such a key: itself; those of its machine, if they
        add up and it leads them; or none, if another one does."""
        if not self._adds_up(axes):
            return (rank,)
        here = tuple(one for one, machine in enumerate(self.workers) if machine == self.workers[rank])
        return here if here[0] == rank else ()

    def _adds_up(self, axes: Axes) -> bool:
        return self.aggregates and axes.adds_up_on_machine

    def cards(self, plan: KeyPlan) -> Dict[int, Card]:
        """Of each machine, in a round of a key of float32 in which every worker takes part."""
        return {machine: self._card(machine, plan) for machine in {*self.workers, *self.servers}}

    def _card(self, machine: int, plan: KeyPlan) -> Card:
        here, pushes, adds_up = self.workers.count(machine), self.pushes(plan.axes), self._adds_up(plan.axes)
        away = len(self.workers) - here
        pushers = min(here, 1) if adds_up else here  # who talk to servers
        others = pushes - pushers
        owned = self.servers.count(machine) / len(self.servers)
        crossing = (1 - owned) * pushers + owned * others  # of each slice: pushes, and as many answers
        content, headers = _ELEMENT_BYTES * plan.elements, crossing * FRAME_BYTES * plan.slices
        if plan.parts == 0:
            return Card(headers + crossing * content, headers + crossing * content)
        # A worker's part leaves once for its server, which sends it to all pushers but the one that it came from.
        sent = (1 - owned) * here + owned * (here * others + away * (others - 1))
        parts = away if adds_up else len(self.workers) - 1  # that a pusher gets
        received = owned * away + (1 - owned) * pushers * parts
        return Card(headers + sent * content, headers + received * content)

    def busiest(self, plan: KeyPlan) -> float:
        """The most that any card sends or receives."""
        return max(max(card) for card in self.cards(plan).values())
