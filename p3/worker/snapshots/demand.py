"""Snapshots that a signal asks for: workers agree behind which step one is taken, and whether the job ends with it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time

from p3.launch.execute import SAME_SIGNAL_S
from p3.worker.links.link import Link

log = logging.getLogger("p3.snapshots")


class Ended(SystemExit):
    """The job was asked to end, and every worker ends here, as from SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Demand:
    """Of one session, whose lock guards it."""

    def __init__(self, session, link: Link, snapshots) -> None:
        self._session, self._send, self._snapshots = session, link.send, snapshots
        self._told_to_end_at = math.inf
        self._question = self._decision = 0  # the last one of the scheduler's, and the last that it has decided
        self._demanded, self._ends = 0, False  # so: from which round on one is due, and whether the job ends with it
        session.handle("snapshot_wanted", self._on_wanted)
        session.handle("snapshot_at", self._on_decided)
        if snapshots.directory is not None and os.environ.get("P3_SIGNALS") != "0":
            self._listen_to_signals()

    def _listen_to_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows it there alone
        for number, ends in ((signal.SIGUSR1, False), (signal.SIGTERM, True)):
            # A supervisor has SIGUSR1 ignored, so that it does no harm before this point.
            if signal.getsignal(number) is signal.SIG_DFL or (not ends and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, self._on_sigterm if ends else self._on_sigusr1)

    def _on_sigusr1(self, *_ignored) -> None:
        self._demand(ends=False)

    def _on_sigterm(self, *_ignored) -> None:
        takes_steps = self._snapshots.last_round > 0 and not self._session.has_ended
        if not takes_steps or time.monotonic() > self._told_to_end_at + SAME_SIGNAL_S:  # asked twice: no more grace
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._told_to_end_at = min(self._told_to_end_at, time.monotonic())
        self._demand(ends=True)

    def _demand(self, ends: bool) -> None:
        """In another thread: a signal's handler may have come between anything and its lock."""
        message = {"kind": "demand_snapshot", "ends": ends}
        threading.Thread(target=self._send, args=(message,), name="p3-snapshot", daemon=True).start()

    def pass_mark(self, round: int) -> bool:
        """The end of a step. Whether a snapshot that was asked for is to be taken here, on which all workers agree."""
        session = self._session
        with session.changed:
            is_asked = self._question > self._decision
            if not is_asked:
                self._snapshots.last_round = round
        if is_asked:  # and has answered with the step before
            session.flush()
            what = "to hear behind which step a snapshot is taken"
            try:
                session.wait_until(lambda: self._question <= self._decision, what)
            except TimeoutError as error:
                log.warning("%s; there is none", error)
            self._snapshots.last_round = round
        return 0 < self._demanded <= round

    def _on_wanted(self, message: dict) -> None:
        self._question = message["number"]
        self._send({"kind": "mark", "number": message["number"], "round": self._snapshots.last_round})

    def _on_decided(self, message: dict) -> None:
        self._decision, self._demanded, self._ends = message["number"], message["round"], message["ends"]

    def end_with(self, round: int) -> None:
        """Behind a snapshot: if it is the one that was asked for, and the job is to end with it, Ended, once it is
        written."""
        session = self._session
        with session.changed:
            demanded, ends = self._demanded, self._ends
            if not 0 < demanded <= round:
                return
            if not ends:
                self._demanded = 0
                return
        self._snapshots.finish()
        what = "to hear what became of the snapshot of round %d" % round
        session.wait_until(lambda: self._snapshots.over >= round or self._demanded != demanded, what)
        with session.changed:
            if self._demanded == demanded:  # else it has been asked for again meanwhile
                self._demanded = 0
        if self._snapshots.over < round or (self._snapshots.taken < round and not self._snapshots.has_failed):
            return  # given up, as somebody takes no steps now: it will be asked for again
        saved = "its snapshot of round %d is complete" % round
        lost = "without a snapshot of round %d, which could not be written" % round
        told = saved if self._snapshots.taken == round else lost
        log.warning("%s: the job ends, as SIGTERM asked; %s", session.label, told)
        raise Ended()
