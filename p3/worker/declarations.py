"""How the keys of a session are declared: what excludes one, what of its store applies to it, what the core is told."""

from __future__ import annotations

import logging
import math
from typing import Optional, Set

from p3._core import DTYPES
from p3.plan import planner
from p3.plan.key_plan import Axes
from p3.worker import dgc
from p3.worker.key import Key
from p3.worker.links.link import Link
from p3.worker.store_options import StoreOptions

log = logging.getLogger("p3")


class Declarations:
    """Of one session."""

    def __init__(self, session, link: Link, options: StoreOptions) -> None:
        self._session, self._link, self._options = session, link, options
        self._with_momentum: Set[int] = set()  # handles of keys whose momentum this worker's core knows

    def _problem_with_servers_alone(self, lost: str, taken: str) -> Optional[str]:
        """Why this job cannot have a key of which the servers do not know all: what becomes of a `lost` worker, or of a
        snapshot that is `taken`. None where nobody would ask them."""
        if self._link.replaces_workers:
            return "P3_ON_WORKER_LOSS=wait is set, but " + lost
        if self._link.settings.snapshot_dir is not None:
            return "P3_SNAPSHOT_DIR is set, but " + taken
        return None

    def require_weights_on_servers(self, key: Key) -> None:
        """ValueError where a weight that the workers update would be missing from the servers."""
        problem = self._problem_with_servers_alone(
            "a lost worker's successor could not have its weight", "a snapshot would not have its weight"
        )
        if problem is not None:
            raise ValueError(
                "%s: key %r: %s, as every worker updates it from factors. Unset it, or leave the layer out of "
                "p3.factors or p3.torch.factors" % (self._session.label, key.name, problem)
            )

    def require_no_common_state(self, key: Key) -> None:
        """ValueError where one is needed: workers that are rounds apart leave none that a snapshot, or a lost worker's
        successor, could begin from."""
        problem = self._problem_with_servers_alone("no lost worker could be replaced", "no snapshot could be taken")
        if problem is None and dgc.is_chosen(self._options.wanted(key.store, "compression")):
            problem = "dgc sums what all workers send in a round, and there is no such round"
        if problem is not None:
            raise ValueError(
                "%s: key %r: %s, as the workers of a job with staleness are rounds apart. Unset "
                "it, or set staleness to 0" % (self._session.label, key.name, problem)
            )

    def axes_of(self, key: Key) -> Axes:
        """As the scheduler will have them, which goes by the same options."""
        options = {name: self._options.wanted(key.store, name) for name in planner.OPTIONS}
        return planner.axes(key.shape, key.dtype, options, key.sparse, key.staleness, key.factors is not None)

    def declare_to_core(self, key: Key) -> int:
        """The core's handle for it. ValueError if its store's sums are averaged, which its type does not allow."""
        if key.axes.reduction != "sum" and not key.dtype.startswith(("float", "bfloat")):
            raise ValueError(
                "%s: key %r is of type %s, but the gradients of store %d are averaged, which only floating point "
                "types can be; put it into another store" % (self._session.label, key.name, key.dtype, key.store)
            )
        if key.factors is not None:
            return self._declare_factors(key)
        return self._declare_rows(key) if key.sparse else self._declare_dense(key)

    def _declare_dense(self, key: Key) -> int:
        handle = self._session.core.declare(str(key.name), math.prod(key.shape), DTYPES[key.dtype], key.axes.codec)
        self._say_if_left_out(key)
        self.give_momentum(key._replace(handle=handle))
        return handle

    def _declare_rows(self, key: Key) -> int:
        self._say_if_left_out(key)
        core, (rows, *of_row) = self._session.core, key.shape
        handle = core.declare_rows(str(key.name), rows, math.prod(of_row), DTYPES[key.dtype])
        pushes = 1 if key.staleness > 0 else self._link.placement.pushes  # that a round's counts are of
        core.choose_route(handle, pushes)
        return handle

    def _declare_factors(self, key: Key) -> int:
        session = self._session
        average = key.axes.reduction == "average"
        handle = session.core.declare_factors(str(key.name), key.factors, session.num_workers, average)
        optimizer = self._options.agreed(key.store, "optimizer")
        if optimizer is not None:
            session.core.set_optimizer(handle, optimizer)
        return handle

    def give_momentum(self, key: Key) -> None:
        """If this worker applies its momentum, and the optimizer is known by now."""
        optimizer = self._options.agreed(key.store, "optimizer")
        if optimizer is None or not key.axes.takes_steps or key.handle in self._with_momentum:
            return
        self._with_momentum.add(key.handle)
        clip_norm = dgc.local_clip_norm(key.axes.codec, self._session.num_workers)
        self._session.core.set_momentum(key.handle, optimizer["momentum"], clip_norm)

    def _say_if_left_out(self, key: Key) -> None:
        is_chosen = dgc.is_chosen(self._options.wanted(key.store, "compression"))
        if self._session.rank == 0 and is_chosen and len(key.shape) > 1 and not key.axes.takes_steps:
            why = "row_sparse" if key.sparse else "of type " + key.dtype
            text = "%s: key %r is %s, and not compressed: dgc is for dense float32 keys"
            log.warning(text, self._session.label, key.name, why)
