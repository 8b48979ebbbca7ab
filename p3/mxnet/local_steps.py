"""LocalSteps: a Gluon Trainer that trains on each worker by itself, and shares its weights now and then.

    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001}, kvstore=None)
    trainer = p3.mxnet.LocalSteps(trainer, every=30, fragments=6, delay=2, codec="int4")

It stays the same object, whose steps are Gluon's own: `trainer.step(batch_size)` with this worker's batch. Behind each
p3/frontend/local_steps/, which has the algorithm, sends what is due and merges what has come.
"""

import contextlib
import os

import mxnet as mx
import numpy as np

from p3.frontend import snapshots, waiting
from p3.frontend.local_steps.in_place import InPlaceTrainer
from p3.frontend.local_steps.options import Options
from p3.frontend.local_steps.value import merged
from p3.mxnet import hooks, store_snapshots
from p3.plan import choices, combinations
from p3.settings import Settings
from p3.worker.session import current

# Of a global value, by that of the weight: a step may be less than a weight of half precision can show.
_GLOBAL_TYPES = {"float16": "float32", "float32": "float32", "float64": "float64"}


def LocalSteps(  # a class to its users
    trainer, *, every, fragments=1, delay=0, alpha=None, codec=None, outer=None, strided=False, strategy=None,
    quorum=None, grace=None, **others
):  # fmt: skip
    """Lets each worker take steps of its own, and has them share their weights; returns the same Trainer.

    `trainer`: a gluon.Trainer with kvstore=None, all of whose parameters have shapes: run the net once before, if it
    finds them out by itself. Call it on every worker at the same point, before the first step; it returns when every
    worker has rank 0's parameters. All workers take the same number of steps. Of parameters with grad_req="null", as
    running statistics, each worker has its own from there on.

    The options are those of p3.torch.LocalSteps (docs/local-steps.md); layers are parameters whose names are alike up
    to the last underscore, as "dense0_weight". The same on every worker: ValueError where they differ, and for what
    cannot be trained so. ConfigError or RendezvousError if there is no job to join.
    """
    if not isinstance(trainer, mx.gluon.Trainer):
        raise ValueError("LocalSteps takes a gluon.Trainer, not a %s" % type(trainer).__name__)
    if isinstance(trainer, _Local):
        raise ValueError("LocalSteps: this Trainer has them already: call its release() before")
    options = Options.checked(every, fragments, delay, alpha, codec, outer, strided, strategy, quorum, grace)
    settings = Settings.from_env(os.environ)
    options.require_together(settings, others, {"staleness": choices.STALE}, *_found(trainer))
    trainer._p3_local = _Shared(trainer, options, settings)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Local, kind), {"__module__": kind.__module__})
    return trainer


def snapshot(round, state=None):
    """As kv.snapshot(), of Trainers with LocalSteps: on every worker after each step."""
    snapshots.take(current(), round, {} if state is None else state)


def resume():
    """As kv.resume(), on every worker before the first LocalSteps: (round, state), (0, {}) where there is no snapshot.
    Each LocalSteps then begins with the snapshot's parameters, optimizer and global weights, each worker its own."""
    found = snapshots.resume(current())
    return found.map(lambda state: {} if state is None else state)


class _Local:
    """What such a Trainer has beside the methods of its class. Threads: the script's, one at a time."""

    def step(self, batch_size, ignore_stale_grad=False):
        self._p3_local.take_step(lambda: super(_Local, self).step(batch_size, ignore_stale_grad))

    def update(self, batch_size, ignore_stale_grad=False):
        self._p3_local.take_step(lambda: super(_Local, self).update(batch_size, ignore_stale_grad))

    @property
    def rank(self):
        """Of this worker, in the job."""
        return self._p3_local.session.rank

    @property
    def num_workers(self):
        return self._p3_local.session.num_workers

    def synchronize(self):
        """Waits for all exchanges under way, which are merged when their time comes."""
        self._p3_local.synchronize()

    def take_global(self):
        """The parameters become the global ones, for good; on every worker, as at the end of a training. Waits for what
        is under way. Steps since a fragment's last exchange are not in it."""
        self._p3_local.take_global()

    @contextlib.contextmanager
    def global_weights(self):
        """Within it the parameters are the global ones, the same bits on all workers: to evaluate, or to save the net.
        Behind it they are this worker's own again. Any worker may do so alone; waits for what is under way."""
        with self._p3_local.global_weights():
            yield

    def broadcast(self):
        """Rank 0's parameters become all workers', and the global ones: on every worker at the same point, as behind
        net.load_parameters(). Momentum stays."""
        self._p3_local.broadcast()

    def weigh(self, samples):
        """The step under way trains on so many samples or tokens: as p3.torch.LocalSteps's. Once before each step, on
        every worker. Returns at once."""
        is_number = isinstance(samples, mx.nd.NDArray) and samples.size == 1
        self._p3_local.weigh(samples.asscalar() if is_number else samples)

    def stats(self):
        """step: this worker's; merges: of fragments; waits: how many of them came before the values, and waited_s: for
        how long training then waited in all; under_way: fragments sent and not merged."""
        return self._p3_local.stats()

    def release(self):
        """Ends it: the Trainer is Gluon's own again, the parameters stay as they are on each worker, and the servers
        keep nothing. On every worker at the same point."""
        self._p3_local.release()

    def state_dict(self):
        """The position in the schedule, global weights and outer momentum: numbers, strings and NumPy arrays, without
        what net.save_parameters() and trainer.save_states() save. Waits for what is under way, and for the servers."""
        return self._p3_local.outer_state()

    def load_state_dict(self, state):
        """Takes over what state_dict() gave, each worker its own: on every worker at the same point. ValueError if it
        does not fit, and then on all workers."""
        self._p3_local.require_own_weights("load_state_dict()")
        self._p3_local.load_outer_state(state)


