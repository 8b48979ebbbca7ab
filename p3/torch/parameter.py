"""One parameter of the job: its key, its round under way, and how a new value gets into it.

In each step of the optimizer every worker has one round of every key: a push if it has a gradient, else a skip. The
round's result lands in a buffer of its own, as it may come while backward still reads the old weight; land() takes it
over when the forward pass needs the weight.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional, Union

import torch

from p3._core import NO_SCALARS
from p3.torch import job, rules
from p3.torch.arrays import DTYPES, bits, in_memory_order, like, other_holders, shape_in_memory

# Each push wakes the sender, which may take the training thread's core. Most parameters are as small as a bias.
_SMALL_BYTES = 16 << 10


class Parameter:
    """Threads: those of the script, one at a time; autograd's hooks count as such."""

    has_state_here = False  # the servers' optimizer runs on each worker, which has the state of its own update

    def __init__(self, session, store: int, name: str, tensor: torch.Tensor, group: Dict[str, Any],
                 update_here: Optional[Callable], staleness: Union[int, float] = 0) -> None:  # fmt: skip
        """`update_here(parameter, gradient, group)` makes the update from the mean gradient; None: the servers do."""
        self.name, self.tensor, self.group = name, tensor, group
        self.description: Optional[Dict[str, Any]] = None  # of the servers' optimizer; None: they have none
        self.priority = 0
        self.updates = 0  # that have been taken over: torch's `step`
        self.is_guarded = True  # nobody else may write to the tensor
        self.is_watched = False  # a change of the gradient under way that torch does not count is found, too
        self.is_new = False  # has a round of the current step
        self.fires, self.expected_fires = 0, 0  # of the gradient's hook, in one step; 0: not known yet
        self._session, self._update_here = session, update_here
        self._rescale = 1.0 / session.num_workers
        self._operation: Any = None
        self._is_skip = False  # this worker's part of it
        self._gradient: Optional[torch.Tensor] = None  # what was pushed, or is being added up
        self._gradient_version = -1
        self._gradient_bits: Optional[torch.Tensor] = None
        self._sent: Any = None  # the scalars
        self._group_then: Dict[str, Any] = {}  # as step() found it
        self._version = -1  # of the tensor, when P3 wrote it last; -1: anybody may write
        self._address: Optional[int] = None  # of its memory then; None: it may be any
        self.landing = torch.empty_like(tensor, requires_grad=False)
        self._array = self._landing_array()
        self._array_of_tensor: Any = None  # the same of its memory, if that was the landing before
        nbytes = tensor.numel() * tensor.element_size()
        self._is_small = nbytes <= _SMALL_BYTES
        # Whether the memory is this parameter's alone, so that nobody notices if it changes places with the landing.
        is_whole = tensor.untyped_storage().nbytes() == nbytes
        self._may_swap = is_whole and not (tensor.device.type == "cpu" and tensor.is_shared())
        self.key = self._declare(store, staleness)
        self.takes_steps = session.takes_steps(self.key)  # what lands is subtracted from what landed before
        self.must_copy = self.takes_steps  # the landing array has to hold what landed last

    def _landing_array(self) -> Any:
        """Where the core writes new values: an array in CPU memory, of the tensor's elements in the order of memory."""
        return in_memory_order(self.landing)

    def _declare(self, store: int, staleness: Union[int, float]):
        shape, dtype = shape_in_memory(self.tensor), DTYPES[self.tensor.dtype]
        return self._session.declare(self.name, shape, dtype, store, staleness=staleness)

    @property
    def is_compressed(self) -> bool:
        return self._session.compression_of(self.key) is not None

    # The first value

    def init(self, value: Optional[Any] = None) -> None:
        """Gives the key rank 0's value: `value` if there is one, else the tensor's. On every worker. Waits for none."""
        self.drop()
        self._require_same_layout()
        self._version, self._address = -1, None
        if value is None and self._session.rank == 0:
            value = in_memory_order(self.tensor.detach().to("cpu", copy=True))
        self._operation = self._init(value)
        self._landed = self._take_value

    def _init(self, value):
        return self._session.init(self.key, value, self._array, self.priority)

    # A round

    def count_gradient(self) -> bool:
        """A gradient was accumulated. Whether it is complete, as far as earlier steps tell."""
        gradient = self.tensor.grad
        goes_on = gradient is self._gradient and gradient._version == self._gradient_version + 1
        self.fires = self.fires + 1 if goes_on else 1
        self._gradient, self._gradient_version = gradient, gradient._version
        return self.fires == self.expected_fires

    def forget_gradient(self) -> None:
        self._gradient, self.fires = None, 0

    def push(self, more: bool = False) -> None:
        """Begins a round with the tensor's gradient, which belongs to P3 until the round's result has landed.

        `more`: others follow soon, with which a small gradient can leave.
        """
        self.land()
        self._require_unwritten()
        gradient = self.tensor.grad
        if gradient.dtype != self.landing.dtype:
            raise ValueError("the gradient of %s is of %s, but its key is of %s: change types before "
                             "DistributedOptimizer" % (self.name, gradient.dtype, self.landing.dtype))  # fmt: skip
        self._sent = self._scalars()
        self._gradient_bits = bits(gradient) if self.is_watched else None
        self._operation, self._is_skip = self._push(gradient, more and self._is_small), False
        self._gradient, self._gradient_version = gradient, gradient._version
        self.is_new = True
        self._landed = self._take_round

    def _as_landing(self, gradient: torch.Tensor) -> torch.Tensor:
        """Dense, and in the order of memory of the landing."""
        return like(self.landing, gradient if gradient.layout == torch.strided else gradient.to_dense())

    def _push(self, gradient, more):
        source = in_memory_order(self._as_landing(gradient))
        return self._session.pushpull(self.key, source, self._array, self.priority, *self._sent, more=more)

    def skip(self) -> None:
        """Begins a round without a gradient of this worker."""
        self.land()
        self._operation, self._is_skip = self._skip(), True
        self.is_new = True
        self._landed = self._take_round

    def _skip(self, goes_on=True):
        return self._session.skip(self.key, self._array, self.priority, goes_on=goes_on)

    def take_last(self) -> None:
        """When no worker steps any more: lands the value that all end with, where they have been steps apart."""
        self.land()
        if self.key.staleness > 0:
            self._operation, self._landed = self._skip(goes_on=False), self._take_value

    def _scalars(self):
        if self._update_here is not None:
            return NO_SCALARS
        return rules.scalars(self.group, self._rescale, self.updates + 1)

    def end_step(self) -> None:
        """The round is the current step's: ValueError if what it was pushed with no longer holds."""
        if self._sent is not None and self._scalars() != self._sent:
            raise ValueError(
                "learning rate or weight decay of %s was changed between backward() and step(), when the gradient was "
                "under way already: %r became %r. Change them before backward(), or pass synchronous=True"
                % (self.name, self._sent[:2], self._scalars()[:2])
            )
        if self._update_here is not None:  # a scheduler may change the group before that, and a tensor in it in place
            copied = {name: value.clone() for name, value in self.group.items() if isinstance(value, torch.Tensor)}
            self._group_then = {**self.group, **copied}
        self.release_gradient("step(). To clip it, pass max_grad_norm; for other changes pass synchronous=True and "
                              "call optimizer.synchronize() before them")  # fmt: skip

    def release_gradient(self, until: str) -> None:
        """P3 looks at it no more: ValueError if it was changed since it was pushed, as nobody could before `until`."""
        if self._sent is not None:
            gradient = self._gradient
            is_same = self.tensor.grad is gradient and gradient._version == self._gradient_version
            if not is_same or self._gradient_bits is not None and self._gradient_bits != bits(gradient):
                raise ValueError("the gradient of %s was changed when it was under way already, between backward() "
                                 "and %s" % (self.name, until))  # fmt: skip
        self._sent, self.is_new = None, False
        self.forget_gradient()

    # Its result

    def updates_by_now(self) -> int:
        """With the round under way. Waits for that if this worker has skipped it, as others may have pushed."""
        if self._is_skip:
            self.land()
        return self.updates + self.is_pending

    @property
    def is_pending(self) -> bool:
        """A round's result is not in the tensor yet."""
        return self._operation is not None

    def renew(self) -> None:
        """Before the weight is read: takes over the last step's result, and not what comes before step()."""
        if not self.is_new:
            self.land()

    def land(self) -> bool:
        """Waits for the round under way, if there is one, and takes its result over. Whether any worker pushed."""
        operation = self._operation
        if operation is None:
            return False
        if torch.is_inference_mode_enabled():  # what is made in it can never be changed outside
            with torch.inference_mode(False):
                return self.land()
        if not operation.done:
            began = time.monotonic_ns()
            self._wait(operation)
            self._session.mark_stall(self.key, began, time.monotonic_ns())
        else:
            self._session.check()
        self._require_unwritten()
        self._operation = None
        with torch.no_grad():
            is_updated = self._landed(operation)
        self.note_written()
        return is_updated

    def note_written(self) -> None:
        """The tensor was written by us."""
        # Parameters that are parts of one memory have one version.
        self._version = self.tensor._version if self.is_guarded and self._may_swap else -1
        self._address = self.tensor.data_ptr() if self.is_guarded else None

    def drop(self) -> None:
        """Waits for the round under way without taking its result."""
        if self._operation is not None:
            self._wait(self._operation)
            self._operation = None

    def _require_unwritten(self) -> None:
        if self._version not in (-1, self.tensor._version) or self._address not in (None, self.tensor.data_ptr()):
            self._require_same_layout()
            raise ValueError(
                "parameter %s was written by the script, but its value is kept on the servers. Call "
                "optimizer.synchronize() before writing to parameters, and optimizer.broadcast() afterwards, on every "
                "worker" % self.name
            )

    def _require_same_layout(self) -> None:
        was, now = ((one.dtype, one.device, one.stride()) for one in (self.landing, self.tensor))
        if was != now:
            raise ValueError(
                "type, device or memory format of parameter %s was changed from %s, %s, strides %s to %s, %s, strides "
                "%s: do that before DistributedOptimizer" % (self.name, *was, *now)
            )

    def _wait(self, operation) -> None:
        timeout_s = self._session.wait_timeout_s
        self._session.flush()
        if not job.wait(self._session, operation, timeout_s):
            raise TimeoutError(
                "%s: waited %g s for a new value of %s; another worker is slow or stuck (P3_WAIT_TIMEOUT_S)"
                % (self._session.label, timeout_s, self.name)
            )

    def _take_value(self, _operation) -> bool:
        self.tensor.copy_(self.landing)
        return True

    def _take_round(self, operation) -> bool:
        if not operation.updated:
            return False
        self.updates += 1
        if self._update_here is None:
            self._take_update(operation)
        else:
            self._update_here(self, self._mean_gradient(operation), self._group_then)
        return True

    def _take_update(self, _operation) -> None:
        known = self._array_of_tensor
        copies = self.must_copy or not self._may_swap
        if copies or other_holders(self.tensor) > (known is not None):  # who would keep the old memory
            self.tensor.copy_(self.landing)
            return
        # Without a copy, for which the forward pass would wait. An older graph that needs the old value must notice.
        array = in_memory_order(self.tensor) if known is None else known
        self.tensor.data, self.landing = self.landing, self.tensor.data
        self._array_of_tensor, self._array = self._array, array
        torch.autograd.graph.increment_version(self.tensor)

    def _mean_gradient(self, operation) -> torch.Tensor:
        return self.landing.mul_(self._rescale)

    # The optimizer's state on the servers: part 1, 2 ... of rules.State

    def fetch_state(self, part: int, landing: torch.Tensor) -> Any:
        return self._session.fetch_state(self.key, part, in_memory_order(landing))

    def store_state(self, part: int, content: torch.Tensor) -> Any:
        return self._session.store_state(self.key, part, in_memory_order(content))


