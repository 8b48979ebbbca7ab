"""A model of docs/replicated-servers.md: workers, the server that is lost, its heir, who comes back. Pure Python, no
bytes.

A gradient is (worker, round), a sum a frozenset of these, the first value "first". So whether two sums have the same
bits is whether they are equal, as sums are made in one order. What a worker has updated, value and state, is the tuple
of all that it has updated by: sums, and the numbers of their rounds, which are those of whoever has pushed. A World can
be copied, and tells what may happen next; whoever explores chooses. FAULTS are mistakes that an implementation might
make, each of which the explorer has to find.

Of each worker and slice the frames on a connection come in order; those of different slices in any.

S is the server, H its heir, and each process that comes back in its place an R. Or it is the heir that comes back: then
S is lost no sooner, and workers may hear of its heir before they are connected to that.
"""

import copy
from collections import deque

FAULTS = (
    "settles early",  # the heir waits for the claim of one worker only
    "keeps no copy",  # a worker claims the round, but has no value for it any more
    "claims first",  # and closes its connection to the lost server later
    "counts again",  # a push of a round that was published counts for the next one
    "answers at once",  # who is behind gets the value before its push has come, which then is one of no round
    "waits for the lost",  # the heir waits for claims of workers that have departed
    "pushes nothing again",
    "forgets a half",  # what had partly come has spoilt the gradient
    "answers the lost",  # and not one of those who are there
    "claims no numbers",  # of a round, by which who has pushed nothing in it is to update
    "goes by its own",  # numbers, though it has pushed nothing in that round
    "updates by a half",  # as a sum comes, and not when it has come
    "asks once",  # for a value; and whoever was asked may be lost
    "asks anybody",  # and not who has the last round
    "gives nothing unasked",  # though it leaves
)
FAULTS_OF_RETURNS = (
    "claims nothing to it",
    "begins before all are back",  # a worker, while others still send to the heir
    "hands over early",  # what is still claimed from the heir
    "inherits first",  # and is to hand over later, what it had inherited before
    "claims into nothing",  # to an heir to which there is no connection yet, and not again when there is
    "claims late",  # what an heir had asked for that has handed over since, and inherits again
)
FAULTS_OF_JOINS = (
    "asks who has joined",  # for a value that it has not
    "joins in a round",  # that not all others have the sum of
)


NOTHING = (-1, (None, None))  # claimed
CLAIMS = ("claim", "claim alone", "value")
LACKING = "lacking"  # the value of a round that those alone have who are left, who have joined behind it


class Wrong(AssertionError):
    """What must never be."""


class Worker:
    def __init__(self, slices):
        self.alive = True
        self.server = "S"
        self.landed = [-1] * slices  # round; -1: no first value yet
        self.kept = [None] * slices
        self.numbers = [None] * slices  # of the round of that
        self.updated = [()] * slices
        self.owed = set()  # slices that it has claimed, and not given the value of
        self.lacking = set()  # slices of whose last round it has no value: it has joined behind that
        self.has_left = False
        self.cut = set()  # servers to which it has no connection
        self.begun = -1  # round, of all slices: one key
        self.spoilt = set()


class Server:
    """The part that both have of one slice."""

    def __init__(self, workers):
        self.published, self.value, self.numbers = -1, None, None
        self.next = [0] * workers  # round whose frame is due of each worker
        self.came = {}  # of the round in progress, by worker
        self.asked = set()  # for the first value
        self.gone = set()  # workers that have departed
        self.left = set()  # with a goodbye
        # Of an heir:
        self.claims = None  # by worker, while it is open: round, and value with numbers, once given
        self.inquired = None  # of which worker
        self.have_joined = set()  # who have claimed a round alone
        self.held = {}
        self.behind = set()
        self.has_handed_over = False

    def clone(self):
        other = copy.copy(self)
        other.next, other.came, other.held = list(self.next), dict(self.came), dict(self.held)
        other.asked, other.gone, other.left = set(self.asked), set(self.gone), set(self.left)
        other.claims, other.behind = None if self.claims is None else dict(self.claims), set(self.behind)
        other.have_joined = set(self.have_joined)
        return other


