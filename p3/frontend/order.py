"""The order in which forward passes use the keys of a store, from which priorities follow.

    order = Order(session, store)
    if order.follow(used):      # once a forward pass has ended: what it used, by first use
        ...                     # order.place() has changed: where the next pass is expected to use each

The first pass gives the order, and a key that comes later takes its place behind the one that was used before it. Where
passes differ, the order as the last one had it is tried beside the one in force, and takes over once it has been right
about more pairs of keys, by enough to be worth a message. If that does not pay, as where each pass takes a way of its
own, the next change must promise more.

Rank 0 decides and announces, all workers follow; until they hear of an order, they go by their own. An order that turns
out wrong makes a pass wait longer. No value and no end of a wait depends on it.
"""

from __future__ import annotations

import bisect
from typing import Any, Dict, List, Optional, Sequence, Set

from p3.worker.key import Name
from p3.worker.session import Session

# In shares of a pass's pairs: what the last pass's order must have gained, over all passes since the last change, to be
# announced; and what counts as nothing in each of them. tests/frontend/test_routes.py shows what comes of it.
_PRICE = 0.2
_SLACK = 0.02


def share_in_order(predicted: Sequence[Name], used: Sequence[Name]) -> float:
    """The share of all pairs of keys in `used` that have the same order in `predicted`; 1.0 if there is no pair.

    Keys that `predicted` lacks come behind all others there, and in no order among themselves.
    """
    places = {name: place for place, name in enumerate(predicted)}
    before: List[int] = []  # the places of those used before, sorted
    right = 0
    for name in used:
        place = places.get(name, len(places))
        right += bisect.bisect_left(before, place)
        bisect.insort(before, place)
    pairs = len(used) * (len(used) - 1) // 2
    return right / pairs if pairs else 1.0


def merged(order: Sequence[Name], used: Sequence[Name]) -> List[Name]:
    """`order`, with the keys in `used` in the order that they have there.

    Those that it had exchange places among themselves; each new one comes behind the one used before it.
    """
    known, again = set(order), set(used)
    in_turn = iter([name for name in used if name in known])
    behind: Dict[Optional[Name], List[Name]] = {}
    previous = None
    for name in used:
        if name in known:
            previous = name
        else:
            behind.setdefault(previous, []).append(name)
    made = behind.get(None, [])
    for name in order:
        made.append(next(in_turn) if name in again else name)
        made += behind.get(made[-1], ())
    return made


class Order:
    """Of one store. Threads: the script's, one at a time."""

    def __init__(self, session: Session, store: int) -> None:
        self.names: List[Name] = []  # in force
        self._places: Dict[Name, int] = {}  # of those, from 0 on
        self._session, self._store = session, store
        self._used: List[Name] = []  # by the last pass
        self._known: Set[Name] = set()  # used by any
        self._first: List[Name] = []  # as the first pass had it; what came later stands behind
        self._last: List[Name] = []  # as the last pass had it
        self._former: List[Name] = []  # in force before it last changed
        self._judged: Any = None  # what _shares is of
        self._shares: List[float] = []
        self._gain = 0.0  # of _last over what is in force
        self._worth = 0.0  # of what is in force over _former
        self._price = _PRICE
        self._orders = self._passes = 0
        self._right = self._right_by_first = 0.0

    def follow(self, used: Sequence[Name], again: bool = False) -> bool:
        """A forward pass has ended. `again`: the same as at the last call, of which more is known by now. Whether
        `names` has changed."""
        used, before = list(used), self.names
        new = [name for name in used if name not in self._known]
        if before and used and not again:
            self._judge(used)
        if used != self._used:
            self._used, self._last = used, merged(self._last, used)
        if new:
            self._known.update(new)
            self._first = self._first + new
        announced = self._session.orders.of(self._store) if not self._session.is_first else []
        if announced:
            self.names = announced
        elif new or self._is_worth_a_change():
            self.names, self._gain = self._last, 0.0
            self._session.orders.announce(self._store, self.names)  # if this is rank 0
        if self.names == before:
            return False
        self._places = {name: place for place, name in enumerate(self.names)}
        self._orders += 1
        return True

    def place(self, name: Name, unknown: int) -> int:
        """Where the next pass is expected to use it, from 0 on: the negative of a priority. `unknown` if no pass is."""
        return self._places.get(name, unknown)

    def stats(self) -> Dict[str, float]:
        """orders: how many have been in force, each of which rank 0 has announced; passes: forward passes since the
        first. Of their pairs of keys, `followed` is the share that were used in the order in force, `first` what it
        would be with the order of the first pass, and behind it what came later. 1.0 of no pass."""
        first, followed = (
            total / self._passes if self._passes else 1.0 for total in (self._right_by_first, self._right)
        )
        return {"orders": self._orders, "passes": self._passes, "first": first, "followed": followed}

    def _judge(self, used: List[Name]) -> None:
        """How right each order was about a pass."""
        orders = (self.names, self._last, self._former, self._first)
        if self._judged != (used, orders):
            self._judged = used, orders
            self._shares = [share_in_order(one, used) for one in orders]
        right, of_last, of_former, of_first = self._shares
        self._passes += 1
        self._right += right
        self._right_by_first += of_first
        self._gain = max(0.0, self._gain + of_last - right - _SLACK)
        self._worth += right - of_former

    def _is_worth_a_change(self) -> bool:
        if self._gain <= self._price:
            return False
        has_paid = self._worth > _PRICE
        self._price = max(_PRICE, self._price / 2) if has_paid else 2 * self._price
        self._former, self._worth = self.names, 0.0
        return True
