"""What P3 changes in MXNet, once, when MXNet is imported (hooks.py).

- `p3_sync`, `p3_async` and `p3_ssp`, with "dist_" before them or not, become names of stores, also where MXNet takes
  only names that contain "dist".
- The order of the forward pass is noted (forward_order.py).
- Gluon's Trainer may change its batch size and load new values while it trains with a P3 store; for all other stores
  it refuses as before.
- With AMP's loss scaler and a P3 store, Trainer updates on the workers unless told otherwise: a step whose gradients
  have overflowed must be left out, and MXNet looks for the overflow only after the gradients have been pushed. What
  compression has left out follows the scale, and forgets such a step. dgc, which cannot leave a step out, is refused.
- A P3 store hears where the pushes of a Trainer's step end, and where its updates begin (clipping.py).
- With a P3 store Trainer also updates on the workers where gradients are row_sparse; for other distributed stores it
  refuses as before.
- Module synchronises its first weights also where the store does not update them.
- In a distributed worker, operators are not bulked: a bulk of 15 waits for the weights of all its layers.
"""

import functools
import logging
import weakref

from p3 import codecs
from p3.mxnet import forward_order
from p3.mxnet.hooks import KINDS, NAMES, is_distributed_worker
from p3.plan import choices, combinations

log = logging.getLogger("p3")


def plug_in(mxnet, store_type):
    """Changes MXNet. Called once, by the module of the store when that is imported."""
    for kind in KINDS:
        make = functools.partial(store_type, kind)
        mxnet.kvstore.KVStoreBase.kv_registry.update({kind: make, "dist_" + kind: make})
    forward_order.watch(mxnet.gluon)
    _adapt_trainer(mxnet.gluon.Trainer, store_type)
    for module in (mxnet.gluon.trainer, mxnet.module.module, mxnet.model):
        module._create_kvstore = _accepting_p3s_names(module._create_kvstore)
    for module in (mxnet.module.module, mxnet.model):
        module._initialize_kvstore = _giving_first_weights(module._initialize_kvstore, store_type)
    if is_distributed_worker():
        mxnet.ndarray.CachedOp = _unbulked(mxnet.ndarray.CachedOp)


