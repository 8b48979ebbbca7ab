"""Replacing a lost worker while the others wait (P3_ON_WORKER_LOSS=wait): what the scheduler knows and decides. No I/O.

The servers are told that the worker is `lost`. Each closes its connection and says `lost_at`: up to which round of each
key it has pushes of it. The other workers run the same program, so they know what it was about to do: the scheduler
asks them (`missing`), and they say where they stand (`place`, p3/worker/replacement/steps.py). As long as they are in
the step that was cut short, the servers `fill` what the lost worker would have pushed in it, as if it had nothing to
add. As soon as one of them is behind that step and what follows it, all is known: the number of the step, which rounds
of which keys are behind the job then, and the numbers of the optimizers. When the servers have `filled` up to there,
another process may join as that rank: it gets the values after those rounds, and goes on with the next step.

If nobody is left who could tell, as all are lost, or there is but one worker, the counts of rounds must do: infer().
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from p3.cluster.messages import columns
from p3.cluster.node import Node
from p3.errors import ProtocolError, RendezvousError

Rounds = Dict[int, int]  # by wire key


class Standing(NamedTuple):
    """The cut behind which another process takes the lost worker's place."""

    step: int  # that is behind the job
    rounds: Rounds  # and of each key
    numbers: Optional[dict] = None  # of the optimizers; None: nobody could tell
    is_marked: bool = False  # the script says where steps end


