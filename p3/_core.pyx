# distutils: language = c++
"""The C++ core as Python sees it; _core.pyi is the documentation.

This file converts, checks and releases the GIL; it decides nothing. Each buffer view is held until the core is done
with the memory: an Operation that is dropped early lives on in its worker until then.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from libcpp.memory cimport make_shared
from libcpp.utility cimport move

from p3.key_plan import KeyPlan

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class P3Error(RuntimeError):
    """The job has failed: see _core.pyi."""

    def __init__(self, text, kind="remote", peer=None, key=None, round=None):
        super().__init__(text)
        self.kind = kind
        self.key = key
        self.round = round
        # A node is called "worker 2 (10.0.0.5)".
        self.peer, _, host = (peer or "").partition(" (")
        self.peer, self.host = self.peer or None, host.rstrip(")") or None


cdef string utf8(text) except *:
    return (<str?>text).encode()


cdef NodeOptions node_options(label, double heartbeat_s, double timeout_s, int trace_fd, cbool checksums) except *:
    if not heartbeat_s > 0 or not timeout_s > heartbeat_s:
        raise ValueError(f"timeout_s ({timeout_s}) must be larger than heartbeat_s ({heartbeat_s}), and both positive")
    cdef NodeOptions options
    options.label = utf8(label)
    options.heartbeat_s = heartbeat_s
    options.timeout_s = timeout_s
    options.checksums = checksums
    return traced(options, trace_fd)


cdef CKeyPlan key_plan(plan) except *:
    if plan.dtype not in DTYPES:
        raise ValueError(f"{plan.dtype!r} is no element type; DTYPES lists them")
    if plan.slice_elements == 0:
        raise ValueError("slice_elements must be at least 1")
    cdef CKeyPlan core_plan
    core_plan.wire_key = plan.wire_key
    core_plan.dtype = dtype_of(DTYPES[plan.dtype])
    core_plan.elements = plan.elements
    core_plan.slice_elements = plan.slice_elements
    core_plan.first_slice = plan.first_slice
    core_plan.row_elements = plan.row_elements
    core_plan.partitions = plan.partitions
    return core_plan


NO_SCALARS = (0.0, 0.0, 1.0, 0.0, 1.0)  # where the servers only sum
MASTER = 255  # kMaster


cdef RoundScalars round_scalars(scalars) except *:
    cdef RoundScalars round
    round.lr, round.wd, round.rescale, round.updates, round.schedule = scalars
    return round


cdef DType dtype_of(int code) except *:
    if not 0 <= code <= 6:
        raise ValueError(f"{code} is no element type; DTYPES lists them")
    return <DType>code


# The values of the C++ enumeration.
cdef dict _ALGORITHMS = {
    "sgd": 0,
    "nag": 1,
    "adam": 2,
    "adagrad": 3,
    "rmsprop": 4,
    "rmsprop_centered": 5,
    "signum": 6,
    "ftml": 7,
    "ftrl": 8,
    "adadelta": 9,
    "adamax": 10,
    "nadam": 11,
    "dcasgd": 12,
    "test": 13,
}


# ValueError, naming the field, unless the description is complete and sensible (p3/server/optimizers.py).
cdef OptimizerSpec optimizer_spec(description) except *:
    from p3.server.optimizers import validate

    validate(description)
    cdef OptimizerSpec spec
    spec.algorithm = <Algorithm> <unsigned char> _ALGORITHMS[description["name"]]
    # A field that the algorithm does not have keeps the default of the C++ struct.
    spec.momentum = description.get("momentum", spec.momentum)
    spec.beta1 = description.get("beta1", spec.beta1)
    spec.beta2 = description.get("beta2", spec.beta2)
    spec.epsilon = description.get("epsilon", spec.epsilon)
    spec.gamma1 = description.get("gamma1", spec.gamma1)
    spec.gamma2 = description.get("gamma2", spec.gamma2)
    spec.rho = description.get("rho", spec.rho)
    spec.beta = description.get("beta", spec.beta)
    spec.lamda1 = description.get("lamda1", spec.lamda1)
    spec.lamda = description.get("lamda", spec.lamda)
    spec.wd_lh = description.get("wd_lh", spec.wd_lh)
    spec.schedule_decay = description.get("schedule_decay", spec.schedule_decay)
    spec.clip_gradient = description["clip_gradient"]
    spec.clip_weights = description.get("clip_weights", spec.clip_weights)
    spec.multi_precision = description["multi_precision"]
    return spec


cdef Compression compression_from(description) except *:
    if description is None:
        return Compression()
    return compression_of(utf8(description["type"]), description.get("threshold", 0.5))


cdef list late_list(vector[Late] all):
    return [
        {"worker": late.worker, "of_machine": late.of_machine, "key": late.key.decode("utf-8", "replace"),
         "round": late.round, "waited_s": late.waited_s, "waiting": late.waiting}
        for late in all
    ]


cdef dict traffic_dict(const Traffic& traffic):
    return {
        "bytes_sent": traffic.bytes_sent,
        "bytes_received": traffic.bytes_received,
        "slices_sent": traffic.slices_sent,
        "slices_received": traffic.slices_received,
        "queued_slices": traffic.queued_slices,
        "peak_queued_slices": traffic.peak_queued_slices,
        "held_bytes": traffic.held_bytes,
        "peak_held_bytes": traffic.peak_held_bytes,
        "queued_s": traffic.queued_s,
    }


TLS_BUILT_IN = TlsStream.built_in()


cdef class Tls:
    cdef TlsStream* stream
    cdef readonly int read_fd, write_fd

    def __cinit__(self, int fd, bytes key not None, cbool connects, *, int notsent_low_water_bytes=131072):
        self.stream = new TlsStream(fd, notsent_low_water_bytes, key, connects)
        self.read_fd = self.stream.read_fd()
        self.write_fd = self.stream.write_fd()

    def __dealloc__(self):
        del self.stream

    cdef TlsStream* still_here(self) except NULL:
        if self.stream == NULL:
            raise ValueError("this TLS connection belongs to the core by now")
        return self.stream

    def handshake(self):
        return ("done", "read", "write")[shake_hands(self.still_here()[0])]

    def read(self, int size):
        cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
        cdef int64_t moved = read_some(self.still_here()[0], <char*>data, size)
        if moved == 0:
            return None
        return data[:max(moved, 0)]

    def write(self, data):
        cdef const unsigned char[::1] view = data
        if view.shape[0] == 0:
            return 0
        cdef int64_t moved = write_some(self.still_here()[0], <const char*>&view[0], view.shape[0])
        if moved < 0:
            raise BrokenPipeError("the other end has gone")
        return moved

    def end_writing(self):
        self.still_here().end_writing()

    def close(self):
        if self.stream != NULL:
            self.stream.close()

    @property
    def writes_in_kernel(self):
        return self.still_here().writes_in_kernel()


# For stream_of(): the core's from here on; null for None.
cdef TlsStream* released(Tls tls) except? NULL:
    if tls is None:
        return NULL
    cdef TlsStream* stream = tls.still_here()
    tls.stream = NULL
    return stream


def make_ring(bytes_each_way):
    """Descriptors of new shared memory for one van, to be passed to the other side and to add_server / add_worker."""
    return list(c_make_ring(bytes_each_way))


def state_parts(description, int dtype):
    """The parts that move with the rows of a key of that type: 0, the value; and what the optimizer keeps for them."""
    if description is None:
        return [0]
    return list(parts_of(optimizer_spec(description), dtype_of(dtype)))


def slice_count(elements, slice_elements):
    """How many slices a key of `elements` has."""
    return c_slice_count(key_plan(KeyPlan(0, "float32", elements, 0, slice_elements)))


cdef check_size(name, size_t nbytes, size_t expected, rows):
    if nbytes == expected:
        return
    whole = "the key has" if rows is None else f"{rows} rows have"
    raise ValueError(f"the {name} array has {nbytes} bytes; {whole} {expected}")


cdef class CoreArray:
    """An array of the core's, which lives as long as this or the core needs it: read it with memoryview or NumPy."""

    @staticmethod
    cdef CoreArray over(shared_ptr[char] data, Py_ssize_t elements, DType dtype):
        cdef CoreArray array = CoreArray.__new__(CoreArray)
        array.data = data
        array.elements = elements
        array.itemsize = size_of(dtype)
        array.format = b"fdeBibq"[<int>dtype : <int>dtype + 1]
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