def _adapt_trainer(trainer, store_type):
    rescale, reset, init = trainer._check_and_rescale_grad, trainer._reset_kvstore, trainer._init_kvstore
    reduce, update = trainer._allreduce_grads, trainer._update

    @functools.wraps(rescale)
    def _check_and_rescale_grad(self, scale):
        if isinstance(self._kvstore, store_type):
            self._optimizer.rescale_grad = scale  # travels with every push
        else:
            rescale(self, scale)

    @functools.wraps(reset)
    def _reset_kvstore(self):
        if isinstance(self._kvstore, store_type):
            store = self._kvstore.store
            store.expect_new_values()
            store.reset_trainer = weakref.ref(self)
            self._kvstore_params["kvstore"] = self._kvstore  # also for who gave a name, which would make another store
            self._kvstore = None  # what MXNet refuses to reset; the next step sets it up again
        reset(self)

    @functools.wraps(init)
    def _init_kvstore(self):
        config = self._kvstore_params
        kvstore = config["kvstore"]
        is_p3 = isinstance(kvstore, store_type) or (isinstance(kvstore, str) and kvstore.lower() in NAMES)
        scaled = getattr(self, "_amp_loss_scaler", None) is not None
        given = self._compression_params
        ways = codecs.ways_of_mxnet(given) if is_p3 and isinstance(given, dict) else codecs.Ways()
        if isinstance(kvstore, store_type):
            of_store = kvstore.store.compression
            ways = codecs.Ways(ways.up or of_store.up, ways.down or of_store.down)
        if is_p3 and scaled:
            back = [] if config["update_on_kvstore"] else choices.of_sums_back(ways.down)
            combinations.require("Trainer", choices.of_compression(ways.up), *back, choices.SCALER)
        if is_p3 and scaled and config["update_on_kvstore"] is None:
            log.warning("a loss scaler is in use: the workers update the weights, and steps that overflow are skipped")
            config["update_on_kvstore"] = False
        elif is_p3 and scaled and config["update_on_kvstore"]:
            log.warning(
                "a loss scaler is in use with update_on_kvstore=True: the servers update before MXNet looks for an "
                "overflow, so one is in the weights. Leave update_on_kvstore out, or set it to False"
            )
        summed = is_p3 and config["update_on_kvstore"] is False
        if not summed or not self._contains_sparse_grad or self._contains_sparse_weight:
            init(self)
        else:
            self._contains_sparse_grad = False  # for which MXNet would refuse
            try:
                init(self)
            finally:
                self._contains_sparse_grad = True
            self._distributed = False  # as which it would not pull row_sparse sums
        if is_p3:
            self._kvstore.store.priorities.know_parameters(dict(enumerate(self._params)))

    @functools.wraps(reduce)
    def _allreduce_grads(self):
        if not isinstance(self._kvstore, store_type):
            return reduce(self)
        store, scaler = self._kvstore.store, getattr(self, "_amp_loss_scaler", None)
        if scaler is not None:
            store.follow_loss_scale(scaler.loss_scale)
        store.begin_pushes(self._optimizer)
        reduce(self)
        store.end_pushes()

    @functools.wraps(update)
    def _update(self, *arguments, **named):
        if not isinstance(self._kvstore, store_type):
            return update(self, *arguments, **named)
        store, scaler = self._kvstore.store, getattr(self, "_amp_loss_scaler", None)
        store.end_step()
        if scaler is None or self._update_on_kvstore:
            return update(self, *arguments, **named)
        has_overflow = scaler.has_overflow

        def and_forget(parameters):
            overflows = has_overflow(parameters)
            if overflows:
                store.leave_out(i for i, parameter in enumerate(self._params) if parameter.grad_req != "null")
            store.follow_loss_scale(scaler.loss_scale)  # a snapshot that follows has both as they belong together
            return overflows

        scaler.has_overflow = and_forget
        try:
            return update(self, *arguments, **named)
        finally:
            del scaler.has_overflow

    trainer._check_and_rescale_grad = _check_and_rescale_grad
    trainer._allreduce_grads, trainer._update = _allreduce_grads, _update
    trainer._reset_kvstore = _reset_kvstore
    trainer._init_kvstore = _init_kvstore


def _giving_first_weights(initialize, store_type):
    @functools.wraps(initialize)
    def _initialize_kvstore(kvstore, param_arrays, arg_params, param_names, update_on_kvstore):
        updates_here = isinstance(kvstore, store_type) and not update_on_kvstore
        if updates_here and kvstore.store.session.snapshots.directory is not None:
            combinations.require("Module", choices.BY_MODULE, choices.SNAPSHOTS)
        if updates_here:
            entrance = kvstore.store.session.entrance
            entrance.exclude(choices.BY_MODULE, "Modules that update, whose weights nobody hands on")
        initialize(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
        if updates_here:
            for name, arrays in zip(param_names, param_arrays):
                kvstore.pull(name, out=arrays)

    return _initialize_kvstore


def _accepting_p3s_names(create):
    """MXNet silently trains without any store when the name has no "dist" in it and there is one device."""

    @functools.wraps(create)
    def _create_kvstore(kvstore, num_device, arg_params):
        if isinstance(kvstore, str) and kvstore.lower() in KINDS:
            kvstore = "dist_" + kvstore.lower()
        return create(kvstore, num_device, arg_params)

    return _create_kvstore


def _unbulked(cached_op):
    """Hybridized blocks whose operators run one by one, unless the user asked for a bulk size himself."""

    class CachedOp(cached_op):
        __slots__ = ()

        def __init__(self, sym, flags=()):
            flags = list(flags)
            given = {name for name, _ in flags}
            flags += [(name, 1) for name in ("forward_bulk_size", "backward_bulk_size") if name not in given]
            super().__init__(sym, flags)

    return CachedOp