class Loss:
    """One lost worker, from the moment that the scheduler notices until another process has taken its place."""

    def __init__(
        self, node: Node, attempt: int, servers: Sequence[Node], stores: Callable[[], Mapping[int, int]], joins: int = 0
    ) -> None:
        """`attempt`: of the losses of this rank. `stores()`: that of each key, by wire key, which the servers know now.
        `joins`: how often the worker had called join()."""
        self.node, self.attempt, self.joins = node, attempt, joins
        self._servers, self._stores = servers, stores
        self._its_stores = set(stores().values())
        self._unheard: Set[Node] = set(servers)  # of `lost_at`, then of `filled`
        self.pushed: Rounds = {}  # by the lost worker, any part of it
        self.is_asked = False  # all servers have said so, and the other workers are asked
        self._places: Dict[Node, dict] = {}  # the last word of each
        self.standing: Optional[Standing] = None  # once it is known
        self.is_taken = False  # another process is on its way

    # From servers

    def on_lost_at(self, server: Node, message: dict, restores: bool) -> bool:
        """True once all have answered. RendezvousError if the worker cannot be replaced. `restores`: before a store's
        first push, it gave the servers what a snapshot has of the optimizer's state."""
        if self.is_asked:
            raise ProtocolError("%s sent a second %r message" % (server, message["kind"]))
        self._hear(server, message)
        if message["problem"]:
            raise RendezvousError(message["problem"])
        self.pushed = _latest([self.pushed, self._rounds(server, message)])
        if self._unheard:
            return False
        stores = self._stores()
        begun = {stores[key] for key, pushed in self.pushed.items() if pushed > 0}
        if restores and not begun >= self._its_stores:
            raise RendezvousError("it had not yet restored all of the snapshot")
        self.is_asked = True
        return True

    def on_filled(self, server: Node, message: dict) -> None:
        if self.standing is None:
            raise ProtocolError("%s sent a %r message too early" % (server, message["kind"]))
        self._hear(server, message)

    def _hear(self, server: Node, message: dict) -> None:
        if server not in self._unheard:
            raise ProtocolError("%s sent a %r message, which is not allowed now" % (server, message["kind"]))
        self._unheard.remove(server)

    def _rounds(self, sender: Node, message: dict) -> Rounds:
        if len(message["keys"]) != len(message["rounds"]) or not self._stores().keys() >= set(message["keys"]):
            raise ProtocolError("%s names other keys than those agreed on" % (sender,))
        return dict(zip(message["keys"], message["rounds"]))

    # What is said to servers and workers

    def question(self) -> dict:
        about = {"rank": self.node.rank, "attempt": self.attempt, "joins": self.joins}
        return {"kind": "missing", **about, **columns(self.pushed)}

    def fill(self, rounds: Mapping[int, int], skips: bool = False, is_last: bool = False) -> dict:
        return {"kind": "fill", "rank": self.node.rank, **columns(rounds), "skips": skips, "last": is_last}

    # From workers

    def on_place(self, worker: Node, message: dict) -> Optional[dict]:
        """The `fill` that this asks for, if it does."""
        rounds = self._rounds(worker, message)
        if not self.is_asked or self.standing is not None:
            return None
        self._places[worker] = message
        if message["state"] not in ("in", "skipping") or not rounds:
            return None
        return self.fill(rounds, skips=message["state"] == "skipping")

    def is_within(self, workers: Iterable[Node]) -> bool:
        """All of these have said that they are in the step that was cut short, or not yet past what follows it."""
        states = [self._places[worker]["state"] if worker in self._places else None for worker in workers]
        return self.standing is None and all(state not in (None, "behind") for state in states)

    # What follows

    def decide(self, workers: Mapping[Node, Optional[int]], is_uneven: bool = False) -> bool:
        """Of what the workers say who are there: the standing, if that is enough. `workers`: which step each has called
        join() behind, and it is not over; else None. `is_uneven`: workers have called it behind different steps.

        True if the lost worker counts as one that has called that join() too, and all are to be asked again: as far as
        anybody can tell, all call it behind the same step, and that was its last.
        """
        places = {worker: self._places.get(worker) for worker in workers}
        behind = [place for place in places.values() if place is not None and place["state"] == "behind"]
        if not self.is_asked or self.standing is not None or not workers:
            return False
        if behind:
            self._stand_at(behind[0])
            return False
        if any(place is None or place["state"] != "joined" for place in places.values()):
            return False
        last = max(places.values(), key=lambda place: place["step"])
        announced = list(workers.values())
        if None in announced or is_uneven or last["step"] > max(announced):
            self._stand_at(last)
            return False
        self.joins += 1
        self._places.clear()
        return True

    def stand_at(self, standing: Standing) -> None:
        self.standing = standing._replace(rounds=_latest([standing.rounds, self.pushed]))
        self._unheard = set(self._servers)

    def _stand_at(self, place: dict) -> None:
        rounds = dict(zip(place["keys"], place["rounds"]))
        self.stand_at(Standing(place["step"], rounds, place["numbers"], place["marked"]))

    @property
    def is_vacant(self) -> bool:
        """Another process may take the place."""
        return self.standing is not None and not self._unheard and not self.is_taken


def infer(pushed: Sequence[Rounds], begun: Sequence[Standing], at_least: int = 0) -> Tuple[List[int], Standing]:
    """Of workers that are lost when no other is there: which of them can be replaced now, and behind which cut. The
    others were lost in later steps, of which those who come can tell.

    `pushed`: the rounds of keys that each has pushed. `begun`: from where each had taken its steps; rounds that all
    skipped since are in its rounds. `at_least`: steps that are behind the job for sure. In each step a worker pushes
    the keys once: so the key that is furthest tells the step.
    """
    steps = [
        start.step + max((round - start.rounds.get(key, 0) for key, round in rounds.items()), default=0)
        for rounds, start in zip(pushed, begun)
    ]
    steps = [max(step, start.step, at_least) for step, start in zip(steps, begun)]
    first = min(steps)
    those = [number for number, step in enumerate(steps) if step == first]
    return those, Standing(first, _latest(pushed[number] for number in those))


def _latest(several: Iterable[Rounds]) -> Rounds:
    """Of each key, the last of these rounds."""
    latest: Rounds = {}
    for rounds in several:
        for key, round in rounds.items():
            latest[key] = max(round, latest.get(key, 0))
    return latest
