"""Snapshots of a job whose values all go through sessions: of its trainers, as an optimizer or a model's weights.

The servers' copies are the values of all keys, with the optimizer's state where the servers update. What is left, each
worker writes into its own part: its script's state, and what its trainers know themselves. A trainer takes the rest
back when it is made again. Trainers are made in one order on all workers, which is how a snapshot tells them apart.

A process that joins a running job begins from the same, which the first worker gives it (p3/worker/entrance.py).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from p3.snapshots import tree
from p3.worker.key import Key
from p3.worker.session import Session
from p3.worker.snapshots.resumed import Resumed

_trainers: List[weakref.ref] = []  # in the order in which they were made
_made = 0  # so many that follow no other: their places in a snapshot
_released = 0  # and so many were released, whom nobody has followed yet


class Trainer(ABC):
    """Of keys of one job. A snapshot has what it says of itself."""

    kind: str  # what the script calls it

    @property
    def parameters(self) -> Iterable[Any]:
        """The script's own tensors that it writes to, each a `tensor` with its `name`; who takes one over releases this
        trainer before."""
        return ()

    @abstractmethod
    def keys_to_capture(self) -> List[Key]:
        """Those that a snapshot has the servers copy."""

    @abstractmethod
    def own_state(self) -> Dict[str, Any]:
        """What a snapshot cannot have from the servers: a tree (p3.snapshots.tree), with the numbers of its "stores",
        in the order in which add() is given them."""

    @abstractmethod
    def rest(self) -> None:
        """Waits until nothing is under way; ValueError in the middle of a step."""

    def own_state_now(self) -> Dict[str, Any]:
        """own_state(), and what else one that joins the job must have, when nothing is under way."""
        return self.own_state()

    def give_more(self) -> None:
        """What such a process takes in settle(), in rounds of all workers."""
        return

    def settle(self) -> None:
        """In such a process: all that the first step would agree on with the others; takes what they give_more()."""
        return


def take(session: Session, round: int, state: Any) -> None:
    """Of all trainers, if this round is due; by every worker after each step. See p3.torch.snapshot."""
    trainers = living()
    if not session.snapshots.due(round):
        return
    keys = [key for one in trainers for key in one.keys_to_capture()]
    own = {"script": state, "optimizers": [{**one.own_state(), "kind": one.kind} for one in trainers]}
    session.snapshots.take(round, keys, own)


def resume(session: Session) -> Resumed:
    """On every worker, before its first trainer is made. See p3.torch.resume."""
    return session.resume(servers_load=True).map(lambda state: state.get("script"))


def members(session: Session, round: Optional[int], state: Any) -> Tuple[int, ...]:
    """See p3.torch.members."""
    if round is None:
        return session.agree_on_members()
    trainers = living()
    for one in trainers:
        one.rest()
    if session.entrance.is_on_trial:
        _require_all(session, trainers)
        for one in trainers:
            one.settle()
    own = tree.checked(state, "state")

    def given() -> Dict[str, Any]:
        return {"script": own, "optimizers": [{**one.own_state_now(), "kind": one.kind} for one in trainers]}

    def give_more() -> None:
        for one in trainers:
            one.give_more()

    return session.entrance.agree(round, given, give_more)


def _require_all(session: Session, trainers: Sequence[Trainer]) -> None:
    wanted = [saved["kind"] for saved in session.entrance.given["optimizers"]]
    if [one.kind for one in trainers] != wanted:
        raise ValueError(
            "%s: this process has joined a running job, whose workers train by %s; this one has %s at its first "
            "members()" % (session.label, _listed(wanted), _listed([one.kind for one in trainers]))
        )


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "nothing that P3 knows"


def living() -> List[Any]:
    """Those that take part, in the order in which they were made."""
    return [one for one in (reference() for reference in _trainers) if one is not None]


def release_former(tensors: Iterable[Any], successor: str) -> None:
    """Whoever has trained one of these until now; all workers have the same order of them. `successor`: who does from
    here on."""
    tensors = set(tensors)
    for former in living():
        taken = [one.name for one in former.parameters if one.tensor in tensors]
        if taken:
            more = " and %d more of its parameters" % (len(taken) - 1) if taken[1:] else ""
            former.release("%s has taken over %s%s: call that one's methods" % (successor, taken[0], more))


def remove(trainer: Trainer) -> None:
    """It was released, if it was ever added, and takes part no more."""
    global _released
    others = [reference for reference in _trainers if reference() is not trainer]
    _released += len(_trainers) - len(others)
    _trainers[:] = others


def add(session: Session, trainer: Trainer, stores: Sequence[int]) -> Optional[Dict[str, Any]]:
    """A trainer is made, over these stores of the session: takes part from now on. What it gave as own_state(), if the
    job has resumed and nobody has begun from that before, and then its keys' first values are the snapshot's. Who
    follows a trainer that was released begins from its model."""
    own = _own_of(session, trainer)
    for number, store in enumerate(stores):
        if own is None:
            session.saved.forget(store)
        else:
            session.saved.continue_store(store, own["stores"][number])
    return own


def _own_of(session: Session, trainer: Trainer) -> Optional[Dict[str, Any]]:
    global _made, _released
    _trainers.append(weakref.ref(trainer))
    if _released > 0:
        _released -= 1
        return None
    number, _made = _made, _made + 1
    if session.entrance.barrier:
        source, whole = "the first worker's job", session.entrance.given
    elif session.saved.own is not None:
        source, whole = "the snapshot", session.saved.own["state"]
    else:
        return None
    saved = whole["optimizers"]
    if number >= len(saved):
        raise ValueError("resume: %s has %d distributed optimizers, and this script makes more" % (source, len(saved)))
    of = saved[number].get("kind", trainer.kind)
    if of != trainer.kind:
        raise ValueError("resume: number %d of what %s has is a %s, and here it is a %s: go on with the "
                         "first, or begin anew from a state_dict() of the model"
                         % (number + 1, source, of, trainer.kind))  # fmt: skip
    return saved[number]
