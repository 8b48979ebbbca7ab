"""Jobs that clip Gluon's gradients by their global norm, one function for each: gluon_clipping.py NAME...

Most train the same net with plain MXNet as well, on the joined batch and with gluon.utils.clip_global_norm.
"""

import gc
import hashlib
import math
import sys
import time

import numpy as np

import p3
import mxnet as mx
from mxnet import gluon

import this_job
from p3.mxnet import clip_global_norm

STEPS, ROWS, WORDS = 6, 4, 30
NORM = 4.0  # every second step is above it, on up to four workers
SGD = "sgd", {"learning_rate": 0.01, "momentum": 0.9, "wd": 0.01}
ADAM = "adam", {"learning_rate": 0.01}


class Net(gluon.Block):
    """With rows or without, a weight that is frozen, and one that the others' gradients do not depend on."""

    def __init__(self, sparse, **named):
        super().__init__(**named)
        with self.name_scope():
            self.words = gluon.nn.Embedding(WORDS, 6, sparse_grad=sparse)
            self.body = gluon.nn.Dense(6, in_units=6, activation="tanh", flatten=False)
            self.frozen = gluon.nn.Dense(6, in_units=6)
            self.head = gluon.nn.Dense(3, in_units=6)
            self.shift = self.params.get("shift", shape=(3,), init="zeros")
        self.frozen.collect_params().setattr("grad_req", "null")

    def forward(self, ids):
        return self.head(self.frozen(self.body(self.words(ids)).mean(axis=1)))


def made(sparse=False, devices=(mx.cpu(),), dtype="float32"):
    mx.random.seed(3)
    np.random.seed(3)
    net = Net(sparse, prefix="net_")
    net.initialize(mx.init.Xavier(), ctx=list(devices))
    net.cast(dtype)
    return net


def gradients(net, step, workers, devices=(mx.cpu(),), factor=1.0):
    """Of the workers' batches together, shared out to the devices."""
    batches = [np.random.RandomState(100 * worker + step).randint(0, WORDS, (ROWS, 3)) for worker in workers]
    ids = np.concatenate(batches)
    share = len(ids) // len(devices)
    losses = []
    with mx.autograd.record():
        for place, device in enumerate(devices):
            output = net(mx.nd.array(ids[place * share : (place + 1) * share], device))
            shift = net.shift.data(device).astype("float32")
            loss = ((output.astype("float32") * (0.5, 20.0)[step % 2]) ** 2).sum() * factor
            losses.append(loss + shift.sum() * share * 0.1)
    mx.autograd.backward(losses)


class Pair:
    """A net that P3 trains and one that plain MXNet trains, step by step."""

    def __init__(self, optimizer=SGD, sparse=False, devices=(mx.cpu(),), dtype="float32", kv=None, **options):
        if kv is None:
            kv = mx.kv.create("p3_sync")
            kv.set_clipping()
        self.kv, self.devices = kv, devices
        self.net, self.plain = made(sparse, devices, dtype), made(sparse, dtype=dtype)
        name, settings = optimizer
        self.trainer = gluon.Trainer(
            self.net.collect_params(), name, dict(settings), kvstore=kv, update_on_kvstore=False, **options
        )
        self.reference = gluon.Trainer(self.plain.collect_params(), name, dict(settings), kvstore=None)

    def reduce(self, step, **named):
        gradients(self.net, step, [self.kv.rank], self.devices, **named)
        self.trainer.allreduce_grads()

    def update(self):
        self.trainer.update(ROWS * self.kv.num_workers)

    def step(self, step, norm):
        """Returns the norm."""
        self.reduce(step)
        told = clip_global_norm(self.trainer, norm)
        self.update()
        return told

    def step_plain(self, step, norm=None, workers=None):
        """Returns the norm; None: it does not clip."""
        workers = range(self.kv.num_workers) if workers is None else workers
        gradients(self.plain, step, workers)
        found = None
        if norm is not None:
            found = clip_plain(grads_of(self.plain), norm)
        self.reference.step(ROWS * self.kv.num_workers)
        return found

    def compare(self, where, tolerance=1e-6):
        for name, expected in self.plain.collect_params().items():
            for value in self.net.collect_params()[name].list_data():
                difference = abs(value.asnumpy() - expected.data().asnumpy()).max()
                assert difference < tolerance, (where, name, difference)

    def digest(self):
        digest = hashlib.sha256()
        for parameter in self.net.collect_params().values():
            digest.update(parameter.list_data()[0].asnumpy().tobytes())
        return digest.hexdigest()[:16]


