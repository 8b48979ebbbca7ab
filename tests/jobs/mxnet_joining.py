"""mxnet_joining.py CASES FOLDER: workers of MXNet of whom rank 0 dies in step DIE_AT; another one takes its place
before step JOIN_AT, once FOLDER has a file "go". With P3_ON_WORKER_LOSS=continue. CASES are some of cases(), with
commas, which all train in one job, in turns, each with a store of its own. Among them may be: "grows": nobody dies, and
one more comes; "uneven": a worker has fewer steps in each epoch, and who joins has none in its first one, and all end
with join(); "exact": who dies does so between two steps; "loads": just before another one comes all load states that
were saved in step 1; "resets": just before that all change weights by themselves; "snapshots": all take them, and
a job that resumes from one repeats what was said behind that.

Each worker says a digest of each case's weights behind each step, and at the end what its optimizers have counted and a
digest of their states.
"""

import copy
import hashlib
import os
import pickle
import signal
import sys
import time

STEPS, WORKERS, DIE_AT, JOIN_AT, EPOCH, LATE = 12, 3, 3, 6, 2, 8
ROWS = 4


class Gluon:
    """A net, its Trainer and its store."""

    def __init__(self, optimizer, settings=None, options=None, net=None, prepare=None, every=1, step=None):
        import mxnet as mx
        from mxnet import gluon

        self.kv = mx.kv.create("p3_sync")
        if prepare is not None:
            prepare(self.kv)
        self.net = (net or plain)(gluon.nn)
        self.net.initialize(mx.init.Xavier())
        settings = {"learning_rate": 0.01, **(settings or {})}
        options = {"kvstore": self.kv, **(options or {})}
        self.trainer = gluon.Trainer(self.net.collect_params(), optimizer, settings, **options)
        self._every, self._step = every, step or (lambda trainer: trainer.step(ROWS))

    def begin(self, joins):
        pass

    def step(self, step, rank):
        import mxnet as mx

        if step % self._every:
            return
        mx.random.seed(100 * step + rank)
        inputs = mx.nd.random.uniform(shape=(ROWS, 8))
        with mx.autograd.record():
            loss = (self.net(inputs) ** 2).mean()
        self.backward(loss)
        self._step(self.trainer)

    def backward(self, loss):
        loss.backward()

    def join(self):
        def update(store):
            if self._step is clipped:
                clip(self.trainer)
            self.trainer.update(ROWS)

        self.kv.join(None if self.trainer._update_on_kvstore else update)

    def reset(self):
        _, parameter = min(self.net.collect_params().items())
        parameter.set_data(parameter.data() * 0.5)

    def weights(self):
        parameters = sorted(self.net.collect_params().items())
        return [one.data().asnumpy() for name, one in parameters if one.grad_req != "null"]

    def statistics(self):
        parameters = sorted(self.net.collect_params().items())
        return [one.data().asnumpy() for name, one in parameters if one.grad_req == "null"]

    @property
    def optimizer(self):
        return self.trainer._optimizer

    def save(self, path):
        self.trainer.save_states(path)

    def load(self, path):
        self.trainer.load_states(path)

    def know_late(self, path):
        pass


class Scaled(Gluon):
    """With AMP's loss scaler, whose scale grows every other step."""

    def __init__(self):
        from mxnet.contrib import amp

        super().__init__("sgd", {"momentum": 0.9}, {"compression_params": {"type": "int8"}})
        amp.init_trainer(self.trainer)
        self.scaler = self.trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
        self.scaler._loss_scale = self.scaler._next_loss_scale = 256.0
        self.scaler._scale_seq_len = 2

    def backward(self, loss):
        import mxnet as mx
        from mxnet.contrib import amp

        with mx.autograd.record(), amp.scale_loss(loss, self.trainer) as scaled:
            mx.autograd.backward(scaled)

    def weights(self):
        import numpy as np

        return [*super().weights(), np.array([self.scaler.loss_scale])]


class Rows(Gluon):
    """An embedding, of which each step touches some rows; its weight is dense, or it stays on the servers."""

    def __init__(self, optimizer, sparse_weight=False, options=None):
        from mxnet import gluon

        if sparse_weight:
            layer = gluon.contrib.nn.SparseEmbedding(30, 5)
        else:
            layer = gluon.nn.Embedding(30, 5, sparse_grad=True)
        super().__init__(optimizer, options=options, net=lambda nn: layer)
        self._is_sparse = sparse_weight

    def step(self, step, rank):
        import mxnet as mx

        rows = mx.nd.array([(step + rank) % 30, (3 * step) % 30])
        with mx.autograd.record():
            loss = (self.net(rows) ** 2).sum()
        loss.backward()
        self.trainer.step(ROWS)

    def weights(self):
        if not self._is_sparse:
            return super().weights()
        import mxnet as mx

        return [self.net.weight.row_sparse_data(mx.nd.arange(30)).asnumpy()]


