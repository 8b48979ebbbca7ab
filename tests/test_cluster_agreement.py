"""What nodes agree on: rank 0's word decides, contradictions name both workers, nobody waits for the gone."""

import random

import pytest

from p3.cluster import messages
from p3.cluster.agreement import Agreement, slice_count
from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(2)]


class Job:
    """An Agreement whose servers answer when told to, and what each node was sent."""

    def __init__(self, slice_elements=10):
        self.agreement = Agreement(WORKERS, SERVERS, slice_elements)
        self.sent = {node: [] for node in WORKERS + SERVERS}

    def say(self, node, kind, **fields):
        for receiver, message in self.agreement.receive(node, messages.check(dict(fields, kind=kind))):
            self.sent[receiver].append(messages.check(message))

    def announce(self, rank, name, shape=(2, 3), dtype="float32", store=0):
        self.say(WORKERS[rank], "announce", store=store, name=name, shape=list(shape), dtype=dtype)

    def answer_all(self):
        for server in SERVERS:
            for message in self.sent[server]:
                if message["kind"] == "define":
                    self.say(server, "defined", wire_key=message["wire_key"])
                elif message["kind"] == "set_optimizer":
                    self.say(server, "optimizer_set", store=message["store"])
            self.sent[server] = []

    def kinds(self, node):
        return [message["kind"] for message in self.sent[node]]


def test_rank_0_decides_and_workers_hear_when_every_server_knows():
    job = Job()
    job.announce(1, "w")
    assert not any(job.sent.values())
    job.announce(0, "w")
    define = job.sent[SERVERS[0]][0]
    assert (define["wire_key"], define["first_slice"], define["elements"]) == (0, 0, 6)
    job.say(SERVERS[0], "defined", wire_key=0)
    assert not job.sent[WORKERS[0]]
    job.say(SERVERS[1], "defined", wire_key=0)
    for worker in WORKERS:
        (agreed,) = job.sent[worker]
        assert (agreed["kind"], agreed["name"], agreed["wire_key"], agreed["slice_elements"]) == ("agreed", "w", 0, 10)


def test_slices_are_counted_over_all_keys():
    job = Job(slice_elements=10)
    for name, shape in (("a", (25,)), ("empty", (0, 5)), ("scalar", ()), ("b", (10,)), ("c", (11,))):
        job.announce(0, name, shape)
    assert [m["first_slice"] for m in job.sent[SERVERS[0]]] == [0, 3, 4, 5, 6]
    assert [m["wire_key"] for m in job.sent[SERVERS[0]]] == [0, 1, 2, 3, 4]


def test_slice_count_is_the_cores():
    core = pytest.importorskip("p3._core", reason="the extension is not built")
    for elements in (0, 1, 9, 10, 11, 12345678):
        for slice_elements in (1, 10, 50000):
            assert slice_count(elements, slice_elements) == core.slice_count(elements, slice_elements)


def test_the_same_plan_comes_out_in_whatever_order_the_others_announce():
    plans = []
    for seed in range(10):
        job, turns = Job(), [(rank, name) for rank in (1, 2) for name in "abc"]
        random.Random(seed).shuffle(turns)
        for name in "abc":  # rank 0 keeps its order, the others come in between
            for rank, other in turns[:2]:
                job.announce(rank, other)
            turns = turns[2:]
            job.announce(0, name)
        job.answer_all()
        plans.append(sorted((m["name"], m["wire_key"], m["first_slice"]) for m in job.sent[WORKERS[2]]))
    assert all(plan == plans[0] for plan in plans)


def test_names_1_and_one_are_different_keys_and_so_are_stores():
    job = Job()
    for name, store in ((1, 0), ("1", 0), (1, 1)):
        job.announce(0, name, store=store)
    assert len(job.sent[SERVERS[0]]) == 3


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_another_shape_names_both_workers_the_key_and_both_values(first, second):
    job, shapes = Job(), {0: (2, 3), 1: (3, 2)}
    job.announce(first, "w", shapes[first])
    with pytest.raises(DisagreementError) as caught:
        job.announce(second, "w", shapes[second])
    assert str(caught.value) == (
        "worker 0 (w0) and worker 1 (w1) disagree about key 'w': "
        "shape is (2, 3) on the first and (3, 2) on the second"
    )