def grads_of(net):
    return [one.list_grad()[0] for one in net.collect_params().values() if one.grad_req != "null"]


def clip_plain(arrays, norm):
    if arrays[0].dtype == np.float32:
        return gluon.utils.clip_global_norm(arrays, norm, check_isfinite=False).asscalar()
    found = norm_of(arrays)  # MXNet's takes no other type
    for one in arrays:
        one *= min(1, norm / (found + 1e-8))
    return found


def norm_of(arrays):
    return math.sqrt(sum((one.asnumpy().astype("float64") ** 2).sum() for one in arrays))


def close(told, expected, tolerance=1e-6):
    assert told.shape == (1,)
    assert abs(told.asscalar() - expected) <= tolerance * expected, (told.asscalar(), expected)


def trained():
    """Equal to plain MXNet after each step; the bits that all workers end with are printed."""
    cases = {
        "sgd": {}, "adam": {"optimizer": ADAM}, "rows": {"sparse": True}, "double": {"dtype": "float64"},
        "two devices": {"devices": (mx.cpu(0), mx.cpu(1))},
        "rows on two devices": {"devices": (mx.cpu(0), mx.cpu(1)), "sparse": True},
    }  # fmt: skip
    for name, case in cases.items():
        pair = Pair(**case)
        clipped = []
        for step in range(STEPS):
            told = pair.step(step, NORM)
            expected = pair.step_plain(step, NORM)
            if step % 3 < 2:  # in others nobody reads it
                close(told, expected)
            clipped.append(expected > NORM)
            pair.compare((name, step))
        assert {*clipped} == {False, True}, (name, clipped)
        print("worker %d: %s ends with %s" % (pair.kv.rank, name, pair.digest()))


def averaged():
    """Of averages the norm is that of averages, and update() is given one worker's batch size."""
    kv = mx.kv.create("p3_sync")
    kv.set_reduction("average")
    kv.set_clipping()
    pair = Pair(kv=kv)
    for step in range(STEPS):
        pair.reduce(step)
        close(clip_global_norm(pair.trainer, NORM), pair.step_plain(step, NORM * kv.num_workers) / kv.num_workers)
        pair.trainer.update(ROWS)
        pair.compare(step)
    print("worker %d clipped averages" % kv.rank)


def compressed():
    """The norm is that of the sums as they come."""
    for kind in ({"type": "2bit", "threshold": 0.5}, {"type": "fp16"}, {"type": "int8", "down": "int8"}):
        pair = Pair(compression_params=kind)
        for step in range(STEPS):
            pair.reduce(step)
            told = clip_global_norm(pair.trainer, math.inf)
            close(told, norm_of(grads_of(pair.net)), 1e-5)
            pair.update()
    print("worker %d knows the norm of compressed sums" % pair.kv.rank)


