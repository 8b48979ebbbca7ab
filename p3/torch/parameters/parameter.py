"""One parameter of the job: its key, its rounds (p3/frontend/rounds.py), and how a new value gets into its tensor.

A round's result lands in a buffer of its own, as it may come while backward still reads the old weight.

With staleness a step need not wait for the round before, whose gradient may then still have to leave while the step
computes the next: when a round lands, its gradient must be as it was pushed (_Gradient), or what has left is not what
the script meant.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch

from p3._core import NO_SCALARS
from p3.frontend.rounds import KeyRounds, Round
from p3.torch import rules
from p3.torch.parameters import advice, pending, trained
from p3.torch.parameters.arrays import (
    DTYPES, bits, flat, in_memory_order, integers, like, memory_of, on_host, other_holders, shape_in_memory,
)  # fmt: skip

# Each push wakes the sender, which may take the training thread's core. Most parameters are as small as a bias.
_SMALL_BYTES = 16 << 10


class _Gradient:
    """One that is being added up, or was pushed, as it was then."""

    __slots__ = ("tensor", "version", "bits")

    def __init__(self, tensor: torch.Tensor, is_watched: bool = False) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.bits = bits(tensor) if is_watched else None  # None: nobody looks

    def notes_no_more_than(self, tensor: torch.Tensor) -> bool:
        """Whether this is what would be made of the tensor now, if nobody looked at its bits."""
        return self.tensor is tensor and self.version == tensor._version and self.bits is None

    def is_unwritten(self) -> bool:
        is_same = self.tensor._version == self.version
        return is_same and (self.bits is None or bool(self.bits == bits(self.tensor)))


class Parameter(KeyRounds):
    """Threads: those of the script, one at a time; autograd's hooks count as such."""

    def __init__(self, session, store: int, name: str, tensor: torch.Tensor, group: Dict[str, Any],
                 update_here: Optional[Callable], staleness: Union[int, float] = 0,
                 options: Optional[Dict[str, Any]] = None) -> None:  # fmt: skip
        """`update_here(parameter, gradient, group)` makes the update from the mean gradient, and returns True; or it is
        made later, with note_written() behind it. None: the servers do.
        `options`: see Session.declare."""
        landing = torch.empty_like(tensor, requires_grad=False)
        self.tensor, self.group = tensor, group
        key = self._declare(session, store, name, staleness, options)
        super().__init__(session, key, landing, self._array_of(landing))
        self.description: Optional[Dict[str, Any]] = None  # of the servers' optimizer; None: they have none
        self.fields: Optional[Tuple[float, ...]] = None  # of that, as rounds go by now; None: as described
        self.unread_state: Dict[str, Any] = {}  # loaded: a velocity, where there is no momentum, stays as it is
        self.lacks: Tuple[str, ...] = ()  # of the arrays of its state, as its first update did without: torch has none
        self.advice = advice.OF_SCRIPTS
        self.is_guarded = True  # nobody else may write to the tensor
        self.is_lent = False  # but for the time from a value's arrival to the next step's end
        self.is_watched = False  # a change of it, or of its gradient under way, that torch does not count is found, too
        self.has_zero_gradient = False  # in torch, though its last gradient has left
        self.must_copy = self.lands_changes  # the landing array has to hold what landed last
        self._has_left = False  # the gradient of the last step
        self.fires, self.expected_fires = 0, 0  # of the gradient's hook, in one step; 0: not known yet
        self._update_here = update_here
        self._gradient: Optional[_Gradient] = None  # of the current step
        self._sent: Any = None  # the scalars
        self._group_then: Dict[str, Any] = {}  # as step() found it
        self._version = -1  # of the tensor, when P3 wrote it last; -1: anybody may write
        self._address: Optional[int] = None  # of its memory then; None: it may be any
        self._memory: Optional[torch.Tensor] = None  # that memory, which a tensor that moves leaves behind
        self._bits: Any = None  # of its elements then; None: nobody looks
        self._is_written = True  # what has landed is in the tensor
        self._is_given_away = False  # others have the memory, who may write without torch's counting it
        self._array_of_tensor: Any = None  # the same of its memory, if that was the landing before
        self.is_on_cpu = tensor.device.type == "cpu"
        self._is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        self._kind, self._strides = self._kind_of(landing), landing.stride()  # of each gradient, as it is pushed
        self._may_swap = self._has_own_memory()

    def _has_own_memory(self) -> bool:
        """Whether it is this parameter's alone, so that nobody notices if it changes places with the landing."""
        is_whole = self.tensor.untyped_storage().nbytes() == self.tensor.numel() * self.tensor.element_size()
        return is_whole and not (self.is_on_cpu and self.tensor.is_shared())

    def _array_of(self, landing: torch.Tensor) -> Any:
        """Where the core writes new values: an array in CPU memory, of the tensor's elements in the order of memory."""
        return in_memory_order(landing)

    def _new_landing(self) -> Tuple[torch.Tensor, Any]:
        landing = torch.empty_like(self.landing)
        return landing, self._array_of(landing)

    def _declare(self, session, store: int, name: str, staleness: Union[int, float], options: Any):
        shape, dtype = shape_in_memory(self.tensor), DTYPES[self.tensor.dtype]
        return session.declare(name, shape, dtype, store, False, staleness, options)

    def lend(self) -> None:
        """From the next value on the script may write to the tensor, too, where no round of it is under way."""
        self.is_lent = True
        self._let_anybody_write()

    def leave(self) -> None:
        """The tensor is the script's again."""
        del trained.names[self.tensor]

    def end_without_result(self) -> None:
        super().end_without_result()
        pending.end(self.tensor)
        self._sent = None
        self.forget_gradient()

    # The first value

    def init(self, value: Optional[Any] = None) -> None:
        """Gives the key rank 0's value: `value` if there is one, else the tensor's. On every worker, when no round of
        it is under way. Waits for none."""
        self._require_same_layout()
        self._let_anybody_write()
        if value is None and self._session.is_first:
            value = in_memory_order(self.tensor.detach().to("cpu", copy=True))
        self._under_way = Round(self._init(value), self._take_value)

    def _init(self, value):
        return self._session.init(self.key, value, self._array, self.priority)

    # A round

    def count_gradient(self) -> bool:
        """A gradient was accumulated. Whether it is complete, as far as earlier steps tell."""
        before, now = self._gradient, self.tensor.grad
        goes_on = before is not None and now is before.tensor and now._version == before.version + 1
        self.fires = self.fires + 1 if goes_on else 1
        is_complete = self.fires == self.expected_fires
        self._gradient = _Gradient(now, not is_complete and (self.is_watched or not self.expected_fires))
        return is_complete

    def require_gradient_of_backward(self) -> None:
        """ValueError if a gradient that waits for step() was changed since backward(): other workers' are not in it."""
        if self._gradient is None:
            return

        def problem() -> str:
            return ("the gradient of %s was changed between backward() and step(), when it was this worker's alone. %s"
                    % (self.name, self.advice.to_change))  # fmt: skip

        if not self._is_as_it_was(self._gradient, problem):
            raise ValueError(problem())

    def forget_gradient(self) -> None:
        self._gradient, self.fires = None, 0

    def push(self, more: bool = False) -> None:
        """Begins a round with the tensor's gradient, which belongs to P3 until the round's result has landed. With
        staleness that may be in the next step but one.

        `more`: others follow soon, with which a small gradient can leave.
        """
        if self._under_way is not None:
            self._make_room()
        self._require_unwritten()
        gradient = self.tensor.grad
        if self._kind_of(gradient) != self._kind:
            raise ValueError("the gradient of %s is of %s, shape %s, on %s, but its key is of %s, %s, on %s: change "
                             "these before DistributedOptimizer"
                             % (self.name, *self._kind_of(gradient), *self._kind))  # fmt: skip
        self._sent = self._scalars()
        sent = self._gradient
        if self.is_watched or sent is None or not sent.notes_no_more_than(gradient):
            sent = _Gradient(gradient, self.is_watched)
        self._begin(self._push(gradient, more and self._is_small), is_skip=False)
        self._gradient = sent
        if self.updates == 0 or self.lacks:
            self._note_lacks()

    def skip(self) -> None:
        super().skip()
        if self.updates == 0 or self.lacks:
            self._note_lacks()

    def _note_lacks(self) -> None:
        unread = rules.unread_states(self.description, self.fields)
        self.lacks = unread if self.updates == 0 else tuple(name for name in self.lacks if name in unread)

    def _as_landing(self, gradient: torch.Tensor) -> torch.Tensor:
        """Dense, and in the order of memory of the landing."""
        if gradient.layout is torch.strided and gradient.stride() == self._strides:
            return gradient
        return like(self.landing, gradient if gradient.layout == torch.strided else gradient.to_dense())

    def _push(self, gradient, more):
        if self.key.rank == 0:
            source = memory_of(self._as_landing(gradient))
            return self._session.push_memory(self.key, source, self._array, self.priority, self._sent, more)
        source = in_memory_order(self._as_landing(gradient))
        return self._session.pushpull(self.key, source, self._array, self.priority, *self._sent, more=more)

    def _scalars(self):
        if self._update_here is not None:
            return NO_SCALARS
        if self._is_stale:
            return (*rules.scalars_of_apart(self.group, self._rescale), self.fields)
        return (*rules.scalars(self.group, self._rescale, self.updates + 1), self.fields)

    def require_as_sent(self, awaits_mean: bool) -> None:
        """ValueError if what the current step's round was pushed with no longer holds, or its gradient was changed
        since. `awaits_mean`: as the step does."""
        if self._sent is None:
            return
        if self._scalars() != self._sent:
            raise ValueError(
                "learning rate or weight decay of %s was changed between backward() and step(), when the gradient was "
                "under way already: %r became %r. Change them before backward(), or pass synchronous=True"
                % (self.name, self._sent[:2], self._scalars()[:2])
                if self._scalars()[:2] != self._sent[:2] else
                "the optimizer's numbers for %s were changed between backward() and step(), when the gradient was "
                "under way already: %s. Change them before backward(), or pass synchronous=True"
                % (self.name, rules.change_of(self.description, self._sent[-1], self.fields))
            )
        sent, now = self._gradient, self.tensor.grad
        if now is not sent.tensor or now._version != sent.version or sent.bits is not None:
            self._require_as_it_was(sent, awaits_mean)

    def end_step(self, group_then: Optional[Dict[str, Any]] = None) -> None:
        """Behind require_as_sent(). `group_then`: where workers update, as_now() of its group."""
        if self._update_here is not None:
            self._group_then = as_now(self.group) if group_then is None else group_then
        self.release_gradient()

    def release_gradient(self) -> None:
        """P3 looks at it no more."""
        has_left = self._sent is not None
        if has_left and self._may_go_ahead:
            self._under_way.pushed = self._gradient
        self._has_left, self.has_zero_gradient = has_left, False
        self._sent, self.is_new = None, False
        self._gradient, self.fires = None, 0

    def _require_as_it_was(self, sent: _Gradient, awaits_mean: bool) -> None:
        def problem() -> str:
            until = self.advice.to_change_awaited if awaits_mean else "step(). " + self.advice.to_change
            return ("the gradient of %s was changed when it was under way already, between backward() and %s"
                    % (self.name, until))  # fmt: skip

        if not self._is_as_it_was(sent, problem):
            raise ValueError(problem())

    def _is_as_it_was(self, gradient: _Gradient, problem: Callable[[], str]) -> bool:
        """Whether the tensor's gradient is this one, and was not written to since. `problem()` says that it was."""
        if self.tensor.grad is not gradient.tensor or gradient.tensor._version != gradient.version:
            return False
        return gradient.bits is None or self._is_same(gradient.bits != bits(gradient.tensor), problem)

    def zero_left_gradient(self, set_to_none: bool) -> None:
        """zero_grad() was called, and may mean a gradient that has left."""
        self.has_zero_gradient = not set_to_none and (self._has_left or self.has_zero_gradient)
        self._has_left = False

    def take_zero_gradient(self) -> bool:
        """In the place of its own gradient, or of none, it has one of zero if torch would have that; else none."""
        self.tensor.grad = self.zero_gradient() if self.has_zero_gradient else None
        return self.has_zero_gradient

    def zero_gradient(self) -> torch.Tensor:
        return torch.zeros_like(self.landing)

    def scale_gradient(self, factor: float) -> None:
        """The tensor's, before it is pushed: without a copy, on its device."""
        gradient = self.tensor.grad
        with torch.no_grad():
            (gradient if gradient.layout == torch.strided else gradient._values()).mul_(factor)

    # Its result

    def leave_pending(self) -> None:
        """The step is over: from here on whoever uses the tensor waits for the round's result."""
        if self._under_way is not None:
            if self.is_lent:
                self._note_as_it_is()
            pending.begin(self.tensor, self._land_for_use)

    def _land_for_use(self, may_be_written: bool) -> None:
        self._is_given_away = may_be_written
        self.land()

    def _go_ahead(self, round: Round) -> None:
        pending.end(self.tensor)
        super()._go_ahead(round)

    def _take_over(self, round: Round) -> bool:
        if torch.is_inference_mode_enabled():  # what is made in it can never be changed outside
            with torch.inference_mode(False):
                return self._take_over(round)
        was_pending = pending.end(self.tensor)
        try:
            self._require_unwritten()
            if self._may_go_ahead:
                self._require_gradients_unwritten()
        except ValueError:
            if was_pending:
                self.leave_pending()
            raise
        self._is_written = True
        is_updated = super()._take_over(round)
        if self._is_written:
            self.note_written()
        return is_updated

    def show(self, value: torch.Tensor) -> None:
        """The tensor has this value until the next one comes; nothing is pending."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.note_written()

    def take(self, value: Any) -> None:
        """The same of an array that on_host() has made of another worker's."""
        tensor = torch.empty_like(self.tensor, device="cpu", requires_grad=False)
        on_host(tensor)[...] = value
        self.show(tensor)

    def note_written(self) -> None:
        """The tensor was written by us."""
        if self.is_lent:
            self._let_anybody_write()
        else:
            self._note_as_it_is()
        self._is_given_away = False

    def _let_anybody_write(self) -> None:
        self._version, self._address, self._memory, self._bits = -1, None, None, None

    def _note_as_it_is(self) -> None:
        if self.is_guarded:
            self._note_place()
        else:
            self._version, self._address, self._memory = -1, None, None
        self._bits = None
        if self.is_watched or self._is_given_away:
            self.watch()

    def _note_place(self) -> None:
        # Parameters that are parts of one memory have one version.
        self._version = self.tensor._version if self._may_swap else -1
        self._address = self.tensor.data_ptr()
        if self._memory is None or self._memory.data_ptr() != self._address:
            self._memory = self.tensor.detach()

    def watch(self) -> None:
        """Notes the elements as they are: what is written from here on is found, also where torch does not count it."""
        if self._address is not None and self._bits is None:
            self._bits = bits(self.tensor)

    def _require_unwritten(self) -> None:
        tensor = self.tensor
        is_known = tensor._version == self._version and tensor.data_ptr() == self._address and self._bits is None
        if not (is_known or self._is_unwritten()):
            self._require_same_layout()
            raise ValueError(self._was_written())

    def _was_written(self) -> str:
        return ("parameter %s was written by the script, but its value is kept on the servers. %s"
                % (self.name, self.advice.to_write))  # fmt: skip

    def _require_gradients_unwritten(self) -> None:
        """Of the rounds that have landed: else what has left may be neither the one nor the other."""
        pushed = (one.pushed for one in (self._before, self._under_way) if one is not None)
        if all(one is None or one.is_unwritten() for one in pushed):
            return
        raise ValueError(
            "the gradient of %s was written after step(), when it was still under way: with staleness the next step "
            "does not wait until it has left. Leave the gradients to torch, which makes new ones in each step, or give "
            "P3 a clone, or call optimizer.synchronize() before writing" % self.name
        )

    def _is_unwritten(self) -> bool:
        if self._version not in (-1, self.tensor._version):
            return False
        if self._address not in (None, self.tensor.data_ptr()) and not self._follow():
            return False
        return self._bits is None or self._is_same(self._bits != bits(self.tensor), self._was_written)

    def _follow(self) -> bool:
        """To other memory, where the tensor has its old elements: flatten_parameters() of an LSTM moves weights so."""
        if self._layout(self.tensor) != self._layout(self.landing):
            return False
        was, now = (integers(flat(one)) for one in (self._memory, self.tensor))
        if not self._is_same((was != now).any(), self._was_written):
            return False
        self._may_swap, self._array_of_tensor = self._has_own_memory(), None
        self._note_place()
        return True

    def _is_same(self, differs: Any, _problem: Callable[[], str]) -> bool:
        """Whether not. `differs`: a bool, or a tensor of one. On a device it is not known yet: then True, and the
        problem is told later, if it is one."""
        return not differs

    def _require_same_layout(self) -> None:
        was, now = self._layout(self.landing), self._layout(self.tensor)
        if was != now:
            raise ValueError(
                "type, device, shape or memory format of parameter %s was changed from %s, %s, %s, strides %s to %s, "
                "%s, %s, strides %s: do that before DistributedOptimizer" % (self.name, *was, *now)
            )

    @staticmethod
    def _kind_of(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, tensor.device

    @staticmethod
    def _layout(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()

    def _take_value(self, _operation) -> bool:
        self._copy_landing()
        return True

    def _copy_landing(self) -> None:
        with torch.no_grad():
            self.tensor.copy_(self.landing)

    def _take_result(self, operation) -> None:
        if self._update_here is None:
            self._take_update(operation)
        else:
            self._is_written = self._update_here(self, self._mean_gradient(operation), self._group_then)

    def _take_update(self, _operation) -> None:
        known = self._array_of_tensor
        if self.must_copy or not self._may_swap:
            return self._copy_landing()
        ours = (known is not None) + (self._memory is not None)
        if other_holders(self.tensor) > ours:  # who would keep the old memory
            self._is_given_away = True
            return self._copy_landing()
        # Without a copy, for which the forward pass would wait. An older graph that needs the old value must notice.
        array = in_memory_order(self.tensor) if known is None else known
        before = self.tensor.data if self._memory is None else self._memory
        self.tensor.data = self._memory = self.landing
        self.landing = before
        self._array_of_tensor, self._array = self._array, array
        torch.autograd.graph.increment_version(self.tensor)

    def mean_gradient(self) -> Optional[torch.Tensor]:
        """A copy of what the round under way has made, which nobody has taken over; None if no worker had a gradient.
        Waits for it."""
        operation = self.await_result()
        return self._mean_gradient(operation).clone() if operation.updated else None

    def _mean_gradient(self, operation) -> torch.Tensor:
        return self.landing


def as_now(group: Dict[str, Any]) -> Dict[str, Any]:
    """A copy of a param group, which a scheduler may change before its update is made, and a tensor in it in place."""
    copied = {name: value.clone() for name, value in group.items() if isinstance(value, torch.Tensor)}
    return {**group, **copied}


class RowParameter(Parameter):
    """One whose gradients are sparse, as those of nn.Embedding(sparse=True): only their rows travel."""

    goes_ahead = False  # its landing keeps all that has landed, so there is one

    def _declare(self, session, store: int, name: str, staleness: Union[int, float], options: Any):
        tensor = self.tensor
        return session.declare(name, tensor.shape, DTYPES[tensor.dtype], store, True, staleness, options)

    def _push(self, gradient, _more):
        if gradient.layout != torch.sparse_coo:
            raise ValueError(
                "the gradient of %s is dense, but its module says sparse=True: a weight that other modules use, too, "
                "needs sparse=False" % self.name
            )
        gradient = gradient.coalesce()
        ids = gradient.indices()[0].numpy()
        values = in_memory_order(gradient.values().contiguous())
        return self._session.pushpull(self.key, (ids, values), self._array, self.priority, *self._sent)

    def zero_gradient(self) -> torch.Tensor:
        no_rows = self.landing[:0]
        rows = torch.empty((1, 0), dtype=torch.int64, device="cpu")
        return _sparse(rows, no_rows, self.landing.shape)

    def _take_value(self, operation) -> bool:
        super()._take_value(operation)
        if self._update_here is not None:
            self.landing.zero_()  # from here on it holds sums
        return True

    def _take_update(self, operation) -> None:
        if operation.changed is None:  # after a skip
            return self._copy_landing()  # they cannot change places: the landing keeps all that has landed
        rows = torch.from_numpy(operation.changed)
        with torch.no_grad():
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
