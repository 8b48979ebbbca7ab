"""A server's part of a snapshot: what worker 0 has had captured (P3Server.take_captured) goes to one file.

Writing happens in a thread, so neither rounds nor control messages wait for the disk. It imports neither NumPy nor
a framework.
"""

from __future__ import annotations

import threading
from typing import Callable, Optional

from p3._core import P3Server
from p3.settings import Settings
from p3.snapshots.files import write_part


class SnapshotWriter:
    """Does what `write_snapshot` messages ask of one server."""

    def __init__(
        self, core: P3Server, settings: Settings, label: str, rank: int, fail: Optional[Callable[[str], None]] = None
    ) -> None:
        """`fail`: ends the job with a text; without, by way of the core."""
        self._core, self._label, self._rank = core, label, rank
        self._fail = core.fail if fail is None else fail
        self._directory = settings.snapshot_dir
        self._thread: Optional[threading.Thread] = None  # of the last snapshot

    def write(self, round: int, answer: Callable[[dict], None]) -> None:
        """Takes what was captured for it, and returns; a thread writes it and calls `answer` with `snapshot_written`.

        What goes wrong fails the job, with a text that names this server and the file.
        """
        if self._directory is None:
            self._fail("%s: cannot write a snapshot: P3_SNAPSHOT_DIR is not set here" % self._label)
            return
        before, arrays = self._thread, self._core.take_captured(round)
        arguments = (round, arrays, answer, before)
        # A daemon: what is still being written when the process ends is no snapshot, as nobody is left to complete it.
        self._thread = threading.Thread(target=self._write, args=arguments, name="p3-snapshot", daemon=True)
        self._thread.start()

    def _write(
        self, round: int, arrays: list, answer: Callable[[dict], None], before: Optional[threading.Thread]
    ) -> None:
        if before is not None:
            before.join()  # two at a time would only share the disk
        tensors = [
            ("%d.%d.%d" % (wire_key, piece, part), dtype, [elements], memory)
            for wire_key, piece, part, dtype, elements, memory in arrays
        ]
        try:
            part = write_part(self._directory, round, "server-%d" % self._rank, tensors)
        except OSError as error:
            self._fail(
                "%s: writing the snapshot of round %d to %s failed: %s. Make room, or set another P3_SNAPSHOT_DIR."
                % (self._label, round, error.filename, error.strerror)
            )
        except Exception as error:  # whatever it is, the job must not wait for this part
            self._fail("%s: writing the snapshot of round %d failed: %r" % (self._label, round, error))
        else:
            answer(dict(part, kind="snapshot_written", round=round))
