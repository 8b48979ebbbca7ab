"""Sufficient factors: a fully connected layer's gradient as the two matrices that it is a product of, and when it pays.

Of a weight of M x N, outputs x inputs, and K rows in a worker's batch, the gradient has MN elements, and its factors
K(M + N). Each worker gets the factors of all others and forms the sum itself; so their number costs more workers more,
and larger batches more. What is compared is what the busiest network card carries in a round (p3/placement.py): the
rule of Poseidon (Zhang et al., USENIX ATC 2017), for any number of workers and servers on any machines.
"""

from __future__ import annotations

import logging
from typing import Optional

from p3.placement import Placement
from p3.plan.factor_shape import FactorShape, key_of
from p3.plan.key_plan import KeyPlan, Name, SliceSize, even_slices
from p3.plan.strategy import Strategy
from p3.worker.key import Key

log = logging.getLogger("p3")

ROUTES = ("auto", "factors", "dense")
# How many times the bytes of factors those of the gradient must be, as each worker also multiplies the factors of all
# others (docs/decisions.md).
MARGIN = 1.01


class Rule:
    """What one job's placement makes of layers. `slice_size`: of its keys."""

    def __init__(self, placement: Placement, slice_size: SliceSize) -> None:
        self.placement, self._slice_size = placement, slice_size

    def plan(self, shape: FactorShape, as_factors: bool) -> KeyPlan:
        """As the layer's key is cut."""
        if not as_factors:
            elements = shape.outputs * shape.inputs
            return KeyPlan(0, "float32", elements, 0, self._slice_size.of(elements))
        whole = even_slices(shape.elements, self._slice_size.of(shape.elements))
        return KeyPlan(0, "float32", shape.elements, 0, whole, parts=len(self.placement.workers))

    def pays(self, shape: FactorShape) -> bool:
        dense, factors = (self.placement.busiest(self.plan(shape, as_factors)) for as_factors in (False, True))
        return MARGIN * factors < dense

    def most_rows(self, outputs: int, inputs: int) -> int:
        """The largest batch of a worker for which factors pay."""
        pays, pays_not = 0, outputs * inputs // (outputs + inputs) + 1
        while pays_not - pays > 1:
            rows = (pays + pays_not) // 2
            if self.pays(FactorShape(rows, outputs, inputs)):
                pays = rows
            else:
                pays_not = rows
        return pays

    def why_dense(self, route: str, shape: FactorShape) -> str:
        """In words, why a layer's gradient travels as it is; empty if its factors shall."""
        if route == "dense":
            return "its route is 'dense'"
        if not shape.fits_gradient:
            return "factors of %d rows are larger than the gradient" % shape.rows
        if route == "factors":
            return ""
        machines = {*self.placement.workers, *self.placement.servers}
        if len(machines) == 1:
            return "the whole job is on one machine"
        if self.pays(shape):
            return ""
        most = self.most_rows(shape.outputs, shape.inputs)
        return "it has %d rows, and with %d workers, %d servers and %d machines factors pay up to %d" % (
            shape.rows, len(self.placement.workers), len(self.placement.servers), len(machines), most,
        )  # fmt: skip


def checked(batch_size: Optional[int], route: str) -> None:
    """What a script passes to factors(): ValueError if it makes no sense."""
    if route not in ROUTES:
        raise ValueError("route is %r; it must be one of %s" % (route, ", ".join(ROUTES)))
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError("batch_size is %r; it must be a whole number from 1 on" % (batch_size,))


class FactoredLayer:
    """What one fully connected layer of a front end has decided: by the batch of its first recorded forward pass."""

    def __init__(self, session, name: str, outputs: int, batch_size: Optional[int], route: str) -> None:
        self.name, self.outputs = name, outputs  # the weight's name
        self.route = route
        self.shape: Optional[FactorShape] = None  # of one device, once that is decided
        self.of_worker: Optional[FactorShape] = None  # of all its devices
        self.has_factors = False
        self._session, self._batch_size, self._of_script = session, batch_size, route
        self._why_not = ""
        self._uses = 0  # recorded forward passes since the last push
        self._problem: Optional[str] = None

    def follow(self, strategy: Strategy, name: Name) -> None:
        """What a strategy says of the weight, the key of that name. ValueError if the script says something else, or if
        it is decided otherwise by now."""
        self.route = strategy.route(name, self._of_script)
        if self.shape is not None and bool(self._why_dense()) == self.has_factors:
            now = "as factors" if self.has_factors else "dense"
            raise ValueError(
                "%s: its gradients leave %s by now%s. Say route=%r to p3.factors or p3.torch.factors; in PyTorch "
                "P3_STRATEGY comes early enough, too" % (name, now, strategy.said_of(name), self.route)
            )

    def _why_dense(self) -> str:
        rule = Rule(self._session.placement, self._session.slice_size)
        return self._why_not or rule.why_dense(self.route, self.of_worker)

    def note_use(self, rows: int) -> None:
        """Before each recorded use, once it has decided. `rows`: of its input on this device."""
        self._uses += 1
        if rows > self.shape.rows and self.has_factors:
            self._problem = (
                "%s: a batch has %d rows on a device, but its factors are of %d: pass batch_size, the most that any "
                "batch has, to p3.factors or p3.torch.factors" % (self.name, rows, self.shape.rows)
            )

    def decide(self, rows: int, inputs: int, devices: int = 1, why_not: str = "") -> None:
        """Once. `rows` of its input on each of this worker's `devices`; `why_not`: in words, what excludes factors."""
        self.shape = FactorShape(self._batch_size or rows, self.outputs, inputs)
        self.of_worker = of_worker = self.shape._replace(rows=self.shape.rows * devices)
        self._why_not = why_not
        why = self._why_dense()
        self.has_factors = not why
        if not self._session.is_first:
            return
        if why:
            log.info("%s stays dense: %s", self.name, why)
            return
        text = "%s: gradients leave as factors of %d rows: %d elements instead of %d"
        log.warning(text, self.name, of_worker.rows, of_worker.elements, of_worker.outputs * of_worker.inputs)

    def declare(self, weight: Key) -> Key:
        """The key of its factors, once it is decided. Declared as well if there are none, with no elements, so that
        workers who have decided otherwise hear of it. `weight`: the key that brings the first weight."""
        name = key_of(weight.name)
        if self.has_factors:
            return self._session.declare_factors(name, self.of_worker, weight.store)
        return self._session.declare(name, (0, self.of_worker.width), "float32", weight.store)

    def forget_uses(self) -> None:
        """Nothing of them leaves."""
        self._uses, self._problem = 0, None

    def require_one_use(self, devices: int) -> None:
        """Before its push: ValueError unless the gradient array holds the factors of one use, on each device."""
        uses, self._uses = self._uses, 0
        if self._problem is not None:
            raise ValueError(self._problem)
        if uses > devices:
            raise ValueError(
                "%s was used %d times in one step, and factors hold one use of a layer: leave it out of p3.factors or "
                "p3.torch.factors" % (self.name, uses)
            )
