"""One parameter of the job: its key, its round under way, and how a new value gets into it.

In each step of the optimizer every worker has one round of every key: a push if it has a gradient, else a skip. The
round's result lands in a buffer of its own, as it may come while backward still reads the old weight; land() takes it
over when the forward pass needs the weight.

With staleness a step need not wait for the round before: where that has not landed, it goes on with the result of the
round before that one, if the pushes of all workers that must be in it are (renew_for_step). Then there are two rounds:
one whose answer may come during the step, in a buffer of its own, and the step's, which leaves behind it. The first
one's gradient may still have to leave while the step computes the next: when a round lands, its gradient must be as it
was pushed (_Pushed), or what has left is not what the script meant.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Union

import torch

from p3._core import NO_SCALARS
from p3.frontend import waiting
from p3.torch import pending, rules
from p3.torch.arrays import DTYPES, bits, flat, in_memory_order, integers, like, other_holders, shape_in_memory

# Each push wakes the sender, which may take the training thread's core. Most parameters are as small as a bias.
_SMALL_BYTES = 16 << 10


class _Pushed(NamedTuple):
    """A gradient as it was when its round began."""

    gradient: torch.Tensor
    version: int
    bits: Optional[torch.Tensor]  # None: nobody looks

    def is_unwritten(self) -> bool:
        is_same = self.gradient._version == self.version
        return is_same and (self.bits is None or bool(self.bits == bits(self.gradient)))


class Parameter:
    """Threads: those of the script, one at a time; autograd's hooks count as such."""

    goes_ahead = True  # with staleness; else each step waits for the answer to the one before
    has_state_here = False  # the servers' optimizer runs on each worker, which has the state of its own update

    def __init__(self, session, store: int, name: str, tensor: torch.Tensor, group: Dict[str, Any],
                 update_here: Optional[Callable], staleness: Union[int, float] = 0) -> None:  # fmt: skip
        """`update_here(parameter, gradient, group)` makes the update from the mean gradient; None: the servers do."""
        self.name, self.tensor, self.group = name, tensor, group
        self.description: Optional[Dict[str, Any]] = None  # of the servers' optimizer; None: they have none
        self.priority = 0
        self.updates = 0  # that have been taken over: torch's `step`
        self.is_guarded = True  # nobody else may write to the tensor
        self.is_watched = False  # a change of it, or of its gradient under way, that torch does not count is found, too
        self.is_new = False  # has a round of the current step
        self.has_zero_gradient = False  # in torch, though its last gradient has left
        self._has_left = False  # the gradient of the last step
        self.fires, self.expected_fires = 0, 0  # of the gradient's hook, in one step; 0: not known yet
        self._session, self._update_here = session, update_here
        self._rescale = 1.0 / session.num_workers
        self._operation: Any = None
        self._rounds = 0  # of this worker, begun
        self._before: Any = None  # with staleness: the operation of a round that a step has not waited for
        self._other_landing: Any = None  # and where that lands, with its array; the two are used in turn
        self._pushed: Optional[_Pushed] = None  # with staleness, from step() on: in the round under way
        self._pushed_before: Optional[_Pushed] = None  # and in the one before
        self._is_skip = False  # this worker's part of it
        self._gradient: Optional[torch.Tensor] = None  # what was pushed, or is being added up
        self._gradient_version = -1
        self._gradient_bits: Optional[torch.Tensor] = None
        self._sent: Any = None  # the scalars
        self._group_then: Dict[str, Any] = {}  # as step() found it
        self._version = -1  # of the tensor, when P3 wrote it last; -1: anybody may write
        self._address: Optional[int] = None  # of its memory then; None: it may be any
        self._memory: Optional[torch.Tensor] = None  # that memory, which a tensor that moves leaves behind
        self._bits: Optional[torch.Tensor] = None  # of its elements then; None: nobody looks
        self._is_given_away = False  # others have the memory, who may write without torch's counting it
        self.landing = torch.empty_like(tensor, requires_grad=False)
        self._array = self._landing_array()
        self._array_of_tensor: Any = None  # the same of its memory, if that was the landing before
        nbytes = tensor.numel() * tensor.element_size()
        self._is_small = nbytes <= _SMALL_BYTES
        self._may_swap = self._has_own_memory()
        self.key = self._declare(store, staleness)
        self._may_go_ahead = self.goes_ahead and self.key.staleness > 0
        self.takes_steps = self.key.axes.takes_steps  # what lands is subtracted from what landed before
        self.must_copy = self.takes_steps  # the landing array has to hold what landed last

    def _has_own_memory(self) -> bool:
        """Whether it is this parameter's alone, so that nobody notices if it changes places with the landing."""
        is_whole = self.tensor.untyped_storage().nbytes() == self.tensor.numel() * self.tensor.element_size()
        return is_whole and not (self.tensor.device.type == "cpu" and self.tensor.is_shared())

    def _landing_array(self) -> Any:
        """Where the core writes new values: an array in CPU memory, of the tensor's elements in the order of memory."""
        return in_memory_order(self.landing)

    def _declare(self, store: int, staleness: Union[int, float]):
        shape, dtype = shape_in_memory(self.tensor), DTYPES[self.tensor.dtype]
        return self._session.declare(self.name, shape, dtype, store, staleness=staleness)

    @property
    def is_compressed(self) -> bool:
        return bool(self.key.axes.codec)

    @property
    def keeps_residual(self) -> bool:
        """Compression adds what it has left out to the next gradient."""
        return self._session.core.keeps_residual(self.key.handle)

    @property
    def was_pushed(self) -> bool:
        """In the last round; else this worker has skipped it."""
        return not self._is_skip

    def leave(self) -> None:
        """The tensor is the script's again."""
        del self.tensor._p3_parameter

    def end_without_result(self) -> None:
        """Waits for the round under way, and nobody takes its result over: the tensor stays as it is."""
        operation, self._operation = self._operation, None
        if operation is not None:
            self._wait(operation)
        self.land()  # of a step before this one
        pending.end(self.tensor)
        self._sent, self.is_new = None, False
        self.forget_gradient()

    # The first value

    def init(self, value: Optional[Any] = None) -> None:
        """Gives the key rank 0's value: `value` if there is one, else the tensor's. On every worker, when no round of
        it is under way. Waits for none."""
        self._require_same_layout()
        self._version, self._address, self._memory, self._bits = -1, None, None, None
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
        """Begins a round with the tensor's gradient, which belongs to P3 until the round's result has landed. With
        staleness that may be in the next step but one.

        `more`: others follow soon, with which a small gradient can leave.
        """
        self._make_room()
        self._require_unwritten()
        gradient = self.tensor.grad
        if gradient.dtype != self.landing.dtype:
            raise ValueError("the gradient of %s is of %s, but its key is of %s: change types before "
                             "DistributedOptimizer" % (self.name, gradient.dtype, self.landing.dtype))  # fmt: skip
        self._sent = self._scalars()
        self._gradient_bits = bits(gradient) if self.is_watched else None
        self._operation, self._is_skip = self._push(gradient, more and self._is_small), False
        self._rounds += 1
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
        self._make_room()
        self._operation, self._is_skip = self._skip(), True
        self._rounds += 1
        self.is_new = True
        self._landed = self._take_round

    def _skip(self, goes_on=True):
        return self._session.skip(self.key, self._array, self.priority, goes_on=goes_on)

    def take_last(self) -> None:
        """When no worker steps any more: lands the value that all end with, where they have been steps apart."""
        self.land()
        if self.key.staleness > 0:
            self._operation, self._landed = self._skip(goes_on=False), self._take_value
            self._rounds += 1

    def _scalars(self):
        if self._update_here is not None:
            return NO_SCALARS
        if self.key.staleness > 0:
            return rules.scalars_of_apart(self.group, self._rescale)
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
            problem = ("the gradient of %s was changed when it was under way already, between backward() and %s"
                       % (self.name, until))  # fmt: skip
            is_same = self.tensor.grad is gradient and gradient._version == self._gradient_version
            if is_same and self._gradient_bits is not None:
                is_same = self._is_same(self._gradient_bits != bits(gradient), problem)
            if not is_same:
                raise ValueError(problem)
            if self._may_go_ahead:
                self._pushed = _Pushed(gradient, self._gradient_version, self._gradient_bits)
        self._has_left, self.has_zero_gradient = self._sent is not None, False
        self._sent, self.is_new = None, False
        self.forget_gradient()

    def zero_left_gradient(self, set_to_none: bool) -> None:
        """zero_grad() was called, and may mean a gradient that has left."""
        self.has_zero_gradient = not set_to_none and (self._has_left or self.has_zero_gradient)
        self._has_left = False

    def zero_gradient(self) -> torch.Tensor:
        return torch.zeros_like(self.landing)

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

    def leave_pending(self) -> None:
        """The step is over: from here on whoever uses the tensor waits for the round's result."""
        if self._operation is not None:
            pending.begin(self.tensor, self._land_for_use)

    def _land_for_use(self, may_be_written: bool) -> None:
        self._is_given_away = may_be_written
        self.land()

    def renew(self) -> None:
        """Before the weight is read: takes over the last step's result, and not what comes before step()."""
        if not self.is_new and self._operation is not None:
            self.land()

    def renew_for_step(self) -> None:
        """The same, for the step's own forward pass."""
        if not self.is_new and self._operation is not None:
            self._make_room()

    def _make_room(self) -> None:
        """Another round may begin: nothing is under way, or with staleness one round that the tensor may do without.

        Which is so if the tensor lacks that one alone of this worker's rounds, and of the others' none that is more
        than `staleness` rounds behind the last one of this worker.
        """
        operation = self._operation
        if operation is None:
            return
        if not self._may_go_ahead or operation.done:
            self.land()
            return
        if self._before is not None:
            self._take_before()
        landed, least_clock = self._session.landed_round(self.key)
        if landed == self._rounds or least_clock < self._rounds - self.key.staleness:
            self.land()
            return
        self._session.check()
        pending.end(self.tensor)
        self._before, self._operation = operation, None
        self._pushed_before, self._pushed = self._pushed, None
        self._change_landings()

    def _take_before(self) -> None:
        """The round that the last step has not waited for is what the tensor holds from here on."""
        operation, self._operation = self._operation, self._before
        pushed, self._pushed = self._pushed, None
        self._change_landings()
        try:
            self.land()
        finally:
            self._change_landings()
            self._operation, self._pushed = operation, pushed

    def _change_landings(self) -> None:
        mine, other = (self.landing, self._array), self._other_landing
        if other is None:
            landing = torch.empty_like(self.landing)
            other = landing, in_memory_order(landing)
        (self.landing, self._array), self._other_landing = other, mine

    def land(self) -> bool:
        """Waits for all that is under way, and takes the last result over. Whether any worker pushed in the last step's
        round, if nobody has waited for it yet."""
        operation = self._operation
        if operation is None:
            if self._before is not None:
                self._take_before()
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
        was_pending = pending.end(self.tensor)
        try:
            self._require_unwritten()
            self._require_gradients_unwritten()
        except ValueError:
            if was_pending:
                self.leave_pending()
            raise
        self._operation = self._before = self._pushed = self._pushed_before = None
        with torch.no_grad():
            is_updated = self._landed(operation)
        self.note_written()
        return is_updated

    def note_written(self) -> None:
        """The tensor was written by us."""
        self._note_place()
        self._bits = None
        if self.is_watched or self._is_given_away:
            self.watch()
        self._is_given_away = False

    def _note_place(self) -> None:
        # Parameters that are parts of one memory have one version.
        self._version = self.tensor._version if self.is_guarded and self._may_swap else -1
        self._address = self.tensor.data_ptr() if self.is_guarded else None
        self._memory = self.tensor.detach() if self.is_guarded else None

    def watch(self) -> None:
        """Notes the elements as they are: what is written from here on is found, also where torch does not count it."""
        if self.is_guarded and self._bits is None:
            self._bits = bits(self.tensor)

    def _require_unwritten(self) -> None:
        problem = (
            "parameter %s was written by the script, but its value is kept on the servers. Call "
            "optimizer.synchronize() before writing to parameters, and optimizer.broadcast() afterwards, on every "
            "worker" % self.name
        )
        if not self._is_unwritten(problem):
            self._require_same_layout()
            raise ValueError(problem)

    def _require_gradients_unwritten(self) -> None:
        """Of the rounds that have landed: else what has left may be neither the one nor the other."""
        if all(one is None or one.is_unwritten() for one in (self._pushed_before, self._pushed)):
            return
        raise ValueError(
            "the gradient of %s was written after step(), when it was still under way: with staleness the next step "
            "does not wait until it has left. Leave the gradients to torch, which makes new ones in each step, or give "
            "P3 a clone, or call optimizer.synchronize() before writing" % self.name
        )

    def _is_unwritten(self, problem: str) -> bool:
        if self._version not in (-1, self.tensor._version):
            return False
        if self._address not in (None, self.tensor.data_ptr()) and not self._follow(problem):
            return False
        return self._bits is None or self._is_same(self._bits != bits(self.tensor), problem)

    def _follow(self, problem: str) -> bool:
        """To other memory, where the tensor has its old elements: flatten_parameters() of an LSTM moves weights so."""
        if self._layout(self.tensor) != self._layout(self.landing):
            return False
        was, now = (integers(flat(one)) for one in (self._memory, self.tensor))
        if not self._is_same((was != now).any(), problem):
            return False
        self._may_swap, self._array_of_tensor = self._has_own_memory(), None
        self._note_place()
        return True

    def _is_same(self, differs: torch.Tensor, _problem: str) -> bool:
        """Whether not. On a device it is not known yet: then True, and the problem is told later, if it is one."""
        return not differs

    def _require_same_layout(self) -> None:
        was, now = self._layout(self.landing), self._layout(self.tensor)
        if was != now:
            raise ValueError(
                "type, device or memory format of parameter %s was changed from %s, %s, strides %s to %s, %s, strides "
                "%s: do that before DistributedOptimizer" % (self.name, *was, *now)
            )

    @staticmethod
    def _layout(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.device, tensor.stride()

    def _wait(self, operation) -> None:
        timeout_s = self._session.wait_timeout_s
        self._session.flush()
        if not waiting.wait(self._session, operation, timeout_s):
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
        self.updates = self._session.updates(self.key) if self.key.staleness > 0 else self.updates + 1
        if self._update_here is None:
            self._take_update(operation)
        else:
            self._update_here(self, self._mean_gradient(operation), self._group_then)
        return True

    def _take_update(self, _operation) -> None:
        known = self._array_of_tensor
        if self.must_copy or not self._may_swap:
            self.tensor.copy_(self.landing)
            return
        ours = (known is not None) + (self._memory is not None)
        if other_holders(self.tensor) > ours:  # who would keep the old memory
            self._is_given_away = True
            self.tensor.copy_(self.landing)
            return
        # Without a copy, for which the forward pass would wait. An older graph that needs the old value must notice.
        array = in_memory_order(self.tensor) if known is None else known
        self.tensor.data, self.landing = self.landing, self.tensor.data
        self._array_of_tensor, self._array = self._array, array
        torch.autograd.graph.increment_version(self.tensor)

    def _mean_gradient(self, operation) -> torch.Tensor:
        return self.landing

    # The optimizer's state on the servers: part 1, 2 ... of rules.State

    def fetch_state(self, part: int, landing: torch.Tensor) -> Any:
        return self._session.fetch_state(self.key, part, in_memory_order(landing))

    def store_state(self, part: int, content: torch.Tensor) -> Any:
        return self._session.store_state(self.key, part, in_memory_order(content), self._updates_to_store())

    def _updates_to_store(self) -> int:
        """With staleness the servers count: from this number on."""
        return self.updates if self.key.staleness > 0 else 0


class RowParameter(Parameter):
    """One whose gradients are sparse, as those of nn.Embedding(sparse=True): only their rows travel."""

    goes_ahead = False  # its landing keeps all that has landed, so there is one

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

    def zero_gradient(self) -> torch.Tensor:
        no_rows = self.landing[:0]
        rows = torch.empty((1, 0), dtype=torch.int64, device="cpu")
        return _sparse(rows, no_rows, self.landing.shape)

    def _skip(self, goes_on=True):
        return self._session.skip_rows(self.key, self._array, self.priority, goes_on)

    def fetch_state(self, part: int, landing: torch.Tensor) -> Any:
        return self._session.fetch_rows(self.key, self._all_rows(), in_memory_order(landing), part)

    def store_state(self, part: int, content: torch.Tensor) -> Any:
        content, updates = in_memory_order(content), self._updates_to_store()
        return self._session.store_rows(self.key, self._all_rows(), content, part, updates)

    def _all_rows(self):
        return torch.arange(len(self.tensor), device="cpu").numpy()

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
        rows = torch.arange(len(self.landing), device="cpu") if changed is None else torch.from_numpy(changed)
        rows = rows[self.landing.index_select(0, rows).flatten(1).any(1)]
        values = self.landing.index_select(0, rows)
        return _sparse(rows[None], values, self.tensor.shape)


def _sparse(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows, values, shape, device="cpu", check_invariants=False)
