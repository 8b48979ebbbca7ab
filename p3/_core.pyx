# distutils: language = c++
#
# cython: c_string_type=unicode, c_string_encoding=utf8
"""The C++ core as Python sees it.

Arrays are anything with the buffer protocol and C order (NumPy arrays of any type of DTYPES, memoryviews). Calls that
may wait or send release the GIL; all may be made from any thread. Errors of use are ValueError; a failed job is
P3Error.

This file converts, checks and releases the GIL; it decides nothing. Each buffer view is held until the core is done
with the memory: an Operation that is dropped early lives on in its worker until then.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.string cimport memset
from libcpp.utility cimport move
from posix.unistd cimport getpid

from p3.plan.key_plan import REDUCTIONS, UPDATES, KeyPlan

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6, "bfloat16": 12}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
# struct's letters; bfloat16, which it does not know, is held as its bits.
cdef dict _FORMATS = dict(zip(DTYPES.values(), (b"f", b"d", b"e", b"B", b"i", b"b", b"q", b"H")))

NO_SCALARS = (0.0, 0.0, 1.0, 0.0, 1.0)  # of a round where the servers only sum
MASTER = 255  # the part of a slice's state that is the float32 master of its float16 value, or the exact one of its value
LEFT_OUT = 254  # what encoded sums have left out, on the servers
HEADER_BYTES = sizeof(Header)  # of a frame
ROUND_FLOATS = kRoundFloats  # behind the residual of a key that takes steps: how far its warm-up is (src/codec/dgc.h)


class P3Error(RuntimeError):
    """The job has failed; the text says how. The rest is there for programs, each as far as it is known.

    A failure that another node has told of ("remote") has its text alone.
    """

    def __init__(self, text, kind="remote", peer=None, key=None, round=None):
        super().__init__(text)
        self.kind = kind  # usage, disagreement, peer_lost, peer_silent, protocol, remote, stopped
        self.key = key
        self.round = round
        # Whom it is about, who is called "server 0 (10.0.0.8)", and where that is.
        self.peer, _, host = (peer or "").partition(" (")
        self.peer, self.host = self.peer or None, host.rstrip(")") or None


cdef NodeOptions options_of(label, double heartbeat_s, double timeout_s, int trace_fd, cbool checksums,
                            cbool outlives_scheduler, cbool outlives_servers=False) except *:
    if not heartbeat_s > 0 or not timeout_s > heartbeat_s:
        raise ValueError(f"timeout_s ({timeout_s}) must be larger than heartbeat_s ({heartbeat_s}), and both positive")
    return node_options(label, heartbeat_s, timeout_s, checksums, trace_fd, outlives_scheduler, outlives_servers)


cdef CKeyPlan key_plan(plan) except *:
    if plan.dtype not in DTYPES:
        raise ValueError(f"{plan.dtype!r} is no element type; DTYPES lists them")
    if plan.slice_elements == 0:
        raise ValueError("slice_elements must be at least 1")
    cdef CKeyPlan made
    made.wire_key, made.first_slice = plan.wire_key, plan.first_slice
    made.dtype, made.elements = dtype_of(DTYPES[plan.dtype]), plan.elements
    made.slice_elements, made.parts = plan.slice_elements, plan.parts
    made.row_elements, made.partitions = plan.row_elements, plan.partitions
    made.servers = plan.servers
    made.staleness, made.quorum, made.grace_s = plan.staleness, plan.quorum, plan.grace_s
    made.codec = compression_from(plan.codec)
    made.value_codec = compression_from(plan.value_codec)
    made.reduction = <Reduction><int>REDUCTIONS.index(plan.reduction)
    made.update = <Update><int>UPDATES.index(plan.update)
    return made


cdef RoundSettings round_settings(scalars) except *:
    cdef RoundSettings round
    if len(scalars) == 6 and scalars[5] is not None:
        round.fields = shared_fields(scalars[5])
    round.scalars.lr, round.scalars.wd, round.scalars.rescale = scalars[0], scalars[1], scalars[2]
    round.scalars.updates, round.scalars.schedule = scalars[3], scalars[4]
    return round


cdef DType dtype_of(int code) except *:
    if code not in DTYPE_NAMES:
        raise ValueError(f"{code} is no element type; DTYPES lists them")
    return <DType>code


cdef Compression compression_from(description) except *:
    if not description:
        return Compression()
    return compression_of(description["type"], {name: value for name, value in description.items() if name != "type"})


def codec_applies(description not None, str dtype not None, int dimensions):
    """Whether that compression applies to dense keys of that type with so many dimensions. False for a type that P3 does
    not know; whoever defines the key refuses it."""
    if dtype not in DTYPES:
        return False
    return compression_from(description).codec().is_for(dtype_of(DTYPES[dtype]), dimensions <= 1)


def adds_up_on_machine(axes not None):
    """Whether the workers of a machine may add up what they have for the servers of a key with these axes."""
    cdef CKeyPlan plan
    plan.staleness, plan.codec = axes.staleness, compression_from(axes.codec)
    return plan.adds_up_on_machine()


def codecs():
    """What each codec of gradients (include/p3/codec.h) says of itself, in the order of their numbers on the wire."""
    cdef vector[Codec*] all = c_codecs()
    return [codec_description(codec) for codec in all]


cdef dict codec_description(Codec* codec):
    cdef vector[CodecOption] options = codec.options
    return dict(
        name=codec.name, effect=codec.effect, options=[option_description(option) for option in options],
        residuals=codec.residuals(), carries_sums=codec.carries_sums(), makes_steps=codec.makes_steps(),
        encodes_values=codec.encodes_values(),
    )


cdef dict option_description(const CodecOption& option):
    return dict(
        name=option.name, standard=_OPTION_TYPES[<int>option.kind](option.standard), least=option.least,
        most=option.most, is_above_least=option.is_above_least, allowed=option.allowed,
        kind=_OPTION_TYPES[<int>option.kind], is_mxnets=option.is_mxnets,
    )


cdef tuple _OPTION_TYPES = (float, int, bool)  # in the order of the C++ enumeration


def sent_elements(compression not None, size_t elements, uint64_t round):
    """How many of a slice's elements a worker sends in that round of its key, counted from 1; 0: after any warm-up."""
    cdef Compression how = compression_from(compression)
    return how.codec().sent(how.options, round, elements)


