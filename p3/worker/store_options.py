"""The options of stores (p3/plan/options.py) as one worker sets them, and as all have agreed on them."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from p3.cluster.messages import sendable
from p3.plan import choices, combinations, planner
from p3.plan.options import validate
from p3.plan.strategy import Strategy
from p3.worker.key import Key
from p3.worker.links.link import Link
from p3.worker.repartition import Repartition

log = logging.getLogger("p3")

_OF_FIRST_KEY = (*planner.OPTIONS, planner.STRATEGY)
_MOST_BYTES_OF_STRATEGY = 4 << 20  # of its text, which may take twice as many in a message


def say_lossy(label: str, option: str, of: str, value: Mapping[str, Any]) -> None:
    """`option`: one of planner.OF_KEYS. Once for all that have it."""
    what = of if option == "compression" else "what comes back of %s" % of
    log.warning("%s: %s is compressed, %s. That is lossy: training differs from uncompressed", label, what, value)


def told_of(label: str, store: int, strategy: Strategy) -> Dict[str, str]:
    """A strategy as messages have it. ValueError if it is too long for one."""
    text = strategy.text()
    if len(text) > _MOST_BYTES_OF_STRATEGY:
        raise ValueError(
            "%s: the strategy %s of store %d has more than %d MiB: give it by P3_STRATEGY, from a file"
            % (label, strategy.path, store, _MOST_BYTES_OF_STRATEGY >> 20)
        )
    return {"sha256": strategy.sha256, "text": text, "path": sendable(strategy.path)}


class StoreOptions:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link, repartition: Repartition) -> None:
        self._session, self._link, self._repartition = session, link, repartition
        self._wanted: Dict[Tuple[int, str], dict] = {}  # store and name -> what this worker asked for
        self._agreed: Dict[Tuple[int, str], dict] = {}
        self._strategies: Dict[int, Strategy] = {}  # by store, those that the script has given
        self._pushed: Set[int] = set()  # stores to which this worker has pushed
        self.pushed_keys: Dict[int, Set[int]] = {}  # by store: the handles of its keys to which it has
        session.handle("option_agreed", self._on_agreed)

    def wanted(self, store: int, name: str) -> Optional[dict]:
        return self._wanted.get((store, name))

    def agreed(self, store: int, name: str) -> Optional[dict]:
        return self._agreed.get((store, name))

    def defaults(self, store: int) -> List[str]:
        """Those that the store's first key settles (but for one of norms), as this worker has not set them."""
        return [option for option in _OF_FIRST_KEY if (store, option) not in self._wanted]

    def begin_push(self, key: Key, require: Callable[[Key], None]) -> None:
        """Before a key's first push, `require(key)`: an optimizer is set by now, or never. Before the store's: whether
        this worker goes without one is compared with what others have set, or their rounds would be updated, and ours
        summed."""
        store = key.store
        with self._session.changed:
            require(key)
            goes_without = store not in self._pushed and (store, "optimizer") not in self._wanted
            self._pushed.add(store)
            self.pushed_keys.setdefault(store, set()).add(key.handle)
        if goes_without:
            self._link.send({"kind": "option", "store": store, "name": "optimizer", "value": {}})

    def set(self, store: int, name: str, value: dict) -> None:
        """See Session.set_option."""
        validate(name, value)
        self._set(store, name, dict(value), dict(value))

    def set_strategy(self, store: int, strategy: Strategy) -> None:
        """See Session.set_strategy."""
        strategy.require_servers(self._session.num_servers)
        told, value = told_of(self._session.label, store, strategy), {"sha256": strategy.sha256}
        if not self._session.is_first:
            told = value
        self._set(store, planner.STRATEGY, value, told)
        self._strategies[store] = strategy

    def strategy(self, store: Optional[int]) -> Strategy:
        """See Session.strategy."""
        return self._strategies.get(store, self._link.strategy)

    def _set(self, store: int, name: str, value: Dict[str, Any], told: Dict[str, Any]) -> None:
        """`told`: to the scheduler, which has all agree on `value`."""
        session = self._session
        with session.changed:
            before = self._wanted.get((store, name))
            if before is None:
                self._require_still_open(store, name, value)
                self._require_together(store, name, value)
                self._wanted[store, name] = value
        if before is None:
            aggregates = self._link.settings.local_aggregation and session.local_size > 1
            if name == "compression" and aggregates and session.local_rank == 0:
                text = combinations.yielding(choices.AGGREGATION, choices.of_compression(value))
                if text:
                    log.info("%s: store %d: %s", session.label, store, text)
            if name in planner.OF_KEYS and session.is_first:
                say_lossy(session.label, name, "store %d" % store, value)
            self._link.send({"kind": "option", "store": store, "name": name, "value": told})
        elif before != value:
            raise ValueError(
                "%s: store %d has the %s %s already; it cannot become %s: make a new store"
                % (session.label, store, name, before, value)
            )
        session.wait_until(
            lambda: self._agreed.get((store, name)) == value,
            "for the %s of store %d: worker 0 has not set it, or a server does not answer" % (name, store),
        )
        if name == "optimizer" and before is None:
            self._begin_replicas(store)
            session.keys.give_optimizer(store)

    def _begin_replicas(self, store: int) -> None:
        """Where servers may be lost, each worker keeps what they would."""
        session = self._session
        if not session.keys.have_replicas(store):
            return
        session.entrance.exclude(choices.REPLICAS, "states of the store's optimizer, which nobody hands on to "
                                 "one that joins, as P3_ON_SERVER_LOSS=continue is set. Let the workers update, as "
                                 "gluon.Trainer(update_on_kvstore=False) does")
        if session.is_first:
            log.info("%s: store %d: each worker updates by %s itself, as P3_ON_SERVER_LOSS=continue is set",
                     session.label, store, self.agreed(store, "optimizer")["name"])  # fmt: skip

    def _require_together(self, store: int, name: str, value: dict) -> None:
        options = {each: self.wanted(store, each) for each in (*planner.OPTIONS, "optimizer")}
        options[name] = value
        chosen = [choices.of_compression(options["compression"]), choices.of_reduction(options["reduction"])]
        chosen.append(choices.of_value_compression(options["value_compression"]))
        chosen += [choices.NORM] * self._session.keys.have_norm(store)
        if options["optimizer"] is not None:  # else it may still come, before the first push
            chosen.append(choices.of_optimizer(options["optimizer"]))
        combinations.require("%s: store %d" % (self._session.label, store), *chosen)

    def _require_still_open(self, store: int, name: str, value: dict) -> None:
        session = self._session
        if name in _OF_FIRST_KEY and any(not key.is_norm for key in session.keys.of(store)):
            raise ValueError(
                "%s: store %d has keys already; its %s %s must be set before the first init"
                % (session.label, store, name, value)
            )
        if name != "optimizer":
            return
        if store in self._pushed:
            raise ValueError(
                "%s: gradients were pushed to store %d already; set its optimizer %s before the first push"
                % (session.label, store, value)
            )
        moving = self._repartition.moving_of(store)
        if moving is not None:  # its state could not go with the rows
            raise ValueError(
                "%s: the rows of key %r of store %d are moving to other partitions; set the optimizer before "
                "the first push" % (session.label, moving, store)
            )

    def forget(self, store: int) -> None:
        for table in (self._wanted, self._agreed):
            for known in [one for one in table if one[0] == store]:
                del table[known]
        self._strategies.pop(store, None)
        self._pushed.discard(store)
        self.pushed_keys.pop(store, None)

    def _on_agreed(self, message: dict) -> None:
        self._agreed[message["store"], message["name"]] = message["value"]
