"""Control messages, mutated; and that a peer which has proved itself cannot make the scheduler grow without end."""

import itertools
import sys
from pathlib import Path

import pytest

from p3.cluster import agreement, messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.errors import ProtocolError
from p3.plan.strategy import Cut, Strategy

sys.path.insert(0, str(Path(__file__).resolve().parent))

import control

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(2)]
SERVERS = [Node("server", 0, "s0")]


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_but_refusals_comes_of_mutated_messages(seed):
    campaign = control.Campaign(seed)
    campaign.run(10000)
    assert min(campaign.refused, campaign.disagreed, campaign.taken) > 300, vars(campaign)  # it reaches all of them


def announce(name, shape=(1,), defaults=()):
    kind = dict(dtype="float32", sparse=False, staleness=0, gathered=False, norm=False)
    fields = dict(kind, store=0, name=name, shape=list(shape), kind="announce", defaults=list(defaults), options={})
    return messages.check(fields)


def strategy(store, name):
    made = Strategy(keys={name: Cut()})
    value = {"sha256": made.sha256, "text": made.text(), "path": ""}
    return {"kind": "option", "store": store, "name": "strategy", "value": value}


@pytest.mark.parametrize(
    "flood, reason",
    [
        (lambda n: announce("k%d" % n + "x" * 10000), "more than"),
        (lambda n: announce("k", defaults=["%d" % n + "x" * 10000]), "more than"),
        (lambda n: {"kind": "option", "store": n, "name": "optimizer", "value": {"a": "x" * 10000}}, "more than"),
        (lambda n: strategy(n, "x" * 10000), "more than"),
        (lambda n: {"kind": "barrier", "number": n, "mark": None}, "barriers"),
        (lambda n: {"kind": "count", "number": n}, "counts"),
    ],
    ids=["keys", "defaults", "options", "strategies", "barriers", "counts"],
)
def test_a_worker_cannot_fill_the_tables_of_the_agreement(flood, reason, monkeypatch):
    monkeypatch.setattr(agreement, "MAX_CLAIM_BYTES", 1 << 20)
    job = Agreement(WORKERS, SERVERS, slice_elements=10)
    with pytest.raises(ProtocolError, match=reason):
        for number in itertools.count(1):
            assert number < 10000
            job.receive(WORKERS[0], flood(number))


@pytest.mark.parametrize("shape", [[1] * 33, [2**32, 2**32], [2**62, 0, 2**62]])
def test_shapes_that_no_array_has_are_refused(shape):
    with pytest.raises(ProtocolError, match="shape"):
        Agreement(WORKERS, SERVERS, slice_elements=10).receive(WORKERS[0], announce("w", shape))


def test_a_number_of_many_digits_is_refused_before_it_is_read():
    with pytest.raises(ProtocolError):
        messages.decode(b'{"kind":"barrier","number":' + b"9" * 4000 + b"}")
