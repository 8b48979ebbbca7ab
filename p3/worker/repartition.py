"""Cuts the rows of a sparse key anew while the job trains, as Session.repartition() says.

Rank 0 asks; once the servers have agreed, the scheduler tells all workers (`repartitioned`), and each moves its share
of the rows when rank 0's next round has told that the former partitions end. When all have, the scheduler says so
(`settled`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Dict, Optional, Set

from p3._core import DTYPES, state_parts
from p3.plan import choices, combinations
from p3.plan.key_plan import KeyPlan
from p3.worker.key import Agreed, Identity, Key, Name
from p3.worker.links.link import Link

_MOVE_POLL_S = 1.0  # how soon the end of the session is noticed; that of the move, at once


class Repartition:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        self._partitions: Dict[Identity, int] = {}  # of sparse keys
        self._placed: Set[Identity] = set()  # those of them whose servers or partitions a strategy has named
        self._moving: Set[Identity] = set()  # those that are on their way to other partitions
        self._reporting: Dict[Identity, Any] = {}  # operations whose end the scheduler has not been told of
        session.handle("settled", self._on_settled)

    def partitions(self, key: Key) -> int:
        with self._session.changed:
            return self._partitions.get(key.identity, 0)

    def is_placed(self, key: Key) -> bool:
        with self._session.changed:
            return key.identity in self._placed

    def is_moving(self, key: Key) -> bool:
        with self._session.changed:
            return key.identity in self._moving

    def moving_of(self, store: int) -> Optional[Name]:
        """The name of a key of the store that is on its way, if there is one."""
        with self._session.changed:
            return next((name for number, name in self._moving if number == store), None)

    def request(self, key: Key, partitions: int) -> None:
        session = self._session
        if not session.is_first or not key.sparse or not 1 <= partitions <= key.shape[0]:
            raise ValueError(
                "%s: key %r cannot get %r partitions: only rank 0 cuts sparse keys anew, into at most their rows"
                % (session.label, key.name, partitions)
            )
        chosen = [choices.MOVING, choices.of_staleness(key.staleness)]
        chosen += choices.of_losses(self._link.on_worker_loss)
        chosen += [choices.NORM] * session.keys.have_norm(key.store)
        combinations.require("%s: key %r" % (session.label, key.name), *chosen)
        if self.is_moving(key):
            raise ValueError("%s: key %r is already moving to other partitions" % (session.label, key.name))
        if self.partitions(key) == 0:
            raise ValueError("%s: key %r is not agreed yet; wait for its first value" % (session.label, key.name))
        with session.changed:
            self._moving.add(key.identity)
        self._link.send({"kind": "repartition", "store": key.store, "name": key.name, "partitions": partitions})

    def agreed(self, key: Key, plan: KeyPlan) -> None:
        """The key's first plan; with the lock held."""
        self._partitions[key.identity] = plan.partitions
        if plan.servers or self._session.strategy(key.store).of(key.name).partitions:
            self._placed.add(key.identity)

    def is_over(self, store: int) -> bool:
        """Of keys that are idle: their moves have ended, and the scheduler knows, or no round will ever begin them."""
        return not any(operation.done for (number, _), operation in self._reporting.items() if number == store)

    def forget(self, store: int) -> None:
        """With the lock held."""
        self._moving = {one for one in self._moving if one[0] != store}
        self._reporting = {one: operation for one, operation in self._reporting.items() if one[0] != store}
        self._partitions = {one: count for one, count in self._partitions.items() if one[0] != store}
        self._placed = {one for one in self._placed if one[0] != store}

    def _on_settled(self, message: dict) -> None:
        self._moving.discard((message["store"], message["name"]))

    def move(self, key: Key, agreed: Agreed, plan: KeyPlan, optimizer: Optional[dict]) -> None:
        """This worker's share of a sparse key's rows is to go to other partitions, once rank 0's next round tells all.

        `agreed` gets the new plan. `optimizer`: as agreed by now, not as this worker has asked: the servers expect the
        same parts of its state.
        """
        session = self._session
        first, end = (plan.rows * rank // session.num_workers for rank in (session.rank, session.rank + 1))
        parts = state_parts(optimizer, DTYPES[key.dtype])
        operation = session.core.move_rows(key.handle, plan, parts, first, end - first)
        with session.changed:
            former, agreed.plan = agreed.plan, plan
            self._moving.add(key.identity)
            self._reporting[key.identity] = operation
            session.changed.notify_all()
        arguments = (operation, key, former, plan)
        threading.Thread(target=self._report_move, args=arguments, name="p3-move", daemon=True).start()
        self._link.note_key(key, plan)

    def _report_move(self, operation, key: Key, former: KeyPlan, plan: KeyPlan) -> None:
        """A thread of its own: the core tells of the end, the control thread is for messages."""
        session = self._session
        while not operation.done:
            if session.has_ended or self._reporting.get(key.identity) is not operation:  # or the store is gone
                return
            with contextlib.suppress(TimeoutError):
                operation.wait(_MOVE_POLL_S)
        with session.changed:
            self._partitions[key.identity] = plan.partitions
            session.changed.notify_all()
        self._link.send({"kind": "moved", "wire_key": former.wire_key})
        with session.changed:
            self._reporting.pop(key.identity, None)
            session.changed.notify_all()