class Raw:
    """Keys of the bare store: one is pushed in each step, one in every third, one from step LATE on; and one of rows
    that is declared as a plain one."""

    def __init__(self, optimizer=None, behind_first=False):
        import mxnet as mx

        self.kv = mx.kv.create("p3_sync")
        self._behind_first = behind_first
        self.optimizer = optimizer or mx.optimizer.SGD(learning_rate=0.5)
        self._weights = {key: mx.nd.zeros((4, 3)) for key in ("always", "third", "late", "rows")}

    def begin(self, joins):
        self.kv.init("always", self._weights["always"])
        if not self._behind_first or joins:
            self.kv.set_optimizer(self.optimizer)
        keys = list(self._weights)
        self.kv.broadcast(keys, list(self._weights.values()), list(self._weights.values()))

    def step(self, step, rank):
        import mxnet as mx

        due = {"always": True, "third": step % 3 == 0, "late": step >= LATE, "rows": True}
        for key in self._weights:
            gradient = mx.nd.full((4, 3), 4.0**rank)
            if key == "rows":
                row = (step + rank) % 4
                gradient = mx.nd.sparse.row_sparse_array((gradient[:1], [row]), shape=(4, 3))
            if due[key]:
                self.kv.push(key, gradient)
        if self._behind_first and step == 0:
            self.kv.set_optimizer(self.optimizer)
        for key, weight in self._weights.items():
            self.kv.pull(key, weight)

    def weights(self):
        return [weight.asnumpy() for weight in self._weights.values()]

    def statistics(self):
        return []

    def save(self, path):
        self.kv.save_optimizer_states(path)

    def load(self, path):
        self.kv.load_optimizer_states(path)

    def know_late(self, path):
        """The file has a state of the key that was not pushed yet."""
        with open(path, "rb") as file:
            states = pickle.load(file)
        with open(path, "wb") as file:
            pickle.dump({**states, "late": copy.deepcopy(states["always"])}, file)


def plain(nn):
    net = nn.Sequential()
    net.add(nn.Dense(50, in_units=8, activation="tanh"), nn.Dense(3, in_units=50))
    return net


def normed(nn):
    net = nn.Sequential()
    net.add(nn.Dense(50, in_units=8), nn.BatchNorm(in_channels=50), nn.Dense(3, in_units=50))
    return net


def deferred(nn):
    net = nn.Sequential()
    net.add(nn.Dense(50), nn.BatchNorm(), nn.Dense(3))
    return net


def half(nn):
    """MXNet multiplies float16 matrices on GPUs alone."""

    class Dense(nn.Dense):
        def hybrid_forward(self, F, x, weight, bias):
            return super().hybrid_forward(F, x, weight.astype("float32"), bias.astype("float32"))

    net = nn.Sequential()
    net.add(Dense(50, in_units=8), Dense(3, in_units=50))
    net.cast("float16")
    return net


def scheduled(mx):
    return {"lr_scheduler": mx.lr_scheduler.FactorScheduler(step=4, factor=0.7, base_lr=0.02)}


def clip(trainer):
    import p3.mxnet

    p3.mxnet.clip_global_norm(trainer, 0.01)


def clipped(trainer):
    trainer.allreduce_grads()
    clip(trainer)
    trainer.update(ROWS)


def cases():
    import mxnet as mx

    here = {"update_on_kvstore": False}
    compressed = lambda **how: {"compression_params": how}  # noqa: E731
    return {
        "sgd": lambda: Gluon("sgd", {"momentum": 0.9, **scheduled(mx)}, net=normed),
        "adam": lambda: Gluon("adam", scheduled(mx)),
        "nadam": lambda: Gluon("nadam", every=3),
        "ftml": lambda: Gluon("ftml", net=deferred, every=2),
        "dcasgd": lambda: Gluon("dcasgd", {"momentum": 0.5}),
        "adam here": lambda: Gluon("adam", scheduled(mx), here, deferred),
        "nadam here": lambda: Gluon("nadam", None, here, normed, every=2),
        "lamb": lambda: Gluon("lamb", scheduled(mx), {"update_on_kvstore": True}),
        "lbsgd": lambda: Gluon("lbsgd", {"momentum": 0.9, "batch_scale": 3}, {"update_on_kvstore": True}),
        "rows": lambda: Rows("adam"),
        "rows here": lambda: Rows("adam", options=here),
        "sparse weights": lambda: Rows("sgd", True),
        "named": lambda: Gluon("adam", None, {**here, "kvstore": "p3_sync"}),
        "raw": Raw,
        "raw adam": lambda: Raw(mx.optimizer.Adam(learning_rate=0.1)),
        "raw lamb": lambda: Raw(mx.optimizer.LAMB(learning_rate=0.1)),
        "raw behind": lambda: Raw(mx.optimizer.Adam(learning_rate=0.1), behind_first=True),
        "fp16": lambda: Gluon("sgd", {"momentum": 0.9}, compressed(type="fp16")),
        "fp16 here": lambda: Gluon("sgd", {"momentum": 0.9}, {**compressed(type="fp16"), **here}),
        "2bit": lambda: Gluon("sgd", {"momentum": 0.9}, compressed(type="2bit", threshold=0.001)),
        "both ways": lambda: Gluon("adam", None, compressed(type="int8", down="int8")),
        "average": lambda: Gluon("sgd", {"momentum": 0.9}, prepare=lambda kv: kv.set_reduction("average")),
        "half": lambda: Gluon("sgd", {"momentum": 0.9, "multi_precision": True}, net=half),
        "half here": lambda: Gluon("adam", {"multi_precision": True}, here, half),
        "scaled": Scaled,
        "clipping": lambda: Gluon("adam", None, here, step=clipped, prepare=lambda kv: kv.set_clipping()),
    }