def test_another_type_is_a_disagreement():
    job = Job()
    job.announce(0, 7)
    with pytest.raises(DisagreementError, match="key 7: dtype is float32 on the first and float64 on the second"):
        job.announce(2, 7, dtype="float64")


def test_a_key_announced_again_changes_nothing():
    job = Job()
    job.announce(0, "w")
    job.announce(0, "w")
    assert len(job.sent[SERVERS[0]]) == 1


def test_optimizers_are_agreed_like_keys():
    job, description = Job(), {"name": "sgd", "momentum": 0.9}
    job.say(WORKERS[0], "optimizer", store=0, description=description)
    job.say(WORKERS[1], "optimizer", store=0, description=description)
    job.answer_all()
    assert job.kinds(WORKERS[2]) == ["optimizer_agreed"]
    with pytest.raises(DisagreementError, match="optimizer of store 0: momentum is 0.9 on the first and 0.8"):
        job.say(WORKERS[2], "optimizer", store=0, description=dict(description, momentum=0.8))


def test_the_order_of_rank_0_goes_to_all_and_nobody_elses_does():
    job = Job()
    job.say(WORKERS[0], "order", store=0, names=["b", 1])
    assert all(job.sent[worker][0]["names"] == ["b", 1] for worker in WORKERS)
    with pytest.raises(ProtocolError, match="only worker 0"):
        job.say(WORKERS[1], "order", store=0, names=[])


def test_a_barrier_opens_when_the_last_arrives():
    job = Job()
    for worker in WORKERS[:2]:
        job.say(worker, "barrier", number=1)
    assert not any(job.sent.values())
    job.say(WORKERS[2], "barrier", number=1)
    assert [job.kinds(worker) for worker in WORKERS] == [["barrier_done"]] * 3
    with pytest.raises(ProtocolError, match="out of turn"):
        job.say(WORKERS[0], "barrier", number=1)


def test_servers_are_stopped_when_the_last_worker_leaves():
    job = Job()
    for worker in WORKERS:
        assert not job.sent[SERVERS[0]]
        job.say(worker, "bye")
    assert job.kinds(SERVERS[0]) == job.kinds(SERVERS[1]) == ["stop"]


@pytest.mark.parametrize("leave_first", [True, False])
def test_nobody_waits_in_a_barrier_for_one_who_left(leave_first):
    job, steps = Job(), [(WORKERS[1], "bye", {}), (WORKERS[0], "barrier", {"number": 1})]
    (first, last) = steps if leave_first else steps[::-1]
    job.say(first[0], first[1], **first[2])
    with pytest.raises(DisagreementError, match=r"worker 1 \(w1\) left the job while worker 0 .* in barrier 1"):
        job.say(last[0], last[1], **last[2])


@pytest.mark.parametrize("leave_first", [True, False])
def test_nobody_waits_for_a_key_that_rank_0_left_without(leave_first):
    job = Job()
    steps = [lambda: job.say(WORKERS[0], "bye"), lambda: job.announce(1, "extra")]
    (first, last) = steps if leave_first else steps[::-1]
    first()
    with pytest.raises(DisagreementError, match=r"worker 1 \(w1\) declared key 'extra', but worker 0 \(w0\) left"):
        last()


@pytest.mark.parametrize(
    "node, kind, fields",
    [
        (SERVERS[0], "bye", {}),
        (SERVERS[0], "barrier", {"number": 1}),
        (WORKERS[0], "defined", {"wire_key": 0}),
        (SERVERS[0], "defined", {"wire_key": 0}),
        (SERVERS[0], "optimizer_set", {"store": 0}),
        (WORKERS[0], "abort", {"text": "x"}),
        (WORKERS[0], "agreed", {"store": 0, "name": "w", "shape": [], "dtype": "float32", "wire_key": 0,
                                "first_slice": 0, "slice_elements": 1}),
    ],
)
def test_what_a_node_may_not_say_is_refused(node, kind, fields):
    with pytest.raises(ProtocolError):
        Job().say(node, kind, **fields)


def test_who_has_left_says_no_more():
    job = Job()
    job.say(WORKERS[0], "bye")
    with pytest.raises(ProtocolError):
        job.announce(0, "w")
