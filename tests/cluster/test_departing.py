"""Agreement without some of its workers, explored: workers run one program, in any order of their messages; some are
lost anywhere. Whoever is left comes to the end of the program, and all agree on the same."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.node import Node
from p3.errors import DisagreementError
from p3.plan.strategy import Cut, Strategy
from p3.worker.store_options import told_of

SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(2)]
SGD = {"name": "sgd", "momentum": 0.5, "clip_gradient": -1.0, "multi_precision": False}

# What a script does, and waits for at once. A snapshot is taken behind each step.
CALLS = ("announce", "option", "barrier", "release", "step", "replan")


class Worker:
    """One that runs a program against an Agreement, a message at a time."""

    def __init__(self, node, program, alive):
        """`alive`: all who are, which changes."""
        self.node, self.program, self._alive = node, list(program), alive
        self.completed = 0  # snapshots that it has completed
        self._more = []  # to be said next
        self.at = self.barriers = self.steps = self.joins = self.replans = 0
        self.heard, self.store, self.awaits = [], 0, None
        self.has_said_bye = False

    def next(self):
        """What it says now, if it does not wait. `awaits` is what the message is for."""
        if self._more:
            return self._more.pop(0)
        self.awaits = None
        if self.at == len(self.program):
            self.has_said_bye = True
            return {"kind": "bye"}
        call, self.at = self.program[self.at], self.at + 1
        return getattr(self, "_" + call)()

    def _has_heard(self, kind, **fields):
        def heard():
            return any(
                message["kind"] == kind and all(message[field] == value for field, value in fields.items())
                for message in self.heard
            )

        return heard

    def _announce(self):
        name = "key %d" % self.at
        self.awaits = self._has_heard("agreed", store=self.store, name=name)
        return dict(kind="announce", store=self.store, name=name, shape=[3], dtype="float32", defaults=[],
                    sparse=False, staleness=0, gathered=False, norm=False, options={})  # fmt: skip

    def _option(self):
        store = 100 + self.at  # of which each has its option once
        self.awaits = self._has_heard("option_agreed", store=store)
        return dict(kind="option", store=store, name="optimizer", value=SGD)

    def _barrier(self):
        self.barriers += 1
        self.awaits = self._has_heard("barrier_done", number=self.barriers)
        return dict(kind="barrier", number=self.barriers, mark=None)

    def _release(self):
        store, self.store = self.store, self.store + 1
        self.awaits = self._has_heard("released", store=store)
        return dict(kind="release", store=store)

    def _replan(self):
        self.replans += 1
        self.awaits = self._has_heard("replanned", number=self.replans)
        told = {}
        if self._alive[0] is self:
            told = told_of("", 0, Strategy(Cut((self.replans % 2,), 1 + self.replans % 3)))
        keys = list(self.plans().values())
        return dict(kind="replan", stores=[self.store], strategy=told, keys=keys, rounds=[7] * len(keys))

    def plans(self):
        """The wire key of each key of the store, by name, as this worker has heard."""
        known = {}
        for message in self.heard:
            for agreed in [message] if message["kind"] == "agreed" else message.get("keys", []):
                if agreed["store"] == self.store:
                    known[agreed["name"]] = agreed["wire_key"]
        return known

    def _step(self):
        """Which all take together. The first worker completes the step's snapshot, and waits until that is over."""
        self.steps = number = self.steps + 1
        written = dict(kind="snapshot_written", round=number, bytes=1, sha256="0" * 64)
        self.awaits = lambda: all(one.steps >= number for one in self._alive)
        if self._alive[0] is not self:
            return written
        self._more, together = [written], self.awaits
        self.awaits = lambda: together() and (
            self._has_heard("snapshot_failed", round=number)() or self._completes(number)
        )
        return dict(kind="captured", round=number, changes=0)

    def _completes(self, number):
        if self._has_heard("snapshot_complete", round=number)() and self.completed < number:
            self.completed = number
            self._more = [dict(kind="snapshot_taken", round=number)]
        return self.completed >= number

    @property
    def is_ready(self):
        return bool(self._more) or not self.has_said_bye and (self.awaits is None or self.awaits())


