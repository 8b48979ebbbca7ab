"""Keys of more than 2^31 bytes and more than 2^31 elements. Not in CI: run with `pytest -m large`; needs 16 GB."""

import mmap
import os
from importlib.util import find_spec

import numpy as np
import pytest

from p3.settings import Settings
from p3.worker.session import Session

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE < 15 << 30, reason="this machine has less than 16 GB of memory"
    ),
]
DEADLINE_S = 600


def test_more_elements_than_an_int_can_count():
    elements = (1 << 31) + 12_345
    value = np.zeros(elements, "uint8")
    value[[0, 1 << 31, -1]] = 1, 2, 3
    with Session.open(Settings(slice_elements=10_000_000)) as session:
        key = session.declare("large", (elements,), "uint8")
        session.init(key, value, value).wait(DEADLINE_S)
        session.pushpull(key, value, value).wait(DEADLINE_S)  # summed over the one worker
    assert value[[0, 1, 1 << 31, -1]].tolist() == [1, 0, 2, 3]


@pytest.mark.skipif(find_spec("mxnet") is None, reason="MXNet is not installed")
def test_more_bytes_than_an_int_can_count():
    import mxnet as mx

    import p3  # noqa: F401

    elements = (1 << 29) + 12_345
    kv = mx.kv.create("p3_sync")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    weight = mx.nd.ones(elements)
    kv.broadcast("large", weight, weight)
    kv.pushpull("large", mx.nd.ones(elements) * 2, out=weight)
    for place in (0, elements // 2, elements - 1):
        assert weight[place].asscalar() == 0
    assert weight.sum().asscalar() == 0
