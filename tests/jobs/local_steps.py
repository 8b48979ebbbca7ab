"""Jobs with local steps over NumPy arrays, a function for each: local_steps.py NAME ARGUMENT...

References train all workers' weights here, in one process, as the papers' algorithms say.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
import zlib

import numpy as np
import p3
import this_job
from p3.frontend import waiting
from p3.frontend.snapshots import resume, take
from turns import Turns

PLAIN = {"lr": 1.0, "momentum": 0.0}
LAYERS = ((6, 40), (40, 40), (40, 3))


def first(dtype="float32", seed=5):
    source = np.random.RandomState(seed)
    weights = {}
    for number, (inputs, outputs) in enumerate(LAYERS):
        weights["%d.weight" % number] = source.normal(0, inputs**-0.5, (inputs, outputs)).astype(dtype)
        weights["%d.bias" % number] = np.zeros(outputs, dtype)
    return weights


def gradients(weights, worker, step):
    """Of the mean square of what a perceptron is off, for this worker's batch of the step."""
    source = np.random.RandomState(1000 * worker + step)
    x = source.normal(size=(8, 6)).astype(weights["0.bias"].dtype)
    inputs = [x]
    for number in range(len(LAYERS)):
        y = inputs[-1] @ weights["%d.weight" % number] + weights["%d.bias" % number]
        inputs.append(np.tanh(y) if number < len(LAYERS) - 1 else y)
    made, back = {}, 2 * (inputs[-1] - np.sin(x[:, :3])) / y.size
    for number in reversed(range(len(LAYERS))):
        made["%d.weight" % number], made["%d.bias" % number] = inputs[number].T @ back, back.sum(0)
        back = (back @ weights["%d.weight" % number].T) * (1 - inputs[number] ** 2)
    return made


class Adam:
    """A pure function of weights and what it keeps itself."""

    def __init__(self):
        self.kept = {}

    def step(self, weights, worker, step):
        made = {}
        for name, gradient in gradients(weights, worker, step).items():
            mean, square = self.kept.get(name, (0.0, 0.0))
            mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
            self.kept[name] = mean, square
            made[name] = weights[name] - 0.005 * mean / (np.sqrt(square) + 1e-8)
        return {name: made[name] for name in weights}


def distance(one, other):
    return max(float(np.abs(one[name] - other[name]).max()) for name in other)


def digest(weights):
    made = 0
    for array in weights.values():
        made = zlib.crc32(np.ascontiguousarray(array), made)
    return "%08x" % made


# Exactness


