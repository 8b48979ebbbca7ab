"""Snapshots of MXNet's stores: what scripts do around a resume, each in a job of one worker inside this process."""

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")
from mxnet import gluon  # noqa: E402

import p3  # noqa: E402, F401
from p3.mxnet.optimizers.states import read  # noqa: E402


@pytest.fixture
def new_job(tmp_path, monkeypatch):
    """Ends the job that there is; returns the first store of the next one, which takes a snapshot of each round."""
    monkeypatch.setenv("P3_SNAPSHOT_DIR", str(tmp_path))
    monkeypatch.setenv("P3_SNAPSHOT_EVERY", "1")
    opened = [mx.kv.create("p3_sync")]  # perhaps of a job that another test has begun

    def begin():
        mx.nd.waitall()
        opened.pop().store.session.close()
        opened.append(mx.kv.create("p3_sync"))
        return opened[0]

    yield begin
    mx.nd.waitall()
    opened.pop().store.session.close()


def sgd(rate, momentum=0.0):
    return mx.optimizer.SGD(learning_rate=rate, momentum=momentum)


def value_of(kv, key, shape):
    out = mx.nd.zeros(shape)
    kv.pull(key, out)
    return out.asnumpy()


@pytest.mark.parametrize("make", [sgd, lambda rate: mx.optimizer.LAMB(learning_rate=rate)], ids=["servers", "workers"])
def test_a_resume_is_of_the_first_optimizer_alone(new_job, make):
    def begin(rate):
        kv = new_job()
        kv.resume()
        kv.set_optimizer(make(rate))
        kv.init("w", mx.nd.ones(3))
        return kv

    kv = begin(0.5)
    kv.push("w", mx.nd.ones(3))
    kv.snapshot(1)
    kv = begin(0.25)
    assert kv._updater.optimizer.learning_rate == 0.5
    for number in range(2):
        kv.push("w", mx.nd.ones(3))
        kv.snapshot(2 + number)
        kv.set_optimizer(make(0.125))
        assert kv._updater.optimizer.learning_rate == 0.125
        assert kv._updater.optimizer.num_update == 0


@pytest.mark.parametrize("settings", [{"update_on_kvstore": False}, {}], ids=["trainer", "servers"])
@pytest.mark.parametrize("devices", [(1, 2), (2, 1), (2, 3)])
def test_a_trainer_comes_back_with_other_devices(new_job, monkeypatch, devices, settings):
    def train(count, first, steps):
        mx.random.seed(1 + first)
        contexts = [mx.cpu(number) for number in range(count)]
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(3, in_units=6), gluon.nn.BatchNorm(in_channels=3, use_global_stats=True))
        net.initialize(mx.init.Normal(1), ctx=contexts)
        kv = new_job()
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1}, kvstore=kv, **settings)
        assert kv.resume(trainer=trainer)[0] == first
        for step in range(first, steps):
            batch = mx.nd.array(np.random.RandomState(step).uniform(-1, 1, (6, 6)))
            with mx.autograd.record():
                losses = [(net(part) ** 2).sum() for part in gluon.utils.split_and_load(batch, contexts)]
            mx.autograd.backward(losses)
            trainer.step(6)
            if step == 1:
                for statistic in net[1].running_mean.list_data():
                    statistic[:] = mx.nd.array([0.5, -0.5, 0.25])
            kv.snapshot(step + 1, trainer=trainer)
        values = [[one.asnumpy() for one in parameter.list_data()] for parameter in net.collect_params().values()]
        assert all(len(each) == count and np.array_equal(each[0], one) for each in values for one in each)
        return [each[0] for each in values]

    train(devices[0], 0, 3)
    resumed = train(devices[1], 3, 6)
    monkeypatch.delenv("P3_SNAPSHOT_DIR")
    for one, expected in zip(resumed, train(devices[0], 0, 6)):
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("load", [False, True])
def test_a_snapshot_has_the_weights_that_were_loaded_before_it(new_job, tmp_path, load):
    def begin():
        net = gluon.nn.Dense(2, in_units=3)
        net.initialize(mx.init.One())
        kv = new_job()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
        kv.resume(trainer=trainer)
        return net, kv, trainer

    def step():
        with mx.autograd.record():
            loss = net(mx.nd.ones((4, 3))).sum()
        loss.backward()
        trainer.step(4)

    net, kv, trainer = begin()
    step()
    if load:
        path = str(tmp_path / "parameters")
        net.save_parameters(path)
        net.load_parameters(path)
    net.weight.set_data(mx.nd.full((2, 3), 7))
    kv.snapshot(1, trainer=trainer)
    step()
    weights = [parameter.data().asnumpy().tolist() for parameter in net.collect_params().values()]
    net, kv, trainer = begin()
    assert net.weight.data().asnumpy().tolist() == [[7, 7, 7]] * 2
    step()
    assert weights == [parameter.data().asnumpy().tolist() for parameter in net.collect_params().values()]


