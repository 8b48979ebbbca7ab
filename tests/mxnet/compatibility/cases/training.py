"""Training with Gluon's Trainer. A script is run twice: by this worker, and by one process on the joined batch, without
a store. Both must come to the same weights."""

import numpy as np

from compatibility.registry import case, expect, expect_close, expect_equal

GLUON = "Gluon"
BATCH, FEATURES = 8, 5


class Training:
    """A small net in training. With a store, on this worker's share of each batch; without, on all of it."""

    def __init__(self, mx, kv, optimizer="sgd", update_on_kvstore=None, in_units=FEATURES, net=None, **settings):
        self.mx, self.kv = mx, kv
        self.net = net or make_net(mx, in_units)
        self.settings = settings or {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
        self.optimizer, self.update_on_kvstore = optimizer, update_on_kvstore if kv is not None else None
        self._trainer = None
        self._data = np.random.RandomState(5)

    @property
    def trainer(self):
        """Made at first use: after what a script sets on the parameters."""
        if self._trainer is None:
            self._trainer = self.mx.gluon.Trainer(
                self.net.collect_params(), self.optimizer, self.settings, kvstore=self.kv,
                update_on_kvstore=self.update_on_kvstore,
            )  # fmt: skip
        return self._trainer

    def backward(self, batch=BATCH):
        x, y = self._data.uniform(-1, 1, (batch, FEATURES)), self._data.uniform(-1, 1, (batch, 2))
        share = batch // self.kv.num_workers if self.kv is not None else batch
        first = self.kv.rank * share if self.kv is not None else 0
        x, y = (self.mx.nd.array(part[first : first + share]) for part in (x, y))
        with self.mx.autograd.record():
            loss = ((self.net(x) - y) ** 2).sum()
        loss.backward()

    def step(self, batch=BATCH, times=1):
        for _ in range(times):
            self.backward(batch)
            self.trainer.step(batch)

    def weights(self):
        return [parameter.data().asnumpy() for parameter in self.net.collect_params().values()]


def make_net(mx, in_units=FEATURES):
    """The same first weights on every worker, as Trainer only sends them after the first gradients."""
    mx.random.seed(3)
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(6, activation="tanh", in_units=in_units))
        net.add(mx.gluon.nn.Dense(2, in_units=6 if in_units else 0))
    net.initialize(mx.init.Xavier())
    return net


def follows(mx, kv, script, tolerance=1e-5, **settings):
    """The script, run with the store, comes to the weights that it comes to in one process."""
    start, worker, alone = make_net(mx), Training(mx, kv, **settings), Training(mx, None, **settings)
    for training in (worker, alone):
        mx.random.seed(3)  # deferred weights are drawn in the first step
        script(training)
    for got, expected in zip(worker.weights(), alone.weights()):
        expect_close(got, expected, tolerance)
    first = [parameter.data().asnumpy() for parameter in start.collect_params().values()]
    moved = any(np.abs(a - b).max() > 1e-4 for a, b in zip(first, alone.weights()))
    expect(moved, "the case is at fault: nothing was learnt")


@case(GLUON)
def trainer_dense(mx, kv):
    """`Trainer`, updating on the store"""
    follows(mx, kv, lambda training: training.step(times=4), update_on_kvstore=True)


@case(GLUON)
def trainer_default(mx, kv):
    """`Trainer`, default `update_on_kvstore`"""
    follows(mx, kv, lambda training: training.step(times=4))


@case(GLUON)
def trainer_updates_on_workers(mx, kv):
    """`Trainer`, `update_on_kvstore=False`"""
    follows(mx, kv, lambda training: training.step(times=4), update_on_kvstore=False)


@case(GLUON, creates_store=True)
def trainer_string(mx, store):
    """`Trainer(kvstore=...)` with the name as a string, each worker on the same data"""
    training = Training(mx, None)
    # Half of the batch's loss on each of the two workers: the sum is that of one process.
    training._trainer = mx.gluon.Trainer(
        training.net.collect_params(), "sgd", dict(training.settings, rescale_grad=0.5), kvstore=store
    )
    training.step(times=4)
    alone = Training(mx, None)
    alone.step(times=4)
    for got, expected in zip(training.weights(), alone.weights()):
        expect_close(got, expected)


@case(GLUON)
def deferred_initialisation(mx, kv):
    """deferred initialisation"""
    follows(mx, kv, lambda training: training.step(times=3), in_units=0)


@case(GLUON)
def grad_req_add(mx, kv):
    """`grad_req="add"`: gradients of several passes"""

    def script(training):
        training.net.collect_params().setattr("grad_req", "add")
        for _ in range(2):
            training.backward()
            training.step()
            training.net.collect_params().zero_grad()

    follows(mx, kv, script)


@case(GLUON)
def frozen_parameters(mx, kv):
    """`grad_req="null"`: frozen parameters"""

    def script(training):
        frozen = training.net[0].collect_params()
        frozen.setattr("grad_req", "null")
        before = training.net[0].weight.data().asnumpy()
        training.step(times=3)
        expect_equal(training.net[0].weight.data(), before)

    follows(mx, kv, script)