class _Shared(InPlaceTrainer):
    """What stands between one Trainer and the job."""

    kind = "p3.mxnet.LocalSteps"

    def __init__(self, trainer, options, settings):
        self._trainer, self._kind = trainer, type(trainer)
        parameters = [one for one in trainer._params if 0 not in one.shape]
        self._shared = {_key_name(one): one for one in parameters if one.grad_req != "null"}
        self._others = [one for one in parameters if one.grad_req == "null"]
        if not trainer._kv_initialized:
            trainer._init_kvstore()  # so that a snapshot has all of it, also before the first step
        self.session = current()
        super().__init__(self.session, list(self._shared), options, settings)
        with self.beginning():
            total = sum(array.nbytes for array in self._arrays_of_others())
            self._others_key = self.session.declare("others", (total,), "uint8", self._together.store)
        resumed = self.begin()
        self._give_others()
        if resumed is not None:
            with self.beginning():
                store_snapshots.restore_trainer(trainer, resumed["trainer"])

    def _arrays_of_others(self):
        return [one.list_data()[0].asnumpy() for one in self._others]

    def _give_others(self):
        """Rank 0's running statistics, and weights that nobody trains, on every worker."""
        arrays = self._arrays_of_others()
        if not arrays:
            return
        own = np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in arrays])
        whole, begin = waiting.from_rank_0(self.session, self._others_key, own), 0
        for one, array in zip(self._others, arrays):
            content = whole[begin : begin + array.nbytes].tobytes()
            _write(one, np.frombuffer(content, array.dtype).reshape(array.shape))
            begin += array.nbytes

    # Steps

    def before_step(self):
        self.require_own_weights("a step")
        _require_no_scaler(self._trainer)
        thawed = next((one.name for one in self._others if one.grad_req != "null"), None)
        if thawed is not None:
            raise RuntimeError(
                "LocalSteps: parameter %s had grad_req='null' when LocalSteps was made, and would train on each worker "
                "alone: call trainer.release(), and LocalSteps again" % thawed
            )

    def broadcast(self):
        super().broadcast()
        self._give_others()

    # Local weights

    def shape_and_type(self, name):
        one = self._shared[name]
        return tuple(one.shape), _GLOBAL_TYPES[np.dtype(one.dtype).name]

    def local(self, name):
        return np.ascontiguousarray(self._array(name).asnumpy(), self.shape_and_type(name)[1])

    def rounded(self, name, value):
        own = np.dtype(self._shared[name].dtype)
        return None if own == value.dtype else value.astype(own).astype(value.dtype)

    def merge(self, name, value, alpha):
        if alpha < 1:
            _write(self._shared[name], value if alpha == 0 else merged(self.local(name), value, alpha))

    def _array(self, name):
        return self._shared[name].list_data()[0]

    def copied(self):
        return {name: self._array(name).copy() for name in self._shared}

    def put_back(self, own):
        for name, array in own.items():
            array.copyto(self._array(name))

    # Saved

    def own_state(self):
        return {**super().own_state(), "trainer": store_snapshots.own_of_trainer(self._trainer)}

    def release(self):
        super().release()
        self._trainer.__class__ = self._kind
        del self._trainer._p3_local


def _found(trainer):
    """What the Trainer is for, of which the table may know something. ValueError for what it cannot train so."""
    store = trainer._kvstore_params["kvstore"]
    name = store.lower() if isinstance(store, str) else getattr(store, "type", None) or ""
    if "dist" in name or name in hooks.NAMES:
        yield choices.MXNET.said("kvstore=%r" % name)
    for one in trainer._params:
        if one._data is None:
            raise ValueError("LocalSteps: parameter %s has no shape yet, or no value: call net.initialize(), and run a "
                             "forward pass before" % one.name)  # fmt: skip
        if len(one.list_ctx()) > 1:
            raise ValueError("LocalSteps: parameter %s is on %d devices: start a worker for each"
                             % (one.name, len(one.list_ctx())))  # fmt: skip
        if one._stype != "default" or (one.grad_req != "null" and np.dtype(one.dtype).name not in _GLOBAL_TYPES):
            raise ValueError("LocalSteps: parameter %s is %s of %s; it can train dense ones of %s"
                             % (one.name, one._stype, np.dtype(one.dtype).name, ", ".join(_GLOBAL_TYPES)))  # fmt: skip
        if trainer._optimizer.multi_precision and one.grad_req != "null" and np.dtype(one.dtype).name == "float16":
            raise ValueError("LocalSteps: parameter %s is float16, and the optimizer, which has multi_precision=True, "
                             "updates a copy in float32, which no exchange reaches: train in float32, or leave "
                             "multi_precision out" % one.name)  # fmt: skip
    _require_no_scaler(trainer)


def _require_no_scaler(trainer):
    if hasattr(trainer, "_amp_loss_scaler"):
        combinations.require("LocalSteps", choices.LOCAL_STEPS, choices.SCALER)


def _key_name(parameter):
    """In which a dot stands before the last part: names alike up to that are of one layer."""
    return ".".join(parameter.name.rsplit("_", 1))


def _write(parameter, value):
    """By MXNet's engine, behind what uses the weight; the value is copied at once."""
    array = parameter.list_data()[0]
    store_snapshots.to_mxnet(np.asarray(value, np.dtype(array.dtype))).copyto(array)