@pytest.mark.parametrize("compression", [{"type": "1bit"}, {"down": "int8"}, {"type": "int8", "down": "1bit"}], ids=str)
def test_states_that_are_loaded_behind_a_resume_leave_what_compression_has_left_out(new_job, tmp_path, compression):
    def begin():
        net = gluon.nn.Dense(30, in_units=40)
        mx.random.seed(3)
        net.initialize(mx.init.Normal(1))
        kv = new_job()
        settings = {"learning_rate": 0.1, "momentum": 0.9}
        trainer = gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kv, compression_params=compression)
        return net, kv, trainer

    def step(number):
        with mx.autograd.record():
            loss = net(mx.nd.array(np.random.RandomState(number).uniform(-1, 1, (4, 40)))).square().sum()
        loss.backward()
        trainer.step(4)

    path = str(tmp_path / "states")
    net, kv, trainer = begin()
    for number in range(3):
        step(number)
    kv.snapshot(3, trainer=trainer)
    trainer.save_states(path)
    step(3)
    whole = net.weight.data().asnumpy()
    net, kv, trainer = begin()
    assert kv.resume(trainer=trainer)[0] == 3
    trainer.load_states(path)
    step(3)
    np.testing.assert_array_equal(net.weight.data().asnumpy(), whole)


@pytest.mark.parametrize("settings", [{}, {"update_on_kvstore": False}], ids=["servers", "trainer"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_states_that_are_saved_right_behind_a_resume_are_the_snapshots(new_job, tmp_path, settings, dtype):
    def begin():
        weight = gluon.Parameter("weight", shape=(3, 2), init=mx.init.One(), dtype=dtype)
        weight.initialize()
        kv, numbers = new_job(), {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
        trainer = gluon.Trainer([weight], "sgd", numbers, kvstore=kv, **settings)
        kv.resume(trainer=trainer)
        return weight, kv, trainer

    def saved(name):
        trainer.save_states(str(tmp_path / name))
        states = read(tmp_path / name)[0]
        found = states[0] if isinstance(states[0], tuple) else states.values()
        return [array.asnumpy().tolist() for array in found]

    weight, kv, trainer = begin()
    for _ in range(3):
        with mx.autograd.record():
            loss = (weight.data() * 0.3).sum()
        loss.backward()
        trainer.step(1)
    kv.snapshot(3, trainer=trainer)
    whole = saved("whole")
    weight, kv, trainer = begin()
    assert saved("resumed") == whole
    kv.snapshot(4, trainer=trainer)
    weight, kv, trainer = begin()
    assert saved("resumed again") == whole


def test_states_of_a_store_with_staleness_go_on_in_one_that_takes_snapshots(new_job, tmp_path, monkeypatch):
    def pushed(kind, count):
        kv = mx.kv.create(kind)
        kv.set_optimizer(mx.optimizer.Adam())
        kv.init("w", mx.nd.ones(3))
        for _ in range(count):
            kv.push("w", mx.nd.ones(3))
        return kv

    path = str(tmp_path / "states")
    with monkeypatch.context() as without:
        without.delenv("P3_SNAPSHOT_DIR")
        new_job()
        pushed("p3_ssp", 3).save_optimizer_states(path, dump_optimizer=True)
    new_job()
    kv = pushed("p3_sync", 0)
    kv.load_optimizer_states(path)
    kv.push("w", mx.nd.ones(3))
    kv.snapshot(1)
    assert kv._updater.optimizer._index_update_count == {"w": 4}
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    with open(path, "rb") as file:
        updater.set_states(file.read())
    updater("w", mx.nd.ones(3), mx.nd.ones(3))
    assert updater.optimizer._index_update_count == {"w": 4}


def module_of(kv):
    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="out")
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, mx.sym.var("label"), name="loss"), label_names=["label"])
    module.bind(data_shapes=[("data", (4, 2))], label_shapes=[("label", (4, 1))])
    module.init_params(mx.init.One())
    module.init_optimizer(kvstore=kv, optimizer_params={"learning_rate": 0.5})
    return module


