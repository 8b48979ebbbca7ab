"""The C++ core as Python sees it (implemented in _core.pyx).

Arrays are anything with the buffer protocol and C order (NumPy arrays of any type of DTYPES, memoryviews); raw
addresses go through the `*_raw` methods, where the caller answers for lifetime and size. All calls release the GIL
while in C++ and may be made from any thread. Errors of use are `ValueError`; a failed job is `P3Error`.
"""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from p3.key_plan import KeyPlan

DTYPES: dict  # {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
DTYPE_NAMES: dict  # the same the other way round

MASTER: int  # the part of a slice's state that is the float32 master of its float16 value
NO_SCALARS: Tuple[float, ...]  # those of a round without an optimizer

class P3Error(RuntimeError):
    """The job has failed; the text says how. The rest is there for programs, each as far as it is known.

    A failure that another node has told of ("remote") has its text alone.
    """

    kind: str  # usage, disagreement, peer_lost, peer_silent, protocol, remote, stopped
    peer: Optional[str]  # whom it is about: "server 0"
    host: Optional[str]  # where that is: "10.0.0.8"
    key: Optional[str]
    round: Optional[int]

class Operation:
    """One round of one key under way. Holds its arrays until the core is done with them."""

    def wait(self, timeout_s: float) -> None: ...  # P3Error if the job failed; TimeoutError
    @property
    def done(self) -> bool: ...
    @property
    def updated(self) -> bool: ...  # once done: False if every worker skipped this round
    @property
    def changed(self) -> Optional[Any]: ...  # of push_rows, once done: int64 ids of the rows that changed, ascending

class CoreArray:
    """An array of the core's, which lives as long as this or the core needs it: read it with memoryview or NumPy."""

class Completions:
    """Where operations given the same one are announced when they complete, in that order."""

    # (token, updated) of the next one; None after timeout_s. P3Error if the job failed.
    def next(self, timeout_s: float) -> Optional[Tuple[int, bool]]: ...

TLS_BUILT_IN: bool  # whether this build has OpenSSL

class Tls:
    """A TLS connection before the core takes it over (include/p3/tls_stream.h), or one that Python keeps."""

    # Owns `fd`. `key`: 32 bytes that the other end has, too. `connects`: the client of the two.
    def __init__(self, fd: int, key: bytes, connects: bool, *, notsent_low_water_bytes: int = 131072) -> None: ...
    read_fd: int  # readable while read() may move bytes or tell the end
    write_fd: int
    def handshake(self) -> str: ...  # "done", or what to wait for: "read", "write". P3Error: not the same key
    def read(self, size: int) -> Optional[bytes]: ...  # None: nothing now; b"": it has gone. P3Error: altered, or lost
    # How much was taken; the rest must be offered next. BrokenPipeError: the other end has gone.
    def write(self, data: Any) -> int: ...
    def end_writing(self) -> None: ...
    def close(self) -> None: ...
    @property
    def writes_in_kernel(self) -> bool: ...

