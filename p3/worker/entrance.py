"""Entering a job that runs, in the place of a worker that has departed, or in one that none has had yet: the part of
workers, those that are there and the one that comes. What the scheduler does with it is in p3/cluster/entrants.py.

All workers call agree_on_members(round) at the same point of their program, with nothing under way. Whoever enters
does so at the end of that barrier. Then the first worker gives it what the servers do not hold: a tree, as a snapshot
has one, with the numbers of the job's stores; front ends may give more. It opens its session with that, makes its keys,
with the values that the servers have, and comes to its own first agree_on_members(round), which is the barrier that the
others wait in by then. Until that it is *on trial*: whatever goes wrong, it departs, and the others go on as if it had
never come.
"""

from __future__ import annotations

import io
import logging
import time
import zlib
from typing import Any, Callable, Optional, Set, Tuple

import numpy as np

from p3._core import P3Error
from p3.plan import choices, combinations
from p3.plan.choices import Choice
from p3.snapshots import tree
from p3.worker import streams
from p3.worker.control import Patience
from p3.worker.links.link import Link

log = logging.getLogger("p3")

# The first of two stores whose keys bring what the first worker gives: beyond all that scripts make, so the same on one
# that does not know yet how many there are.
_STORE = 1 << 30
_WHAT = "for worker %d to give what who joins the job lacks"
_LOOK_S = 0.001