cdef class Operation:
    """Something under way on one key. Holds its arrays until the core is done with them."""

    def __cinit__(self):
        self.completion = make_shared[Completion]()
        self.holds_source = self.holds_landing = self.holds_ids = self.tells_changed = False

    # Either may be None, and is null to the core then. `rows`: how many the array has, if it is not the whole key.
    cdef take_landing(self, landing, size_t nbytes, rows=None):
        if landing is None:
            return
        PyObject_GetBuffer(landing, &self.landing, PyBUF_WRITABLE)
        self.holds_landing = True
        check_size("landing", self.landing.len, nbytes, rows)

    cdef take_source(self, source, size_t nbytes, rows=None):
        if source is None:
            return
        PyObject_GetBuffer(source, &self.source, PyBUF_SIMPLE)
        self.holds_source = True
        check_size("value or gradient", self.source.len, nbytes, rows)

    # Of rows; returns how many.
    cdef uint64_t take_ids(self, ids) except? 0:
        PyObject_GetBuffer(ids, &self.ids, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        self.holds_ids = True
        if self.ids.itemsize != 8 or self.ids.format == NULL or self.ids.format[0] not in b"lq":
            raise ValueError("row ids must be int64, in one contiguous array")
        return self.ids.len // 8

    cdef const void* source_address(self):
        return self.source.buf if self.holds_source else NULL

    cdef void* landing_address(self):
        return self.landing.buf if self.holds_landing else NULL

    def __dealloc__(self):
        # The worker keeps unfinished operations alive, so nothing is borrowed any more.
        if self.holds_landing:
            PyBuffer_Release(&self.landing)
        if self.holds_source:
            PyBuffer_Release(&self.source)
        if self.holds_ids:
            PyBuffer_Release(&self.ids)

    @property
    def done(self):
        return self.completion.get().done()

    @property
    def updated(self):
        return self.completion.get().updated()

    @property
    def changed(self):
        if not self.tells_changed or not self.completion.get().done():
            return None
        import numpy  # not at the top: a server has no need of it

        cdef const vector[int64_t]* rows = &self.completion.get().changed_rows()
        if rows.empty():
            return numpy.empty(0, numpy.int64)
        return numpy.frombuffer((<const char*>rows.data())[: rows.size() * 8], numpy.int64).copy()

    def wait(self, double timeout_s):
        cdef Completion* completion = self.completion.get()
        cdef cbool in_time
        with nogil:
            in_time = completion.wait(timeout_s)
        if not in_time:
            raise TimeoutError(f"the operation was not complete after {timeout_s:g} s")


cdef class Completions:
    """Where operations given the same one are announced when they complete, in that order."""

    def __cinit__(self):
        self.queue = make_shared[CCompletions]()

    def next(self, double timeout_s):
        cdef CCompletions* queue = self.queue.get()
        cdef pair[int64_t, cbool] result
        with nogil:
            result = queue.next(timeout_s)
        return None if result.first < 0 else (result.first, result.second)

    cdef Done done_of(self, int64_t token) except *:
        return CCompletions.done_of(self.queue, token)


cdef class P3Worker:
    def __cinit__(self, int rank, int num_servers, label, *, double heartbeat_s=1.0, double timeout_s=10.0,
                  int notsent_low_water_bytes=131072, int trace_fd=-1, cbool checksums=False):
        self.core = new Worker(rank, num_servers, node_options(label, heartbeat_s, timeout_s, trace_fd, checksums))
        self.notsent_low_water_bytes = notsent_low_water_bytes
        self.unfinished = []
        self.sweep_at = 64
        self.sizes = []
        self.rank = rank

    def __dealloc__(self):
        cdef Worker* core = self.core
        with nogil:
            del core

    def add_server(self, int server, int fd, label, *, ring=(), Tls tls=None):
        cdef string text = utf8(label)
        self.core.add_server(server, stream_of(fd, self.notsent_low_water_bytes, ring, True, released(tls)), text)

    def add_local(self, int worker, int fd, label, *, ring=(), cbool made_ring=False):
        self.core.add_local(worker, stream_of(fd, self.notsent_low_water_bytes, ring, made_ring, NULL), utf8(label))

    def add_watch(self, int fd, label, *, Tls tls=None):
        cdef string text = utf8(label)
        self.core.add_watch(stream_of(fd, self.notsent_low_water_bytes, (), False, released(tls)), text)

    def start(self):
        self.core.start()

    def declare(self, name, uint64_t elements, int dtype, compression=None):
        cdef DType type = dtype_of(dtype)
        cdef int key = self.core.declare(utf8(name), elements, type, compression_from(compression))
        self.sizes.append((elements, dtype, elements * size_of(type), elements * size_of(sum_type(type)), 0))
        return key

    def declare_rows(self, name, uint64_t rows, uint64_t row_elements, int dtype):
        cdef DType type = dtype_of(dtype)
        cdef int key = self.core.declare_rows(utf8(name), rows, row_elements, type)
        cdef uint64_t elements = rows * row_elements
        self.sizes.append(
            (elements, dtype, elements * size_of(type), elements * size_of(sum_type(type)), row_elements)
        )
        return key

    def agree(self, int key, plan not None, cbool catches_up=False):
        cdef CKeyPlan core_plan = key_plan(plan)
        with nogil:
            self.core.agree(key, core_plan, catches_up)

    def init(self, int key, value, landing not None, int32_t priority=0):
        cdef Operation operation = self.begin(key, value, landing, 2)
        cdef const void* source = operation.source_address()
        with nogil:
            self.core.init(key, source, operation.landing.buf, priority, Completion.done_of(operation.completion))
        return operation

    def push(self, int key, gradient, landing not None, int32_t priority=0, scalars=NO_SCALARS):
        if gradient is None:
            raise ValueError("push needs a gradient")
        cdef Operation operation = self.begin(key, gradient, landing, 2)
        cdef RoundScalars round = round_scalars(scalars)
        with nogil:
            self.core.push(key, operation.source.buf, operation.landing.buf, priority, round,
                           Completion.done_of(operation.completion))
        return operation

    def skip(self, int key, landing not None, int32_t priority=0):
        cdef Operation operation = self.begin(key, None, landing, 2)
        with nogil:
            self.core.skip(key, operation.landing.buf, priority, Completion.done_of(operation.completion))
        return operation

    def fetch(self, int key, uint8_t part, landing not None):
        cdef Operation operation = self.begin(key, None, landing, 3)
        with nogil:
            self.core.fetch(key, part, operation.landing.buf, Completion.done_of(operation.completion))
        return operation

    def store(self, int key, uint8_t part, content):
        if content is None:
            raise ValueError("store needs a content")
        cdef Operation operation = self.begin(key, content, None, 3)
        with nogil:
            self.core.store(key, part, operation.source.buf, Completion.done_of(operation.completion))
        return operation

    def init_rows(self, int key, value, landing, int32_t priority=0):
        cdef Operation operation = self.begin(key, value, landing, 2)
        cdef const void* source = operation.source_address()
        cdef void* target = operation.landing_address()
        if source == NULL and self.rank == 0:
            raise ValueError("init_rows needs a value on rank 0")
        with nogil:
            self.core.init_rows(key, source, target, priority, Completion.done_of(operation.completion))
        return operation

    def push_rows(self, int key, ids not None, values not None, landing, int32_t priority=0, scalars=NO_SCALARS):
        cdef Operation operation = Operation()
        cdef RowsView rows
        rows.count = operation.take_ids(ids)
        operation.take_source(values, rows.count * self.row_bytes(key, 0), rows.count)
        operation.take_landing(landing, self.sizes[key][2])
        operation.tells_changed = True
        rows.ids = <const int64_t*>operation.ids.buf
        rows.values = operation.source_address()
        cdef RoundScalars round = round_scalars(scalars)
        cdef void* target = operation.landing_address()
        self.keep(operation)
        with nogil:
            self.core.push_rows(key, rows, target, priority, round, Completion.rows_done_of(operation.completion))
        return operation

    def skip_rows(self, int key, landing, int32_t priority=0):
        cdef Operation operation = self.begin(key, None, landing, 2)
        cdef void* target = operation.landing_address()
        with nogil:
            self.core.skip_rows(key, target, priority, Completion.done_of(operation.completion))
        return operation

    def fetch_rows(self, int key, uint8_t part, ids not None, landing not None, int32_t priority=0):
        cdef Operation operation = Operation()
        cdef uint64_t count = operation.take_ids(ids)
        operation.take_landing(landing, count * self.row_bytes(key, part), count)
        cdef const int64_t* wanted = <const int64_t*>operation.ids.buf
        self.keep(operation)
        with nogil:
            self.core.fetch_rows(key, part, wanted, count, operation.landing.buf, priority,
                                 Completion.done_of(operation.completion))
        return operation

    def store_rows(self, int key, uint8_t part, ids not None, content not None):
        cdef Operation operation = Operation()
        cdef RowsView rows
        rows.count = operation.take_ids(ids)
        operation.take_source(content, rows.count * self.row_bytes(key, part), rows.count)
        rows.ids = <const int64_t*>operation.ids.buf
        rows.values = operation.source_address()
        self.keep(operation)
        with nogil:
            self.core.store_rows(key, part, rows, Completion.done_of(operation.completion))
        return operation

    def move_rows(self, int key, plan not None, parts, uint64_t first_row, uint64_t rows):
        self.row_bytes(key, 0)
        cdef CKeyPlan core_plan = key_plan(plan)
        cdef vector[uint8_t] moving = parts
        cdef RowRange share
        share.first = first_row
        share.count = rows
        cdef Operation operation = Operation()
        with nogil:
            self.core.move_rows(key, core_plan, moving, share, Completion.move_done_of(operation.completion))
        return operation

    def route_rows(self, int key, cbool as_slices):
        self.core.route_rows(key, as_slices)

    def choose_route(self, int key, int pushes):
        self.core.choose_route(key, pushes)

    def capture(self, int key, uint64_t snapshot, residual=None):
        self.check_handle(key)
        cdef Operation operation = Operation()
        operation.take_landing(residual, self.residual_bytes(key))
        cdef float* target = <float*>operation.landing_address()
        self.keep(operation)
        with nogil:
            self.core.capture(key, snapshot, target, Completion.done_of(operation.completion))
        return operation

    def keeps_residual(self, int key):
        return self.core.keeps_residual(key)

    def restore_residual(self, int key, residual not None):
        self.check_handle(key)
        cdef Operation holder = Operation()
        holder.take_source(residual, self.residual_bytes(key))
        self.core.restore_residual(key, <const float*>holder.source.buf)

    def captured_plan(self, int key):
        cdef optional[CKeyPlan] captured = self.core.captured_plan(key)
        if not captured.has_value():
            return None
        cdef CKeyPlan plan = captured.value()
        return KeyPlan(plan.wire_key, DTYPE_NAMES[<int>plan.dtype], plan.elements, plan.first_slice,
                       plan.slice_elements, plan.row_elements, plan.partitions)

    cdef CoreArray new_residual(self, int key):
        """Memory for what compression leaves out of the key; None where it leaves nothing out."""
        if not self.core.keeps_residual(key):
            return None
        return CoreArray.over(new_bytes(self.residual_bytes(key)), self.sizes[key][0], <DType>0)

    cdef size_t residual_bytes(self, int key):
        return self.sizes[key][0] * sizeof(float)

    cdef size_t row_bytes(self, int key, int part) except? 0:
        self.check_handle(key)
        _, dtype, _, _, row_elements = self.sizes[key]
        if row_elements == 0:
            raise ValueError(f"the key with handle {key} is no key of rows; declare it as such")
        cdef DType type = dtype_of(dtype)
        return row_elements * size_of(type if part == 0 else sum_type(type))

    cdef check_handle(self, int key):
        if not 0 <= key < len(self.sizes):
            raise ValueError(f"there is no key with handle {key}")

    cdef Operation begin(self, int key, source, landing, int size):
        self.check_handle(key)
        cdef Operation operation = Operation()
        operation.take_landing(landing, self.sizes[key][size])
        operation.take_source(source, self.sizes[key][size])
        self.keep(operation)
        return operation

    cdef keep(self, Operation operation):
        if len(self.unfinished) >= self.sweep_at:  # seldom enough that it costs nothing per operation
            self.unfinished = [one for one in self.unfinished if not one.done]
            self.sweep_at = 2 * len(self.unfinished) + 64
        self.unfinished.append(operation)

    def fail(self, text):
        cdef string told = utf8(text)
        with nogil:
            fail_worker(self.core[0], told)

    @property
    def error(self):
        return error_or_none(self.core.error())

    @property
    def event_fd(self):
        return self.core.event_fd()

    def counters(self):
        cdef Counters counters = self.core.counters()
        return dict(traffic_dict(counters.traffic), rounds=counters.rounds, local=traffic_dict(counters.local))

    def traffic_with(self, int server):
        return traffic_dict(self.core.traffic_with(server))

    def key_counters(self, int key):
        cdef KeyCounters counters = self.core.key_counters(key)
        result = {"rounds": counters.rounds, "waited_s": counters.waited_s, "longest_wait_s": counters.longest_wait_s}
        if self.sizes[key][4] > 0:
            result.update(
                completed_s=counters.completed_s,
                as_slices=counters.as_slices,
                own_rows=counters.own_rows,
                pushed_rows=counters.pushed_rows,
                touched_rows=counters.touched_rows,
                row_bytes_sent=counters.row_bytes_sent,
                row_bytes_received=counters.row_bytes_received,
            )
        return result

    def late(self):
        """Who of this machine keeps the others of it waiting: see p3/lateness.h."""
        return late_list(self.core.late())

    def mark_stall(self, int key, int64_t begin_ns, int64_t end_ns):
        self.core.mark_stall(key, begin_ns, end_ns)

    def close(self, double timeout_s):
        cdef cbool orderly
        with nogil:
            orderly = self.core.close(timeout_s)
        self.unfinished.clear()
        return orderly

    def abandon_after_fork(self):
        self.core.abandon_after_fork()


cdef class P3Server:
    cdef Server* core
    cdef int notsent_low_water_bytes

    def __cinit__(self, int rank, int num_servers, int num_workers, label, *, sum_order="rank", int threads=0,
                  machines=None, cbool local_aggregation=True, cbool outlives_workers=False, double heartbeat_s=1.0,
                  double timeout_s=10.0, int notsent_low_water_bytes=131072, int trace_fd=-1, cbool checksums=False):
        if sum_order not in ("rank", "arrival"):
            raise ValueError(f"sum_order is 'rank' or 'arrival', not {sum_order!r}")
        if threads < 0:
            raise ValueError(f"threads must not be negative ({threads})")
        self.notsent_low_water_bytes = notsent_low_water_bytes
        self.core = new Server(rank, num_servers, num_workers,
                               server_options(node_options(label, heartbeat_s, timeout_s, trace_fd, checksums),
                                              sum_order == "arrival", threads,
                                              range(max(num_workers, 0)) if machines is None else machines,
                                              local_aggregation, outlives_workers))

    def __dealloc__(self):
        cdef Server* core = self.core
        with nogil:
            del core

    def add_worker(self, int worker, int fd, label, *, ring=(), Tls tls=None):
        cdef string text = utf8(label)
        self.core.add_worker(worker, stream_of(fd, self.notsent_low_water_bytes, ring, False, released(tls)), text)

    def add_watch(self, int fd, label, *, Tls tls=None):
        cdef string text = utf8(label)
        self.core.add_watch(stream_of(fd, self.notsent_low_water_bytes, (), False, released(tls)), text)

    def start(self):
        self.core.start()

    def define(self, plan not None, name, int store=0):
        cdef CKeyPlan core_plan = key_plan(plan)
        cdef string text = utf8(name)
        with nogil:
            self.core.define(core_plan, text, store)

    def define_successor(self, plan not None, uint32_t predecessor):
        cdef CKeyPlan core_plan = key_plan(plan)
        with nogil:
            self.core.define_successor(core_plan, predecessor)

    def drop(self, uint32_t wire_key):
        with nogil:
            self.core.drop(wire_key)

    def set_optimizer(self, int store, description):
        self.core.set_optimizer(store, optimizer_spec(description))

    def set_compression(self, int store, description):
        self.core.set_compression(store, compression_from(description))

    def set_reduction(self, int store, str reduction not None):
        if reduction not in ("sum", "average"):
            raise ValueError(f"a reduction is 'sum' or 'average', not {reduction!r}")
        self.core.set_average(store, reduction == "average")

    def lose_worker(self, int worker):
        cdef LostWorker lost
        with nogil:
            lost = self.core.lose_worker(worker)
        return lost.problem.decode(), {pushed.wire_key: pushed.round for pushed in lost.pushed}

    def fill(self, int worker, rounds, cbool skips=False):
        cdef vector[Pushed] pushed
        cdef Pushed one
        for wire_key, number in rounds.items():
            one.wire_key, one.round = wire_key, number
            pushed.push_back(one)
        with nogil:
            self.core.fill(worker, pushed, skips)

    def replace_worker(self, int worker, int fd, *, ring=(), Tls tls=None):
        cdef unique_ptr[Stream] stream = stream_of(fd, self.notsent_low_water_bytes, ring, False, released(tls))
        with nogil:
            self.core.replace_worker(worker, move(stream))

    def fail(self, text):
        cdef string told = utf8(text)
        with nogil:
            fail_server(self.core[0], told)

    @property
    def error(self):
        return error_or_none(self.core.error())

    @property
    def event_fd(self):
        return self.core.event_fd()

    @property
    def finished(self):
        return self.core.finished()

    def take_captured(self, uint64_t snapshot):
        cdef vector[CapturedArray] taken = self.core.take_captured(snapshot)
        cdef CapturedArray* array
        cdef size_t i
        arrays = []
        for i in range(taken.size()):
            array = &taken[i]
            arrays.append((array.wire_key, array.slice, array.part, DTYPE_NAMES[<int>array.dtype], array.elements,
                           CoreArray.over(array.data, array.elements, array.dtype)))
        return arrays

    def counters(self):
        cdef Counters counters = self.core.counters()
        return dict(
            traffic_dict(counters.traffic),
            rounds=counters.rounds,
            received_slices=counters.received_slices,
            peak_received_slices=counters.peak_received_slices,
            buffer_bytes=counters.buffer_bytes,
            peak_buffer_bytes=counters.peak_buffer_bytes,
            late_s=list(self.core.mean_lateness_s()),
        )

    def late(self):
        """Who keeps others waiting: see p3/lateness.h."""
        return late_list(self.core.late())

    def stop(self):
        with nogil:
            self.core.stop()

    def abandon_after_fork(self):
        self.core.abandon_after_fork()
