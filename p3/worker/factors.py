"""Sufficient factors: a fully connected layer's gradient as the two matrices that it is a product of, and when it pays.

Of a weight of M x N, outputs x inputs, and K rows in a worker's batch, the gradient has MN elements, and its factors
K(M + N). Each worker gets the factors of all others and forms the sum itself; so their number costs more workers more,
and larger batches more. Poseidon's rule (Zhang et al., USENIX ATC 2017; Zhang's thesis, Algorithm 2) compares the
elements that cross the cards of a node which is worker and server.
"""

from __future__ import annotations

import logging
from typing import List, Optional

from p3.key_plan import KeyPlan
from p3.worker.key import FactorShape, Key

log = logging.getLogger("p3")

ROUTES = ("auto", "factors", "dense")
# Of the elements of the dense gradient and weight: what factors may have, as each worker also multiplies those of all
# others (docs/decisions.md).
MARGIN = 0.9
_HEADER_BYTES = 80


def break_even(outputs: int, inputs: int, workers: int, servers: int) -> int:
    """Poseidon's rule: the largest batch of a worker whose factors take no more elements than the dense gradient and
    weight. ValueError with one worker, whom nothing is sent to."""
    if workers < 2:
        raise ValueError("the rule compares what workers send to each other; there is one worker")
    return outputs * inputs * (workers + servers - 2) // (servers * (workers - 1) * (outputs + inputs))


def most_rows(outputs: int, inputs: int, workers: int, servers: int) -> int:
    """The largest batch for which they pay: the rule's, with MARGIN."""
    return int(MARGIN * break_even(outputs, inputs, workers, servers))


def why_dense(route: str, shape: FactorShape, workers: int, servers: int) -> str:
    """In words, why a layer's gradient travels as it is; empty if its factors shall."""
    if route == "dense":
        return "its route is 'dense'"
    if not shape.fits_gradient:
        return "factors of %d rows are larger than the gradient" % shape.rows
    if route == "factors":
        return ""
    if workers < 2:
        return "there is one worker"
    most = most_rows(shape.outputs, shape.inputs, workers, servers)
    if shape.rows <= most:
        return ""
    return "it has %d rows, and with %d workers factors pay up to %d" % (shape.rows, workers, most)


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
        self._session, self._batch_size = session, batch_size
        self._uses = 0  # recorded forward passes since the last push
        self._problem: Optional[str] = None

    def note_use(self, rows: int) -> None:
        """Before each recorded use, once it has decided. `rows`: of its input on this device."""
        self._uses += 1
        if rows > self.shape.rows and self.has_factors:
            self._problem = (
                "%s: a batch has %d rows on a device, but its factors are of %d: pass batch_size, the most that any "
                "batch has, to p3.factors" % (self.name, rows, self.shape.rows)
            )

    def decide(self, rows: int, inputs: int, devices: int = 1, why_not: str = "") -> None:
        """Once. `rows` of its input on each of this worker's `devices`; `why_not`: in words, what excludes factors."""
        self.shape = FactorShape(self._batch_size or rows, self.outputs, inputs)
        self.of_worker = of_worker = self.shape._replace(rows=self.shape.rows * devices)
        why = why_not or why_dense(self.route, of_worker, self._session.num_workers, self._session.num_servers)
        self.has_factors = not why
        if self._session.rank != 0:
            return
        if why:
            log.info("%s stays dense: %s", self.name, why)
            return
        text = "%s: gradients leave as factors of %d rows: %d elements instead of %d"
        log.warning(text, self.name, of_worker.rows, of_worker.elements, of_worker.outputs * of_worker.inputs)

    def declare(self, weight: Key) -> Key:
        """The key of its factors, once it is decided. Declared as well if there are none, with no elements, so that
        workers who have decided otherwise hear of it. `weight`: the key that brings the first weight."""
        name = "%s (factors)" % weight.name
        if self.has_factors:
            return self._session.declare_factors(name, self.of_worker, weight.store)
        return self._session.declare(name, (0, self.of_worker.width), "float32", weight.store)

    def require_one_use(self, devices: int) -> None:
        """Before its push: ValueError unless the gradient array holds the factors of one use, on each device."""
        uses, self._uses = self._uses, 0
        if self._problem is not None:
            raise ValueError(self._problem)
        if uses > devices:
            raise ValueError(
                "%s was used %d times in one step, and factors hold one use of a layer: leave it out of p3.factors"
                % (self.name, uses)
            )


def card_bytes(plan: KeyPlan, host: int, servers: int) -> List[int]:
    """What host `host`, with the worker and the server of that rank, sends to other hosts in one round of the key, and
    what it receives: headers included, without what carries them."""
    workers, per_part = plan.parts, plan.slices // plan.parts
    sent = received = 0
    for number, elements in enumerate(plan.sizes()):
        owner, server = number // per_part, (plan.first_slice + number) % servers
        content = 4 * elements
        if server != host:
            sent += _HEADER_BYTES + content * (owner == host)
            received += _HEADER_BYTES + content * (owner != host)
        else:
            others = workers - (host < workers)
            sent += others * _HEADER_BYTES + content * (others - (owner != host))
            received += others * _HEADER_BYTES + content * (owner != host)
    return [sent, received]
