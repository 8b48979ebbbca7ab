"""Who joins gets a rank; what contradicts is an error that names both nodes."""

import random

import pytest

from p3.cluster.messages import PROTOCOL_VERSION
from p3.cluster.node import Node
from p3.cluster.rendezvous import Rendezvous
from p3.cluster.roster import Entry, Roster
from p3.errors import RendezvousError


def join(role, rank=None, host="10.0.0.1", port=0, pid=1, counts=(2, 1), protocol=PROTOCOL_VERSION, **settings):
    return {
        "kind": "join",
        "role": role,
        "rank": rank,
        "host": host,
        "port": port,
        "machine": host,
        "pid": pid,
        "version": "1",
        "protocol": protocol,
        "counts": dict(zip(("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "P3_MAX_WORKERS"), (*counts, None))),
        "settings": dict({"P3_SLICE_ELEMENTS": 50000}, **settings),
    }


def rendezvous_of(*joins, workers=2, servers=1):
    rendezvous = Rendezvous("10.0.0.9", workers, servers)
    for message in joins:
        rendezvous.join(message)
    return rendezvous


def test_ranks_are_given_as_asked():
    rendezvous = rendezvous_of(join("worker", 1), join("server", 0), join("worker", 0, host="10.0.0.2"))
    assert rendezvous.complete()
    assert list(map(str, rendezvous.assign())) == ["worker 1 (10.0.0.1)", "server 0 (10.0.0.1)", "worker 0 (10.0.0.2)"]


def test_without_ranks_the_order_is_by_host_and_process_whoever_comes_first():
    nodes = [join("worker", host=host, pid=pid, counts=(4, 1)) for host in ("10.0.0.1", "10.0.0.2") for pid in (5, 6)]
    nodes.append(join("server", port=80, counts=(4, 1)))
    for seed in range(20):
        order = list(range(5))
        random.Random(seed).shuffle(order)
        rendezvous = Rendezvous("10.0.0.9", 4, 1)
        for identity in order:
            rendezvous.join(nodes[identity])
        ranks = {identity: node.rank for identity, node in zip(order, rendezvous.assign())}
        assert ranks == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0}, "seed %d" % seed


def test_nodes_without_rank_fill_the_gaps():
    rendezvous = rendezvous_of(join("worker", 0, host="z"), join("worker", host="a"), join("server"))
    assert [node.rank for node in rendezvous.assign()] == [0, 1, 0]


def test_the_missing_are_named_by_count_and_rank():
    assert rendezvous_of(join("worker", 1)).missing() == "1 of 2 workers (rank 0) and 1 of 1 server (rank 0)"
    assert rendezvous_of(join("worker"), join("server")).missing() == "1 of 2 workers"


def test_one_too_many_is_refused():
    with pytest.raises(RendezvousError, match=r"server \(10.0.0.7, process 1\) is one too many: the job has 1 server"):
        rendezvous_of(join("server"), join("server", host="10.0.0.7"))


def test_a_rank_given_twice_names_both():
    with pytest.raises(RendezvousError, match=r"worker 1 \(a\) and worker 1 \(b\) both have P3_RANK=1"):
        rendezvous_of(join("worker", 1, host="a"), join("worker", 1, host="b"))


def test_a_rank_beyond_the_count_is_refused():
    with pytest.raises(RendezvousError, match="P3_RANK=2, but the job has 2 workers"):
        rendezvous_of(join("worker", 2))


def test_other_counts_than_the_schedulers_are_refused():
    text = r"has DMLC_NUM_WORKER=3, but scheduler \(10.0.0.9\) has DMLC_NUM_WORKER=2"
    with pytest.raises(RendezvousError, match=text):
        rendezvous_of(join("worker", counts=(3, 1)))


def test_another_number_of_places_than_the_schedulers_is_refused():
    text = r"has P3_MAX_WORKERS=4, but scheduler \(10.0.0.9\) has P3_MAX_WORKERS=unset"
    with pytest.raises(RendezvousError, match=text):
        rendezvous_of(join("worker", counts=(2, 1, 4)))
    Rendezvous("10.0.0.9", 2, 1, 4).join(join("worker", counts=(2, 1, 4)))


def test_a_node_is_the_same_wherever_its_process_is():
    roster, (node,) = Roster(), rendezvous_of(join("worker", counts=(1, 0)), workers=1, servers=0).assign()
    roster.entries.append(Entry(None, join("worker")))
    roster.assign([node])
    roster.add_places("worker", [1, 2])
    assert roster.nodes("worker") == [Node("worker", rank, "anywhere") for rank in range(3)]
    for rank in (0, 2):
        roster.replace(Node("worker", rank, "of old"), Entry(None, join("worker", host="10.0.0.7")))
    assert [str(entry) for entry in roster.entries] == ["worker 0 (10.0.0.7)", "worker 2 (10.0.0.7)"]
    assert [node.host for node in roster.nodes("worker")] == ["10.0.0.7", "nobody yet", "10.0.0.7"]
    assert not roster.find("worker", 1).hears and roster.find("worker", 2).hears


def test_another_protocol_is_refused():
    with pytest.raises(RendezvousError, match="install the same version"):
        rendezvous_of(join("worker", protocol=PROTOCOL_VERSION + 1))


def test_settings_that_differ_name_both_nodes_and_values():
    rendezvous = rendezvous_of(join("worker", 0), join("server"), join("worker", 1, host="b", P3_SLICE_ELEMENTS=7))
    with pytest.raises(RendezvousError) as caught:
        rendezvous.assign()
    text = "worker 1 (b) has P3_SLICE_ELEMENTS=7, but worker 0 (10.0.0.1) has P3_SLICE_ELEMENTS=50000"
    assert text in str(caught.value)
