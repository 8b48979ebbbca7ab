"""A server's part of a snapshot: what worker 0 has had captured (P3Server.take_captured) goes to one file; and before a
job resumes, the server reads its share of the files; then its keys begin with what its own part has of them.

All of it happens in threads, so neither rounds nor control messages wait for the disk. It imports neither NumPy nor a
framework.
"""

from __future__ import annotations

import logging
import threading
from typing import Callable, Optional

from p3._core import P3Server
from p3.cluster.messages import sendable
from p3.plan.key_plan import KeyPlan
from p3.settings import Settings
from p3.snapshots.files import why, write_part
from p3.snapshots.reading import PartReader, Refused, problem_with_share
from p3.snapshots.pace import Pace

log = logging.getLogger("p3.snapshots")

Answer = Callable[[dict], None]


class SnapshotWriter:
    """Does what `write_snapshot` and `check_snapshot` messages ask of one server."""

    def __init__(
        self, core: P3Server, settings: Settings, label: str, rank: int, servers: int,
        fail: Optional[Callable[[str], None]] = None,
    ) -> None:  # fmt: skip
        """`fail`: ends the job with a text; without, by way of the core."""
        self._core, self._settings = core, settings
        self._label, self._rank, self._servers = label, rank, servers
        self._fail = core.fail if fail is None else fail
        self._thread: Optional[threading.Thread] = None  # of the last snapshot
        self._source: Optional[PartReader] = None  # this server's part of the snapshot that the job resumes from

    def apply(self, message: dict, answer: Answer) -> bool:
        """Whether it is one of those messages. Returns at once; a thread calls `answer`."""
        if message["kind"] == "write_snapshot":
            self.write(message["round"], answer)
        elif message["kind"] == "check_snapshot":
            self._start(self._check, message["round"], answer)
        elif message["kind"] == "load_snapshot":
            self._open(message["round"])
        else:
            return False
        return True

    def _open(self, round: int) -> None:
        try:
            self._source = PartReader(self._settings.snapshot_dir, round, self._rank, self._servers)
        except Refused as reason:
            log.info("%s: its part of the snapshot of round %d is not loaded here: %s", self._label, round, reason)

    @property
    def loads(self) -> bool:
        return self._source is not None

    def load(self, define: dict, answer: Answer) -> bool:
        """Whether all of this server's slices of a key that was just defined now have what the snapshot has of them.
        If not, worker 0 brings it."""
        pace, plan = self._pace(answer), KeyPlan.of(define)
        try:
            for number, part, content in self._source.slices(define["store"], define["name"], plan):
                self._core.load(plan.wire_key, number, part, content)
                pace.moved()
        except ValueError as reason:  # Refused, or the core's: it is of another size
            log.info("%s: key %r is not loaded here: %s", self._label, define["name"], reason)
            return False
        return True

    def write(self, round: int, answer: Answer) -> None:
        """Takes what was captured for it, and returns; a thread writes it and calls `answer` with `snapshot_written`,
        or with `snapshot_failed`, and the error is logged."""
        if self._settings.snapshot_dir is None:
            self._fail("%s: cannot write a snapshot: P3_SNAPSHOT_DIR is not set here" % self._label)
            return
        self._thread = self._start(self._write, round, self._core.take_captured(round), answer, self._thread)

    def _start(self, work: Callable, *arguments) -> threading.Thread:
        # A daemon: what is still being written when the process ends is no snapshot, as nobody is left to complete it.
        thread = threading.Thread(target=work, args=arguments, name="p3-snapshot", daemon=True)
        thread.start()
        return thread

    def _pace(self, answer: Answer) -> Pace:
        settings = self._settings
        return Pace(settings.wait_timeout_s, lambda: answer({"kind": "progress"}), settings.snapshot_rate)

    def _write(self, round: int, arrays: list, answer: Answer, before: Optional[threading.Thread]) -> None:
        if before is not None:
            before.join()  # two at a time would only share the disk
        tensors = [
            ("%d.%d.%d" % (wire_key, piece, part), dtype, [elements], memory)
            for wire_key, piece, part, dtype, elements, memory in arrays
        ]
        name = "server-%d" % self._rank
        try:
            part = write_part(self._settings.snapshot_dir, round, name, tensors, pace=self._pace(answer))
        except Exception as error:  # whatever it is, nobody must wait for this part
            text = "%s: %s" % (self._label, why(error))
            log.error("%s; there is no snapshot of round %d", text, round)
            answer({"kind": "snapshot_failed", "round": round, "text": sendable(text)})
        else:
            answer(dict(part, kind="snapshot_written", round=round))

    def _check(self, round: int, answer: Answer) -> None:
        problem, _ = problem_with_share(
            self._settings.snapshot_dir, round, "server", self._rank, self._servers, self._pace(answer)
        )
        text = sendable("%s: %s" % (self._label, problem)) if problem else ""
        answer({"kind": "snapshot_checked", "round": round, "problem": text})
