# distutils: language = c++
"""P3's rounds as operations of MXNet's dependency engine; _mxnet.pyi is the documentation.

Like _core.pyx, this file converts and releases the GIL; it decides nothing.
"""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from p3._core cimport Completions, CoreArray, Done, P3Worker, RoundScalars, Worker, round_scalars


cdef extern from "api.h" namespace "p3" nogil:
    cdef cppclass MXNetApi:
        pass


cdef extern from "engine.h" namespace "p3" nogil:
    cdef cppclass Priority:
        int32_t in_queues
        int in_engine
    cdef cppclass CMXNetKey "p3::MXNetEngine::Key":
        int handle
        string name
        void* landing
    cdef cppclass CMXNetEngine "p3::MXNetEngine":
        CMXNetEngine(const string& library) except +
        void init(Worker*, const CMXNetKey&, Priority) except +
        void push(Worker*, const CMXNetKey&, void* gradient, const RoundScalars&, Priority) except +
        void skip(Worker*, const CMXNetKey&, Priority, Done) except +
        void capture(Worker*, const CMXNetKey&, uint64_t snapshot, shared_ptr[char] residual, Priority, Done) except +
        void copy(void* source, void* destination) except +
        bint same_shape(void* left, void* right) except +
        bint same_type(void* left, void* right) except +
        bint in_cpu_memory(void* array) except +
        const MXNetApi& api() noexcept


cdef extern from "rows.h" namespace "p3" nogil:
    cdef cppclass CMXNetRows "p3::MXNetRows":
        CMXNetRows(const CMXNetEngine*, Worker*, uint64_t rows, uint64_t row_bytes, cbool lands) except +
        CMXNetKey key
        void init(void* value, uint64_t round, Priority) except +
        void push(void* gradient, cbool is_sparse, uint64_t round, const RoundScalars&, Priority) except +
        void skip(uint64_t round, Priority, Done) except +
        void capture(uint64_t snapshot, Priority, Done) except +
        void copy_changed(void* weight, uint64_t begin, uint64_t end, Priority) except +
        void fetch(vector[int64_t] ids, void* destination, Priority) except +
    void* make_rows(const MXNetApi&, int dtype, const vector[int64_t]& shape, const int64_t* ids,
                    uint64_t count) except +
    void c_gather_rows "p3::gather_rows"(const CMXNetEngine&, Worker*, const CMXNetKey&, uint64_t row_bytes,
                                         vector[int64_t] ids, void* source, void* destination, Priority) except +


cdef Priority priority_of(priority) except *:
    cdef Priority converted
    converted.in_queues, converted.in_engine = priority
    return converted


cdef vector[int64_t] vector_of(const int64_t[::1] ids):
    cdef vector[int64_t] copied
    if len(ids):
        copied.assign(&ids[0], &ids[0] + len(ids))
    return copied


cdef class MXNetEngine:
    cdef P3Worker worker
    cdef CMXNetEngine* engine

    def __cinit__(self, P3Worker worker not None, str library not None):
        self.engine = new CMXNetEngine(library.encode())
        self.worker = worker
        # Queued operations hold the bare C++ worker and may outlive every Python object: it is never freed.
        Py_INCREF(worker)

    def __dealloc__(self):
        del self.engine

    def same_shape(self, size_t left, size_t right):
        return self.engine.same_shape(<void*>left, <void*>right)

    def same_type(self, size_t left, size_t right):
        return self.engine.same_type(<void*>left, <void*>right)

    def copy(self, size_t source, size_t destination):
        with nogil:
            self.engine.copy(<void*>source, <void*>destination)

    def in_cpu_memory(self, size_t array):
        return self.engine.in_cpu_memory(<void*>array)


cdef class MXNetKey:
    cdef MXNetEngine engine
    cdef CMXNetKey key

    def __cinit__(self, MXNetEngine engine not None, int handle, str name not None, size_t landing):
        self.engine = engine
        self.key.handle = handle
        self.key.name = name.encode()
        self.key.landing = <void*>landing

    def init(self, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.engine.engine.init(self.engine.worker.core, self.key, urgency)

    def push(self, size_t gradient, scalars, priority):
        cdef RoundScalars round = round_scalars(scalars)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.engine.engine.push(self.engine.worker.core, self.key, <void*>gradient, round, urgency)

    def skip(self, priority, Completions completions not None, int64_t token):
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.engine.engine.skip(self.engine.worker.core, self.key, urgency, done)

    def capture(self, uint64_t snapshot, priority, Completions completions not None, int64_t token):
        cdef CoreArray residual = self.engine.worker.new_residual(self.key.handle)
        cdef shared_ptr[char] memory
        if residual is not None:
            memory = residual.data
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.engine.engine.capture(self.engine.worker.core, self.key, snapshot, memory, urgency, done)
        return residual


cdef class MXNetRowsKey:
    cdef MXNetEngine engine
    cdef CMXNetRows* rows

    def __cinit__(self, MXNetEngine engine not None, int handle, str name not None, size_t landing, uint64_t rows,
                  uint64_t row_bytes, cbool lands):
        self.engine = engine
        self.rows = new CMXNetRows(engine.engine, engine.worker.core, rows, row_bytes, lands)
        self.rows.key.handle = handle
        self.rows.key.name = name.encode()
        self.rows.key.landing = <void*>landing

    def __dealloc__(self):
        del self.rows

    def init(self, size_t value, uint64_t round, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.init(<void*>value, round, urgency)

    def push(self, size_t gradient, cbool is_sparse, uint64_t round, scalars, priority):
        cdef RoundScalars numbers = round_scalars(scalars)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.push(<void*>gradient, is_sparse, round, numbers, urgency)

    def skip(self, uint64_t round, priority, Completions completions not None, int64_t token):
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.rows.skip(round, urgency, done)

    def capture(self, uint64_t snapshot, priority, Completions completions not None, int64_t token):
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.rows.capture(snapshot, urgency, done)

    def copy_changed(self, size_t weight, uint64_t begin, uint64_t end, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.copy_changed(<void*>weight, begin, end, urgency)

    def fetch(self, const int64_t[::1] ids not None, size_t destination, priority):
        cdef vector[int64_t] copied = vector_of(ids)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.fetch(copied, <void*>destination, urgency)


def new_rows(MXNetEngine engine not None, int dtype, shape, const int64_t[::1] ids not None):
    if len(ids) == 0:
        raise ValueError("new_rows: at least one row is needed")
    return <size_t>make_rows(engine.engine.api(), dtype, shape, &ids[0], len(ids))


def gather_rows(MXNetEngine engine not None, str name not None, size_t source, uint64_t row_bytes,
                const int64_t[::1] ids not None, size_t destination, priority):
    cdef CMXNetKey key
    key.name = name.encode()
    cdef vector[int64_t] copied = vector_of(ids)
    cdef Priority urgency = priority_of(priority)
    with nogil:
        c_gather_rows(engine.engine[0], engine.worker.core, key, row_bytes, copied, <void*>source,
                      <void*>destination, urgency)
