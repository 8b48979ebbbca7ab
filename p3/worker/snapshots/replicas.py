"""What a snapshot has of keys that the workers update and not the servers (Session.updates_here): values and states,
which are the same on all workers. The first worker writes them into its own part, under the names that servers would
give them; so a job with servers that update can resume from it, and the other way round.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np

from p3._core import DTYPES, state_parts
from p3.worker.key import Key


class Replicas:
    """Copies for one snapshot."""

    def __init__(self, session) -> None:
        self._session = session
        self._copies: List[Tuple[Key, int, str, np.ndarray]] = []

    def begin(self, keys: Sequence[Key]) -> List[Any]:
        """On the first worker, behind the last round of each key: the operations that copy what it has of those."""
        operations = []
        for key in keys:
            if not self._session.keys.have_replicas(key.store):
                continue
            optimizer = self._session.option(key.store, "optimizer")
            for part in state_parts(optimizer, DTYPES[key.dtype]):
                dtype = "float32" if part > 0 and key.dtype in ("float16", "bfloat16") else key.dtype
                array = np.empty(key.shape, "uint16" if dtype == "bfloat16" else dtype)
                operations.append(self._session.core.fetch(key.handle, part, array))
                self._copies.append((key, part, dtype, array))
        return operations

    def tensors(self) -> Iterator[Tuple[str, str, List[int], np.ndarray]]:
        """For files.write_part(), when the keys are captured and all is copied."""
        for key, part, dtype, array in self._copies:
            plan, begin = self._session.core.captured_plan(key.handle), 0
            for number, size in enumerate(plan.sizes()):
                piece = array.reshape(-1)[begin : begin + size]
                yield "%d.%d.%d" % (plan.wire_key, number, part), dtype, [size], piece
                begin += size
