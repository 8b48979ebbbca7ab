"""One clock for all processes. Those with the same boot id read the same CLOCK_MONOTONIC. Between machines, offsets
come from the slices themselves, as NTP takes them from its packets:

A header is read after it was taken off the sender's queue. So for slices from A to B, received - sent is never less
than what B's clock is ahead; for those from B to A, never less than what it is behind. The smallest of each bound the
offset from both sides. It is taken to be in the middle, and half the distance is the uncertainty: half the least round
trip in the trace, which is larger on a link that is never idle. The clocks are taken to run equally fast.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

import numpy as np

from p3.errors import ConfigError
from p3.trace.reader import NO_PEER, RECEIVE_BEGIN, SEND_BEGIN, Process, local_peer


class Offset(NamedTuple):
    """To be added to a process's times. True within +- uncertainty_ns."""

    ns: int
    uncertainty_ns: int


def offsets(processes: List[Process]) -> List[Offset]:
    """Of each process, to the clock of the first. ConfigError where no slices join the machines."""
    machines = list(dict.fromkeys(process.boot for process in processes))
    known: Dict[str, Offset] = {machines[0]: Offset(0, 0)}
    bounds = _bounds(processes) if len(machines) > 1 else {}
    while len(known) < len(machines):
        steps = [
            (known[here].uncertainty_ns + (bounds[here, there] + bounds[there, here]) // 2, here, there)
            for here in known
            for there in machines
            if there not in known and (here, there) in bounds and (there, here) in bounds
        ]
        if not steps:
            lost = next(process for process in processes if process.boot not in known)
            raise ConfigError(
                "%s: no slices went both ways between %s and %s, so their clocks cannot be compared"
                % (lost.path.parent, processes[0].label, lost.label)
            )
        uncertainty, here, there = min(steps)
        # What `there` reads later than `here` at the same moment:
        ahead = (bounds[here, there] - bounds[there, here]) // 2
        known[there] = Offset(known[here].ns - ahead, uncertainty)
    return [known[process.boot] for process in processes]


def _bounds(processes) -> Dict[Tuple[str, str], int]:
    """(sender's machine, receiver's machine) -> least received - sent of any slice."""
    bounds: Dict[Tuple[str, str], int] = {}
    at = {(process.role, process.rank): process for process in processes}
    for sender in processes:
        for peer in set(sender.events["peer"].tolist()) - {NO_PEER}:
            receiver, known_as = _other_end(at, sender, peer)
            if receiver is None or receiver.boot == sender.boot:
                continue
            sent = _first(sender.events, SEND_BEGIN, peer)
            received = _first(receiver.events, RECEIVE_BEGIN, known_as)
            names, from_sent, from_received = np.intersect1d(sent[0], received[0], return_indices=True)
            if len(names):
                pair = (sender.boot, receiver.boot)
                least = int((received[1][from_received] - sent[1][from_sent]).min())
                bounds[pair] = min(bounds.get(pair, least), least)
    return bounds


def _other_end(at, process, peer):
    """Which process that is, and as which peer it knows this one: another worker, of a group, or of the other role."""
    if peer < NO_PEER:
        return at.get(("worker", local_peer(peer))), local_peer(process.rank)
    return at.get(("server" if process.role == "worker" else "worker", peer)), process.rank


def _first(events, kind, peer):
    """The names of slices on a van, and when each passed first. Names that come twice in a round are left out."""
    chosen = events[(events["kind"] == kind) & (events["peer"] == peer)]
    names = chosen[["frame", "key", "slice", "round"]]
    unique, index, count = np.unique(names, return_index=True, return_counts=True)
    return unique[count == 1], chosen["time_ns"][index[count == 1]]
