"""Plans for a job that trains, made in another process: it has a processor's idle time alone, and what it takes to
import and to simulate disturbs no step. See p3/measure/planning/answer.py for what it is asked.

    planner = Planner(question)
    ...
    answer = planner.answer()      # None while it thinks
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from typing import Any, Dict, Optional

_COMMAND = [sys.executable, "-m", "p3.measure.planning.answer"]
_OTHERS = ("P3_", "DMLC_")  # variables about the job, of which that process is no part


class Planner:
    """Threads: one at a time. The process ends with this one, at the latest."""

    def __init__(self, question: Dict[str, Any]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
        # Files, not pipes: nobody reads or writes while this process trains.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")
        with tempfile.TemporaryFile("w+", encoding="utf-8") as asked:
            json.dump(question, asked)
            asked.seek(0)
            self._process = subprocess.Popen(
                _COMMAND, stdin=asked, stdout=self._said, stderr=subprocess.PIPE, env=environment, text=True
            )
        self._end = weakref.finalize(self, _end, self._process)

    def answer(self) -> Optional[Dict[str, Any]]:
        """Once. None while it thinks. RuntimeError, with what it has said, if it could not."""
        if self._process.poll() is None:
            return None
        try:
            complaint = self._process.stderr.read().strip()
            if self._process.returncode != 0:
                raise RuntimeError(complaint[-500:] or "it ended with %d" % self._process.returncode)
            self._said.seek(0)
            return json.load(self._said)
        finally:
            self.close()

    def close(self) -> None:
        self._end()
        self._said.close()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stderr.close()
