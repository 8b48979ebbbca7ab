"""Workers that take different numbers of steps: those that have finished join, and all end with the same weights."""

import sys
from importlib.util import find_spec

import numpy as np
import plugin_jobs as jobs
import pytest

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)
import mxnet as mx
from mxnet import gluon

sys.path.insert(0, str(jobs.SCRIPTS))
import uneven


def run(directory, update, reduction, steps, **variables):
    command = jobs.python("uneven.py", directory, update, reduction, *steps)
    status, output = jobs.run_p3(len(steps), 2, command, **variables)
    assert status == 0, output
    return [dict(np.load(directory / f"{rank}.npz")) for rank in range(len(steps))]


def in_one_process(update, reduction, steps):
    """The weights that the workers together should end with: each step joins the batches of those that take it."""
    net = uneven.make_net(gluon, mx)
    optimizer, _ = uneven.UPDATES[update]
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01}, kvstore=None)
    for epoch, counts in enumerate((steps, steps[::-1])):
        for step in range(max(counts)):
            present = [rank for rank, count in enumerate(counts) if step < count]
            xs, ys = zip(*(uneven.batch(mx, rank, epoch, step) for rank in present))
            uneven.gradients(mx, net, mx.nd.concat(*xs, dim=0), mx.nd.concat(*ys, dim=0))
            trainer.step(uneven.BATCH * (len(present) if reduction == "average" else len(steps)))
    return {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}


@pytest.mark.parametrize(
    "update, reduction, steps",
    [
        ("servers", "sum", (2, 5, 3)),
        ("servers", "average", (5, 1)),
        ("workers", "sum", (1, 4)),
        ("trainer", "sum", (2, 5, 3)),
        ("trainer", "average", (4, 2)),
        ("servers", "sum", (3, 3)),
    ],
)
def test_all_end_with_the_weights_of_the_joined_batches(tmp_path, update, reduction, steps):
    expected = in_one_process(update, reduction, steps)
    results = run(tmp_path, update, reduction, steps)
    for result in results:
        assert result.pop("updates") == 2 * max(steps)  # also where a worker slept through them
        for name, value in result.items():
            assert np.allclose(value, expected[name.partition("-")[2]], rtol=1e-5, atol=1e-7), name
            assert np.array_equal(value, results[0][name]), name


def test_with_the_naive_engine_too(tmp_path):
    steps = (1, 3)
    expected = in_one_process("servers", "sum", steps)
    for result in run(tmp_path, "servers", "sum", steps, MXNET_ENGINE_TYPE="NaiveEngine"):
        assert np.allclose(result["0-net_dense0_weight"], expected["net_dense0_weight"], rtol=1e-5, atol=1e-7)


def test_stores_that_one_worker_has_dropped_and_another_still_trains(run_job):
    """A net and a Trainer for each fold: worker 0 drops them, worker 1 keeps them, and trains on with the first one."""
    script = """
        import gc
        import p3, mxnet as mx
        from mxnet import gluon

        kept = []
        for fold in range(3):
            mx.random.seed(1)
            net = gluon.nn.HybridSequential()
            net.add(gluon.nn.Embedding(6, 3, sparse_grad=True), gluon.nn.Dense(2, in_units=3, flatten=False))
            net.initialize()
            kv = mx.kv.create("p3_sync")
            trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)

            def step(net, trainer):
                x = mx.nd.array([kv.rank, 2 + kv.rank])
                with mx.autograd.record():
                    loss = net(x).sum()
                loss.backward()
                trainer.step(1)

            for number in range(2 + kv.rank):
                step(net, trainer)
                if kept and number == 2:
                    step(*kept[0])
            kv.join()
            weights = mx.nd.concat(*[p.data().reshape((-1,)) for p in net.collect_params().values()], dim=0)
            print("fold", fold, weights.asnumpy().round(4).tolist())
            if kv.rank == 1:
                kept.append((net, trainer))
            del net, trainer, kv, step
            gc.collect()
        mx.nd.waitall()
    """
    for aggregates in "10":
        env = {"P3_STRAGGLER_S": "5", "P3_STUCK_S": "20", "P3_LOCAL_AGGREGATION": aggregates}
        finished = run_job(script, workers=2, env=env)
        assert finished.code == 0, finished.err
        lines = sorted(line.partition("] ")[2] for line in finished.out.splitlines() if "fold" in line)
        assert len(lines) == 6 and lines[::2] == lines[1::2], finished.out


