"""Processes that enter in the place of workers that have departed, explored: workers run one program, in any order of
their messages; some are lost anywhere, others come, at any moment and mostly not at a good one, and die on the way; and
at any moment the scheduler is another one, which knows its predecessor's journal alone; and servers are lost. Whoever
is left comes to the end of the program, all agree on who is there, and both schedulers have told the same."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from p3.cluster import messages
from p3.cluster.agreement import Agreement
from p3.cluster.departures import Departures
from p3.cluster.entrants import Entrants
from p3.cluster.node import Node
from p3.errors import DisagreementError, ProtocolError

SERVERS = [Node("server", rank, "s%d" % rank) for rank in range(3)]
CALLS = ("mark", "mark", "announce", "barrier")
EVENTS = ("lose", "come", "die", "take over", "lose a server")


def announcement(name, shape=3):
    return dict(kind="announce", store=0, name=name, shape=[shape], dtype="float32", defaults=[], sparse=False,
                staleness=0, gathered=False, norm=False, options={})  # fmt: skip


class Scheduler:
    """What p3/cluster/scheduler.py and entrances.py make of messages, without connections."""

    def __init__(self, workers, journal=(), places=()):
        """`places`: of workers to come."""
        self.workers = workers
        self.agreement = Agreement(workers, SERVERS, vacant=[node.rank for node in places])
        self.entrants = Entrants(self.agreement, [*workers, *places], SERVERS)
        self.departures, self.departing = Departures(), set()  # ranks
        self.told = {node: [] for node in [*workers, *places, *SERVERS]}
        self.journal = []
        self.candidates = {}  # on the way, by node
        self.replays = True
        for node, message in journal:
            self.decide(node, message) if "kind" not in message else self.hear(node, message)
        self.replays = False
        for node in self.entrants.on_the_way:
            if self.entrants.is_answered(node):
                self.depart(node)
        self.consider()

    def tell(self, sent):
        for node, message in sent:
            self.told[node].append(messages.check(message))

    def hear(self, node, message):
        self.journal.append((node, message))
        if message["kind"] == "admitted":
            return self.on_admitted(node, message)
        if message["kind"] == "dismissed":
            return self.end_departures(self.departures.on_dismissed(node, message))
        self.tell(self.agreement.receive(node, message))
        if message["kind"] == "barrier":
            self.entrants.end_trial(node)
        self.consider()

    def on_admitted(self, server, message):
        outcome = self.entrants.on_admitted(server, message)
        candidate = None if outcome is None else self.candidates.get(outcome.node)
        if outcome is None or self.replays:
            return
        if candidate is None or candidate.is_dead or outcome.problem:
            self.depart(outcome.node)
        else:
            candidate.node = outcome.node

    def consider(self):
        if self.replays:
            return
        for node in self.entrants.on_the_way if self.agreement.mark is None else ():
            if self.entrants.is_ready(node):
                self.depart(node)
        while self.agreement.mark is not None and self.entrants.may_enter and self.entrants.next_in is not None:
            self.decide(self.entrants.next_in, {"decision": "entered"})
        for candidate, node in self.entrants.choose():
            self.entrants.waiting.remove(candidate)
            self.candidates[node] = candidate
            self.decide(node, {"decision": "admit"})
        if self.entrants.lets_mark_end:
            self.decide(self.workers[0], {"decision": "pass"})

    def decide(self, node, message):
        self.journal.append((node, message))
        decision = message["decision"]
        if decision == "admit":
            assert self.agreement.heirs.are_known
            self.tell(self.entrants.admit(node))
        elif decision == "server departed":
            self.tell(self.agreement.depart_server(node))
            self.end_departures(self.departures.lose_server(node))
            for entering in self.entrants.on_the_way:
                if entering in self.candidates:
                    self.candidates[entering].is_dead = True
                if not self.entrants.is_on_the_way(entering):
                    continue
                if self.entrants.is_awaited(entering, node):
                    self.on_admitted(node, {"kind": "admitted", "rank": entering.rank, "problem": "it is lost"})
                elif self.entrants.is_answered(entering) and not self.replays:
                    self.depart(entering)
            for entered in [] if self.replays else self.entrants.on_trial:
                self.depart(entered)
        elif decision == "pass":
            self.tell(self.agreement.end_mark())
        elif decision == "entered":
            self.candidates.pop(node, None)
            self.told[node] = []
            self.tell([(node, past) for past in self.entrants.enter(node)])
            members = self.agreement.workers
            self.tell([(node, {"kind": "members", "ranks": [worker.rank for worker in members]})])
            entered = {"kind": "entered", "rank": node.rank, "host": "h"}
            self.tell([(other, entered) for other in members if other != node])
        else:
            self.candidates.pop(node, None)
            was_member = not self.entrants.drop(node)
            servers = [server for server in SERVERS if self.agreement.heirs.is_alive(server)]
            if was_member:
                self.departing.add(node.rank)
            self.departures.begin(node, was_member, "", servers)
            self.tell([(server, {"kind": "departed", "rank": node.rank}) for server in SERVERS])
            self.consider()

    def end_departures(self, over):
        for node in [departure.worker for departure in over]:
            self.departing.remove(node.rank)
            decided = self.agreement.depart(node)
            departed = {"kind": "departed", "rank": node.rank}
            for server in SERVERS:  # if it is there, it has done so before
                assert departed in self.told[server]
            self.tell([(other, departed) for other in self.agreement.workers])
            self.tell(decided)
            self.consider()

    def depart(self, node):
        self.decide(node, {"decision": "departed"})

    def be_ready(self, node):
        self.entrants.note_ready(node)
        self.consider()

    def seniority(self, server):
        """Ranks in the order of coming, as that server knows them."""
        ranks = [node.rank for node in self.workers]
        for message in self.told[server]:
            if message["kind"] == "departed" and message["rank"] in ranks:
                ranks.remove(message["rank"])
            if message["kind"] == "admit":
                ranks.append(message["rank"])
        return ranks


class Worker:
    """One that runs a program, a message at a time: at call `at`, with so many barriers behind it."""

    def __init__(self, node, program, at=0, barriers=0):
        self.node, self.program, self.at, self.barriers = node, program, at, barriers
        self.awaits = None  # the kind, and the fields, of what it waits for
        self.todo = []  # calls before the program goes on
        self.members = []  # at each mark that it has passed: (number, ranks that are there, those that entered)
        self.has_said_bye = False

    def is_ready(self, told):
        if self.has_said_bye:
            return False
        return self.awaits is None or any(fits(message, *self.awaits) for message in told)

    def next(self, told):
        if self.awaits is not None and self.awaits[0] == "barrier_done":
            done = next(message for message in told if fits(message, *self.awaits))
            self.members.append((done["number"], tuple(done["members"]), tuple(done["entered"])))
            if done["entered"]:  # all wait for it at one more
                self.todo.insert(0, ("mark", self.at - 1))
        self.awaits = None
        if self.todo:
            call, at = self.todo.pop(0)
        elif self.at == len(self.program):
            self.has_said_bye = True
            return {"kind": "bye"}
        else:
            call, at = self.program[self.at], self.at
            self.at += 1
        if call == "announce":
            self.awaits = "agreed", {"name": "key %d" % at}
            return announcement("key %d" % at)
        self.barriers += 1
        self.awaits = "barrier_done", {"number": self.barriers}
        mark = {"round": at, "problem": ""} if call == "mark" else None
        return {"kind": "barrier", "number": self.barriers, "mark": mark}


class Candidate:
    def __init__(self, rank):
        self.rank, self.node, self.is_dead = rank, None, False


def fits(message, kind, fields):
    return message["kind"] == kind and all(message[field] == value for field, value in fields.items())


@settings(max_examples=600)
@given(st.data())
def test_whoever_is_left_comes_to_the_end_with_those_that_have_entered(data):
    first, count = data.draw(st.sampled_from([(1, 2), (1, 3), (2, 2), (2, 4), (3, 3), (3, 4), (4, 4)]), "workers")
    program = data.draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=7), "program")
    every = [Node("worker", rank, "w%d" % rank) for rank in range(count)]
    nodes, places = every[:first], every[first:]
    scheduler = Scheduler(nodes, places=places)
    alive = {node: Worker(node, program) for node in nodes}
    answered = dict.fromkeys(SERVERS, 0)
    coming, standing, events = [], {}, 0  # and those whose connections stand: (step, barriers), by node
    while True:
        ready = [one for one in alive.values() if one.is_ready(scheduler.told[one.node])]
        serving = [server for server in SERVERS if scheduler.agreement.heirs.is_alive(server)]
        answering = [server for server in serving if answered[server] < len(scheduler.told[server])]
        arriving = [one for one in coming if one.node is not None and not one.is_dead]
        turns = [*ready, *answering, *arriving]
        if not turns:
            break
        if events < 2:  # so that somebody waits for a place when the first mark comes
            turns = EVENTS[events : events + 1]
        elif events < 9 and data.draw(st.integers(0, 5), "event?") == 0:
            turns = EVENTS
        turn = data.draw(st.sampled_from(turns), "turn")
        try:
            if turn == "lose":
                events += 1
                victims = [one for one in alive.values() if not one.has_said_bye]
                if len(alive) > 1 and victims:
                    victim = data.draw(st.sampled_from(victims), "lost")
                    del alive[victim.node]
                    scheduler.depart(victim.node)
            elif turn == "come":
                events += 1
                coming.append(Candidate(data.draw(st.sampled_from([None, None, *range(count)]), "rank")))
                scheduler.entrants.waiting.append(coming[-1])
                scheduler.consider()
            elif turn == "die":
                events += 1
                if coming:
                    gone = coming.pop(data.draw(st.integers(0, len(coming) - 1), "who"))
                    gone.is_dead = True
                    if gone in scheduler.entrants.waiting:
                        scheduler.entrants.waiting.remove(gone)
                    if gone.node is not None:
                        scheduler.depart(gone.node)
            elif turn == "lose a server":
                events += 1
                if len(serving) > 1:
                    lost = data.draw(st.sampled_from(serving), "lost server")
                    scheduler.decide(lost, {"decision": "server departed"})
                    gone = {*scheduler.agreement.vacant, *scheduler.departing}
                    alive = {node: one for node, one in alive.items() if node.rank not in gone}
                    coming = [one for one in coming if not one.is_dead]
            elif turn == "take over":
                events += 1
                before = scheduler
                coming, standing = [], {}
                scheduler = Scheduler(nodes, before.journal, places)
                for node, told in before.told.items():
                    assert scheduler.told[node][: len(told)] == told, node
            elif isinstance(turn, Candidate):
                coming.remove(turn)
                mark = scheduler.agreement.mark
                if mark is not None:  # else all who waited there are gone
                    standing[turn.node] = mark.round, mark.number
                scheduler.be_ready(turn.node)
            elif isinstance(turn, Worker):
                message = turn.next(scheduler.told[turn.node])
                scheduler.hear(turn.node, messages.check(message))
            else:
                message = scheduler.told[turn][answered[turn]]
                answered[turn] += 1
                if message["kind"] == "define":
                    scheduler.hear(turn, {"kind": "defined", "wire_key": message["wire_key"]})
                elif message["kind"] == "inherit":
                    scheduler.hear(turn, {"kind": "inherited", "rank": message["rank"]})
                elif message["kind"] == "departed":
                    scheduler.hear(turn, {"kind": "dismissed", "rank": message["rank"]})
                elif message["kind"] == "admit":
                    problem = data.draw(st.sampled_from(["", "", "", "a round is under way"]), "problem")
                    scheduler.hear(turn, {"kind": "admitted", "rank": message["rank"], "problem": problem})
        except DisagreementError as error:  # the first worker was lost before it had said what others wait for
            is_expulsion = scheduler.agreement.heirs.lost and "no other worker is left" in str(error)
            assert "waits for its word" in str(error) or "left the job while" in str(error) or is_expulsion, error
            return
        for node in [node for node in standing if not scheduler.entrants.is_on_the_way(node)]:
            at, barriers = standing.pop(node)
            if not scheduler.entrants.is_on_trial(node):
                continue
            alive[node] = one = Worker(node, program, at + 1, barriers)
            known = [number for number in range(at) if program[number] == "announce"]
            order = data.draw(st.permutations(known), "order")
            one.todo = [("announce", number) for number in order] + [("mark", at)]
    assert all(one.has_said_bye for one in alive.values()), [(one.node, one.at, one.awaits) for one in alive.values()]
    assert all("stop" in [message["kind"] for message in scheduler.told[server]] for server in serving)
    for server in serving:
        assert scheduler.seniority(server) == [node.rank for node in scheduler.agreement.workers]
    ends = {}
    for one in alive.values():
        for number, *end in one.members:
            assert ends.setdefault(number, end) == end, number
    for server in serving:
        last = {m["rank"]: m["kind"] for m in scheduler.told[server] if m["kind"] in ("departed", "admit")}
        assert all((kind == "admit") == (Node("worker", rank, "w%d" % rank) in alive) for rank, kind in last.items())


def lose(scheduler, node):
    """And all servers have dismissed it."""
    scheduler.depart(node)
    for server in SERVERS:
        scheduler.hear(server, {"kind": "dismissed", "rank": node.rank})


def at_a_mark(departed=(2,), count=3):
    """A scheduler whose workers all wait at a mark, behind one key, and the nodes."""
    nodes = [Node("worker", rank, "w%d" % rank) for rank in range(count)]
    scheduler = Scheduler(nodes)
    for node in nodes:
        scheduler.hear(node, announcement("w"))
    for server in SERVERS:
        scheduler.hear(server, {"kind": "defined", "wire_key": 0})
    for rank in departed:
        lose(scheduler, nodes[rank])
    return scheduler, nodes


def mark(scheduler, nodes, number=1, round=7, problem=""):
    for node in nodes:
        scheduler.hear(node, {"kind": "barrier", "number": number, "mark": {"round": round, "problem": problem}})


def test_no_rank_is_given_twice_while_servers_have_not_answered():
    scheduler, nodes = at_a_mark(departed=(0, 1))
    scheduler.entrants.waiting += [Candidate(None), Candidate(None)]
    mark(scheduler, nodes[2:])
    for server in SERVERS:
        scheduler.hear(server, {"kind": "admitted", "rank": 0, "problem": ""})
    scheduler.decide(nodes[0], {"decision": "entered"})
    scheduler.entrants.waiting.append(Candidate(None))
    lose(scheduler, nodes[2])  # nobody is left where they were admitted
    mark(scheduler, nodes[:1], number=2)
    assert [one["rank"] for one in scheduler.told[SERVERS[0]] if one["kind"] == "admit"] == [0, 1, 2]


def test_a_place_that_none_has_had_is_taken_before_that_of_a_lost_worker():
    nodes = [Node("worker", rank, "w%d" % rank) for rank in range(4)]
    scheduler = Scheduler(nodes[:2], places=nodes[2:])
    lose(scheduler, nodes[0])
    waiting = scheduler.entrants.waiting = [Candidate(None), Candidate(3), Candidate(None), Candidate(None)]
    last = waiting[-1]
    mark(scheduler, nodes[1:2])
    assert [one["rank"] for one in scheduler.told[SERVERS[0]] if one["kind"] == "admit"] == [3, 2, 0]
    assert scheduler.entrants.waiting == [last] and scheduler.entrants.free == []
    assert scheduler.told[nodes[1]] == [{"kind": "departed", "rank": 0}]  # it waits at the mark


def admit(scheduler, candidate):
    for server in SERVERS:
        scheduler.hear(server, {"kind": "admitted", "rank": candidate, "problem": ""})


def test_one_enters_at_the_end_of_the_barrier_and_all_wait_for_it_at_the_next():
    scheduler, nodes = at_a_mark()
    candidate = Candidate(None)
    scheduler.entrants.waiting.append(candidate)
    mark(scheduler, nodes[:2])
    assert all(told[-1] == {"kind": "admit", "rank": 2} for told in (scheduler.told[server] for server in SERVERS))
    assert not any(message["kind"] == "barrier_done" for message in scheduler.told[nodes[0]])
    admit(scheduler, 2)
    assert candidate.node == nodes[2]
    scheduler.decide(nodes[2], {"decision": "entered"})
    scheduler.consider()
    kinds = [message["kind"] for message in scheduler.told[nodes[2]]]
    assert kinds == ["agreed", "members"] and scheduler.told[nodes[2]][0]["catches_up"]
    assert scheduler.told[nodes[2]][1]["ranks"] == [0, 1, 2]
    done = {"kind": "barrier_done", "number": 1, "members": [0, 1, 2], "entered": [2]}
    assert all(scheduler.told[node][-1] == done for node in nodes[:2])
    mark(scheduler, nodes[:2], number=2)
    assert all(scheduler.told[node][-1] == done for node in nodes[:2])
    mark(scheduler, nodes[2:], number=2)
    done = {"kind": "barrier_done", "number": 2, "members": [0, 1, 2], "entered": []}
    assert all(scheduler.told[node][-1] == done for node in nodes)


def with_the_second_ready():
    """A scheduler that has admitted two in the place of ranks 0 and 1, and the nodes."""
    scheduler, nodes = at_a_mark(departed=(0, 1))
    scheduler.entrants.waiting += [Candidate(None), Candidate(None)]
    mark(scheduler, nodes[2:])
    for rank in (0, 1):
        admit(scheduler, rank)
    scheduler.be_ready(nodes[1])
    return scheduler, nodes


def test_two_enter_in_the_order_of_their_admission_whoever_is_ready_first():
    scheduler, nodes = with_the_second_ready()
    assert scheduler.agreement.workers == [nodes[2]]
    scheduler.be_ready(nodes[0])
    assert [node.rank for node in scheduler.agreement.workers] == [2, 0, 1] == scheduler.seniority(SERVERS[0])


def test_one_that_is_ready_waits_for_none_that_is_gone():
    scheduler, nodes = with_the_second_ready()
    lose(scheduler, nodes[0])
    assert [node.rank for node in scheduler.agreement.workers] == [2, 1] == scheduler.seniority(SERVERS[0])


def test_one_with_another_script_is_refused_and_what_it_said_forgotten():
    scheduler, nodes = at_a_mark()
    scheduler.entrants.waiting.append(Candidate(2))
    mark(scheduler, nodes[:2])
    admit(scheduler, 2)
    scheduler.decide(nodes[2], {"decision": "entered"})
    scheduler.consider()
    with pytest.raises(DisagreementError, match="worker 0 .* and worker 2 .* disagree about key 'w': shape"):
        scheduler.hear(nodes[2], announcement("w", shape=4))
    lose(scheduler, nodes[2])
    mark(scheduler, nodes[:2], number=2)
    done = {"kind": "barrier_done", "number": 2, "members": [0, 1], "entered": []}
    assert scheduler.told[nodes[0]][-1] == done
    scheduler.entrants.waiting.append(Candidate(2))
    mark(scheduler, nodes[:2], number=3)
    admit(scheduler, 2)
    scheduler.decide(nodes[2], {"decision": "entered"})
    scheduler.hear(nodes[2], announcement("w"))


def test_one_that_takes_rank_0s_place_is_the_last_to_be_first():
    scheduler, nodes = at_a_mark(departed=(0,))
    scheduler.entrants.waiting.append(Candidate(None))
    mark(scheduler, nodes[1:])
    admit(scheduler, 0)
    scheduler.decide(nodes[0], {"decision": "entered"})
    assert scheduler.told[nodes[0]][-1]["ranks"] == [1, 2, 0]
    with pytest.raises(ProtocolError, match="only worker 1 .* may"):
        scheduler.hear(nodes[0], {"kind": "order", "store": 0, "names": ["w"]})


def test_workers_that_are_at_different_rounds_are_an_error_by_name():
    scheduler, nodes = at_a_mark(departed=())
    mark(scheduler, nodes[:1], round=7)
    mark(scheduler, nodes[1:2], round=7)
    with pytest.raises(DisagreementError, match="round 7 is given on the first, and round 8 on the second"):
        mark(scheduler, nodes[2:], round=8)


def test_nobody_enters_where_something_speaks_against_it_nor_twice_at_a_mark():
    scheduler, nodes = at_a_mark()
    here, *others = scheduler.entrants.waiting = [Candidate(1), Candidate(None), Candidate(None)]  # 1 is there
    done = {"kind": "barrier_done", "number": 1, "members": [0, 1], "entered": []}
    mark(scheduler, nodes[:2], problem="they have LocalSteps")
    assert scheduler.told[nodes[0]][-1] == done and scheduler.entrants.waiting == [here, *others]
    mark(scheduler, nodes[:2], number=2)
    for server in SERVERS:
        assert scheduler.told[nodes[0]][-1] == done
        scheduler.hear(server, {"kind": "admitted", "rank": 2, "problem": "a round is under way"})
    assert scheduler.told[nodes[0]][-1] == dict(done, number=2)
    assert scheduler.told[SERVERS[0]][-1] == {"kind": "departed", "rank": 2}
    assert scheduler.entrants.waiting == [here, others[1]]


def test_a_demanded_snapshot_is_asked_for_again_of_one_that_enters():
    scheduler, nodes = at_a_mark()
    scheduler.tell(scheduler.agreement.demand_snapshot(False))
    scheduler.entrants.waiting.append(Candidate(None))
    mark(scheduler, nodes[:2])
    admit(scheduler, 2)
    scheduler.decide(nodes[2], {"decision": "entered"})
    asked = scheduler.agreement.demand_anew()
    assert [(node, message["kind"]) for node, message in asked] == [(node, "snapshot_wanted") for node in nodes]