class World:
    def __init__(
        self, workers=2, slices=1, rounds=2, server_losses=1, worker_losses=0, faults=(), ends_early=False, returns=0,
        heir_returns=False, joins=0,
    ):  # fmt: skip
        """`ends_early`: the last worker has no gradient in the last round. `returns`: so often a process comes back;
        `joins`: and so often one takes the place of a lost worker."""
        self.rounds, self.slices, self.faults, self.ends_early = rounds, slices, frozenset(faults), ends_early
        self.workers = [Worker(slices) for _ in range(workers)]
        self.at = {name: [Server(workers) for _ in range(slices)] for name in "SH"}
        self.server_losses, self.worker_losses = server_losses, worker_losses
        self.is_declared = self.has_inherited = False  # lost, by the scheduler; the heir has shards for it
        self.serving, self.silent = "S", set()  # who has the slices, but for an heir; who does nothing any more
        self.returns, self.joins = returns, joins
        self.mark = set()  # workers that are in one
        self.to_connect = set()  # of these, who has no connection yet to who comes back
        self.is_handing_over = False
        self.heir_returns = heir_returns  # it is still to come
        if heir_returns:
            for worker in self.workers:
                worker.cut.add("H")
        self.told = set()  # workers that have heard
        self.dropping = set()  # with "claims first": who has claimed, and not closed
        self.channels = {}  # (from, to, slice): deque of frames
        self.seen = {}  # (slice, round): the value that a worker that is alive has, and what it has updated
        self.first = 0

    def clone(self):
        other = copy.copy(self)
        other.workers = [copy.copy(one) for one in self.workers]
        for one in other.workers:
            one.landed, one.kept, one.spoilt = list(one.landed), list(one.kept), set(one.spoilt)
            one.numbers, one.updated, one.owed = list(one.numbers), list(one.updated), set(one.owed)
            one.cut, one.lacking = set(one.cut), set(one.lacking)
        other.at = {name: [one.clone() for one in slices] for name, slices in self.at.items()}
        other.told, other.dropping, other.seen = set(self.told), set(self.dropping), dict(self.seen)
        other.silent, other.mark, other.to_connect = set(self.silent), set(self.mark), set(self.to_connect)
        other.channels = {where: deque(frames) for where, frames in self.channels.items()}
        return other

    def key(self):
        """Equal for worlds in which the same may follow."""
        workers = tuple(
            (w.alive, w.server, tuple(w.landed), tuple(w.kept), tuple(w.numbers), tuple(w.updated), w.begun,
             frozenset(w.spoilt), frozenset(w.owed), frozenset(w.lacking), w.has_left, frozenset(w.cut))
            for w in self.workers
        )  # fmt: skip
        servers = tuple(
            (s.published, s.value, s.numbers, tuple(s.next), frozenset(s.came.items()), frozenset(s.asked),
             frozenset(s.gone), frozenset(s.left), None if s.claims is None else frozenset(s.claims.items()),
             s.inquired, frozenset(s.held.items()), frozenset(s.behind), frozenset(s.have_joined), s.has_handed_over)
            for slices in self.at.values() for s in slices
        )  # fmt: skip
        channels = frozenset((where, tuple(frames)) for where, frames in self.channels.items() if frames)
        flags = (self.server_losses, self.worker_losses, self.is_declared, self.has_inherited, self.first,
                 self.serving, self.returns, self.joins, self.is_handing_over, self.heir_returns)  # fmt: skip
        sets = (frozenset(self.told), frozenset(self.dropping), frozenset(self.seen.items()), frozenset(self.silent),
                frozenset(self.mark), frozenset(self.to_connect))  # fmt: skip
        return (workers, servers, channels, flags, sets)

    # What may happen next, as tuples for do()

    def steps(self):
        steps = [("arrive", where) for where, frames in sorted(self.channels.items(), key=repr) if frames
                 and where[1] not in self.silent]  # fmt: skip
        for rank, worker in enumerate(self.workers):
            if worker.alive and self._may_begin(worker) and (rank not in self.mark or self._is_over_for(rank)):
                steps.append(("begin", rank))
            if worker.alive and self.has_inherited and rank not in self.told:
                steps.append(("hear", rank))
            if worker.alive and rank in self.dropping:
                steps.append(("close", rank))
            if worker.alive and rank in self.to_connect and not self.is_handing_over:
                steps.append(("connect", rank))
            has_all = min(worker.landed) >= self.rounds
            if worker.alive and rank in self.told - self.mark and not worker.has_left and has_all:
                steps.append(("leave", rank))
            if worker.alive and self.worker_losses and sum(w.alive for w in self.workers) > 1:
                steps.append(("lose worker", rank))
        if self.server_losses and not self.is_declared and (not self.heir_returns or self.mark):
            steps += [("kill server",), ("suspect server",)]
        if self.is_declared and not self.has_inherited and (
            not self.is_handing_over or "inherits first" in self.faults
        ):  # fmt: skip
            steps.append(("inherit",))
        if self.is_handing_over and (
            all(its.claims is None for its in self.at["H"]) or "hands over early" in self.faults
        ):  # fmt: skip
            steps.append(("hand over",))
        if self._all_rest and (self.heir_returns or (self.returns and self._all_know)):
            steps.append(("come back",))
        if self.joins and self._may_join:
            steps += [("join", rank) for rank, one in enumerate(self.workers) if not (one.alive or one.has_left)]
        return steps

    @property
    def _may_join(self):
        """At a mark, when all has come that the others claim."""
        its = self.at["H" if self.has_inherited else self.serving]
        is_between = all(one.claims is None and not one.came and not one.behind for one in its)
        rests = self._all_rest or ("joins in a round" in self.faults and not self.mark)
        rounds = {one.published for one in its} | {worker.begun for worker in self.workers if worker.alive}
        knows = (not self.is_declared or self._all_know) and not self.heir_returns and not self.is_handing_over
        return rests and is_between and knows and len(rounds) == 1 and rounds != {-1}

    @property
    def _all_rest(self):
        """And may be in a mark, as the script says."""
        alive = [worker for worker in self.workers if worker.alive]
        return not self.mark and all(
            not worker.has_left and worker.begun == alive[0].begun and set(worker.landed) == {worker.begun}
            for worker in alive
        )

    @property
    def _all_know(self):
        """Of the heir."""
        return self.is_declared and self.told >= {rank for rank, one in enumerate(self.workers) if one.alive}

    def _is_over_for(self, rank):
        """The mark."""
        if "begins before all are back" in self.faults:
            return True
        if self.is_declared and self.serving != "S":  # who came back is lost again
            return rank in self.told
        return not self.to_connect and (not self.is_declared or rank in self.told)

    def _may_begin(self, worker):
        return worker.begun < self.rounds and all(round >= worker.begun for round in worker.landed)

    @property
    def is_over(self):
        return all(not w.alive or min(w.landed) >= self.rounds for w in self.workers)

    @property
    def _first_value_is_lost(self):
        """With who gave it and the server that had it: a job that has lost both fails."""
        alive = [worker for worker in self.workers if worker.alive]
        return not self.workers[0].alive and any(
            all(worker.landed[slice] < 0 for worker in alive) for slice in range(self.slices)
        )

    def do(self, step):
        getattr(self, "_" + step[0].replace(" ", "_"))(*step[1:])

    def require(self):
        """In a world in which nothing can happen any more."""
        if not self.is_over and not self._first_value_is_lost:
            raise Wrong("somebody waits for ever: %s" % [(w.alive, w.begun, w.landed) for w in self.workers])

    # The network

    def _send(self, sender, receiver, slice, frame):
        rank, name = (sender, receiver) if sender in range(len(self.workers)) else (receiver, sender)
        if name in self.workers[rank].cut:
            return  # over a connection that is closed
        self.channels.setdefault((sender, receiver, slice), deque()).append(frame)

    def _arrive(self, where):
        sender, receiver, slice = where
        frame = self.channels[where].popleft()
        if receiver in self.at:
            self._serve(receiver, slice, sender, frame)
        else:
            self._land(receiver, sender, slice, frame)

    def _cut(self, rank, name):
        """A connection is closed: what is on its way is gone. A value may have come in part."""
        self.workers[rank].cut.add(name)
        for slice in range(self.slices):
            coming = self.channels.pop((name, rank, slice), None)
            if coming and "forgets a half" in self.faults:
                self.workers[rank].spoilt.add(slice)
            if coming and "updates by a half" in self.faults:
                self.workers[rank].updated[slice] += ("half",)
            self.channels.pop((rank, name, slice), None)

    # A worker

    def _begin(self, rank):
        worker = self.workers[rank]
        worker.begun += 1
        self.mark.discard(rank)
        for slice in range(self.slices):
            self._send(rank, worker.server, slice, self._frame(rank, worker.begun, slice))

    def _frame(self, rank, round, slice):
        if round == 0:
            return ("init", 0, "first" if rank == 0 else None)
        if self._has_ended(rank, round):
            return ("push", round, None)
        return ("push", round, (rank, "spoilt" if slice in self.workers[rank].spoilt else round))

    def _has_ended(self, rank, round):
        return self.ends_early and rank == len(self.workers) - 1 and round == self.rounds

    def _land(self, rank, sender, slice, frame):
        worker = self.workers[rank]
        if not worker.alive:
            return
        if frame == ("ask",):
            if sender == worker.server and not worker.has_left:  # else another one has given it, and it has handed over
                self._give(rank, slice)
            return
        round, value, numbers = frame
        if worker.server != sender and rank not in self.dropping:
            raise Wrong("worker %d hears of a server that it has closed its connection to" % rank)
        if round != worker.begun or worker.landed[slice] == round:
            raise Wrong("worker %d: an answer to no push: round %d" % (rank, round))
        if any(frame[:2] == ("push", round) for frame in self.channels.get((rank, sender, slice), ())):
            raise Wrong("worker %d: round %d lands where its push is still being read" % (rank, round))
        if value == LACKING:
            raise Wrong("worker %d gets a value of round %d that nobody has" % (rank, round))
        worker.landed[slice] = round
        worker.kept[slice] = value
        worker.lacking.discard(slice)
        worker.owed.discard(slice)
        worker.spoilt.discard(slice)
        goes_by_own = not self._has_ended(rank, round) or "goes by its own" in self.faults
        worker.numbers[slice] = (rank if self._has_ended(rank, round) else "all", round) if goes_by_own else numbers
        if value:  # else nobody has had a gradient
            worker.updated[slice] += ((value, worker.numbers[slice]),)
        self._check(rank, slice, round, value)

    def _check(self, rank, slice, round, value):
        known, has = self.seen.get((slice, round)), (value, self.workers[rank].updated[slice])
        if known is not None and known != has:
            raise Wrong("round %d of slice %d is %s and %s" % (round, slice, known, has))
        self.seen[slice, round] = has
        if round > 0:
            ranks = [worker for worker, _ in value]
            if any(which != round for _, which in value) or len(set(ranks)) != len(ranks):
                raise Wrong("round %d is made of %s" % (round, sorted(value)))
            lacking = [other for other, one in enumerate(self.workers) if one.alive and other not in ranks]
            if any(not self._has_ended(other, round) for other in lacking):
                raise Wrong("round %d lacks somebody: %s" % (round, sorted(value)))

    def _hear(self, rank):
        """`server_departed`."""
        self.told.add(rank)
        worker = self.workers[rank]
        if self.serving != "S":
            self.to_connect.discard(rank)
        if "claims first" in self.faults:
            self.dropping.add(rank)
        else:
            self._cut(rank, self.serving)
        worker.server = "H"
        if "H" not in worker.cut or "claims into nothing" in self.faults:
            self._claim(rank)

    def _claim(self, rank):
        worker = self.workers[rank]
        for slice in range(self.slices):
            if worker.landed[slice] >= 0 and slice not in worker.lacking:
                worker.owed.add(slice)
            kind = "claim alone" if slice in worker.lacking else "claim"
            self._send(rank, worker.server, slice, (kind, worker.landed[slice], None))
            if worker.landed[slice] < worker.begun and "pushes nothing again" not in self.faults:
                self._send(rank, worker.server, slice, self._frame(rank, worker.begun, slice))

    def _connect(self, rank):
        """To who has come back: a server takes its slices, or an heir has what it has inherited meanwhile."""
        worker = self.workers[rank]
        self.to_connect.discard(rank)
        back = self.serving if self.serving != "S" else "H"
        worker.cut.discard(back)
        if back == self.serving:
            worker.server = back
            if "claims nothing to it" in self.faults:
                return
        if worker.server == back and (back != "H" or "claims into nothing" not in self.faults):
            self._claim(rank)

    def _give(self, rank, slice):
        worker = self.workers[rank]
        if slice in worker.owed:
            worker.owed.discard(slice)
            kept = None if "keeps no copy" in self.faults else worker.kept[slice]
            numbers = None if "claims no numbers" in self.faults else worker.numbers[slice]
            self._send(rank, worker.server, slice, ("value", worker.landed[slice], (kept, numbers)))

    def _leave(self, rank):
        """It has all, and goes, with a goodbye."""
        worker = self.workers[rank]
        worker.has_left = True
        for slice in range(self.slices):
            if "gives nothing unasked" not in self.faults:
                self._give(rank, slice)
            for name in self.at:
                self._send(rank, name, slice, ("bye", None, None))

    def _close(self, rank):
        self.dropping.discard(rank)
        self._cut(rank, self.serving)

    def _lose_worker(self, rank):
        self.worker_losses -= 1
        worker = self.workers[rank]
        worker.alive = False
        self.mark.discard(rank)
        self.to_connect.discard(rank)
        for name in self.at:
            self._cut(rank, name)
        # What nobody sees any more may be different.
        self.seen = {
            (slice, round): value for (slice, round), value in self.seen.items()
            if any(one.alive and one.landed[slice] >= round for one in self.workers)
        }  # fmt: skip
        if rank == self.first:
            self.first = next((other for other, one in enumerate(self.workers) if one.alive), rank)
        for name in self.at:
            if name not in self.silent:
                for slice in range(self.slices):
                    self._dismiss(name, slice, rank)

    def _join(self, rank):
        """Another process in the place of that worker: it has what the others have updated, and not their last sums."""
        self.joins -= 1
        slices = range(self.slices)
        round = self.at["H" if self.has_inherited else self.serving][0].published
        other = next(one for one in self.workers if one.alive)
        worker = self.workers[rank] = Worker(self.slices)
        worker.server, worker.cut, worker.updated = other.server, set(other.cut), list(other.updated)
        worker.begun, worker.landed, worker.lacking = round, [round for _ in slices], set(slices)
        if self.is_declared:
            self.told.add(rank)
        for one in self.at.values():
            for its in one:
                its.gone.discard(rank)
                its.next[rank] = round + 1

    # The server that is lost, and what the scheduler does

    def _kill_server(self):
        self.silent.add(self.serving)
        self._suspect_server()

    def _suspect_server(self):
        """It is not dead, and goes on for as long as anybody hears it."""
        self.server_losses -= 1
        self.is_declared, self.has_inherited, self.told = True, False, set()

    def _inherit(self):
        self.has_inherited = True
        if self.is_handing_over:  # a fault
            self.is_handing_over = False
        else:
            self._open("H")

    def _open(self, name):
        """It knows nothing of its slices."""
        former, self.at[name] = self.at.get(name), [Server(len(self.workers)) for _ in range(self.slices)]
        for slice, its in enumerate(self.at[name]):
            its.gone = {rank for rank, worker in enumerate(self.workers) if not worker.alive}
            its.left = set(former[slice].left) if former else set()
            its.claims = {}
            self._settle(name, slice)

    # One that comes back, at a mark

    def _come_back(self):
        self.mark = {rank for rank, worker in enumerate(self.workers) if worker.alive}
        self.to_connect = set(self.mark)
        if self.heir_returns:
            self.heir_returns = False
            return
        self.returns -= 1
        self.serving = "R%d" % len(self.at)  # others than the ones before
        self.is_declared, self.has_inherited, self.told, self.is_handing_over = False, False, set(), True
        self._open(self.serving)

    def _hand_over(self):
        self.is_handing_over = False
        for its in self.at["H"]:
            its.has_handed_over = True

    # A server's slice

    def _serve(self, name, slice, rank, frame):
        its = self.at[name][slice]
        kind, round, content = frame
        if rank in its.gone:
            return
        if kind == "bye":
            its.left.add(rank)
            if its.claims is not None:
                self._settle(name, slice)
            return
        if its.has_handed_over:
            if kind in CLAIMS:
                return
            raise Wrong("%s: %s of worker %d for a slice that it has handed over" % (name, kind, rank))
        if kind == "value" and (its.claims is None or rank not in its.claims) and "claims late" not in self.faults:
            return  # another one has given it, maybe long since
        if its.claims is not None:
            if kind in CLAIMS:
                if kind != "value" and rank in its.claims:
                    raise Wrong("%s: worker %d claims twice" % (name, rank))
                if kind == "claim alone":
                    its.have_joined.add(rank)
                its.claims[rank] = (round, content)
                self._settle(name, slice)
                return
            if rank not in its.claims:
                raise Wrong("worker %d sends %s before it has claimed" % (rank, kind))
            its.held[rank] = frame
            return
        if kind in CLAIMS:
            if "settles early" in self.faults:
                return
            raise Wrong("a claim of a slice that is not open")
        if kind == "push" and rank in its.behind:
            its.behind.discard(rank)
            if "counts again" in self.faults:
                its.came[rank] = content
            if "answers at once" not in self.faults:
                self._send(name, rank, slice, (its.published, its.value, its.numbers))
            return
        if round != its.next[rank]:
            raise Wrong("%s: worker %d is out of turn with round %d, not %d" % (name, rank, round, its.next[rank]))
        its.next[rank] += 1
        if kind == "init":
            its.asked.add(rank)
            if content is not None:
                its.value, its.published = content, max(its.published, 0)
            self._answer_inits(name, slice)
        else:
            its.came[rank] = content
            self._publish(name, slice)

    def _answer_inits(self, name, slice):
        its = self.at[name][slice]
        if its.published >= 0:
            for rank in sorted(its.asked):
                self._send(name, rank, slice, (0, its.value, None))
            its.asked.clear()

    def _publish(self, name, slice):
        its = self.at[name][slice]
        present = [rank for rank in range(len(self.workers)) if rank not in its.gone]
        if not its.came or any(rank not in its.came for rank in present):
            return
        its.published += 1
        its.value = frozenset(gradient for gradient in its.came.values() if gradient is not None)
        its.numbers = ("all", its.published) if its.value else None
        its.came = {}
        receivers = present
        if "answers the lost" in self.faults and its.gone:
            receivers = present[1:]
        for rank in receivers:
            self._send(name, rank, slice, (its.published, its.value, its.numbers))

    def _dismiss(self, name, slice, rank):
        its = self.at[name][slice]
        its.gone.add(rank)
        its.asked.discard(rank)
        its.behind.discard(rank)
        if its.claims is not None:
            its.held.pop(rank, None)
            self._settle(name, slice)
        else:
            self._publish(name, slice)

    def _latest(self, name, its, slice):
        """The claim to go on from, with its value, or None: then one of those who have it is asked for that."""
        given = max((claim for claim in its.claims.values() if claim[1]), key=lambda claim: claim[0], default=NOTHING)
        rounds = {rank: round for rank, (round, _) in its.claims.items() if rank not in its.gone | its.left}
        last = max(rounds.values(), default=-1)
        if last <= given[0]:
            return given
        having = [
            rank for rank, round in sorted(rounds.items())
            if (round == last or "asks anybody" in self.faults)
            and (rank not in its.have_joined or "asks who has joined" in self.faults)
        ]  # fmt: skip
        if not having:
            return last, (LACKING, None)
        if its.inquired in having or (its.inquired is not None and "asks once" in self.faults):
            return None
        its.inquired = having[0]
        self._send(name, its.inquired, slice, ("ask",))
        return None

    def _settle(self, name, slice):
        its = self.at[name][slice]
        wanted = range(len(self.workers)) if "waits for the lost" in self.faults else [
            rank for rank in range(len(self.workers)) if rank not in its.gone | its.left
        ]  # fmt: skip
        if "settles early" in self.faults and its.claims:
            pass
        elif any(rank not in its.claims for rank in wanted):
            return
        best = self._latest(name, its, slice)
        if best is None:
            return  # its value is still to come
        claims, its.claims = its.claims, None
        for rank in range(len(self.workers)):
            claims.setdefault(rank, (-1, None))
        its.published, (its.value, its.numbers) = best
        if "keeps no copy" in self.faults and its.value is None and its.published > 0:
            its.published = min(round for rank, (round, _) in claims.items() if rank not in its.gone)
        for rank, (round, _) in claims.items():
            if rank in its.gone:
                continue
            its.next[rank] = round + 1
            if 0 <= round < its.published:
                if round != its.published - 1:
                    raise Wrong("workers are more than a round apart")
                if its.value == LACKING:
                    raise Wrong("worker %d lacks a sum that nobody has" % rank)
                its.behind.add(rank)
                its.next[rank] = its.published + 1
                if "answers at once" in self.faults:
                    self._send(name, rank, slice, (its.published, its.value, its.numbers))
        held, its.held = its.held, {}
        for rank, frame in held.items():
            self._serve(name, slice, rank, frame)
        self._publish(name, slice)
