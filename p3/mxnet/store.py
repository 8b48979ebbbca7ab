"""What stands behind one P3KVStore (kvstore.py): its parts, which P3's modules use, and the rounds of its keys.

One dense key, from gradient to weight: the gradients of a worker's devices are summed by MXNet on the first device and
brought to CPU memory if they are not there; one operation of MXNet's engine sends the sum and receives the new value
into the key's landing array; MXNet copies that to every device. Each part is queued in the engine behind what it
reads, so every call returns at once, and a layer's weight is readable as soon as its own new value has landed.

Not straight into the weight: MXNet may hold it in a blocked oneDNN layout, and a raw write would scramble it.

Of a key with row_sparse gradients only the touched rows travel, and a pull into a dense array changes only rows that
rounds have changed since the pull before (keys/rows.py).
"""

import functools
import logging
import os
import sys

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError

from p3 import codecs
from p3._core import NO_SCALARS, P3Error
from p3.frontend import partitions
from p3.frontend.loss_scale import LossScale
from p3.mxnet import _mxnet, clipping, entering, store_snapshots
from p3.mxnet.arguments import classic
from p3.mxnet.keys import beginnings
from p3.mxnet.optimizers.descriptions import NotOnServer, describe, would_update_all_rows
from p3.mxnet.optimizers.saved_states import SavedStates
from p3.mxnet.optimizers.updates import Updates
from p3.mxnet.priorities import Priorities
from p3.mxnet.staleness import Staleness
from p3.plan import choices, combinations
from p3.settings import Settings
from p3.worker import session as sessions

log = logging.getLogger("p3")

_ROWS_ALONE = (
    "key %r: so far its rows have been updated alone, as its optimizer had lazy_update=True, and now all of them would "
    "be: leave lazy_update as it was when the key began, or begin with False"
)


def call(method, as_mxnet_errors=(P3Error, ValueError, TimeoutError)):
    """A call of the script: raises the job's first failure, in every call from then on, as the engine itself reports an
    error only once. Nothing that it does belongs in a graph, and MXNet refuses to write an array of a graph while it
    records.
    """

    @functools.wraps(method)
    def call(self, *arguments, **named):
        self.check()
        try:
            if not autograd.is_recording():
                return method(self, *arguments, **named)
            with autograd.pause():
                return method(self, *arguments, **named)
        except as_mxnet_errors as error:
            raise MXNetError(str(error)) from error

    return call


