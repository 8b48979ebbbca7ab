"""In which order the forward pass uses the keys of each store, as rank 0 has announced it to all workers (`order`)."""

from __future__ import annotations

from typing import Dict, List, Sequence

from p3.worker.key import Name
from p3.worker.links.link import Link


class Orders:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        self._orders: Dict[int, List[Name]] = {}
        self.version = 0  # grows with every order that arrives, of any store
        session.handle("order", self._on_order)

    def announce(self, store: int, names: Sequence[Name]) -> None:
        """Rank 0 tells all workers. Elsewhere it does nothing."""
        self._session.check()
        if self._session.is_first:
            self._link.send({"kind": "order", "store": store, "names": list(names)})

    def of(self, store: int) -> List[Name]:
        """The order last announced; empty if there is none yet."""
        with self._session.changed:
            return list(self._orders.get(store, ()))

    def forget(self, store: int) -> None:
        """With the lock held."""
        self._orders.pop(store, None)

    def _on_order(self, message: dict) -> None:
        self._orders[message["store"]] = message["names"]
        self.version += 1