class P3Worker:
    def __init__(
        self,
        rank: int,
        num_servers: int,
        label: str,
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 10.0,
        notsent_low_water_bytes: int = 131072,
        trace_fd: int = -1,  # an empty file, opened for appending, that the core takes over (p3/trace.h)
        checksums: bool = False,  # CRC32C on every slice; the same on all nodes
    ) -> None: ...
    # A connected, proved, blocking or non-blocking stream socket; the core owns `fd` from here (use sock.detach()).
    # With `ring` (this worker's make_ring(), passed to the server over that AF_UNIX socket) slices go through memory.
    # With `tls`, its handshake done, that is the connection, and `fd` is not looked at.
    def add_server(
        self, server: int, fd: int, label: str, *, ring: Sequence[int] = (), tls: Optional[Tls] = None
    ) -> None: ...
    # As add_server, to another worker of this machine: its leader, or if this one leads each of the others
    # (p3/worker.h). `made_ring`: whether the ring is of this worker's making.
    def add_local(
        self, worker: int, fd: int, label: str, *, ring: Sequence[int] = (), made_ring: bool = False
    ) -> None: ...
    def add_watch(self, fd: int, label: str, *, tls: Optional[Tls] = None) -> None: ...
    def start(self) -> None: ...
    # A handle, local to this worker. `compression`: {"type": "2bit", "threshold": 0.5}, {"type": "fp16"} or None.
    def declare(self, name: str, elements: int, dtype: int, compression: Optional[dict] = None) -> int: ...
    # A key of rows, each of `row_elements`: the methods whose names end in _rows are for such keys, and no others.
    def declare_rows(self, name: str, rows: int, row_elements: int, dtype: int) -> int: ...
    # ValueError unless the plan fits the declaration.
    def agree(self, key: int, plan: KeyPlan, catches_up: bool = False) -> None: ...
    def init(self, key: int, value: Optional[Any], landing: Any, priority: int = 0) -> Operation: ...
    # `scalars`: lr, wd, rescale, updates, schedule (p3/optimizer.h, RoundScalars).
    def push(
        self, key: int, gradient: Any, landing: Any, priority: int = 0, scalars: Sequence[float] = NO_SCALARS
    ) -> Operation: ...
    # The next round without a gradient of this worker, whose last step is taken; see p3/worker.h.
    def skip(self, key: int, landing: Any, priority: int = 0) -> Operation: ...
    # One part of the optimizer's state on the servers: 1, 2 ... or MASTER; elements of the type in which sums are made.
    def fetch(self, key: int, part: int, landing: Any) -> Operation: ...
    def store(self, key: int, part: int, content: Any) -> Operation: ...  # rank 0 only
    # `landing` None: this worker keeps no copy of the whole value. `ids`: a contiguous array of int64.
    def init_rows(self, key: int, value: Optional[Any], landing: Optional[Any], priority: int = 0) -> Operation: ...
    def push_rows(
        self,
        key: int,
        ids: Any,
        values: Any,
        landing: Optional[Any],
        priority: int = 0,
        scalars: Sequence[float] = NO_SCALARS,
    ) -> Operation: ...
    def skip_rows(self, key: int, landing: Optional[Any], priority: int = 0) -> Operation: ...
    # `part` 0 is the value; others as for fetch().
    def fetch_rows(self, key: int, part: int, ids: Any, landing: Any, priority: int = 0) -> Operation: ...
    def store_rows(self, key: int, part: int, ids: Any, content: Any) -> Operation: ...
    # Another plan for the rounds after rank 0's next push; every worker takes over rows first_row .. + rows. The
    # Operation is done when the key has gone over; never if it does not come to that.
    # `parts`: of state_parts().
    def move_rows(self, key: int, plan: KeyPlan, parts: Sequence[int], first_row: int, rows: int) -> Operation: ...
    # How gradients travel from the next push on: as blocks of all rows with a bitmap, or as the rows touched.
    def route_rows(self, key: int, as_slices: bool) -> None: ...
    def choose_route(self, key: int, pushes: int) -> None: ...  # by the bytes, before each round; alike on all workers
    # For a snapshot, of any key and called by every worker at the same point: rank 0's is done when the servers hold a
    # copy of the key as this worker's last round left it (take_captured), the others' at once, in turn. `residual`: an
    # array of the key's elements in float32, for what compression has left out so far; of a key that keeps_residual().
    # `snapshot`: its round, as the script counts.
    def capture(self, key: int, snapshot: int, residual: Optional[Any] = None) -> Operation: ...
    def keeps_residual(self, key: int) -> bool: ...
    def restore_residual(self, key: int, residual: Any) -> None: ...  # before the key's first push; copied at once
    # Of the last capture; None if there was none. A key of rows that moves to other partitions has another one then,
    # also another wire_key.
    def captured_plan(self, key: int) -> Optional[KeyPlan]: ...
    def fail(self, text: str) -> None: ...  # first failure wins; told to every server
    @property
    def error(self) -> Optional[P3Error]: ...
    @property
    def event_fd(self) -> int: ...  # readable once failed; for loop.add_reader
    # bytes_sent, bytes_received, slices_sent, slices_received, queued_slices, peak_queued_slices, queued_s,
    # held_bytes, peak_held_bytes (p3/node.h)
    def traffic_with(self, server: int) -> dict: ...
    # The same of all servers together, and rounds; `local`: the same of the other workers of this machine together.
    def counters(self) -> dict: ...
    def late(self) -> List[dict]: ...
    # rounds, waited_s, longest_wait_s; of a key of rows also own_rows, pushed_rows, touched_rows, row_bytes_sent,
    # row_bytes_received (p3/worker.h)
    def key_counters(self, key: int) -> dict: ...
    def mark_stall(self, key: int, begin_ns: int, end_ns: int) -> None: ...  # time.monotonic_ns(), for the trace
    def close(self, timeout_s: float) -> bool: ...
    def abandon_after_fork(self) -> None: ...