def test_module_that_updates_by_itself_takes_no_snapshots_and_says_so_before_it_trains(new_job, monkeypatch):
    module_of(new_job())
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    with pytest.raises(ValueError, match="updates by Module itself .* snapshots.* Unset MXNET_UPDATE_ON_KVSTORE"):
        module_of(new_job())
    monkeypatch.delenv("P3_SNAPSHOT_DIR")
    module_of(new_job())


# Of two workers, of which one joins right behind the resume

JOINS = """
    import sys
    import p3, mxnet as mx
    from mxnet import gluon

    kind, last = sys.argv[1], int(sys.argv[2])
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Embedding(6, 3, sparse_grad=kind == "rows"), gluon.nn.Dense(2, in_units=3, flatten=False))
    net.initialize(mx.init.Normal(1))
    kv = mx.kv.create("p3_sync")
    settings = {"learning_rate": 0.1}
    if kind == "lamb":
        settings["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(1, 0.7, base_lr=0.1)
    own = {} if kind == "lamb" else {"update_on_kvstore": False}
    trainer = gluon.Trainer(net.collect_params(), "lamb" if kind == "lamb" else "sgd", settings, kvstore=kv, **own)
    first, _ = kv.resume(trainer=trainer)
    for step in range(first, last if kv.rank == 0 or not first else first):
        x = mx.nd.array([kv.rank, 2 + kv.rank + step % 2])
        with mx.autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(1)
        kv.snapshot(step + 1, trainer=trainer)
    kv.join(update=lambda store: trainer.update(1))
    weights = mx.nd.concat(*[p.data().reshape((-1,)) for p in net.collect_params().values()], dim=0)
    print("ends", first, weights.asnumpy().tolist(), trainer.optimizer.num_update)
"""


@pytest.mark.parametrize("kind", ["rows", "dense", "lamb"])
def test_a_worker_that_joins_right_behind_a_resume_follows_the_others(run_job, tmp_path, kind):
    snapshots = ["--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "1"]
    for steps in ("2", "6"):
        finished = run_job(JOINS, workers=2, options=snapshots, arguments=[kind, steps])
        assert finished.code == 0, finished.err
        ends = [line.partition("ends")[2] for line in finished.out.splitlines() if "ends" in line]
        assert len(ends) == 2 and ends[0] == ends[1], ends
    assert ends[0].startswith(" 2 ")


ORDERED = """
    import sys
    import p3, mxnet as mx
    shapes = {"large": (1 << 20,), "small": (2,)}
    kv = mx.kv.create("p3_sync")
    first, _ = kv.resume()
    kv.set_optimizer(mx.optimizer.LAMB(lr_scheduler=mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=1)))
    for key, shape in shapes.items():
        kv.init(key, mx.nd.ones(shape))
    for step in range(first, 4 if kv.rank == 0 or not first else first):
        for key, shape in shapes.items():
            kv.push(key, mx.nd.ones(shape), priority=-step if key == "large" else step)
        if not first:
            for _ in range(3):
                kv.push("large", mx.nd.ones(shapes["large"]))
            kv.snapshot(1)
            break
    kv.join()
    for key, shape in shapes.items():
        out = mx.nd.zeros(shape)
        kv.pull(key, out)
        print("ends with", key, out[0].asscalar(), first)
"""


def test_behind_a_resume_a_worker_that_joins_updates_keys_in_the_order_of_the_others(run_job, tmp_path):
    snapshots = ["--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "1"]
    for _ in range(2):
        finished = run_job(ORDERED, workers=2, options=snapshots)
        assert finished.code == 0, finished.err
        ends = sorted(line.partition("ends with")[2] for line in finished.out.splitlines() if "ends with" in line)
        assert len(ends) == 4 and ends[::2] == ends[1::2], finished.out
