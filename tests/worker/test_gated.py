"""Gated rounds of a session: their slices leave as they are said to be ready."""

import time

import numpy as np
import pytest

from p3.settings import Settings

session_module = pytest.importorskip("p3.worker.session", reason="the extension is not built")


@pytest.fixture
def session():
    with session_module.Session.open(Settings.from_env({"P3_SLICE_ELEMENTS": "1000"})) as opened:
        yield opened


@pytest.fixture
def key(session):
    declared = session.declare("w", (3500,), "float32")
    session.init(declared, np.zeros(3500, np.float32), np.empty(3500, np.float32)).wait(30)
    return declared


def wait_until_sent(session, slices):
    deadline = time.monotonic() + 30
    while session.counters()["slices_sent"] < slices:
        assert time.monotonic() < deadline, session.counters()
        time.sleep(0.001)


def test_slices_leave_as_they_become_ready_and_land_where_they_left(session, key):
    both = np.full(3500, -1, np.float32)
    before = session.counters()["slices_sent"]
    operation = session.pushpull(key, both, both, gated=True)
    both[:1500] = 1
    session.ready(key, 1500)
    wait_until_sent(session, before + 1)
    both[1500:] = 2
    assert not operation.done
    session.ready(key, 3500)
    operation.wait(30)
    assert (both[:1500] == 1).all() and (both[1500:] == 2).all()
    assert session.counters()["slices_sent"] == before + 4


def test_a_skip_can_wait_for_its_landing_array(session, key):
    landing = np.full(3500, 5, np.float32)
    operation = session.skip(key, landing, gated=True)
    with pytest.raises(TimeoutError):
        operation.wait(0)
    session.ready(key, 3500)
    operation.wait(30)
    assert not operation.updated and (landing == 5).all()


def test_nothing_waits_for_ready_where_nothing_is_gated(session, key):
    landing = np.empty(3500, np.float32)
    session.ready(key, 10)
    session.pushpull(key, np.ones(3500, np.float32), landing).wait(30)
    assert (landing == 1).all()
