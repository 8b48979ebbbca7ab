"""Replacing a lost worker while the others wait (P3_ON_WORKER_LOSS=wait): what the scheduler knows and decides. No I/O.

The servers are told that the worker is `lost`. Each closes its connection and says `lost_at`: up to which round of each
key it has pushes of it. Of some slices that may be one round more than of others; so the scheduler has the servers
`fill` the rest, as if the worker had had nothing to add, and the job stands at one cut. When all have `filled`, another
process may join as that rank: it gets the value after that cut, and its next push is for the round behind it.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from p3.cluster.node import Node
from p3.errors import ProtocolError, RendezvousError


class Loss:
    """One lost worker, from the moment that the scheduler notices until another process has taken its place."""

    def __init__(self, servers: Sequence[Node], stores: Mapping[int, int], restores: bool = False) -> None:
        """`stores`: that of each key, by wire key, which the servers know. `restores`: before a store's first push,
        this worker gave the servers what a snapshot has of the optimizer's state."""
        self._servers = servers
        self._stores = stores
        self._restores = restores
        self._unheard: Set[Node] = set(servers)  # of `lost_at`, then of `filled`
        self._pushed: Dict[int, int] = {}
        self._rounds: Optional[Dict[int, int]] = None  # that are filled
        self.is_taken = False  # another process is on its way

    def on_lost_at(self, server: Node, message: dict) -> Optional[dict]:
        """The `fill` for all servers, once all have answered. RendezvousError if the worker cannot be replaced."""
        self._hear(server, message, filled=False)
        if message["problem"]:
            raise RendezvousError(message["problem"])
        if len(message["keys"]) != len(message["rounds"]) or not self._stores.keys() >= set(message["keys"]):
            raise ProtocolError("%s knows other keys than were agreed" % (server,))
        for key, pushed in zip(message["keys"], message["rounds"]):
            self._pushed[key] = max(self._pushed.get(key, 0), pushed)
        if self._unheard:
            return None
        self._rounds = rounds_to_fill(self._stores, self._pushed)
        begun = {self._stores[key] for key, pushed in self._pushed.items() if pushed > 0}
        if self._restores and not begun >= set(self._stores.values()):
            raise RendezvousError("it had not brought all of the snapshot back yet")
        self._unheard = set(self._servers)
        keys, rounds = _columns(self._rounds)
        return {"kind": "fill", "rank": message["rank"], "keys": keys, "rounds": rounds}

    def on_filled(self, server: Node, message: dict) -> None:
        self._hear(server, message, filled=True)

    @property
    def is_vacant(self) -> bool:
        """Another process may take the place."""
        return self._rounds is not None and not self._unheard and not self.is_taken

    @property
    def round(self) -> int:
        """Up to which the lost worker counts as having pushed: of its keys that are furthest."""
        return max((self._rounds or {}).values(), default=0)

    def _hear(self, server: Node, message: dict, filled: bool) -> None:
        if server not in self._unheard or filled != (self._rounds is not None):
            raise ProtocolError("%s sent a %r message, which it may not now" % (server, message["kind"]))
        self._unheard.remove(server)


def rounds_to_fill(stores: Mapping[int, int], pushed: Mapping[int, int]) -> Dict[int, int]:
    """Up to which round of each key the lost worker is to count, from the last that it has pushed of any slice of it.

    In each step a worker pushes the keys of a store once. So of a store's keys, those that lag one round behind the
    furthest had their turn in the step that was cut short. Who lags further is not pushed in each step.
    RendezvousError in the first step: a key without a push may have its turn yet, or be one that is never pushed.
    """
    furthest: Dict[int, int] = {}
    for key, last in pushed.items():
        furthest[stores[key]] = max(furthest.get(stores[key], 0), last)
    rounds = {}
    for key, last in pushed.items():
        step = furthest[stores[key]]
        if step == 1 and last == 0:
            raise RendezvousError("it was in its first step")
        rounds[key] = step if last == step - 1 else last
    return rounds


def _columns(rounds: Mapping[int, int]) -> Tuple[List[int], List[int]]:
    return list(rounds.keys()), list(rounds.values())
