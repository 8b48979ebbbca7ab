"""How the keys of a session are declared: what excludes one, what of its store applies to it, what the core is told."""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from p3._core import DTYPES
from p3.plan import choices, combinations, planner
from p3.plan.choices import Choice
from p3.plan.key_plan import Axes
from p3.worker import dgc
from p3.worker.key import Key
from p3.worker.links.link import Link
from p3.worker.store_options import StoreOptions, say_lossy

log = logging.getLogger("p3")


class Declarations:
    """Of one session."""

    def __init__(self, session, link: Link, options: StoreOptions) -> None:
        self._session, self._link, self._options = session, link, options
        self._with_optimizer: Set[int] = set()  # handles of keys whose optimizer this worker's core applies, and knows
        self._warned: Set[Tuple[int, str, str]] = set()  # by store and option: values that only some keys have

    def require_together(self, key: Key) -> None:
        """ValueError unless this job, and its store, can have such a key."""
        wanted = self._wanted(key)
        asked = (choices.of_compression(wanted["compression"]), choices.of_reduction(wanted["reduction"]),
                 choices.of_value_compression(wanted["value_compression"]))  # fmt: skip
        takes_snapshots = self._link.settings.snapshot_dir is not None
        of_job = choices.of_job(takes_snapshots, self._link.on_worker_loss, self._link.on_server_loss)
        of_job += choices.of_sums_back(wanted["value_compression"])
        rule = []  # others hear of it at the first push
        if key.is_norm:
            rule = [choices.of_optimizer(self._options.wanted(key.store, "optimizer"))]
        norm = [choices.NORM] * (choices.LOW_RANK in asked and self._session.keys.have_norm(key.store))
        self._require(key, *self._choices(key), *asked, *rule, *norm, *of_job)

    def require_to_push(self, key: Key) -> None:
        """ValueError unless it can be pushed with the optimizer that its store has by now, or without one."""
        rule = choices.of_optimizer(self._options.wanted(key.store, "optimizer"))
        compression = choices.of_compression(self._wanted(key)["compression"])
        of_job = choices.of_server_losses(self._link.on_server_loss)
        self._require(key, *self._choices(key), compression, rule, *of_job)

    def _wanted(self, key: Key) -> Dict[str, Optional[Mapping[str, Any]]]:
        """The planner's options: its own, or its store's."""
        return {**{name: self._options.wanted(key.store, name) for name in planner.OPTIONS}, **key.options}

    def _choices(self, key: Key) -> List[Choice]:
        quorum = (self._wanted(key)["quorum"] or {"least": 0})["least"]
        return choices.of_key(key.dtype, key.sparse, key.factors is not None, key.staleness, key.is_norm, quorum)

    def _require(self, key: Key, *chosen: Choice) -> None:
        by_strategy = self._options.strategy(key.store).said_of(key.name)
        combinations.require("%s: key %r%s" % (self._session.label, key.name, by_strategy), *chosen)

    def say_if_lossy(self, key: Key) -> None:
        """What a key has of its own is said once for all of its store that have the same, by the first one's name."""
        applying = {"compression": key.axes.codec or key.rank, "value_compression": key.axes.value_codec}
        for option, value in key.options.items():
            one = key.store, option, repr(value)
            if not self._session.is_first or not value or not applying[option] or one in self._warned:
                continue
            self._warned.add(one)
            say_lossy(self._session.label, option, "key %r of store %d, and others so," % (key.name, key.store), value)

    def forget(self, store: int) -> None:
        self._warned = {one for one in self._warned if one[0] != store}

    def axes_of(self, key: Key) -> Axes:
        """As the scheduler will have them, which goes by the same options."""
        is_gathered, options = key.factors is not None, self._wanted(key)
        return planner.axes(key.shape, key.dtype, options, key.sparse, key.staleness, is_gathered, key.is_norm)

    def rank_of(self, key: Key) -> int:
        is_gathered, options = key.factors is not None, self._wanted(key)
        return planner.rank(key.shape, key.dtype, options, key.sparse, is_gathered, key.is_norm)

    def declare_to_core(self, key: Key) -> int:
        """The core's handle for it."""
        if key.factors is not None:
            return self._declare_factors(key)
        return self._declare_rows(key) if key.sparse else self._declare_dense(key)

    def _declare_dense(self, key: Key) -> int:
        handle = self._session.core.declare(str(key.name), math.prod(key.shape), DTYPES[key.dtype], key.axes.codec)
        self._say_if_left_out(key)
        self.give_optimizer(key._replace(handle=handle))
        return handle

    def _declare_rows(self, key: Key) -> int:
        self._say_if_left_out(key)
        core, (rows, *of_row) = self._session.core, key.shape
        handle = core.declare_rows(str(key.name), rows, math.prod(of_row), DTYPES[key.dtype])
        pushes = 1 if key.staleness > 0 else self._link.placement.pushes(key.axes)  # that a round's counts are of
        core.choose_route(handle, pushes)
        return handle

    def _declare_factors(self, key: Key) -> int:
        session = self._session
        handle = session.core.declare_factors(str(key.name), key.factors, session.num_workers)
        optimizer = self._options.agreed(key.store, "optimizer")
        if optimizer is not None:
            session.core.set_optimizer(handle, optimizer)
        return handle

    def are_replicated(self, store: int) -> bool:
        """As Keys.have_replicas()."""
        return self._link.on_server_loss == "continue" and self._options.agreed(store, "optimizer") is not None

    def give_optimizer(self, key: Key) -> None:
        """Of a dense key, if this worker applies it, or its momentum, and it is known by now. One of whole numbers
        cannot be pushed then."""
        optimizer, is_dense = self._options.agreed(key.store, "optimizer"), not key.sparse and key.factors is None
        if optimizer is None or not is_dense or key.is_norm or key.handle in self._with_optimizer:
            return
        if key.axes.takes_steps:
            clip_norm = dgc.local_clip_norm(key.axes.codec, self._session.num_workers)
            self._session.core.set_momentum(key.handle, optimizer["momentum"], clip_norm)
        elif self.are_replicated(key.store) and choices.WHOLE_NUMBERS not in self._choices(key):
            self._session.core.set_optimizer(key.handle, optimizer)
        self._with_optimizer.add(key.handle)

    def _say_if_left_out(self, key: Key) -> None:
        """What of the compression asked for does not apply to it. Small keys, as biases are, go without saying."""
        compression = choices.of_compression(self._wanted(key)["compression"])
        if self._session.is_first and compression == choices.DGC and len(key.shape) > 1 and not key.axes.codec:
            text = combinations.yielding(compression, *self._choices(key))
            log.warning("%s: key %r: %s", self._session.label, key.name, text)