def half():
    """float16 gradients."""
    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    parameters = gluon.ParameterDict()
    weights = [parameters.get(name, shape=(200,), dtype="float16", init="ones") for name in "ab"]
    parameters.initialize()
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=kv, update_on_kvstore=False)
    with mx.autograd.record():
        loss = sum((one.data() * factor).sum() for one, factor in zip(weights, (3, 4)))
    loss.backward()
    trainer.allreduce_grads()
    close(clip_global_norm(trainer, 2 * kv.num_workers), 5 * kv.num_workers * math.sqrt(200))
    trainer.update(kv.num_workers)
    for weight, factor in zip(weights, (3, 4)):
        np.testing.assert_allclose(weight.data().asnumpy(), 1 - factor / 5 / math.sqrt(200), rtol=2e-3)

    with mx.autograd.record():  # sums of 20,000 and 30,000, to be clipped by a factor that float16 does not have
        loss = sum((one.data() * (factor * 1e4 / kv.num_workers)).sum() for one, factor in zip(weights, (2, 3)))
    loss.backward()
    trainer.allreduce_grads()
    sums = [one.grad().asnumpy() for one in weights]
    norm = clip_global_norm(trainer, 0.01).asscalar()
    for one, before in zip(weights, sums):
        expected = (before.astype("float32") * np.float32(0.01 / norm)).astype("float16")
        assert expected.min() > 3e-4 and (one.grad().asnumpy() == expected).all(), (one.grad(), expected)
    print("worker %d clipped half precision" % kv.rank)


def now_and_then():
    """Steps may be clipped by another norm each, twice, or not at all; and layers may be frozen and thawed."""
    pair = Pair()
    for step in range(3 * STEPS):
        if step % 4 == 2:
            state = ("write", "null")[step % 8 == 2]
            for net in (pair.net, pair.plain):
                net.head.collect_params().setattr("grad_req", state)
        pair.reduce(step)
        gradients(pair.plain, step, range(pair.kv.num_workers))
        for norm in ([], [3.0], [5.0, 2.0], [math.inf, 1.0])[step % 4]:
            expected = norm_of(grads_of(pair.plain))
            gluon.utils.clip_global_norm(grads_of(pair.plain), norm)
            close(clip_global_norm(pair.trainer, norm), expected, 2e-6)
        pair.update()
        pair.reference.step(ROWS * pair.kv.num_workers)
        pair.compare(step)
    pair.reduce(step)  # is left out
    for step in range(2):
        gradients(pair.net, step, [pair.kv.rank])
        pair.trainer.step(ROWS * pair.kv.num_workers)
        pair.step_plain(step)
    pair.compare("unclipped")
    print("worker %d clips as it likes" % pair.kv.rank)


def two_stores():
    """Each has a norm of its own, which the other's rounds do not count in."""
    pairs = [Pair(), Pair(ADAM, sparse=True)]
    for step in range(STEPS):
        norms = [pair.step(step + 1, NORM + turn) for turn, pair in enumerate(pairs)]
        for turn, pair in enumerate(pairs):
            close(norms[turn], pair.step_plain(step + 1, NORM + turn))
            pair.compare((turn, step))
        if step % 2:
            pairs[1].step(step, NORM)
            pairs[1].step_plain(step, NORM)
    print("worker %d clipped two nets" % pairs[0].kv.rank)


def not_finite():
    """All workers find the same, whoever has the bad element; who reads the norm may leave out the step."""
    for bad in (math.inf, math.nan):
        pair = Pair()
        for step in range(STEPS):
            is_bad = step % 3 == 1
            pair.reduce(step, factor=bad if is_bad and pair.kv.rank == step % pair.kv.num_workers else 1.0)
            norm = clip_global_norm(pair.trainer, NORM)
            assert math.isfinite(norm.asscalar()) != is_bad, (step, norm)
            if not is_bad:
                pair.update()
                pair.step_plain(step, NORM)
            pair.compare((bad, step))
    pair.reduce(0, factor=bad if pair.kv.rank == 0 else 1.0)
    clip_global_norm(pair.trainer, NORM)
    pair.update()
    assert np.isnan(pair.net.shift.data().asnumpy()).all(), "it scales as well"
    print("worker %d left out what was not finite" % pair.kv.rank)


