"""P3's rounds as operations of MXNet's dependency engine (implemented in _mxnet.pyx over engine.h and rows.h).

Handles are addresses: NDArray.handle.value. Nothing here waits.
"""

from typing import Any, Optional, Sequence

from p3._core import Completions, CoreArray, P3Worker
from p3.mxnet.priorities import Priority

class MXNetEngine:
    """Queues a worker's rounds in MXNet's engine. `library`: path of the libmxnet that this process has loaded."""

    def __init__(self, worker: P3Worker, library: str) -> None: ...
    def same_shape(self, left: int, right: int) -> bool: ...
    def same_type(self, left: int, right: int) -> bool: ...
    def in_cpu_memory(self, array: int) -> bool: ...
    # MXNet's own copy from one array to another, which casts; without the detour through Python's ctypes.
    def copy(self, source: int, destination: int) -> None: ...

class MXNetKey:
    """One key's operations. `landing` stays alive through the engine's own handles once an operation is queued."""

    def __init__(self, engine: MXNetEngine, handle: int, name: str, landing: int) -> None: ...
    # The first value: on rank 0 what the landing array holds; on all ranks what it will hold.
    def init(self, priority: Priority) -> None: ...
    # The next round: sends the array `gradient`, receives into the landing array. `scalars`: RoundScalars' five.
    def push(self, gradient: int, scalars: Sequence[float], priority: Priority) -> None: ...
    # The next round without a gradient, past the engine: nothing queued there may use the landing array. `completions`
    # gets `token` when it is complete.
    def skip(self, priority: Priority, completions: Completions, token: int) -> None: ...
    # P3Worker.capture() after the rounds queued so far, and before the next one, which does not wait for it.
    # `completions` gets `token` when it is done. What then holds the residual: a buffer of float32, or None.
    def capture(
        self, snapshot: int, priority: Priority, completions: Completions, token: int
    ) -> Optional[CoreArray]: ...

class MXNetRowsKey:
    """As MXNetKey, of a key of rows. `landing`: of all rows; or, if not `lands`, an array that orders its operations.

    Rounds of the landing array are numbered by the caller, from 1: each init, push and skip is one.
    """

    def __init__(
        self, engine: MXNetEngine, handle: int, name: str, landing: int, rows: int, row_bytes: int, lands: bool
    ) -> None: ...
    # The first value: on rank 0 what the landing array holds, or `value`, if that is not 0.
    def init(self, value: int, round: int, priority: Priority) -> None: ...
    # The next round. `gradient`: in CPU memory; row_sparse, or dense for all rows.
    def push(
        self, gradient: int, is_sparse: bool, round: int, scalars: Sequence[float], priority: Priority
    ) -> None: ...
    def skip(self, round: int, priority: Priority, completions: Completions, token: int) -> None: ...
    # As MXNetKey.capture; nothing is left out of rows.
    def capture(self, snapshot: int, priority: Priority, completions: Completions, token: int) -> None: ...
    # Brings an array that is as the landing array was after round `begin` up to round `end`.
    def copy_changed(self, weight: int, begin: int, end: int, priority: Priority) -> None: ...
    # Writes the values of an array of new_rows() with the same ids, as on the servers after the last round.
    def fetch(self, ids: Any, destination: int, priority: Priority) -> None: ...

# The handle, to be freed, of a row_sparse array with these rows: ascending, each once, at least one. Its values are to
# be written by gather_rows() or MXNetRowsKey.fetch().
def new_rows(engine: MXNetEngine, dtype: int, shape: Sequence[int], ids: Any) -> int: ...

# Writes the values of an array of new_rows() with the same ids, as the dense array `source` will hold them.
def gather_rows(
    engine: MXNetEngine, name: str, source: int, row_bytes: int, ids: Any, destination: int, priority: Priority
) -> None: ...
