"""Snapshots of MXNet's stores: what scripts do around a resume, each in a job of one worker inside this process."""

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")
from mxnet import gluon  # noqa: E402
from mxnet.base import MXNetError  # noqa: E402

import p3  # noqa: E402, F401


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