def never_waits():
    """Neither clip_global_norm() nor update() waits for the network; reading the norm does."""
    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    net = gluon.nn.Dense(1000, in_units=2000)  # 8 MB: more than the rings and sockets between them hold
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv, update_on_kvstore=False)

    def step():
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 2000))).sum()
        loss.backward()
        trainer.allreduce_grads()
        norm = clip_global_norm(trainer, 1.0)
        trainer.update(1)
        return norm

    step()
    mx.nd.waitall()
    with this_job.frozen_server():
        norm = step()
        print("the step returned while the server was frozen")
    close(norm, math.sqrt(4 * 1000 * 2000 + 4 * 1000))
    print("and its norm came afterwards")


def one_by_one():
    """Two workers. Layers that the norm has nothing to do with wait for nothing that comes; and each gradient is
    clipped as soon as its sum and the norm are there, whatever others are late."""
    pair = Pair()
    other = mx.kv.create("p3_sync")
    late = pair.net.head.weight.grad()
    other.init(0, late)
    pair.step(0, NORM)
    mx.nd.waitall()
    pair.kv._barrier()
    if pair.kv.rank == 0:
        pair.reduce(1)
        other.pushpull(0, late.copy(), out=late)  # nothing comes before the other worker has pushed
        clip_global_norm(pair.trainer, NORM)
        pair.update()
        for _ in range(8):  # MXNet's operators share four workspaces
            layer = mx.nd.dot(mx.nd.ones((3, 3)), mx.nd.ones((3, 3))).sum() + mx.nd.ones((3, 3)).mean()
            assert layer.asscalar() == 28
        pair.kv._barrier()
        pair.net.shift.grad().wait_to_read()
        pair.net.body.weight.data().wait_to_read()
        pair.kv._barrier()
    else:
        pair.kv._barrier()
        pair.reduce(1)
        clip_global_norm(pair.trainer, NORM)
        pair.update()
        pair.kv._barrier()
        other.pushpull(0, late.copy(), out=late)
    mx.nd.waitall()
    print("worker %d has all" % pair.kv.rank)


def resumed(last):
    """Steps up to that one, from the newest snapshot on if there is one; one is taken behind each second step."""
    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    pair = Pair(ADAM, kv=kv)
    first, _state = kv.resume(trainer=pair.trainer)
    for step in range(first, int(last)):
        pair.step(step, NORM)
        kv.snapshot(step + 1, trainer=pair.trainer)
    print("worker %d took steps from %d on and ends with %s" % (kv.rank, first, pair.digest()))


def in_step():
    """Two workers, of which one is late with one key: no other key has its next round before the norm is told."""
    kv, other = mx.kv.create("p3_sync"), mx.kv.create("p3_sync")
    kv.set_clipping()
    early, late, landed = mx.nd.full(4, 3), mx.nd.full(4, 4), [mx.nd.zeros(4) for _ in range(2)]
    other.init(0, late)
    for key in range(2):
        kv.init(key, landed[key])
    mx.nd.waitall()
    kv._barrier()
    if kv.rank == 0:
        other.pushpull(0, late.copy(), out=late)
    norms = []
    for _ in range(2):
        kv.pushpull(0, early, out=landed[0])
        kv.pushpull(1, late, out=landed[1])
        kv.store.end_pushes()
        norms.append(kv.store.norm.clip([], math.inf))
    deadline = time.monotonic() + 1  # for what must not happen
    while time.monotonic() < deadline:
        assert kv.stats()["keys"][0]["rounds"] <= 1
        time.sleep(0.01)
    kv._barrier()
    if kv.rank == 1:
        other.pushpull(0, mx.nd.full(4, 6))
    sums = 3 + 3, 4 + 6 + 4  # the late gradient is what the other store has summed
    for norm in norms:
        close(norm, 2 * math.hypot(*sums))
    print("worker %d has rounds of one step" % kv.rank)


def naive():
    """MXNet's engine that waits for each operation."""
    pair = Pair()
    for step in range(3):
        close(pair.step(step, NORM), pair.step_plain(step, NORM))
        pair.compare(step)
    print("worker %d waited for each" % pair.kv.rank)