def digest(arrays):
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def shown(content):
    """Of a file of states, whose bytes depend on which of its objects are one."""
    if hasattr(content, "asnumpy"):
        return "%s of %s: %s" % (content.stype, content.dtype, content.asnumpy().tobytes().hex())
    if isinstance(content, dict):
        return "{%s}" % ", ".join("%r: %s" % (name, shown(one)) for name, one in content.items())
    if isinstance(content, (list, tuple)):
        return "[%s]" % ", ".join(map(shown, content))
    return shown(vars(content)) if hasattr(content, "__dict__") else repr(content)


def counted(optimizer):
    counts = {device: sorted(map(str, one.items())) for device, one in optimizer._all_index_update_counts.items()}
    schedule = getattr(optimizer, "m_schedule", None)
    return "%s %s %r %r" % (optimizer.num_update, counts, schedule, optimizer.learning_rate)


def main(names, folder):
    names = names.split(",")
    options = [name for name in names if name in ("grows", "uneven", "exact", "loads", "resets", "snapshots")]
    names = [name for name in names if name not in options]
    import mxnet as mx
    import numpy as np
    import p3  # noqa: F401

    if "scaled" in names:
        from mxnet.contrib import amp

        amp.init("float16", target_precision_ops=[])  # a CPU has few of half precision
    joins = "P3_JOIN" in os.environ
    mx.random.seed(2 if joins else 1)  # other weights, where they are to come from the others
    np.random.seed(2 if joins else 1)
    made = cases()
    trained = {name: made[name]() for name in names}
    first_kv = next(iter(trained.values())).kv
    trainers = [one.trainer for one in trained.values() if isinstance(one, Gluon)]
    first, state = first_kv.resume(trainer=trainers)
    resumes = "snapshots" in options and first > JOIN_AT
    wanted = (JOIN_AT, {"seed": JOIN_AT, "array": [1.5]}) if joins else (first if resumes else 0, {})
    assert (first, state) == wanted, (first, state)
    for one in trained.values():
        one.begin(joins)
    rank = first_kv.rank

    def say(what, name, value):
        print("worker %d: %s of %s: %s" % (rank, what, name, value), flush=True)

    def say_states(what, name):
        path = os.path.join(folder, "%s of %d" % (name, rank))
        trained[name].save(path)
        with open(path, "rb") as file:
            say(what, name, hashlib.sha256(shown(pickle.load(file)).encode()).hexdigest()[:16])

    for step in range(first, STEPS):
        if step == JOIN_AT and not joins:
            print("worker %d waits for go" % rank, flush=True)
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.01)
        if "loads" in options and step in (1, JOIN_AT) and not joins:
            for name, one in trained.items():
                path = os.path.join(folder, name)
                if step == JOIN_AT:
                    one.load(path)
                elif rank == 1:
                    one.save(path)
                    one.know_late(path)
            first_kv._barrier()
        if "resets" in options and step == JOIN_AT and not joins:
            for one in trained.values():
                one.reset()
        if step % EPOCH == 0:
            members = first_kv.members(step, {"seed": step, "array": [1.5]})
            print("worker %d at %d knows %s" % (rank, step, list(members)), flush=True)
            if step == JOIN_AT:
                for name, one in trained.items():
                    say("weights behind %d" % (step - 1), name, digest(one.weights()))
                    say("statistics", name, digest(one.statistics()))
                    say_states("states behind %d" % (step - 1), name)
        dies = step == DIE_AT and rank == 0 and "grows" not in options
        if step == DIE_AT and "exact" in options:
            first_kv._barrier()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        takes = "uneven" not in options or ((rank != 1 or step % EPOCH == 0) and not (joins and step < JOIN_AT + EPOCH))
        if takes:
            for one in trained.values():
                one.step(step, rank)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if "uneven" in options and step % EPOCH == EPOCH - 1:
            next(iter(trained.values())).join()
        for name, one in trained.items():
            if takes or step % EPOCH == EPOCH - 1:
                say("weights behind %d" % step, name, digest(one.weights()))
        if "snapshots" in options:
            first_kv.snapshot(step + 1, trainer=trainers)
    for name, one in trained.items():
        say("counts", name, counted(one.optimizer))
        say_states("states", name)
        if name == "raw":
            say("ends", name, [weight[:, 0].tolist() for weight in one.weights()])
    first_kv._barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