@settings(max_examples=400)
@given(st.data())
def test_whoever_is_left_comes_to_the_end(data):
    count = data.draw(st.integers(2, 4), "workers")
    program = data.draw(st.lists(st.sampled_from(CALLS), max_size=8), "program")
    alive, sent = [], {server: [] for server in SERVERS}
    workers = [Worker(Node("worker", rank, "w%d" % rank), program, alive) for rank in range(count)]
    alive += workers
    agreement = Agreement([one.node for one in workers], SERVERS)
    lost = 0

    def pass_on(told):
        for receiver, message in told:
            message = messages.check(message)
            if receiver.role == "server":
                sent[receiver].append(message)
            else:
                workers[receiver.rank].heard.append(message)

    def answer(server):
        message = sent[server].pop(0)
        if message["kind"] == "define":
            return {"kind": "defined", "wire_key": message["wire_key"]}
        if message["kind"] == "set_option":
            return {"kind": "option_set", "store": message["store"], "name": message["name"]}
        if message["kind"] == "write_snapshot":
            return {"kind": "snapshot_written", "round": message["round"], "bytes": 1, "sha256": "0" * 64}
        if message["kind"] == "drop_store":
            return {"kind": "dropped", "store": message["store"]}
        if message["kind"] == "recut":
            assert all(key["round"] == 7 for key in message["keys"])
            return {"kind": "recut_done", "number": message["number"]}
        return None

    stopped = False
    while True:
        ready = [one for one in alive if one.is_ready]
        answering = [server for server in SERVERS if sent[server]]
        turns = [*ready, *answering]
        if len(alive) > 1:
            turns += [None]  # somebody is lost
        if not ready and not answering:
            break
        turn = data.draw(st.sampled_from(turns), "turn")
        try:
            if turn is None:
                if lost == count - 1:
                    continue
                victim = data.draw(st.sampled_from([one for one in alive if not one.has_said_bye] or alive), "lost")
                if victim.has_said_bye:
                    continue
                lost += 1
                alive.remove(victim)
                pass_on(agreement.depart(victim.node))
            elif isinstance(turn, Worker):
                pass_on(agreement.receive(turn.node, messages.check(turn.next())))
            else:
                stopped = stopped or sent[turn][0]["kind"] == "stop"
                said = answer(turn)
                if said is not None:
                    pass_on(agreement.receive(turn, messages.check(said)))
        except DisagreementError as error:  # the first worker was lost before it had said what others wait for
            assert "waits for its word" in str(error) or "left the job while" in str(error), error
            return
    assert all(one.has_said_bye for one in alive), [(one.node, one.at) for one in alive]
    assert stopped
    assert all(one.plans() == alive[0].plans() for one in alive)
    for one in alive:
        for message in one.heard:
            if message["kind"] == "barrier_done":
                assert set(message["members"]) >= {one.node.rank for one in alive}
                others = [other for other in alive if message in other.heard]
                assert others == alive


def test_the_next_worker_does_what_the_first_one_did():
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    announced = dict(kind="announce", store=0, name="w", shape=[3], dtype="float32", defaults=[], sparse=False,
                     staleness=0, gathered=False, norm=False, options={})  # fmt: skip
    assert agreement.receive(workers[0], announced)[0][1]["kind"] == "define"
    assert agreement.depart(workers[0]) == []
    assert agreement.receive(workers[1], announced) == []  # it is decided
    other = dict(announced, shape=[4])
    with pytest.raises(DisagreementError, match="worker 1 .* and worker 2 .* disagree about key 'w': shape"):
        agreement.receive(workers[2], other)
    assert agreement.receive(workers[1], dict(announced, name="v"))[0][1]["kind"] == "define"
    assert agreement.receive(workers[1], {"kind": "order", "store": 0, "names": ["w"]})