def samples(worker, step):
    """What a worker weighs in a step: also nothing for a while, and in the end nothing on any worker."""
    return 0 if step >= 160 or (worker == 1 and step // 20 % 3 == 1) else (5 * step + 3 * worker) % 7 * (worker + 1)


class Reference:
    """Streaming DiLoCo, Algorithm 2, of all workers. Without a delay and of one fragment it is DiLoCo, Algorithm 1."""

    weighs = staticmethod(lambda worker, step: 1)

    def __init__(self, size, dtype, layers, every, delay, alpha, lr, momentum, nesterov):
        self.locals, self.inner = [first(dtype) for _ in range(size)], [Adam() for _ in range(size)]
        self.theta, self.velocity = first(dtype), dict.fromkeys(first(dtype), 0.0)
        self.fragments = [[name for name in self.theta if name.partition(".")[0] in one] for one in layers]
        self.every, self.delay, self.alpha = every, delay, alpha
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.coming = {}  # what is merged behind a step
        self.gone = set()
        self.weights = np.zeros((len(layers), size))  # since each fragment's last exchange

    def depart(self, worker):
        """What it has sent stays."""
        self.gone.add(worker)

    def step(self, t):
        """t: from 1 on."""
        self.locals = [inner.step(one, worker, t - 1)
                       for worker, (one, inner) in enumerate(zip(self.locals, self.inner))]  # fmt: skip
        self.weights += [self.weighs(worker, t - 1) for worker in range(len(self.locals))]
        for p, names in enumerate(self.fragments):
            if t % self.every == p * self.every // len(self.fragments):
                self.coming[t + self.delay] = {name: self.stepped(name, self.weights[p]) for name in names}
                self.weights[p] = 0
        for name, value in self.coming.pop(t, {}).items():
            for one in self.locals:
                one[name] = self.alpha * one[name] + (1 - self.alpha) * value

    def stepped(self, name, weights):
        left = [worker for worker in range(len(self.locals)) if worker not in self.gone]
        deltas = sum(weights[worker] * (self.theta[name] - self.locals[worker][name]) for worker in left)
        delta = deltas / (sum(weights[worker] for worker in left) or 1)
        self.velocity[name] = self.momentum * self.velocity[name] + delta
        change = delta + self.momentum * self.velocity[name] if self.nesterov else self.velocity[name]
        self.theta[name] = self.theta[name] - self.lr * change
        return self.theta[name]


def follows(session, steps, layers, every, delay, alpha, lr, momentum, nesterov, *deaths):
    """`layers`: of each fragment, as "0,1 2". `deaths`: "RANK:STEP" of each."""
    deaths = {int(rank): int(step) for rank, step in (one.split(":") for one in deaths)}
    layers = [one.split("-") for one in layers.split(",")]
    outer = {"lr": float(lr), "momentum": float(momentum), "nesterov": nesterov == "1"}
    training = p3.LocalSteps(session, first("float64"), every=int(every), fragments=len(layers), delay=int(delay),
                             alpha=float(alpha), outer=outer)  # fmt: skip
    reference = Reference(session.num_workers, "float64", layers, int(every), int(delay), float(alpha), **outer)
    inner, weights = Adam(), training.arrays
    for step in range(int(steps)):
        if deaths.get(session.rank) == step:
            training._land()  # so that all that it has sent has come
            os.kill(os.getpid(), signal.SIGKILL)
        for rank, when in deaths.items():
            if when == step:
                reference.depart(rank)
        weights = training.step(inner.step(weights, session.rank, step))
        reference.step(step + 1)
        off = distance(weights, reference.locals[session.rank])
        assert off < 1e-6, (step, off)
    assert distance(weights, first("float64")) > 0.05  # it has trained
    print("worker %d follows" % session.rank)


def follows_weighed(session, *given):
    Reference.weighs = staticmethod(samples)
    step, number = p3.LocalSteps.step, itertools.count()

    def weighed(training, arrays):
        training.weigh(samples(session.rank, next(number)))
        return step(training, arrays)

    p3.LocalSteps.step = weighed
    follows(session, *given)


def shares(session, dtype):
    """Of arrays that no training has made: the mean is exact to rounding, and what nobody has changed stays."""
    count, weights = session.num_workers, [1000, 1, 37, 0][: session.num_workers]
    start = {"trained": np.ones((50, 40), dtype), "kept": np.linspace(-3, 3, 999).astype(dtype)}
    own = [np.random.RandomState(worker).normal(1, 0.1, (50, 40)).astype(dtype) for worker in range(count)]
    own[-1][0] = np.nan if weights[-1] == 0 else 1  # of whom nothing counts
    training = p3.LocalSteps(session, start, every=1, outer=PLAIN)
    for total in (sum(weights), 0):
        training.weigh(weights[session.rank] if total else 0)
        found = training.step({**start, "trained": own[session.rank]})
        if total:
            deltas = zip(weights, own)
            exact = 1 + sum(weight * (one.astype(float) - 1) for weight, one in deltas if weight) / total
        assert np.abs(found["trained"] - exact).max() < 3 * np.finfo(dtype).eps
        assert np.array_equal(found["kept"], start["kept"])
    training.weigh(5)
    tiny = np.full_like(found["trained"], 1e-30)  # whose difference from the global weight is that weight
    assert np.allclose(training.step({**found, "trained": tiny})["trained"], 1e-30, 1e-6, 0)
    print("worker %d has the mean" % session.rank)


def weighs_alike(session, codec, number):
    """With the same number on all workers; 0: without weigh(). Prints a digest."""
    training = p3.LocalSteps(session, first(), every=6, fragments=3, delay=2, codec=None if codec == "none" else codec)
    inner, weights = Adam(), training.arrays
    for step in range(30):
        if int(number):
            training.weigh(int(number) + step)
        weights = training.step(inner.step(weights, session.rank, step))
    print("worker %d: global %s" % (session.rank, digest(training.take_global())))


def numbers_come_late(session, folder):
    """Worker 1 tells its number when worker 0 has gone on as far as the deadline, and keeps what it has to send."""
    turns, ahead = Turns(folder), []
    training = p3.LocalSteps(session, first(), every=4, delay=2, outer=PLAIN)
    if session.rank == 1:
        session.pushpull = turns.behind(session.pushpull, "waits")
    else:
        or_time_out = waiting.or_time_out

        def announced(*arguments):
            ahead.append(training.steps_taken)
            turns.come("waits")
            or_time_out(*arguments)

        waiting.or_time_out = announced
    inner, weights = Adam(), training.arrays
    others = [Adam(), Adam()]
    models = [first(), first()]
    for step in range(7):
        training.weigh(1 + 2 * session.rank)
        weights = training.step(inner.step(weights, session.rank, step))
        models = [one.step(model, worker, step) for worker, (one, model) in enumerate(zip(others, models))]
        if step == 3:
            mean = {name: (models[0][name] + 3 * models[1][name]) / 4 for name in weights}
        if step == 5:
            models = [{name: (one[name] + mean[name]) / 2 for name in one} for one in models]
    assert distance(weights, models[session.rank]) < 1e-6
    if session.rank == 0:
        assert ahead and set(ahead) == {6} and training.stats()["waits"] == 1, (ahead, training.stats())
    print("worker %d has gone on" % session.rank)


def one_looks(session, folder):
    """Worker 1, whose number worker 0 has not heard when it goes on to a barrier, looks at the global weights alone."""
    turns = Turns(folder)
    training = p3.LocalSteps(session, first(), every=2, delay=1, outer=PLAIN)
    inner, weights = Adam(), training.arrays
    for step in range(2):
        if (step, session.rank) == (1, 1):
            turns.behind(lambda: None, "kept")()
        training.weigh(1 + session.rank)
        weights = training.step(inner.step(weights, session.rank, step))
    turns.come("kept") if session.rank == 0 else training.state_dict()
    session.barrier()
    print("worker %d has gone on" % session.rank)


def some_weigh(session, way):
    """Worker 1 alone, or the other ones alone."""
    training = p3.LocalSteps(session, first(), every=2, delay=1)
    inner, weights = Adam(), training.arrays
    try:
        for step in range(4):
            if (session.rank == 1) == (way == "one"):
                training.weigh(3)
            weights = training.step(inner.step(weights, session.rank, step))
    except ValueError as error:
        print("refused: %s" % error, flush=True)
    session.barrier("others, which are told, too")


def ends_early(session, way, weighs):
    """Worker 1 takes a step less than worker 0, which waits for its number, or for its weights, in `way`."""
    training = p3.LocalSteps(session, first(), every=4, delay=2)
    inner, weights = Adam(), training.arrays
    for step in range((6 if way == "step" else 4) if session.rank == 0 else 3):
        if step == 3:
            session.wait_timeout_s = 2.0  # from where it waits in vain on
        if weighs == "1":
            training.weigh(1 + session.rank)
        weights = training.step(inner.step(weights, session.rank, step))
    if session.rank == 1:
        with contextlib.suppress(p3.P3Error):  # which tells that worker 0 has waited long enough
            while True:
                session.check()
                time.sleep(0.01)
    elif way == "barrier":
        session.barrier()
    elif way not in ("step", "close"):
        getattr(training, way)()


def one_is_slow(session, folder):
    """Worker 2 sends its first differences when the others have had three exchanges without it; they go on from there
    when it has got its answer. Each worker learns the same in all its exchanges."""
    turns, learned = Turns(folder), [2.0, 4.0, 32.0][session.rank]
    first = {"w": np.zeros(1, np.float32)}
    steps = p3.LocalSteps(session, first, every=2, delay=1, alpha=0, outer=PLAIN, quorum=2, grace=0)
    weights = [steps.step(steps.arrays)]

    def exchange(since=0.0):
        """Sends, and merges when it has learned as much more; the weight then."""
        for amount in (learned, since):
            weights.append(steps.step({"w": weights[-1]["w"] + np.float32(amount)}))
        return weights[-1]["w"].item()

    if session.rank < 2:
        assert [exchange(), exchange(), exchange()] == [3, 6, 9]  # (2 + 4) / 2
        turns.come("three of %d" % session.rank)
        turns.wait("late")
    else:
        turns.wait("three of 0")
        turns.wait("three of 1")
        assert exchange(since=16) == 9 + 16  # what it has sent is in no value yet
        turns.come("late")
    if session.rank == 0:
        assert exchange() == 9 + (32 + 2) / 2
        turns.come("four of 0")
    elif session.rank == 1:
        turns.wait("four of 0")
        assert exchange() == 26  # late, too
        turns.come("four of 1")
    turns.wait("four of 1")  # or all others would stand aside of what it sends
    weights = steps.take_global()
    stats = steps.stats()
    print("worker %d had %d late, took %d steps and has %s"
          % (session.rank, stats["late"], stats["step"], weights["w"].tolist()))  # fmt: skip


def one_dies_aside(session):
    """Worker 1 stands aside of all that it has sent, and dies there. Nobody waits for it, later on either: with a grace
    of an hour an exchange ends only when all have sent that are left."""
    training = p3.LocalSteps(session, {"w": np.zeros(4, np.float32)}, every=1, quorum=1, grace=3600.0)
    weights = training.step({name: one + 1 for name, one in training.arrays.items()})
    if session.rank == 1:
        for one in training._globals.values():
            one.stand_aside()
        until(session, lambda: session.counters()["queued_slices"] == 0)
        os.kill(os.getpid(), signal.SIGKILL)
    until(session, lambda: session.members == (0, 2))
    for _ in range(2):
        for _ in range(3):
            weights = training.step({name: one + 1 for name, one in weights.items()})
        weights = training.take_global()
    print("worker %d has met the others: %s" % (session.rank, digest(weights)))


def two_end(session):
    """Their scripts, while the third worker goes on, whose exchanges then are its own: the quorum is two, and the grace
    an hour."""
    training = p3.LocalSteps(session, {"w": np.zeros(1, np.float32)}, every=1, outer=PLAIN, quorum=2, grace=3600.0)
    weights = training.step({"w": training.arrays["w"] + 3})
    if session.rank > 0:
        return
    for _ in range(4):
        weights = training.step({"w": weights["w"] + 1})
    print("worker 0 has gone on to %s" % weights["w"].tolist())


def until(session, holds):
    deadline = time.monotonic() + 30
    while not holds():
        session.check()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def saves_at_own_speed(session):
    """With a quorum worker 1 asks late for its state's momentum, when worker 0, which waits for nobody, may go on."""
    if session.rank == 1:
        fetch = session.fetch

        def slow(*arguments):
            time.sleep(0.2)
            return fetch(*arguments)

        session.fetch = slow
    training = p3.LocalSteps(session, first(), every=1, quorum=1, grace=0)
    inner, weights = Adam(), training.arrays
    for step in range(6):
        weights = training.step(inner.step(weights, session.rank, step))
        if step == 2:
            training.take_global()
            state = training.state_dict()
            weights = training.arrays
            bits = digest(state["global"]), digest(state["momentum"])
            print("worker %d: global %s momentum %s" % (session.rank, *bits))
    training.take_global()


def averaged(session):
    """An exchange behind each step, a mean: all train as those of a process that averages their weights."""
    training = p3.LocalSteps(session, first(), every=1, outer=PLAIN)
    inner, weights = Adam(), training.arrays
    others, mean = [Adam() for _ in range(session.num_workers)], first()
    for step in range(25):
        weights = training.step(inner.step(weights, session.rank, step))
        stepped = [one.step(mean, worker, step) for worker, one in enumerate(others)]
        mean = {name: np.mean([one[name] for one in stepped], axis=0, dtype=np.float32) for name in mean}
        assert distance(weights, mean) < 1e-6, (step, distance(weights, mean))
    print("worker %d averages" % session.rank)


def alone(session, every, fragments):
    """One worker, whose weights come back as they were sent, to the bit."""
    start = first()
    start["0.weight"] *= 10.0 ** np.linspace(-9, 1, 40, dtype=np.float32)  # where differences lose digits
    training = p3.LocalSteps(session, start, every=int(every), fragments=int(fragments), outer=PLAIN)
    inner, plain, weights, expected = Adam(), Adam(), training.arrays, start
    for step in range(30):
        weights = training.step(inner.step(weights, 0, step))
        expected = plain.step(expected, 0, step)
        assert all(np.array_equal(weights[name], expected[name]) for name in expected), step
    print("worker %d is alone" % session.rank)


def has_same_bits(session, codec, delay):
    """Each begins with weights of its own; P3_CHECK=1 compares the global ones at each merge."""
    training = p3.LocalSteps(session, first(seed=session.rank), every=6, fragments=3, delay=int(delay),
                             codec=None if codec == "none" else codec)  # fmt: skip
    print("worker %d: first %s" % (session.rank, digest(training.arrays)))
    inner, weights = Adam(), training.arrays
    for step in range(30):
        weights = training.step(inner.step(weights, session.rank, step))
    seen = digest(training.global_weights())
    print("worker %d: local %s global %s" % (session.rank, digest(weights), seen))
    assert digest(training.take_global()) == seen == digest(training.arrays)
    weights = training.broadcast({name: one + 1 + session.rank for name, one in training.arrays.items()})
    assert digest(weights) == digest(training.global_weights()) != seen
    print("worker %d: broadcast %s" % (session.rank, digest(weights)))
    training.release()


def placed(session, *given):
    """With a strategy that each worker is given, in JSON, or with none; prints the weights' digest, and what each
    server holds."""
    training = p3.LocalSteps(session, first(), every=3, fragments=3, delay=1,
                             strategy=json.loads(given[session.rank]) if given else None)  # fmt: skip
    inner, weights = Adam(), training.arrays
    for step in range(6):
        weights = training.step(inner.step(weights, session.rank, step))
    weights = training.take_global()
    held = [one["value_bytes"] for one in session.server_counters()]
    print("worker %d: %s held %s" % (session.rank, digest(weights), held), flush=True)


# Saved and loaded

CODECS = {"none": None, "weighed": None}


def weigh(training, codec, worker, step):
    if codec == "weighed":
        training.weigh(samples(worker, step))


def loads(session, codec, saved_at):
    """From what was saved behind a step on, another one takes the same steps, to the bit."""
    given = dict(every=6, fragments=3, delay=3, codec=CODECS.get(codec, codec))
    saved_at = int(saved_at)
    training, inner = p3.LocalSteps(session, first(), **given), Adam()
    weights = training.arrays
    for step in range(21):
        if step == saved_at:
            saved, kept, state = training.arrays, dict(inner.kept), training.state_dict()
        weigh(training, codec, session.rank, step)
        weights = training.step(inner.step(weights, session.rank, step))
    training.release()
    training, inner = p3.LocalSteps(session, first(seed=session.rank), **given), Adam()
    training.load_state_dict(state)
    again, inner.kept = saved, kept
    for step in range(saved_at, 21):
        weigh(training, codec, session.rank, step)
        again = training.step(inner.step(again, session.rank, step))
    assert digest(again) == digest(weights)
    print("worker %d goes on" % session.rank)


def loads_of_the_dead(session, folder, *quorum):
    """Worker 0 dies in load_state_dict(), when all have its values, and nobody has any momentum of it. The others have
    both, and go on from there."""
    rank = session.rank
    given = dict(zip(("quorum", "grace"), map(int, quorum)))
    training, inner = p3.LocalSteps(session, first(), every=2, **given), Adam()
    for step in range(4):
        training.step(inner.step(training.arrays, rank, step))
    training.take_global()
    state = training.state_dict()
    for step in range(4, 8):
        training.step(inner.step(training.arrays, rank, step))
    this_job.die_giving(session, folder, last=3)
    training.load_state_dict(state)
    found = training.state_dict()
    for part in ("global", "momentum"):
        assert digest(found[part]) == digest(state[part]), part
    for step in range(8, 12):
        training.step(inner.step(training.arrays, rank, step))
    print("worker %d goes on with %s" % (rank, digest(training.take_global())))


def resumed(session, folder, codec, steps, die_at):
    """With snapshots; rank 0 is killed behind step `die_at` the first time. Prints digests."""
    round, state = resume(session)
    if round > 0:  # one that is refused takes nothing of the snapshot
        with contextlib.suppress(ValueError):
            p3.LocalSteps(session, first(), every=6 + session.rank)
    training = p3.LocalSteps(session, first(seed=session.rank), every=6, fragments=3, delay=3,
                             codec=CODECS.get(codec, codec))  # fmt: skip
    inner, weights = Adam(), training.arrays
    if state is not None:
        inner.kept = state["kept"]
    for step in range(round, int(steps)):
        weigh(training, codec, session.rank, step)
        weights = training.step(inner.step(weights, session.rank, step))
        take(session, step + 1, {"kept": inner.kept})
        if step + 1 == int(die_at) and round == 0 and session.rank == 0:
            this_job.die_once(session, folder)
    local = digest(weights)
    weights = training.take_global()
    print("worker %d began at %d and has %s of %s" % (session.rank, round, digest(weights), local), flush=True)


def learns(session, codec):
    """What is lost after many steps is close to what exact exchanges have."""
    off = []
    for given in (None, codec):
        training = p3.LocalSteps(session, first(), every=10, fragments=3, delay=2, codec=given)
        inner, weights = Adam(), training.arrays
        for step in range(300):
            weights = training.step(inner.step(weights, session.rank, step))
        weights = training.take_global()
        off.append(float(np.mean([loss(weights, step) for step in range(50)])))
        training.release()
    before = float(np.mean([loss(first(), step) for step in range(50)]))
    print("worker %d: %.4f of %.4f, %s %.4f" % (session.rank, off[0], before, codec, off[1]))
    assert off[0] < before / 10 and off[1] < 1.1 * off[0], off
    print("worker %d has learned as much" % session.rank)


def ordered(session):
    made = {"a": np.zeros(3), "b": np.zeros(3)}
    try:
        p3.LocalSteps(session, dict(reversed(list(made.items()))) if session.rank else made, every=6, fragments=2)
    except ValueError as error:
        print("refused: %s" % error, flush=True)


def loss(weights, step):
    x = y = np.random.RandomState(50000 + step).normal(size=(8, 6)).astype(np.float32)
    for number in range(len(LAYERS)):
        y = y @ weights["%d.weight" % number] + weights["%d.bias" % number]
        y = np.tanh(y) if number < len(LAYERS) - 1 else y
    return np.square(y - np.sin(x[:, :3])).mean()


if __name__ == "__main__":
    with p3.Session.open() as session:
        globals()[sys.argv[1]](session, *sys.argv[2:])