class P3Server:
    def __init__(
        self,
        rank: int,
        num_servers: int,
        num_workers: int,
        label: str,
        *,
        sum_order: str = "rank",  # or "arrival"
        threads: int = 0,  # that only sum; 0: the receiver does
        machines: Optional[Sequence[int]] = None,  # of each worker; None: each has one of its own
        local_aggregation: bool = True,
        outlives_workers: bool = False,  # see lose_worker
        heartbeat_s: float = 1.0,
        timeout_s: float = 10.0,
        notsent_low_water_bytes: int = 131072,
        trace_fd: int = -1,
        checksums: bool = False,
    ) -> None: ...
    def add_worker(
        self, worker: int, fd: int, label: str, *, ring: Sequence[int] = (), tls: Optional[Tls] = None
    ) -> None: ...
    def add_watch(self, fd: int, label: str, *, tls: Optional[Tls] = None) -> None: ...
    # Replacing a worker (p3/server.h): why that cannot be, or ""; and by wire key the last round that it pushed. Then
    # that is made one round for all, and another connection takes the place of the lost one.
    def lose_worker(self, worker: int) -> Tuple[str, Dict[int, int]]: ...
    def fill(self, worker: int, rounds: Mapping[int, int], skips: bool = False) -> None: ...
    def replace_worker(
        self, worker: int, fd: int, *, ring: Sequence[int] = (), tls: Optional[Tls] = None
    ) -> None: ...
    def start(self) -> None: ...
    def define(self, plan: KeyPlan, name: str, store: int = 0) -> None: ...
    # Another plan of a key of rows, which fills it from the workers (move_rows); and the end of the one before,
    # by wire key.
    def define_successor(self, plan: KeyPlan, predecessor: int) -> None: ...
    def drop(self, wire_key: int) -> None: ...
    # `description` as p3.server.optimizers has them: {"name": "sgd", "momentum": 0.9, ...}
    def set_optimizer(self, store: int, description: dict) -> None: ...
    # Both before the store's first define(); the description as P3Worker.declare's, the reduction "sum" or "average".
    def set_compression(self, store: int, description: dict) -> None: ...
    def set_reduction(self, store: int, reduction: str) -> None: ...
    def fail(self, text: str) -> None: ...
    @property
    def error(self) -> Optional[P3Error]: ...
    @property
    def event_fd(self) -> int: ...  # readable once failed or finished
    @property
    def finished(self) -> bool: ...  # every worker said goodbye
    # What rank 0 has had captured for that snapshot, ordered: (wire_key, slice or partition, part, type's name,
    # elements, memory). Part 0 is the value; 1, 2 ... and MASTER are the optimizer's state, as far as there is any. Of
    # earlier snapshots nothing is left.
    def take_captured(self, snapshot: int) -> List[Tuple[int, int, int, str, int, CoreArray]]: ...
    # As P3Worker's, and received_slices, peak_received_slices, buffer_bytes, peak_buffer_bytes (p3/node.h)
    def counters(self) -> dict: ...
    def late(self) -> List[dict]: ...
    def stop(self) -> None: ...
    def abandon_after_fork(self) -> None: ...

def make_ring(bytes_each_way: int) -> List[int]: ...  # a power of two, at least 4096
def slice_count(elements: int, slice_elements: int) -> int: ...

# What moves with the rows of a key: 0, the value, and the parts of the optimizer's state (None: no optimizer).
def state_parts(description: Optional[dict], dtype: int) -> List[int]: ...