def test_a_key_that_waits_for_the_first_workers_word_is_an_error():
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    announced = dict(kind="announce", store=0, name="w", shape=[3], dtype="float32", defaults=[], sparse=False,
                     staleness=0, gathered=False, norm=False, options={})  # fmt: skip
    agreement.receive(workers[1], announced)
    with pytest.raises(DisagreementError, match="worker 1 .* waits for its word on 'w' of store 0"):
        agreement.depart(workers[0])


def snapshot_under_way(agreement, workers):
    """Round 5, which all but worker 2 have written."""
    agreement.receive(workers[0], {"kind": "captured", "round": 5, "changes": 0})
    written = {"kind": "snapshot_written", "round": 5, "bytes": 1, "sha256": "0" * 64}
    for node in [*workers[:2], *SERVERS]:
        agreement.receive(node, written)
    return written


@pytest.mark.parametrize("lost", [0, 2])
def test_a_snapshot_under_way_without_its_first_worker_or_a_part_is_given_up(lost):
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    written = snapshot_under_way(agreement, workers)
    given_up = {"kind": "snapshot_failed", "round": 5, "text": ""}
    left = [node for node in workers if node != workers[lost]]
    assert [sent for sent in agreement.depart(workers[lost]) if sent[0] in left] == [(node, given_up) for node in left]
    agreement.receive(left[0], {"kind": "captured", "round": 8, "changes": 0})
    told = [agreement.receive(node, dict(written, round=8)) for node in [*left, *SERVERS]]
    assert [[message["kind"] for _, message in sent] for sent in told] == [[], [], [], ["snapshot_complete"]]
    assert told[-1][0][0] == left[0]


def test_a_demanded_snapshot_goes_on_without_a_worker():
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    agreement.demand_snapshot(False)
    for node in workers[:2]:
        assert agreement.receive(node, {"kind": "mark", "number": 1, "round": 3}) == []
    decided = agreement.depart(workers[2])
    assert [(node, message["round"]) for node, message in decided] == [(node, 4) for node in workers[:2]]
    asked = agreement.depart(workers[0])  # which was to begin it; the other may be past that step
    assert [(node, message["kind"]) for node, message in asked] == [(workers[1], "snapshot_wanted")]


def test_the_next_worker_may_ask_for_the_very_check_that_the_first_one_had_asked_for():
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    check, checked = {"kind": "check_snapshot", "round": 5}, {"kind": "snapshot_checked", "round": 5, "problem": ""}
    assert len(agreement.receive(workers[0], check)) == 5
    for node in (*SERVERS, workers[1]):
        assert agreement.receive(node, checked) == []
    assert agreement.depart(workers[0]) == agreement.receive(workers[1], check) == []
    assert agreement.receive(workers[2], checked) == [(workers[1], checked)]


@pytest.mark.parametrize("says", ["announce", "option"])
def test_who_waits_for_the_word_of_one_that_has_left_and_is_first_now_hears_of_it(says):
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    agreement.receive(workers[1], {"kind": "bye"})
    if says == "announce":
        told = dict(kind="announce", store=0, name="w", shape=[3], dtype="float32", defaults=[], sparse=False,
                    staleness=0, gathered=False, norm=False, options={})  # fmt: skip
    else:
        told = dict(kind="option", store=0, name="optimizer", value=SGD)
    assert agreement.receive(workers[2], told) == []
    with pytest.raises(DisagreementError, match="worker 2 .*, but worker 1 .* left without doing so"):
        agreement.depart(workers[0])


def test_nobody_waits_for_the_release_of_one_that_is_gone():
    workers = [Node("worker", rank, "w%d" % rank) for rank in range(3)]
    agreement = Agreement(workers, SERVERS)
    agreement.receive(workers[0], {"kind": "release", "store": 0})
    agreement.depart(workers[0])
    for node in workers[1:]:
        told = agreement.receive(node, {"kind": "bye"})
    assert [message["kind"] for _, message in told] == ["stop"] * 2
