"""What a worker writes for whoever measures it: JSON lines, a header, then its iterations, and a result.

    lines = Lines(sys.stdout, computation="real", store="p3_sync")
    lines.header(rank=0, workers=2, versions={"torch": "2.13"})
    lines.iteration(0, warmup=True, start=1.0, end=2.5, loss=0.3)
    lines.result(True, digest="...")
"""

from __future__ import annotations

import hashlib
import json
from typing import Dict, Iterable, TextIO


class Lines:
    def __init__(self, file: TextIO, computation: str, store: str) -> None:
        self._file, self._computation, self._store = file, computation, store

    def write(self, kind: str, **fields) -> None:
        print(json.dumps({"kind": kind, **fields}), file=self._file, flush=True)

    def header(self, versions: Dict[str, str], **fields) -> None:
        import p3

        versions = {"p3": p3.__version__, **versions}
        self.write("header", computation=self._computation, store=self._store, **fields, versions=versions)

    def iteration(self, number: int, warmup: bool, start: float, end: float, **fields) -> None:
        """Moments of the monotonic clock."""
        self.write("iteration", iteration=number, warmup=warmup, start=start, seconds=end - start, **fields)

    def result(self, is_right: bool, **fields) -> None:
        self.write("result", computation=self._computation, result="right" if is_right else "wrong", **fields)


def digest(arrays: Iterable) -> str:
    """Of NumPy arrays, which all workers must have alike."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