class RowParameter(Parameter):
    """One whose gradients are sparse, as those of nn.Embedding(sparse=True): only their rows travel."""

    def _declare(self, store: int, staleness: Union[int, float]):
        tensor = self.tensor
        return self._session.declare(self.name, tensor.shape, DTYPES[tensor.dtype], store, True, staleness)

    def _init(self, value):
        return self._session.init_rows(self.key, value, self._array, self.priority)

    def _push(self, gradient, _more):
        if gradient.layout != torch.sparse_coo:
            raise ValueError(
                "the gradient of %s is dense, but its module says sparse=True: a weight that other modules use, too, "
                "needs sparse=False" % self.name
            )
        gradient = gradient.coalesce()
        ids = gradient.indices()[0].numpy()
        values = in_memory_order(gradient.values().contiguous())
        return self._session.pushpull_rows(self.key, ids, values, self._array, self.priority, *self._sent)

    def _skip(self, goes_on=True):
        return self._session.skip_rows(self.key, self._array, self.priority, goes_on)

    def fetch_state(self, part: int, landing: torch.Tensor) -> Any:
        return self._session.fetch_rows(self.key, self._all_rows(), in_memory_order(landing), part)

    def store_state(self, part: int, content: torch.Tensor) -> Any:
        return self._session.store_rows(self.key, self._all_rows(), in_memory_order(content), part)

    def _all_rows(self):
        return torch.arange(len(self.tensor)).numpy()

    def _take_value(self, operation) -> bool:
        super()._take_value(operation)
        if self._update_here is not None:
            self.landing.zero_()  # from here on it holds sums
        return True

    def _take_update(self, operation) -> None:
        if operation.changed is None:  # after a skip
            return self.tensor.copy_(self.landing)  # they cannot change places: the landing keeps all that has landed
        rows = torch.from_numpy(operation.changed)
        self.tensor.index_copy_(0, rows, self.landing.index_select(0, rows))

    def _mean_gradient(self, operation) -> torch.Tensor:
        # Rows of the round before are listed, too, as they have become zero.
        changed = operation.changed  # None after a skip
        rows = torch.arange(len(self.landing)) if changed is None else torch.from_numpy(changed)
        rows = rows[self.landing.index_select(0, rows).flatten(1).any(1)]
        values = self.landing.index_select(0, rows).mul_(self._rescale)
        return torch.sparse_coo_tensor(rows[None], values, self.tensor.shape, check_invariants=False)
