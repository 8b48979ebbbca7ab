"""Clipping Gluon's gradients by their global norm, without waiting for any of them.

The servers have a step's sums before any worker has them all, and tell their norm in a few bytes (p3/frontend/norms.py
is the same for other front ends). Here that is a round in MXNet's engine, whose result is an array: what reads it, as
the multiplications do that clip_global_norm() queues, waits for it there, and each gradient for its own sum alone.

Some operators of MXNet share a few workspaces, in the order in which they were queued: those with a number, elementwise
ones, cast_storage. A layer behind one of them that waits for the network would wait as well. So of MXNet's only
broadcast_mul, casts and copies are used, which have none; rows need cast_storage.

Each key of such a store has one round in each step, for the norm is of all keys' rounds of one number. One that the
Trainer has not pushed, as its grad_req is "null", is skipped. A key's next round waits for the norm of the one before.
"""

import math
import numbers

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

from p3.frontend import waiting
from p3.frontend.steps import FIRST
from p3.mxnet import _mxnet
from p3.mxnet.arguments import to_dense
from p3.mxnet.priorities import Priority

NOTHING_TO_CLIP = (
    "clip_global_norm: there are no new sums to clip; call it between trainer.allreduce_grads() and trainer.update()"
)

_URGENCY = Priority(FIRST, 1 << 30)


def clip_global_norm(trainer, max_norm):
    """Multiplies a Trainer's gradients by min(1, max_norm / (norm + 1e-8)); `norm` is that of all of them together.

    Called between `trainer.allreduce_grads()` and `trainer.update(batch_size)`, in the place of
    gluon.utils.clip_global_norm, whose norm and gradients it gives; the norm is that of the gradients as
    allreduce_grads() has left them, of each parameter once, however many devices have it: before `update` divides them
    by the batch size. It needs `store.set_clipping()` before the Trainer's first step, and `update_on_kvstore=False`.

    Returns the norm, an NDArray of shape (1,), at once: it is waited for when it is read. So is each gradient, which
    needs the norm and its own sum, not those of the others. `max_norm` may change in each step, and is the same on
    every worker. math.inf leaves gradients as they are. A second call in a step is about what the first one has left.
    The factor is a float32 (0 where `max_norm` is too small for one); float16 gradients are multiplied by just that,
    and rounded once.

    A norm that is not finite is no error: then gradients become what the formula makes of them, NaN or zero, on all
    workers alike. Who wants to leave out such steps reads the norm, which all workers find alike, and does not update.

    MXNetError if the store does not tell norms, or sums have not been asked for since the last update.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real) or not max_norm > 0:
        raise MXNetError(f"clip_global_norm: max_norm is {max_norm!r}; it must be a number above 0")
    clip = getattr(getattr(getattr(trainer, "_kvstore", None), "store", None), "clip", None)
    if clip is None:
        raise MXNetError(
            'clip_global_norm needs a Trainer with a store of P3\'s, as mx.kv.create("p3_sync") makes it, behind its '
            "allreduce_grads(); for others take gluon.utils.clip_global_norm"
        )
    return clip(trainer, float(max_norm))


class StoreNorm:
    """Of the rounds of one store's keys. Threads: the store's."""

    def __init__(self, session, engine, store):
        """On every worker, before the store has any key; waits for rank 0. A worker that does without one fails the job
        as soon as it has a key."""
        key = session.declare_norm(store)
        waiting.from_rank_0(session, key, np.zeros(key.shape))
        self._session, self._engine = session, engine
        self._operations = _mxnet.MXNetNorm(engine, key.handle, key.name, math.prod(key.shape))
        self._told = None  # of the last round
        self._pushed = set()  # entries of the round that has begun
        session.stores.norms[store] = self
        self._of_step = None  # the norm of the sums as they are now; None: of a step that is over, or has none

    @property
    def has_begun(self):
        return self._told is not None or bool(self._pushed)

    def before_push(self, entry, entries):
        """`entries`: all of the store. MXNetError if this one has been pushed in the step already."""
        if not self.has_begun:
            for one in entries:  # the servers must know all keys of the norm before they have summed the first
                self._session.keys.wait_for(one.declared)
        if entry in self._pushed:
            raise MXNetError(
                f"key {entry.id!r} is pushed twice in one step. Since set_clipping() each key has one round in each "
                "step, which gluon.Trainer's allreduce_grads() or step() completes: push with that alone"
            )
        self._pushed.add(entry)
        self._follow(entry)

    def end_pushes(self, entries):
        """Of a step. `entries`: all of the store."""
        for entry in entries:
            if entry not in self._pushed:
                self._follow(entry)
                entry.operations.leave_out(entry.priority)
        self._pushed.clear()
        before = 0 if self._told is None else self._told.handle.value
        norm = _one_float()
        self._operations.tell(before, norm.handle.value, _URGENCY)
        self._told = self._of_step = norm

    def skip(self, completions, token):
        """In join(): of rounds that all begin past MXNet's engine, which holds nothing of the store. Completes without
        an update if no worker takes the step."""
        self._told = self._of_step = _one_float()
        self._operations.skip(self._told.handle.value, _URGENCY, completions, token)

    def _follow(self, entry):
        """Servers count the rounds of a step together."""
        if self._told is not None:
            entry.operations.wait_for(self._told.handle.value, entry.priority)

    def end_step(self):
        """The sums are used: nobody may clip them any more."""
        self._of_step = None

    def clip(self, gradients, max_norm):
        """All arrays of the step's sums. Returns their norm before."""
        norm = self._of_step
        if norm is None:
            raise MXNetError(NOTHING_TO_CLIP)
        if max_norm < math.inf:
            factor = _one_float()
            self._operations.factor(norm.handle.value, factor.handle.value, max_norm, _URGENCY)
            for gradient in gradients:
                self._multiply(gradient, factor)
            self._of_step = mx.nd.broadcast_mul(norm, factor)
        return norm.copy()  # the script may write to it

    def _multiply(self, gradient, factor):
        """In place, and rounded once: a factor in float16 would lose digits, or become 0."""
        kind = gradient.dtype if np.dtype(gradient.dtype).itemsize > 2 else "float32"
        scaled = to_dense(gradient).astype(kind, copy=False)  # MXNet multiplies rows by numbers alone
        mx.nd.broadcast_mul(scaled, factor.astype(kind, copy=False).as_in_context(gradient.context), out=scaled)
        if scaled is not gradient:
            scaled = scaled.astype(gradient.dtype, copy=False).tostype(gradient.stype)
            self._engine.copy(scaled.handle.value, gradient.handle.value)


def _one_float():
    return mx.nd.empty((1,), mx.cpu(), "float32")
