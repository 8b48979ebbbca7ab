"""What the scheduler decides when servers are lost (p3/cluster/heirs.py), and what becomes of what was agreed on with
them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.heirs import Heirs
from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

WORKERS = [Node("worker", rank, "w%d" % rank) for rank in range(2)]
SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(4)]
GIVEN_UP = {"kind": "snapshot_failed", "round": 5, "text": ""}


@settings(max_examples=400)
@given(st.data())
def test_whoever_is_lost_and_whenever_a_living_server_that_knows_of_it_serves_each_rank(data):
    """Workers follow what they are told, as does a server: it serves what it has said it has inherited. A process that
    comes back as a lost one serves that rank again, and its heir does not any more."""
    heirs, alive = Heirs(WORKERS, SERVERS), list(SERVERS)
    asked = []  # of servers that are to answer
    has = {server: {server.rank} for server in SERVERS}
    route = list(SERVERS)  # of the workers
    changes, told_changes = 0, []

    def pass_on(sent):
        for receiver, message in sent:
            messages.check(message)
            if receiver.role == "server":
                asked.append((receiver, message["rank"]))
            elif receiver == WORKERS[0]:
                heir = SERVERS[message["heir"]]
                told_changes.append(message["changes"])
                for rank in message["ranks"]:
                    route[rank] = heir
                    assert heir not in alive or rank in has[heir], (rank, heir)

    while True:
        turns = [("answer", one) for one in asked if one[0] in alive]
        if len(alive) > 1 and data.draw(st.integers(0, 3), "loses") == 3:
            turns += [("lose", server) for server in alive]
        if heirs.are_known and data.draw(st.integers(0, 2), "returns") == 2:
            turns += [("return", SERVERS[rank]) for rank in heirs.lost]
        if not turns:
            break
        what, it = data.draw(st.sampled_from(turns), "turn")
        changes += what != "answer"
        if what == "lose":
            alive.remove(it)
            asked = [one for one in asked if one[0] != it]
            has[it] = set()
            pass_on(heirs.lose(it))
        elif what == "return":
            former = route[it.rank]
            assert heirs.take_back(it) == former and former in alive
            has[former].remove(it.rank)
            alive.append(it)
            has[it], route[it.rank] = {it.rank}, it
            assert heirs.was_former(it.rank, changes - 1) and not heirs.was_former(it.rank, changes)
        else:
            asked.remove(it)
            has[it[0]].add(it[1])
            pass_on(heirs.on_inherited(it[0], {"kind": "inherited", "rank": it[1]}))
    assert all(server in alive and rank in has[server] for rank, server in enumerate(route)), route
    assert heirs.changes == changes and len(set(told_changes) & set(range(1, changes + 1))) == len(told_changes)
    assert heirs.lost == [server.rank for server in SERVERS if server not in alive]


def test_the_last_one_leaves_nobody_and_no_server_inherits_unasked():
    heirs = Heirs(WORKERS, SERVERS[:2])
    assert heirs.lose(SERVERS[1]) == [(SERVERS[0], {"kind": "inherit", "rank": 1})]
    with pytest.raises(ProtocolError, match="server 0 .* has inherited what nobody left it"):
        heirs.on_inherited(SERVERS[0], {"kind": "inherited", "rank": 0})
    with pytest.raises(DisagreementError, match="no other server is left"):
        heirs.lose(SERVERS[0])


def kinds(sent):
    return sorted((str(node).split(" (")[0], message["kind"]) for node, message in sent)


def test_nobody_waits_for_the_answer_of_one_that_is_lost():
    agreement = Agreement(WORKERS, SERVERS[:2])
    announced = dict(kind="announce", store=0, name="w", shape=[3], dtype="float32", defaults=[], sparse=False,
                     staleness=0, gathered=False, norm=False, options={})  # fmt: skip
    assert kinds(agreement.receive(WORKERS[0], announced)) == [("server 0", "define"), ("server 1", "define")]
    agreement.receive(WORKERS[0], {"kind": "count", "number": 1})
    assert agreement.receive(SERVERS[0], {"kind": "defined", "wire_key": 0}) == []
    told = agreement.depart_server(SERVERS[1])
    assert kinds(told) == [("server 0", "inherit"), ("worker 0", "agreed"), ("worker 1", "agreed")]
    told = agreement.receive(SERVERS[0], {"kind": "counted", "worker": 0, "number": 1, "counters": {"rounds": 3}})
    assert told[0][1]["servers"] == [{"rounds": 3, "label": str(SERVERS[0])}, {"late_s": []}]
    told = agreement.receive(SERVERS[0], {"kind": "inherited", "rank": 1})
    assert [(node, message) for node, message in told] == [
        (worker, {"kind": "server_departed", "rank": 1, "heir": 0, "ranks": [1], "changes": 1}) for worker in WORKERS
    ]


@pytest.mark.parametrize("has_written", [False, True])
def test_a_snapshot_that_lacks_its_part_is_given_up(has_written):
    agreement = Agreement(WORKERS, SERVERS[:2])
    agreement.receive(WORKERS[0], {"kind": "captured", "round": 5, "changes": 0})
    if has_written:
        written = {"kind": "snapshot_written", "round": 5, "bytes": 1, "sha256": "0" * 64}
        agreement.receive(SERVERS[1], written)
    told = agreement.depart_server(SERVERS[1])
    assert [sent for sent in told if sent[0].role == "worker"] == (
        [] if has_written else [(worker, GIVEN_UP) for worker in WORKERS]
    )


def test_a_snapshot_whose_copies_were_made_while_one_was_lost_is_none():
    agreement = Agreement(WORKERS, SERVERS[:2])
    agreement.depart_server(SERVERS[1])
    told = agreement.receive(WORKERS[0], {"kind": "captured", "round": 5, "changes": 0})
    assert [message["text"] for _, message in told if message["kind"] == "snapshot_failed"] == ["", ""]  # given up
    told = agreement.receive(WORKERS[0], {"kind": "captured", "round": 6, "changes": 1})
    assert kinds(told) == [("server 0", "write_snapshot")]
