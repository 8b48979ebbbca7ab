"""Local steps of Gluon's Trainer: jobs against the papers' algorithms in NumPy, and what is refused."""

import re
import sys

import plugin_jobs as jobs
import pytest

mx = pytest.importorskip("mxnet")
import p3.mxnet  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402


def script(*arguments):
    return jobs.python("mxnet_local_steps.py", *arguments)


def run(workers, *arguments, **variables):
    status, output = jobs.run_p3(workers, 2, script(*arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("workers, fragments, every, delay, alpha, weighed", [
    (2, "0-1-2", 10, 0, 0, "all alike"),  # DiLoCo
    (3, "0,1,2", 9, 4, 0.25, "all alike"),  # Streaming DiLoCo
    (2, "0,1,2", 6, 2, 0.5, "weighed"),
])  # fmt: skip
def test_local_steps_are_those_of_the_papers(workers, fragments, every, delay, alpha, weighed):
    assert run(workers, "follows", 100, fragments, every, delay, alpha, weighed).count("follows") == workers


@pytest.mark.parametrize("codec, dtype", [("none", "float32"), ("int4", "float32"), ("none", "float64")])
def test_all_workers_have_the_same_global_bits(codec, dtype):
    found = re.findall(r"local (\w+) global (\w+)", run(3, "has_same_bits", codec, dtype, P3_CHECK="1"))
    assert len(found) == 3 and len({one[0] for one in found}) == 3 and len({one[1] for one in found}) == 1, found


def test_statistics_and_frozen_weights_are_rank_0s_and_then_each_workers_own():
    output = run(2, "normalized")
    found = re.findall(r"weights (\w+), statistics (\w+)", output)
    assert len(found) == 2 and len(set(re.findall(r"first (\w+)", output))) == 1
    assert len({one[0] for one in found}) == 1 and len({one[1] for one in found}) == 2, found


def test_a_loaded_state_takes_the_same_steps(tmp_path):
    assert run(2, "loads", tmp_path).count("goes on") == 2


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path, codec):
    whole = run(2, "resumed", tmp_path, codec, 17, 0)
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    status, output = jobs.run([*launcher, *script("resumed", tmp_path, codec, 17, 9)], timeout_s=100,
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"), P3_SNAPSHOT_EVERY="4")  # fmt: skip
    assert status == 0, output
    assert output.count("began at 8") == 2, output
    expected, found = (sorted(re.findall(r"(worker \d) began at \d and has (\w+)", one)) for one in (whole, output))
    assert len(found) == 2 and found == expected


# One worker, in this process


@pytest.fixture
def made():
    """LocalSteps of a small net, with what it is given."""
    made = []

    def make(kvstore=None, shape=4, change=lambda net: None, with_master=False, **given):
        net = gluon.nn.Dense(3, in_units=shape)
        net.initialize()
        change(net)
        numbers = {"learning_rate": 0.1, "multi_precision": with_master}
        trainer = gluon.Trainer(net.collect_params(), "sgd", numbers, kvstore=kvstore)
        made.append(p3.mxnet.LocalSteps(trainer, **{"every": 2, **given}))
        return net, made[-1]

    yield make
    for one in made:
        if hasattr(one, "_p3_local"):
            one.release()


def step(net, trainer):
    with autograd.record():
        loss = net(mx.nd.ones((2, 4))).sum()
    loss.backward()
    trainer.step(2)


def test_it_is_the_same_object_and_its_steps_are_gluons(made):
    net, trainer = made(every=2, outer={"lr": 1.0, "momentum": 0.0})
    assert isinstance(trainer, gluon.Trainer)
    before = net.weight.data().asnumpy()
    for number in (1, 2, 3):
        step(net, trainer)
        assert trainer.stats()["step"] == number
    assert abs(net.weight.data().asnumpy() - (before - 0.3)).max() < 1e-6
    trainer.allreduce_grads()
    with autograd.record():
        net(mx.nd.ones((2, 4))).sum().backward()
    trainer.update(2)
    assert trainer.stats()["step"] == 4
    with pytest.raises(ValueError, match="has them already: call its release"):
        p3.mxnet.LocalSteps(trainer, every=3)
    trainer.release()
    assert type(trainer) is gluon.Trainer


def test_half_precision_has_a_global_value_of_float32(made):
    net, trainer = made(change=lambda net: net.cast("float16"))
    before = net.weight.data().asnumpy()
    values = trainer.state_dict()["global"]
    assert {str(one.dtype) for one in values.values()} == {"float32"}
    trainer.take_global()
    assert (net.weight.data().asnumpy() == before).all()


@pytest.mark.parametrize("given, problem", [
    ({"every": 0}, "every is 0; it must be at least 1"),
    ({"fragments": 2}, "fragments is 2, and the model has 1 layers"),
    ({"codec": {"type": "dgc"}}, "local steps and dgc exclude each other"),
    ({"staleness": 2}, "local steps and staleness .* exclude each other"),
    ({"kvstore": "p3_sync"}, "local steps and a store of MXNet .kvstore='p3_sync'. exclude .*kvstore=None"),
    ({"kvstore": "dist_sync"}, "local steps and a store of MXNet .kvstore='dist_sync'. exclude .*kvstore=None"),
    ({"shape": 0}, "dense\\d+_weight has no shape yet, or no value: .*forward pass before"),
    ({"change": lambda net: net.cast("float16"), "with_master": True}, "is float16, and the optimizer, .*float32"),
    ({"change": lambda net: net.cast("int32")}, "dense\\d+_(weight|bias) is default of int32"),
    ({"change": lambda net: net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])}, "on 2 devices: start a worker"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(made, given, problem):
    with pytest.raises(ValueError, match=problem):
        made(**given)


def test_a_parameter_that_is_thawed_later_is_refused_by_name(made):
    net, trainer = made(change=lambda net: net.bias.__setattr__("grad_req", "null"))
    step(net, trainer)
    net.bias.grad_req = "write"
    with pytest.raises(RuntimeError, match="parameter dense\\d+_bias had grad_req='null' when LocalSteps was made"):
        step(net, trainer)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(ValueError, match="LocalSteps takes a gluon.Trainer, not a Dense"):
        p3.mxnet.LocalSteps(gluon.nn.Dense(3), every=2)


def test_a_loss_scaler_is_refused_by_name(made):
    net, trainer = made()
    trainer._amp_loss_scaler = object()  # as amp.init_trainer() does
    with pytest.raises(ValueError, match="local steps and a loss scaler exclude each other"):
        trainer.step(1)
    del trainer._amp_loss_scaler


def test_nothing_is_lost_within_global_weights(made):
    net, trainer = made()
    step(net, trainer)
    own = net.weight.data().asnumpy()
    state = trainer.state_dict()
    with trainer.global_weights():
        assert (net.weight.data().asnumpy() != own).any()
        for call in (lambda: trainer.step(1), trainer.take_global, trainer.broadcast, trainer.release,
                     lambda: trainer.load_state_dict(state)):  # fmt: skip
            with pytest.raises(RuntimeError, match="within global_weights.*leave the with block before"):
                call()
    assert (net.weight.data().asnumpy() == own).all()