def payload_bytes(compression not None, size_t count, size_t elements):
    """Of a frame with so many of a slice's elements."""
    cdef Compression how = compression_from(compression)
    return how.codec().bytes_with(how.options, count, elements)


def bytes_back(compression not None, size_t elements):
    """Of a slice that comes back so, as far as that is shorter than its elements."""
    return compression_from(compression).if_shorter(elements).bytes(elements)


include "_core_tls.pxi"
include "_core_rules.pxi"
include "_core_lowrank.pxi"


def digest(memory not None):
    """64 bits that change with the bytes of a contiguous array, and with their order; in this process alone."""
    cdef Py_buffer view
    cdef uint64_t found
    PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)
    with nogil:
        found = digest_of(view.buf, view.len)
    PyBuffer_Release(&view)
    return found


def make_ring(bytes_each_way):
    """Descriptors of new shared memory for one van, to be passed to the other side and to add_server / add_worker.

    `bytes_each_way`: a power of two, at least 4096.
    """
    return c_make_ring(bytes_each_way)


def slice_count(elements, slice_elements):
    """How many slices a key of `elements` has."""
    return c_slice_count(key_plan(KeyPlan(0, "float32", elements, 0, slice_elements)))


cdef class CoreArray:
    """An array of the core's, which lives as long as this or the core needs it: read it with memoryview or NumPy."""

    @staticmethod
    cdef CoreArray over(shared_ptr[char] data, Py_ssize_t elements, DType dtype):
        cdef CoreArray array = CoreArray.__new__(CoreArray)
        array.data = data
        array.elements = elements
        array.itemsize = size_of(dtype)
        array.format = _FORMATS[<int>dtype]
        return array

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data.get(), self.elements * self.itemsize, 1, flags)
        view.itemsize = self.itemsize
        if flags & PyBUF_FORMAT:
            view.format = self.format
        if view.shape != NULL:
            view.shape = &self.elements
        if view.strides != NULL:
            view.strides = &self.itemsize