@case(GLUON)
def allreduce_then_update(mx, kv):
    """`allreduce_grads`, then `update`"""

    def script(training):
        for _ in range(3):
            training.backward()
            training.trainer.allreduce_grads()
            training.trainer.update(BATCH)

    follows(mx, kv, script, update_on_kvstore=False)


@case(GLUON)
def clipping_by_global_norm(mx, kv):
    """clipping by global norm"""

    def script(training):
        for _ in range(3):
            training.backward()
            training.trainer.allreduce_grads()
            gradients = [parameter.grad() for parameter in training.net.collect_params().values()]
            norm = mx.gluon.utils.clip_global_norm(gradients, 0.5)
            expect(norm > 0.5, "the case is at fault: nothing was clipped")
            training.trainer.update(BATCH)

    follows(mx, kv, script, update_on_kvstore=False)


@case(GLUON)
def save_and_load_trainer_states(mx, kv):
    """`save_states`, `load_states` midway: as an uninterrupted run"""
    first = Training(mx, kv)
    first.step(times=3)
    names = ["worker%d.%s" % (kv.rank, kind) for kind in ("params", "states")]
    first.net.save_parameters(names[0])
    first.trainer.save_states(names[1])
    second = Training(mx, mx.kv.create(kv.type))
    second.net.load_parameters(names[0])
    second.trainer.load_states(names[1])
    second._data.set_state(first._data.get_state())
    first.step(times=3)
    second.step(times=3)
    for got, expected in zip(second.weights(), first.weights()):
        expect_equal(got, expected)


@case(GLUON)
def set_learning_rate(mx, kv):
    """`set_learning_rate` takes effect at the next step"""

    def script(training):
        for rate in (0.1, 0.01, 0.2):
            training.trainer.set_learning_rate(rate)
            training.step()

    follows(mx, kv, script)


@case(GLUON)
def lr_scheduler(mx, kv):
    """`lr_scheduler`"""

    def script(training):
        training.settings["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5)
        training.step(times=4)

    follows(mx, kv, script)


@case(GLUON)
def changed_batch_size(mx, kv):
    """another batch size in each step"""

    def script(training):
        for batch in (8, 4, 16):
            training.step(batch)

    follows(mx, kv, script)


@case(GLUON)
def multipliers(mx, kv):
    """`lr_mult` and `wd_mult` of a parameter"""

    def script(training):
        training.net[0].weight.lr_mult = 0.1
        training.net[1].weight.wd_mult = 20.0
        training.net[1].bias.lr_mult = 0.0
        training.step(times=3)

    follows(mx, kv, script)


@case(GLUON)
def load_parameters_later(mx, kv):
    """`load_parameters` after training began"""

    def script(training):
        path = "parameters%d" % (kv.rank if training.kv is not None else 2 + kv.rank)
        training.net.save_parameters(path)
        training.step(times=2)
        training.net.load_parameters(path)
        training.step(times=2)

    follows(mx, kv, script, learning_rate=0.1)  # no momentum: loading makes Trainer set its store up anew


def _hybridized(**flags):
    def script(training):
        training.net.hybridize(**flags)
        training.step(times=3)

    return lambda mx, kv: follows(mx, kv, script)


case(GLUON, "`hybridize()`", "hybridize")(_hybridized())
case(GLUON, "`hybridize(static_alloc=True)`", "hybridize_static_alloc")(_hybridized(static_alloc=True))
case(GLUON, "`hybridize(static_alloc=True, static_shape=True)`", "hybridize_static_shape")(
    _hybridized(static_alloc=True, static_shape=True)
)


@case(GLUON, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def naive_engine(mx, kv):
    """`MXNET_ENGINE_TYPE=NaiveEngine`"""
    follows(mx, kv, lambda training: training.step(times=3))


@case(GLUON)
def two_trainers(mx, kv):
    """two stores in one process: the two Trainers of a GAN"""
    stores = [kv, mx.kv.create(kv.type)]

    def run(first, second):
        trainings = [Training(mx, first), Training(mx, second, "adam", learning_rate=0.01)]
        for _ in range(3):
            for training in trainings:
                training.step()
        return [weight for training in trainings for weight in training.weights()]

    for got, expected in zip(run(*stores), run(None, None)):
        expect_close(got, expected)


@case(GLUON)
def sparse_gradient(mx, kv):
    """`Embedding(sparse_grad=True)`: a dense weight with sparse gradients"""
    _embedding(mx, kv, "sgd", sparse_grad=True)


@case(GLUON)
def dense_embedding(mx, kv):
    """`Embedding`, dense"""
    _embedding(mx, kv, "sgd", sparse_grad=False)


def _embedding(mx, kv, optimizer, sparse_grad):
    def run(store):
        mx.random.seed(3)
        net = mx.gluon.nn.Embedding(20, 4, sparse_grad=sparse_grad, prefix="embedding_")
        net.initialize(mx.init.Uniform(1))
        trainer = mx.gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1}, kvstore=store)
        tokens = np.random.RandomState(1).randint(0, 20, (3, 8))
        for row in tokens:
            x = row if store is None else row[kv.rank * 4 : kv.rank * 4 + 4]
            with mx.autograd.record():
                loss = (net(mx.nd.array(x)) ** 2).sum()
            loss.backward()
            trainer.step(8)
        return net.weight.data()

    expect_close(run(kv), run(None))