class Entrance:
    """Of one session. Threads: the script's."""

    def __init__(self, session, link: Link) -> None:
        self._session = session
        entered = link.entered or {"barrier": 0, "round": 0}
        self.barrier: int = entered["barrier"]  # at whose end this process has entered; 0: it was there from the start
        self.round: int = entered["round"]  # that was given there
        self.is_on_trial = link.entered is not None
        self.members: Tuple[int, ...] = tuple(range(session.num_workers))  # as all have agreed on last
        self.given: Any = None  # by the first worker, as agree() has it; of a process that has entered
        self._problem = ""  # why nobody can enter this job
        self._has_resumed = False
        self._inited: Set[int] = set()  # handles of keys, while it is on trial

    # What stands in its way

    def exclude(self, choice: Choice, what: str) -> None:
        """Nobody can enter a job whose workers have that, as `what` says. ValueError if this process has."""
        if self.barrier:
            raise ValueError("%s: this process has joined a running job, and %s cannot" % (self._session.label, what))
        if not self._problem and self._session.goes_on_without and self._session.is_first:
            log.warning("%s: %s", self._session.label, combinations.yielding(choices.ENTERING, choice))
        self._problem = self._problem or "its workers have %s" % what

    def note_resumed(self) -> None:
        self._has_resumed = True

    def require_no_push(self, what: str) -> None:
        """ValueError on trial, when the others take no part in `what`."""
        if self.is_on_trial:
            raise ValueError(
                "%s: this process has joined a running job, and %s comes before its first members(%d), to which the "
                "others have come already: they take no part in it. Move it behind that, or leave it out where "
                "resume() has returned a state" % (self._session.label, what, self.round)
            )

    def note_init(self, key: Any) -> None:
        """On trial: it gets the value that the job has, once, and of no key that the job does not have."""
        session = self._session
        if key.store < _STORE and not session.stores.is_fresh(key.store) and key.identity not in session.keys.agreed:
            raise ValueError("%s: this process has joined a running job, which has no key %r in store %d: its script "
                             "is another one" % (session.label, key.name, key.store))  # fmt: skip
        if key.handle in self._inited:
            self.require_no_push("a new value of key %r (broadcast(), load_state_dict() of a model)" % (key.name,))
        self._inited.add(key.handle)

    def skip_value(self, key: Any) -> None:
        """On trial, before init(): what the servers have of the key is a sum, by which the others have updated. To this
        process, which gets their weights, it is of no use."""
        if self.is_on_trial and not key.sparse:
            self._session.core.ask_for_round_alone(key.handle)

    # At the mark

    def agree(
        self, round: Optional[int], give: Callable[[], Any], more: Callable[[], None] = lambda: None
    ) -> Tuple[int, ...]:
        """See Session.agree_on_members. `give()`: the tree for one that enters, asked of
        the first worker. `more()`: on all workers, what else they give, in rounds in which it takes part."""
        if round is not None and (type(round) is not int or round < 0):
            raise ValueError("%s: round is %r; it must be a whole number, of what is behind all workers"
                             % (self._session.label, round))  # fmt: skip
        if self.is_on_trial:
            self._require_same_script(round)
        mark = None
        if round is not None and (self._session.goes_on_without or self._session.outlives_servers):
            mark = {"round": round, "problem": self._problem}
        while True:
            if mark is not None:
                self._rest()
            members, entered = self._session.barriers.enter("agree_on_members()", mark)
            self.is_on_trial = False
            if not entered:
                self.members = tuple(members)
                return self.members
            self._give(self._session.first, give)
            more()

    def _rest(self) -> None:
        """Until nothing is under way, of any key, nor any snapshot."""
        session = self._session
        session.send_kept()
        session.flush()
        session.snapshots.finish()
        patience = Patience(session)
        keys = session.keys.all()
        while True:
            keys = [key for key in keys if not session.core.is_idle(key.handle)]
            if not keys:
                return
            session.check()
            if patience.left_s() <= 0:
                raise TimeoutError(
                    "%s: waited %g s in agree_on_members() for key %r, of which other workers take part in no round"
                    % (session.label, session.wait_timeout_s, keys[0].name)
                )
            time.sleep(_LOOK_S)

    def _require_same_script(self, round: Optional[int]) -> None:
        """ValueError unless this process stands where the others do."""
        session = self._session
        if round != self.round or not self._has_resumed:
            raise ValueError(
                "%s: this process has joined a running job at members(%d), and its script comes to members(%s)%s: "
                "begin with `round, state = p3.torch.resume()` (kv.resume(), Session.resume()), which tells it where "
                "the others are, and call members(round) there"
                % (session.label, self.round, "" if round is None else round,
                   "" if self._has_resumed else " without having called resume()")
            )  # fmt: skip
        session.keys.require_all()

    # What is given

    def _give(self, giver: int, give: Callable[[], Any]) -> None:
        session, content = self._session, None
        if session.rank == giver:
            content = _encoded(self._content(give))
        self._share(giver, content)

    def _content(self, give: Callable[[], Any]) -> Any:
        """What cannot be given costs only who wants to join."""
        try:
            return {"given": tree.checked(give(), "state"), "stores": self._session.stores.state(), "problem": ""}
        except ValueError as error:
            return {"problem": str(error)}

    def receive(self) -> None:
        """In a process that has entered, when it has heard of all that was agreed: waits for the first worker."""
        content = _decoded(self._share(self._session.first, None))
        if content["problem"]:
            raise ValueError("%s: nobody can join this job: %s" % (self._session.label, content["problem"]))
        self._session.stores.follow(content["stores"])
        self.given = content["given"]
        self.members = self._session.members

    def _share(self, giver: int, content: Optional[np.ndarray]) -> np.ndarray:
        """That of worker `giver`, who is the first; None: of another one."""
        session = self._session
        about = session.declare("about", (4,), "int64", _STORE)
        told = np.zeros(4, np.int64)
        own = None if content is None else _about(giver, len(content), zlib.crc32(content))
        session.wait([session.init(about, own, told)], _WHAT % giver)
        giver, length, checksum, _ = told.tolist()
        if not np.array_equal(told, _about(giver, length, checksum)):
            length = 0  # the giver was lost before it had told any
        session.release(_STORE)
        if content is None:
            content = np.zeros(length if self.is_on_trial else 0, np.uint8)
        if length > 0:
            self.hand_over(giver, length, streams.Bytes(content))
        if self.is_on_trial and not (length > 0 and zlib.crc32(content) == checksum):
            self._give_up(giver)
        return content

    def hand_over(self, giver: int, total: int, stream: streams.Stream) -> None:
        """`total` bytes of that worker, on every worker at the same point: to those on trial, who end without them. The
        others send nothing, and get nothing; their job goes on."""
        session = self._session
        if not streams.hand_over(session, _STORE, total, giver, self.is_on_trial, stream, _WHAT % giver):
            self._give_up(giver)

    def _give_up(self, giver: int) -> None:
        session = self._session
        session.fail("worker %d was lost while it gave this process, which joins the job, what it lacks" % giver)
        session.check()
        raise P3Error("%s: it did not come whole" % session.label)


def _about(*numbers: int) -> np.ndarray:
    """Of the bytes that follow; and of these numbers themselves."""
    return np.array([*numbers, zlib.crc32(b"%d %d %d" % numbers)], np.int64)


def _encoded(content: Any) -> np.ndarray:
    file = io.BytesIO()
    np.savez(file, **{name: array for name, _, _, array in tree.encode(content)})
    return np.frombuffer(file.getbuffer(), np.uint8)


def _decoded(array: np.ndarray) -> Any:
    with np.load(io.BytesIO(array.tobytes()), allow_pickle=False) as arrays:
        return tree.decode({name: arrays[name] for name in arrays.files})
