"""Gradient compression through the store: what NumPy says of both types, and what MXNet itself makes of two-bit."""

import sys

import plugin_jobs as jobs
import pytest

pytest.importorskip("mxnet")
import numpy as np

from p3 import codecs


@pytest.mark.parametrize("aggregates", "01")
def test_sums_and_weights_of_compressed_gradients_are_those_of_numpy(aggregates):
    status, output = jobs.run_p3(2, 2, jobs.python("compressed.py", "numpy"), P3_LOCAL_AGGREGATION=aggregates)
    assert status == 0, output
    for rank in range(2):
        for kind in codecs.of_gradients():
            assert "rank %d: %s sums are those of NumPy" % (rank, kind) in output, output
            assert "rank %d: %s weights are those of NumPy" % (rank, kind) in output, output


def test_two_bits_give_the_bits_of_mxnets_dist_sync(tmp_path):
    ours, theirs = tmp_path / "p3.npz", tmp_path / "mxnet.npz"
    status, output = jobs.run(jobs.python("compressed.py", "save", "p3_sync", ours))  # embedded in one process
    assert status == 0, output
    ((status, output),) = jobs.run_dist_sync(1, 1, jobs.python("compressed.py", "save", "dist_sync", theirs))
    assert status == 0, output
    with np.load(ours) as ours, np.load(theirs) as theirs:
        assert set(ours.files) == set(theirs.files) and len(ours.files) == 15
        for name in ours.files:
            np.testing.assert_array_equal(ours[name].view("uint32"), theirs[name].view("uint32"), err_msg=name)
        assert all(ours["2 of round %d" % step].any() for step in range(5))  # or there was nothing to compare


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_overflows_leaves_nothing_behind_with_amp(workers):
    command = jobs.python("loss_scaled.py", "mxnet")
    status, output = jobs.run(command) if workers == 1 else jobs.run_p3(workers, 2, command)
    assert status == 0, output
    assert output.count(": as if there had been no overflow") == 6 * workers


def test_what_is_left_out_follows_the_scale_where_the_servers_update(run_job):
    """A step ends while its rounds are under way, and the next one may have another scale; of powers of two alike."""
    script = """
        import p3, mxnet as mx
        from mxnet import gluon
        from mxnet.contrib import amp

        amp.init("float16", target_precision_ops=[])
        for scales in ([256.0] * 8, [256.0, 256.0, 512.0, 1024.0, 1024.0, 64.0, 64.0, 2048.0]):
            kv = mx.kv.create("p3_sync")
            weight = gluon.Parameter("weight", shape=(600, 500), init=mx.init.One())
            weight.initialize()
            trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kvstore=kv,
                                    compression_params={"type": "int8"}, update_on_kvstore=True)
            amp.init_trainer(trainer)
            scaler = trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
            mx.random.seed(5 + kv.rank)
            for scale in scales:
                scaler._loss_scale = scaler._next_loss_scale = scale
                factor = mx.nd.random.uniform(-1, 1, weight.shape)
                with mx.autograd.record():
                    loss = (weight.data() * factor).sum()
                    with amp.scale_loss(loss, trainer) as scaled:
                        mx.autograd.backward(scaled)
                trainer.step(kv.num_workers)
            print("ends with", hash(weight.data().asnumpy().tobytes()))
    """
    finished = run_job(script, workers=2, env={"PYTHONHASHSEED": "0"})
    assert finished.code == 0, finished.err
    ends = [line.partition("ends with")[2] for line in finished.out.splitlines() if "ends with" in line]
    assert len(ends) == 4 and len(set(ends)) == 1, ends


def test_a_loss_scaler_and_deep_gradient_compression_are_refused():
    script = (
        "import p3, mxnet as mx; from mxnet.contrib import amp; amp.init('float16', target_precision_ops=[]); "
        "net = mx.gluon.nn.Dense(2, in_units=2); net.initialize(); "
        "trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='p3_sync', "
        "compression_params={'type': 'dgc'}, update_on_kvstore=True); "
        "amp.init_trainer(trainer); trainer._init_kvstore()"
    )
    status, output = jobs.run([sys.executable, "-c", script])
    assert status != 0 and "Trainer: dgc and a loss scaler exclude each other" in output


def test_low_rank_is_refused():
    script = (
        "import p3, mxnet as mx; net = mx.gluon.nn.Dense(20, in_units=20); net.initialize(); "
        "trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='p3_sync', "
        "compression_params={'type': 'lowrank'}); trainer._init_kvstore()"
    )
    status, output = jobs.run([sys.executable, "-c", script])
    assert status != 0
    assert "set_gradient_compression: lowrank and a store of MXNet exclude each other" in output, output


def test_a_loss_scaler_with_the_update_on_the_servers_is_warned_of():
    script = (
        "import p3, mxnet as mx; from mxnet.contrib import amp; amp.init('float16', target_precision_ops=[]); "
        "net = mx.gluon.nn.Dense(2, in_units=2); net.initialize(); "
        "trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='p3_sync', update_on_kvstore=True); "
        "amp.init_trainer(trainer); trainer._init_kvstore()"
    )
    status, output = jobs.run([sys.executable, "-c", script])
    assert status == 0 and "a loss scaler is in use with update_on_kvstore=True" in output, output
