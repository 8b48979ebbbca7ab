"""Another strategy while a job trains, where the servers keep nothing but sums: Session.change_strategy().

All workers rest behind the same rounds, and say so (`replan`). The scheduler cuts the keys by the other strategy, the
servers drop what they have (`recut`), and the workers go on by the new plans (`replanned`). No value moves: every
worker has what it needs, and a sum is made anew in the next round.
"""

from __future__ import annotations

import time
from typing import List, Optional, Sequence

from p3.cluster.messages import columns
from p3.plan import choices, combinations
from p3.plan.key_plan import KeyPlan
from p3.plan.strategy import Strategy
from p3.worker.control import Patience
from p3.worker.key import Key
from p3.worker.links.link import Link
from p3.worker.store_options import told_of

_LOOK_S = 0.001  # between looks at what is under way, which has mostly ended


class Recut:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link) -> None:
        self._session, self._link = session, link
        self._answer: Optional[dict] = None
        session.handle("replanned", self._on_replanned)

    def _require(self, stores: Sequence[int], keys: Sequence[Key]) -> None:
        """ValueError where the job's settings, or what the stores and keys are, exclude it."""
        session = self._session
        of_job = choices.of_server_losses(self._link.on_server_loss)
        combinations.require(session.label, choices.RECUT, *of_job)
        for store in stores:
            of_store = choices.of_optimizer(session.option(store, "optimizer"))
            combinations.require("%s: store %d" % (session.label, store), choices.RECUT, of_store)
        for key in keys:
            of_key = [choices.of_staleness(key.staleness), choices.of_compression(key.axes.codec)]
            of_key += [choices.LOW_RANK] * (key.rank > 0) + choices.of_sums_back(key.axes.value_codec)
            combinations.require("%s: key %r" % (session.label, key.name), choices.RECUT, *of_key)

    def change(self, stores: Sequence[int], strategy: Optional[Strategy]) -> bool:
        """See Session.change_strategy."""
        session = self._session
        keys = [key for store in stores for key in session.keys.of(store)]
        self._require(stores, keys)
        if strategy is not None:
            strategy.require_servers(session.num_servers)
            for store in stores:
                strategy.require_same_choices(session.strategy(store))
        self._wait_until_idle(keys)
        of_keys = [(key, session.keys.wait_for(key)) for key in keys]
        rounds = {its.plan.wire_key: session.core.round(key.handle) for key, its in of_keys if its.plan.can_be_recut}
        told = {} if strategy is None else told_of(session.label, stores[0], strategy)
        self._answer = None
        self._link.send({"kind": "replan", "stores": list(stores), "strategy": told, **columns(rounds)})
        session.wait_until(lambda: self._answer is not None,
                           "for other workers, and the servers, to change the strategy")  # fmt: skip
        changed = self._answer["keys"]
        for one in changed:
            self._take(one)
        if changed:
            session.barrier("the change of a strategy")  # who leads a machine must have the plan before others push
        return bool(changed)

    def _wait_until_idle(self, keys: Sequence[Key]) -> None:
        """The script has had all results; a copy for a snapshot may still be on its way."""
        session, patience = self._session, Patience(self._session)
        while True:
            busy = self._busy(keys)
            if not busy:
                return
            session.check()
            if patience.left_s() <= 0:
                raise TimeoutError("%s: waited %g s for key %r to rest, to change the strategy"
                                   % (session.label, session.wait_timeout_s, busy[0].name))  # fmt: skip
            time.sleep(_LOOK_S)

    def _busy(self, keys: Sequence[Key]) -> List[Key]:
        session = self._session
        return [key for key in keys if not session.core.is_idle(key.handle) or session.low_rank.is_busy(key)]

    def _take(self, changed: dict) -> None:
        session, identity, plan = self._session, (changed["store"], changed["name"]), KeyPlan.of(changed)
        key = next(one for one in session.keys.of(changed["store"]) if one.identity == identity)
        session.core.recut(key.handle, plan)
        with session.changed:
            session.keys.agreed[identity].plan = plan
        self._link.note_key(key, plan)

    def _on_replanned(self, message: dict) -> None:
        self._answer = message