class Store:
    """Threads: those of the script's calls, one at a time."""

    def __init__(self, kind):
        settings = Settings.from_env(os.environ)
        combinations.require("a store of MXNet", choices.MXNET, *choices.of_strategy(settings.strategy))
        session = self.session = sessions.current()
        self.engine_is_naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
        # That engine would wait for a round before it copies what the round waits for.
        first_piece = sys.maxsize if self.engine_is_naive else session.slice_size.most
        self.engine = _mxnet.MXNetEngine(session.core, mx.base._LIB._name, first_piece)
        self.number = session.new_store()
        self.kind = kind
        self.staleness = Staleness(kind, settings.staleness, lambda: session.strategy(self.number))
        self.keys = {}
        self.outdated = set()  # keys that take a new value at their next init
        self.reset_trainer = lambda: None  # the Trainer whose parameters those are, if any
        self.updates = Updates()
        self.priorities = Priorities(session, self.number, settings.priority)
        self.loss_scale = LossScale(session)
        self.strategy = None  # of set_strategy(), until it is held against the keys
        self.clips = False  # set_clipping() was called
        self.norm = None  # then, of its sums, as soon as it has a key
        self.rates = None  # learning rate and weight decay of a Trainer that pushes just now
        self.saved_states = SavedStates(self)
        # Of keys that have begun, and not taken all that a snapshot has of them: whether the optimizer's states, too.
        self.resuming = {}

    def check(self):
        """The job's failure, if it has failed."""
        try:
            self.session.check()
        except P3Error as error:
            raise MXNetError(str(error)) from None

    def after_operation(self):
        if self.engine_is_naive:
            self.check()  # this engine waits for the operation, but drops its error

    @property
    def compression(self):
        """The Ways that the script has chosen for all keys."""
        return codecs.Ways(*(self.session.option(self.number, one) for one in ("compression", "value_compression")))

    # Who updates

    def set_optimizer(self, optimizer):
        updates = self.updates
        is_set = optimizer is updates.optimizer  # by Trainer, after a reset; its state stays
        if is_set and updates.on_servers:
            return
        try:
            description = describe(optimizer)
            if updates.here:
                raise NotOnServer("the workers update this store's weights already")
            if not updates.on_servers and (self.pushed_keys() or entering.updates_here(self)):
                raise NotOnServer("gradients have been pushed without it; set it before the first push")
        except NotOnServer as reason:
            if is_set:
                return
            name = type(optimizer).__name__
            self.staleness.require_servers(f"{name} runs on the workers: {reason}")
            log.warning("%s updates the weights on every worker, not on the servers: %s", name, reason)
            self.set_updater(mx.optimizer.get_updater(optimizer))
        else:
            self.session.set_optimizer(self.number, description)
            for entry in self.keys.values():
                if would_update_all_rows(optimizer, entry):
                    raise MXNetError(_ROWS_ALONE % (entry.id,))
            updates.leave_to_servers(optimizer)
            self.saved_states.begin_anew()
            store_snapshots.restore_optimizer(self)
        self.priorities.know_parameters(getattr(optimizer, "param_dict", None) or {})

    def set_updater(self, updater):
        updates = self.updates
        self.staleness.require_servers("an updater runs on the workers")
        if updates.on_servers:
            raise MXNetError(
                f"the servers update this store's weights with {type(updates.optimizer).__name__} already; "
                "set another optimizer on a new store"
            )
        if updater is updates.updater:
            return
        if self.clips:
            self.refuse_updates()
        if updates.updater is None:
            for entry in self.keys.values():
                beginnings.keep_weight(self, entry)
        updates.updater = updater
        store_snapshots.restore_optimizer(self)

    def refuse_updates(self):
        raise MXNetError(
            f"{self.kind}: with set_clipping() the Trainer updates, behind the store's sums and their norm, and not "
            "the store: pass update_on_kvstore=False to the Trainer"
        )

    # One key

    def key(self, key):
        try:
            return self.keys[key]
        except KeyError:
            raise MXNetError(f"key {key!r} was not initialised on this store; call init or broadcast first") from None

    def note(self, entry):
        """It stands for the script's key from here on."""
        self.keys[entry.id] = entry
        self.session.stores.keys_by_name[self.number][entry.id] = entry.declared

    def pushed_keys(self):
        return [entry for entry in self.keys.values() if entry.pushed]

    def gradients_of(self, key, values):
        """The key, if it can take these arrays as its gradient."""
        entry = self.key(key)
        entry.require_shape(values[0], "pushed with", and_type=True)
        for value in values[1:]:
            entry.require_shape(value, "pushed with")  # its type is cast to that of the first
        return entry

    def push(self, entry, values, outs, priority):
        if self.strategy is not None:
            self.strategy.require_keys(self.keys)
            self.strategy = None
        updates = self.updates
        if not entry.pushed:
            entry = beginnings.before_first_push(self, entry, values)
        elif updates.on_servers and would_update_all_rows(updates.optimizer, entry):
            raise MXNetError(_ROWS_ALONE % (entry.id,))
        declared = entry.declared
        self.session.begin_push(declared)
        gradient = entry.gradient(values)
        scalars = NO_SCALARS
        if updates.on_servers:
            scalars = updates.scalars(entry)
        elif self.rates is not None and not (declared.sparse or declared.factors or declared.staleness):
            scalars = (*self.rates, *NO_SCALARS[2:])
        entry.priority = self.priorities.of_round(entry, priority, (*outs, *values))
        partitions.note_push(self.session, declared)
        if self.norm is not None:
            self.norm.before_push(entry, self.keys.values())
        entry.push(gradient, scalars, entry.priority)
        entry.pushed = entry.in_steps = True
        self.saved_states.note_round(entry.id)
        updates.make(entry)
        self.after_operation()
        return entry

    def copy_out(self, entry, outs):
        entry.copy_out(outs, entry.priority)
        entry.outs = outs

    def follow(self, entry):
        """Takes over what has landed in a round that this worker skipped."""
        self.saved_states.note_round(entry.id)
        self.updates.follow(entry)
        self.copy_out(entry, entry.outs)

    def take_last(self, entry):
        """Takes over the value that all workers end with, where they have been rounds apart."""
        if entry.declared.staleness > 0:
            self.copy_out(entry, entry.outs)

    # What MXNet's Trainer says (hooks.py, clipping.py)

    @call
    def expect_new_values(self):
        """The next init of each key brings rank 0's new value; the optimizer and its state stay. On every worker at the
        same point; waits for them, or one that is late would get that value in the place of the one before."""
        self.session.entrance.require_no_push("set_data() or load_parameters() of a Trainer that has keys")
        mx.nd.waitall()
        self.session.barrier("set_data() or load_parameters()")
        self.outdated = set(self.keys)

    def take_new_values(self):
        """Now, if the Trainer that has been reset has not taken a step since, which would bring them."""
        trainer = self.reset_trainer()
        if trainer is not None and not trainer._kv_initialized:
            trainer._init_kvstore()
            trainer._init_params()

    def begin_pushes(self, optimizer):
        """Of a step. Where workers update, the servers see to it that all do so at the same rate."""
        self.rates = optimizer.learning_rate, optimizer.wd

    @call
    def end_pushes(self):
        self.rates = None
        if self.norm is not None:
            self.norm.end_pushes(self.keys.values())
            self.after_operation()

    def end_step(self):
        """The Trainer is about to update by the sums as they are."""
        if self.norm is not None:
            self.norm.end_step()

    @call
    def clip(self, trainer, max_norm):
        """clip_global_norm of clipping.py."""
        if not self.clips:
            raise MXNetError(
                "clip_global_norm: the servers tell no norms. Call set_clipping() of the store before the first step "
                "of the Trainer, and pass update_on_kvstore=False to that"
            )
        if self.norm is None:
            raise MXNetError(clipping.NOTHING_TO_CLIP)
        if getattr(trainer, "_amp_loss_scaler", None) is not None:
            combinations.require("clip_global_norm", choices.CLIPPING, choices.SCALER)
        parameters = (one for one in trainer._params if one.grad_req != "null")
        norm = self.norm.clip([classic(grad) for one in parameters for grad in one.list_grad()], max_norm)
        self.after_operation()
        return norm

    def follow_loss_scale(self, scale):
        """The gradients that are pushed next have this scale. Where it has changed, waits for those that are under way;
        without updates on the servers they are not, as MXNet has looked at their sums."""
        if scale != self.loss_scale.scale:
            for entry in self.pushed_keys():
                entry.wait()
        self.loss_scale.follow(scale, [entry.declared for entry in self.keys.values()])

    def leave_out(self, keys):
        """Nobody uses the sums of the last step, in which these keys were pushed and which have landed."""
        self.loss_scale.leave_out([self.keys[key].declared for key in keys])