cdef class Memory:
    """That of an object which tells its address and has no buffer protocol, as a tensor of torch; NumPy's array of one
    costs more than all else that is done with a small gradient. `owner`: what keeps it."""

    def __cinit__(self, owner, size_t address, Py_ssize_t nbytes):
        self.owner, self.address, self.nbytes = owner, <void*>address, nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.address, self.nbytes, 0, flags)


cdef check_size(name, size_t nbytes, size_t expected, rows):
    if nbytes == expected:
        return
    whole = "the key has" if rows is None else f"{rows} rows have"
    raise ValueError(f"the {name} array has {nbytes} bytes; {whole} {expected}")


cdef class Operation:
    """Something under way on one key. Holds its arrays until the core is done with them, and somebody has seen that."""

    def __cinit__(self):
        self.completion = new Completion()

    # Either may be None, and is null to the core then. `rows`: how many the array has, if it is not the whole key.
    cdef take_landing(self, landing, size_t nbytes, rows=None):
        if landing is not None:
            PyObject_GetBuffer(landing, &self.landing, PyBUF_WRITABLE)
            check_size("landing", self.landing.len, nbytes, rows)

    cdef take_source(self, source, size_t nbytes, rows=None):
        if source is not None:
            PyObject_GetBuffer(source, &self.source, PyBUF_SIMPLE)
            check_size("value or gradient", self.source.len, nbytes, rows)

    cdef RowsView take_rows(self, ids, values, size_t row_bytes) except *:
        PyObject_GetBuffer(ids, &self.ids, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        if self.ids.itemsize != 8 or self.ids.format == NULL or self.ids.format[0] not in b"lq":
            raise ValueError("row ids must be int64, in one contiguous array")
        cdef RowsView rows
        rows.ids = <const int64_t*>self.ids.buf
        rows.count = self.ids.len // 8
        self.take_source(values, rows.count * row_bytes, rows.count)
        rows.values = self.source.buf
        return rows

    cdef announce(self, tell):
        cdef Completions completions
        if tell is not None:
            completions, token = tell
            self.completion.also(completions.done_of(token))

    def __dealloc__(self):
        # The worker keeps unfinished operations alive, so nothing is borrowed any more.
        self.let_go()
        del self.completion

    cdef void let_go(self) noexcept:
        PyBuffer_Release(&self.landing)
        PyBuffer_Release(&self.source)
        PyBuffer_Release(&self.ids)

    @property
    def done(self):
        if not self.completion.done():
            return False
        self.let_go()  # though the worker may keep the operation for long: the memory of gradients is wanted again
        return True

    @property
    def updated(self):
        """Once done: False if every worker skipped this round."""
        return self.completion.updated()

    @property
    def changed(self):
        """Of push_rows, once done: the int64 ids of the rows that changed, ascending."""
        if not self.tells_changed or not self.completion.done():
            return None
        import numpy  # not at the top: a server has no need of it

        cdef const vector[int64_t]* rows = &self.completion.changed_rows()
        cdef bytes content = PyBytes_FromStringAndSize(<const char*>rows.data(), rows.size() * 8)
        return numpy.ndarray(rows.size(), numpy.int64, content).copy()

    def wait(self, double timeout_s):
        """P3Error if the job failed; TimeoutError."""
        cdef cbool in_time
        with nogil:
            in_time = self.completion.wait(timeout_s)
        if not in_time:
            raise TimeoutError(f"the operation was not complete after {timeout_s:g} s")
        self.let_go()


cdef class Completions:
    """Where operations given the same one are announced when they complete, in that order."""

    def __cinit__(self):
        self.queue = new CCompletions()

    def __dealloc__(self):
        del self.queue

    def next(self, double timeout_s):
        """(token, updated) of the next one; None after timeout_s. P3Error if the job failed."""
        cdef pair[int64_t, cbool] result
        with nogil:
            result = self.queue.next(timeout_s)
        return None if result.first < 0 else result

    cdef Done done_of(self, int64_t token) except *:
        return self.queue.done_of(token)


@cython.no_gc_clear  # else the collector would let go of arrays that the core's threads still use
cdef class P3Worker:
    """include/p3/worker.h says what its methods do.

    `trace_fd`: an empty file, opened for appending, that the core takes over (p3/trace.h). `checksums`: CRC32C on every
    slice; the same on all nodes.
    """

    def __cinit__(self, int rank, int num_servers, label, *, double heartbeat_s=1.0, double timeout_s=10.0,
                  int trace_fd=-1, cbool checksums=False, cbool outlives_scheduler=False, cbool outlives_servers=False):
        self.core = new Worker(rank, num_servers, options_of(label, heartbeat_s, timeout_s, trace_fd, checksums,
                                                             outlives_scheduler, outlives_servers))
        self.process = getpid()
        self.unfinished = []
        self.sweep_at = 64
        self.is_first = rank == 0

    def __dealloc__(self):
        cdef Worker* core = self.core
        if self.process != getpid():  # the child of a fork, which has none of the threads that it would end
            return
        with nogil:
            del core

    def add_server(self, int server, int fd, str label not None, *, ring=(), Tls tls=None):
        """A connected, proved, blocking or non-blocking stream socket, which the core owns from here on.

        With `ring` (this worker's make_ring(), passed to the server over that AF_UNIX socket) slices go through memory.
        With `tls`, its handshake done, that is the connection, and `fd` is not looked at.
        """
        self.core.add_server(server, stream_of(fd, ring, True, released(tls)), label)

    def add_heir(self, int lost, int heir, str label not None):
        """Before start(), behind add_server(heir): that one serves what `lost` did, which the job has lost before this
        worker came."""
        self.core.add_heir(lost, heir, label)

    def add_local(self, int worker, int fd, str label not None, *, ring=(), cbool made_ring=False):
        """As add_server, to another worker of this machine: its leader, or if this one leads each of the others.

        `made_ring`: whether the ring is of this worker's making.
        """
        self.core.add_local(worker, stream_of(fd, ring, made_ring, NULL), label)

    def add_member(self, int worker, int fd, str label not None, *, ring=(), cbool made_ring=False, Tls tls=None):
        """As add_local, to another worker that is in a group with this one."""
        self.core.add_member(worker, stream_of(fd, ring, made_ring, released(tls)), label)

    def join_groups(self, int workers, sizes not None, homes not None):
        """Behind these: the sizes of groups, of groups of groups, and so on; and the home of each server."""
        cdef Groups groups
        groups.workers, groups.sizes, groups.homes = workers, sizes, homes
        self.core.join_groups(groups)

    def add_watch(self, int fd, str label not None, *, Tls tls=None):
        self.core.add_watch(stream_of(fd, (), False, released(tls)), label)

    def replace_watch(self, int fd, *, Tls tls=None):
        """To the scheduler that has taken the former one's place; with outlives_scheduler."""
        cdef unique_ptr[Stream] stream = stream_of(fd, (), False, released(tls))
        with nogil:
            self.core.replace_watch(move(stream))

    def inherit(self, int lost, int heir, ranks not None):
        """Server `heir` serves what `lost` did, which is the slices of these ranks; with outlives_servers."""
        cdef vector[int] moved = ranks
        with nogil:
            self.core.inherit(lost, heir, moved)

    def take_back(self, int server, int fd, *, ring=(), Tls tls=None):
        """Another process is that server, which was lost; with outlives_servers, while nothing is under way. The connection
        as add_server's."""
        cdef unique_ptr[Stream] stream = stream_of(fd, ring, True, released(tls))
        with nogil:
            self.core.take_back(server, move(stream))

    def lost_servers(self):
        """Ranks of servers to which the connection has ended, and of which nothing has been said since."""
        return self.core.lost_servers()

    def become_first(self):
        """All who were there before it have departed: this one is what rank 0 was."""
        self.is_first = True
        self.core.become_first()

    def come_later(self):
        """To a job that runs, in which another one is what rank 0 was. Before start()."""
        self.is_first = False
        self.core.come_later()

    def start(self):
        self.core.start()

    def declare(self, str name not None, uint64_t elements, int dtype, compression=None):
        """A handle, local to this worker. `compression`: as an option of the store (p3/plan/options.py), or None."""
        return self.core.declare(name, elements, dtype_of(dtype), compression_from(compression))

    def set_momentum(self, int key, double momentum, double clip_norm=0.0):
        self.core.set_momentum(key, momentum, clip_norm)

    def declare_factors(self, str name not None, shape, int workers):
        """`shape`: rows, outputs and inputs of one worker's factors."""
        cdef FactorShape core_shape
        core_shape.rows, core_shape.outputs, core_shape.inputs = shape
        return self.core.declare_factors(name, core_shape, workers)

    def set_optimizer(self, int key, description not None):
        """What p3.plan.optimizers.describe() makes, of a key that this worker updates: one of factors, or a dense one where
        it outlives servers."""
        self.core.set_optimizer(key, optimizer_spec(description))

    def declare_rows(self, str name not None, uint64_t rows, uint64_t row_elements, int dtype):
        """A key of rows: the methods whose names end in _rows are for such keys, and no others."""
        return self.core.declare_rows(name, rows, row_elements, dtype_of(dtype))

    def agree(self, int key, plan not None, cbool catches_up=False):
        """ValueError unless the plan fits the declaration."""
        cdef CKeyPlan core_plan = key_plan(plan)
        with nogil:
            self.core.agree(key, core_plan, catches_up)

    def init(self, int key, value, landing not None, int32_t priority=0):
        cdef Operation operation = self.begin(key, 0, value, landing)
        with nogil:
            self.core.init(key, operation.source.buf, operation.landing.buf, priority, operation.completion[0])
        return self.keep(operation)

    def hand_over(self, int key):
        self.core.hand_over(key)

    def ask_for_round_alone(self, int key):
        self.core.ask_for_round_alone(key)

    def push(self, int key, gradient, landing not None, int32_t priority=0, scalars=NO_SCALARS, cbool gated=False,
             cbool more=False, tell=None):
        """`scalars`: lr, wd, rescale, updates, schedule (p3/optimizer.h, RoundScalars), and the values of the rule's
        fields (p3.plan.optimizers.values) where they are not those that were announced. `tell`: Completions, and the
        token by which they announce it."""
        if gradient is None:
            raise ValueError("push needs a gradient")
        cdef Operation operation = self.begin(key, 0, gradient, landing)
        operation.announce(tell)
        cdef RoundSettings round = round_settings(scalars)
        with nogil:
            self.core.push(key, operation.source.buf, operation.landing.buf, priority, round, operation.completion[0],
                           gated, more)
        return self.keep(operation)

    def flush(self):
        with nogil:
            self.core.flush()

    def skip(self, int key, landing not None, int32_t priority=0, cbool gated=False, cbool goes_on=False, tell=None):
        return self.skip_any(key, landing, priority, gated, goes_on, tell)

    def ready(self, int key, uint64_t elements):
        with nogil:
            self.core.ready(key, elements)

    def fetch(self, int key, uint8_t part, landing not None):
        """`part` of the state: 1, 2 ... or MASTER; elements of the type in which sums are made."""
        cdef Operation operation = self.begin(key, part, None, landing)
        with nogil:
            self.core.fetch(key, part, operation.landing.buf, operation.completion[0])
        return self.keep(operation)

    def store(self, int key, uint8_t part, content, uint64_t updates=0):
        """`updates`: with staleness, how many updates the state has had; 0: those that the servers have counted."""
        if content is None:
            raise ValueError("store needs a content")
        cdef Operation operation = self.begin(key, part, content, None)
        with nogil:
            self.core.store(key, part, operation.source.buf, operation.completion[0], updates)
        return self.keep(operation)

    def init_rows(self, int key, value, landing, int32_t priority=0):
        """`landing` None, here and below: this worker keeps no copy of the whole value."""
        if value is None and self.is_first:
            raise ValueError("init_rows needs a value on the first worker")
        cdef Operation operation = self.begin(key, 0, value, landing)
        with nogil:
            self.core.init(key, operation.source.buf, operation.landing.buf, priority, operation.completion[0])
        return self.keep(operation)

    def push_rows(self, int key, ids not None, values not None, landing, int32_t priority=0, scalars=NO_SCALARS):
        """`ids`, here and below: a contiguous array of int64."""
        cdef Operation operation = Operation()
        cdef RowsView rows = operation.take_rows(ids, values, self.core.row_bytes(key, 0))
        operation.take_landing(landing, self.core.bytes(key, 0))
        operation.tells_changed = True
        cdef RoundSettings round = round_settings(scalars)
        with nogil:
            self.core.push_rows(key, rows, operation.landing.buf, priority, round, operation.completion[0])
        return self.keep(operation)

    def skip_rows(self, int key, landing, int32_t priority=0, cbool goes_on=False):
        return self.skip_any(key, landing, priority, False, goes_on, None)

    cdef Operation skip_any(self, int key, landing, int32_t priority, cbool gated, cbool goes_on, tell):
        cdef Operation operation = self.begin(key, 0, None, landing)
        operation.announce(tell)
        with nogil:
            self.core.skip(key, operation.landing.buf, priority, operation.completion[0], gated, goes_on)
        return self.keep(operation)

    def fetch_rows(self, int key, uint8_t part, ids not None, landing not None, int32_t priority=0):
        """`part` 0 is the value; others as for fetch()."""
        cdef size_t row_bytes = self.core.row_bytes(key, part)
        cdef Operation operation = Operation()
        cdef RowsView rows = operation.take_rows(ids, None, row_bytes)
        operation.take_landing(landing, rows.count * row_bytes, rows.count)
        with nogil:
            self.core.fetch_rows(key, part, rows.ids, rows.count, operation.landing.buf, priority,
                                 operation.completion[0])
        return self.keep(operation)

    def updates(self, int key):
        """Of a key with staleness: that it had had in what the servers answered last."""
        return self.core.updates(key)

    def landed_round(self, int key):
        """(round, least clock) of a key with staleness: see p3/worker.h."""
        cdef LandedRound landed = self.core.landed_round(key)
        return landed.round, landed.least_clock

    def store_rows(self, int key, uint8_t part, ids not None, content not None, uint64_t updates=0):
        cdef Operation operation = Operation()
        cdef RowsView rows = operation.take_rows(ids, content, self.core.row_bytes(key, part))
        with nogil:
            self.core.store_rows(key, part, rows, operation.completion[0], updates)
        return self.keep(operation)

    def move_rows(self, int key, plan not None, parts, uint64_t first_row, uint64_t rows):
        """The Operation is done when the key has gone over; never if it does not come to that.

        `parts`: of state_parts(). This worker takes the `rows` from `first_row` on over.
        """
        cdef CKeyPlan core_plan = key_plan(plan)
        cdef vector[uint8_t] moving = parts
        cdef RowRange share = {"first": first_row, "count": rows}
        cdef Operation operation = Operation()
        with nogil:
            self.core.move_rows(key, core_plan, moving, share, operation.completion[0])
        return operation

    def recut(self, int key, plan not None):
        """Another cut of a key of which nothing is under way, from its next round on. ValueError otherwise."""
        cdef CKeyPlan core_plan = key_plan(plan)
        self.core.recut(key, core_plan)

    def round(self, int key):
        """The last one that this worker has begun."""
        return self.core.round(key)

    def take_full_rate(self):
        """Bytes per second: the greatest that this machine's link has carried while it was full, since the last call;
        0: it was not."""
        return self.core.take_full_rate()

    def choose_route(self, int key, int pushes, cbool as_slices=False):
        self.core.choose_route(key, pushes, as_slices)

    def is_idle(self, int key):
        """Whether nothing is under way of it, so that release() may follow."""
        return self.core.is_idle(key)

    def release(self, int key):
        """Forgets an idle key; its handle is none from here on. ValueError if it is not idle."""
        self.core.release(key)

    def capture(self, int key, uint64_t snapshot, residual=None):
        """`residual`: an array of residual_floats() in float32, of a key that keeps_residual()."""
        cdef Operation operation = Operation()
        if residual is not None:
            operation.take_landing(residual, self.residual_bytes(key))
        with nogil:
            self.core.capture(key, snapshot, <float*>operation.landing.buf, operation.completion[0])
        return self.keep(operation)

    def keeps_residual(self, int key):
        """Here, or on the leader of this machine; there, residual_floats() is 0 here once the key is agreed."""
        return self.core.keeps_residual(key)

    def residual_floats(self, int key):
        return self.core.residual_floats(key)

    cdef size_t residual_bytes(self, int key) except *:
        return self.core.residual_floats(key) * sizeof(float)

    def restore_residual(self, int key, residual not None):
        cdef Operation holder = Operation()
        holder.take_source(residual, self.residual_bytes(key))
        self.core.restore_residual(key, <const float*>holder.source.buf)

    def keep_former_residual(self, int key):
        self.core.keep_former_residual(key)

    def change_residual(self, int key, cbool undo, double factor):
        """Before the key's next push, and behind the last one."""
        self.core.change_residual(key, undo, factor)

    def captured_plan(self, int key):
        """How the key was cut in the last capture, as a KeyPlan without axes; None if there was none. A key of rows that
        moves has another wire_key then."""
        cdef optional[CKeyPlan] captured = self.core.captured_plan(key)
        if not captured.has_value():
            return None
        cdef CKeyPlan plan = captured.value()
        return KeyPlan(plan.wire_key, DTYPE_NAMES[<int>plan.dtype], plan.elements, plan.first_slice,
                       plan.slice_elements, plan.row_elements, plan.partitions, plan.parts)

    cdef CoreArray new_residual(self, int key):
        """Memory for what compression leaves out of the key; None where it leaves nothing out, or another worker keeps
        it."""
        cdef size_t floats = self.core.residual_floats(key) if self.core.keeps_residual(key) else 0
        if floats == 0:
            return None
        cdef shared_ptr[char] memory = new_bytes(floats * sizeof(float))
        memset(memory.get(), 0, floats * sizeof(float))  # it stays so where it turns out that another worker keeps it
        return CoreArray.over(memory, floats, DType.kFloat32)

    # Arrays of the whole key, or of that part of its state.
    cdef Operation begin(self, int key, uint8_t part, source, landing):
        cdef Operation operation = Operation()
        operation.take_landing(landing, self.core.bytes(key, part) if part else self.core.landing_bytes(key))
        operation.take_source(source, self.core.bytes(key, part))
        return operation

    # Behind the core's call: one that it refuses is never done.
    cdef Operation keep(self, Operation operation):
        if len(self.unfinished) >= self.sweep_at:  # seldom enough that it costs nothing per operation
            self.unfinished = [one for one in self.unfinished if not one.done]
            self.sweep_at = 2 * len(self.unfinished) + 64
        self.unfinished.append(operation)
        return operation

    def fail(self, str text not None):
        """The first failure wins; told to every server."""
        cdef string told = text
        with nogil:
            fail_worker(self.core[0], told)

    @property
    def error(self):
        return error_or_none(self.core.error())

    @property
    def event_fd(self):
        """Readable once failed; for loop.add_reader."""
        return self.core.event_fd()

    def counters(self):
        """Traffic (p3/node.h) with all servers together, rounds, last_round and system_calls; `local`: that with this
        machine's other workers."""
        cdef Counters counters = self.core.counters()
        return dict(counters.traffic, rounds=counters.rounds, last_round=counters.last_round,
                    system_calls=counters.system_calls, local=counters.local)

    def traffic_with(self, int server):
        return self.core.traffic_with(server)

    def key_counters(self, int key):
        """rounds, waited_s, longest_wait_s; of a key of rows all that p3/worker.h has."""
        cdef dict counters = self.core.key_counters(key)
        if counters.pop("has_rows"):
            return counters
        return {name: counters[name] for name in ("rounds", "waited_s", "longest_wait_s")}

    def late(self):
        """Who of this machine keeps the others of it waiting: see p3/lateness.h."""
        return self.core.late()

    def mark_stall(self, int key, int64_t begin_ns, int64_t end_ns):
        """In time.monotonic_ns(), for the trace."""
        self.core.mark_stall(key, begin_ns, end_ns)

    def close(self, double timeout_s):
        cdef cbool orderly
        with nogil:
            orderly = self.core.close(timeout_s)
        self.unfinished.clear()
        return orderly

    def abandon_after_fork(self):
        self.core.abandon_after_fork()


include "_core_server.pxi"