@pytest.mark.parametrize("optimizer", ["lamb", "nadam"])
def test_a_worker_that_has_joined_updates_keys_in_the_order_of_the_others(run_job, optimizer):
    """Though a small key's sum comes before that of a large one, the learning rate is of as many updates."""
    script = """
        import sys, p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        shapes = {"large": (1 << 20,), "small": (2,)}
        for key, shape in shapes.items():
            kv.init(key, mx.nd.ones(shape))
        def step(*keys):
            for key in keys:
                kv.push(key, mx.nd.ones(shapes[key]))
        step(*shapes)
        scheduler = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=1) if "%s" == "lamb" else None
        kv.set_optimizer(mx.optimizer.create("%s", lr_scheduler=scheduler))  # behind a push: the workers update
        for _ in range(3):
            step("large")
        if kv.rank == 1:
            for _ in range(3):
                step(*shapes)
        kv.join()
        for key, shape in shapes.items():
            out = mx.nd.zeros(shape)
            kv.pull(key, out)
            print("ends with", key, out[0].asscalar())
    """ % (optimizer, optimizer)
    finished = run_job(script, workers=2)
    assert finished.code == 0, finished.err
    ends = sorted(line.partition("ends with")[2] for line in finished.out.splitlines() if "ends with" in line)
    assert len(ends) == 4 and ends[::2] == ends[1::2], finished.out


def test_nadams_schedule_is_the_same_to_the_bit_behind_join(run_job):
    """Servers refuse another one. It is a product over all updates, and results of small keys come first."""
    script = """
        import p3, mxnet as mx
        shapes = {"large": (1 << 20,), "middle": (1000,), "small": (2,)}
        kv = mx.kv.create("p3_sync")
        optimizer = mx.optimizer.Nadam()
        kv.set_optimizer(optimizer)
        for key, shape in shapes.items():
            kv.init(key, mx.nd.ones(shape))
        kv.push("small", mx.nd.ones(2))
        for epoch in range(8):
            for step in range(1 if kv.rank == epoch % 2 else 9):
                for key, shape in shapes.items():
                    kv.push(key, mx.nd.ones(shape), priority=-step if key == "large" else step)
            kv.join()
            print("epoch", epoch, optimizer.m_schedule.hex())
    """
    finished = run_job(script, workers=2)
    assert finished.code == 0, finished.err
    schedules = sorted(line.partition("epoch")[2] for line in finished.out.splitlines() if "epoch" in line)
    assert len(schedules) == 16 and schedules[::2] == schedules[1::2], finished.out


def test_a_worker_that_dies_ends_the_wait(run_job):
    script = """
        import os, signal, p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        kv.init(0, mx.nd.ones(3))
        if kv.rank == 1:
            kv._barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        kv._barrier()
        kv.join()
    """
    finished = run_job(script, workers=2)
    assert finished.code != 0
    assert "worker 1 (127.0.0.1)" in finished.err  # lost by a server or by the scheduler, whoever sees it first


def test_a_worker_that_leaves_without_join_is_named_and_told_how(run_job):
    script = """
        import p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        kv.init(0, mx.nd.ones(3))
        for _ in range(1 + kv.rank):
            kv.pushpull(0, mx.nd.ones(3), out=mx.nd.ones(3))
        mx.nd.waitall()
    """
    finished = run_job(script, workers=2)
    assert finished.code == 1 and "worker 0" in finished.err and "call join() after their last one" in finished.err


def test_a_worker_without_keys_cannot_join(run_job):
    script = """
        import p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        if kv.rank == 0:
            kv.init(0, mx.nd.ones(3))
            mx.nd.waitall()
        else:
            kv.join()
    """
    finished = run_job(script, workers=2)
    assert finished.code == 1 and "has no keys to serve the others' rounds with" in finished.err


def test_sums_need_to_be_told_how_to_be_applied(run_job):
    script = """
        import p3, mxnet as mx
        kv = mx.kv.create("p3_sync")
        kv.init(0, mx.nd.ones(3))
        kv.pushpull(0, mx.nd.ones(3), out=mx.nd.ones(3))
        try:
            kv.join()
        except mx.base.MXNetError as error:
            print(error)
    """
    finished = run_job(script, workers=2)
    assert finished.code == 0 and finished.out.count("call join(update=lambda store: trainer.update(batch_size))") == 2


@pytest.mark.parametrize("joins", [0, 1])
def test_a_worker_that_joins_right_behind_loaded_weights_begins_with_them(run_job, joins):
    script = """
        import sys, p3, mxnet as mx
        from mxnet import gluon

        kv = mx.kv.create("p3_sync")
        weight = gluon.Parameter("weight", shape=(2,), init=mx.init.One())
        weight.initialize()
        trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kv)

        def step():
            with mx.autograd.record():
                loss = weight.data().sum()
            loss.backward()
            trainer.step(1)

        step()
        weight.set_data(mx.nd.array([7 + kv.rank, 7]))
        if kv.rank != int(sys.argv[1]):
            step()
        kv.join()
        print("ends with", weight.data().asnumpy().tolist())
    """
    finished = run_job(script, workers=2, arguments=[str(joins)], env={"P3_STRAGGLER_S": "5", "P3_STUCK_S": "10"})
    assert finished.code == 0, finished.err
    assert finished.out.count("ends with [6.0, 6.0]") == 2, finished.out