def frozen_on_one():
    """The others' sums of a key that one worker has not pushed would make weights differ."""
    pair = Pair()
    pair.step(0, NORM)
    if pair.kv.rank == 0:
        pair.net.head.collect_params().setattr("grad_req", "null")
    fails(lambda: [pair.step(1, NORM).wait_to_read(), mx.nd.waitall(), pair.kv._barrier()])


def on_one_alone(rank):
    kv = mx.kv.create("p3_sync")
    if kv.rank == int(rank):
        kv.set_clipping()
    net = made()
    trainer = gluon.Trainer(net.collect_params(), *SGD, kvstore=kv, update_on_kvstore=False)

    def steps():
        for step in range(2):
            gradients(net, step, [kv.rank])
            trainer.step(ROWS)
            net.head.weight.data().wait_to_read()

    fails(steps)


def uneven():
    """A worker in join() follows the steps of the others, of a store that it has dropped as well."""
    pairs = [Pair(), Pair(ADAM, sparse=True)]
    dropped = Pair()
    dropped.step(0, NORM)
    rank, workers = pairs[0].kv.rank, pairs[0].kv.num_workers
    mine = STEPS - 2 * rank
    if rank == 0:
        dropped.step(1, NORM)
    del dropped
    gc.collect()
    for step in range(mine):
        for pair in pairs:
            pair.step(step, NORM)

    def follow(store):
        (pair,) = [one for one in pairs if one.kv is store]
        clip_global_norm(pair.trainer, NORM)
        pair.update()

    pairs[0].kv.join(update=follow)
    for step in range(STEPS):
        for pair in pairs:
            there = [one for one in range(workers) if step < STEPS - 2 * one]
            pair.step_plain(step, NORM, there)
    for pair in pairs:
        pair.compare("joined")
        pair.step(STEPS, NORM)
        pair.step_plain(STEPS, NORM)
        pair.compare("and on")
    print("worker %d follows" % rank)


def frozen_for_a_step():
    """A step in which nobody pushes any key is a step: a worker in join() does not take it for the end."""
    pair = Pair()
    kv, trained = pair.kv, [one for one in pair.net.collect_params().values() if one.grad_req != "null"]
    pair.step(0, NORM)
    followed = []

    def follow(_store):
        clip_global_norm(pair.trainer, NORM)
        pair.update()
        followed.append(len(followed))

    if kv.rank == 0:
        for step in (1, 2, 3):
            pair.step(step, NORM)
            for state in ("null", "write"):
                for one in trained:
                    one.grad_req = state
                if state == "null":
                    pair.trainer.allreduce_grads()
                    assert clip_global_norm(pair.trainer, NORM).asscalar() == 0
                    pair.update()
    kv.join(update=follow)
    assert len(followed) == (0 if kv.rank == 0 else 3), followed
    says(lambda: clip_global_norm(pair.trainer, NORM), "there are no new sums to clip")
    for step in range(4):
        pair.step_plain(step, NORM, [0] if step else None)
    pair.compare("joined")
    pair.step(4, NORM)
    pair.step_plain(4, NORM)
    pair.compare("and on")
    print("worker %d followed all steps" % kv.rank)


def another_session():
    """One worker. A store that tells no norms is joined as such, whatever store had its number in a session before."""
    pair = Pair()
    pair.step(0, NORM)
    mx.nd.waitall()
    pair.kv.store.session.close()
    kv = mx.kv.create("p3_sync")
    assert kv.store.session is not pair.kv.store.session and kv.store.number == pair.kv.store.number
    weight = mx.nd.ones(3)
    kv.init(0, weight)
    kv.pushpull(0, weight, out=weight)
    del kv
    gc.collect()
    held = mx.kv.create("p3_sync")
    held.init(0, weight)
    held.join()
    print("worker 0 joined in another session")


def says(call, text):
    try:
        call()
    except mx.MXNetError as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")


def fails(call):
    try:
        call()
    except mx.MXNetError as error:
        print("error: %s" % error)
        sys.exit(1)
    print("no error")


if __name__ == "__main__":
    assert p3
    name, *arguments = sys.argv[1].split(":")
    globals()[name](*arguments)
