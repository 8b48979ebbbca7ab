# distutils: language = c++
"""P3's rounds as operations of MXNet's dependency engine, for Python: engine.h, rows.h, norm.h in engine/ tell of them.

Handles are addresses: NDArray.handle.value; 0 is null. Nothing here waits. Like _core.pyx, this file converts and
releases the GIL; it decides nothing. A `priority` is a p3.mxnet.priorities.Priority, and `completions` gets `token`
when an operation is done.
"""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from p3._core cimport Completions, CoreArray, Done, P3Worker, RoundSettings, Worker, round_settings


cdef extern from "engine/api.h" namespace "p3" nogil:
    cdef cppclass MXNetApi:
        @staticmethod
        const MXNetApi* find(const string& library) except +
        bint same_shape(void* left, void* right) except +
        bint same_type(void* left, void* right) except +
        bint in_cpu_memory(void* array) except +
        void copy(void* source, void* destination) except +


cdef extern from "engine/engine.h" namespace "p3" nogil:
    cdef cppclass Priority:
        int32_t in_queues
        int in_engine
    cdef cppclass CMXNetKey "p3::MXNetKey":
        CMXNetKey(const MXNetApi*, Worker*, int handle, string name, void* landing) except +
        void init(void* value, Priority) except +
        void push(void* gradient, const RoundSettings&, Priority) except +
        cppclass Arrival:
            pass
        shared_ptr[Arrival] push_arriving(void* buffer, const RoundSettings&, Priority) except +
        void arrived(shared_ptr[Arrival], void* buffer, uint64_t elements, Priority) except +
        void skip(Priority, Done) except +
        void leave_out(Priority) except +
        void wait_for(void* array, Priority) except +
        void capture(uint64_t snapshot, shared_ptr[char] residual, Priority, Done) except +
        void gather(vector[int64_t] ids, void* source, void* destination, uint64_t row_bytes, Priority) except +


cdef extern from "engine/norm.h" namespace "p3" nogil:
    cdef cppclass CMXNetNorm "p3::MXNetNorm"(CMXNetKey):
        CMXNetNorm(const MXNetApi*, Worker*, int handle, string name) except +
        void tell(void* before, void* norm, uint64_t elements, Priority) except +
        void skip(void* norm, uint64_t elements, Priority, Done) except +
        void factor(void* norm, void* factor, double max_norm, Priority) except +


cdef extern from "engine/rows.h" namespace "p3" nogil:
    cdef cppclass CMXNetRowsKey "p3::MXNetRowsKey"(CMXNetKey):
        CMXNetRowsKey(const MXNetApi*, Worker*, int handle, string name, void* landing, uint64_t rows,
                      uint64_t row_bytes, cbool lands) except +
        uint64_t rounds() noexcept
        void copy_changed(void* weight, uint64_t since, Priority) except +
        void fetch(vector[int64_t] ids, void* destination, Priority) except +


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
    """Queues a worker's rounds in MXNet's engine. `library`: path of the libmxnet that this process has loaded."""

    cdef P3Worker worker
    cdef const MXNetApi* api
    cdef readonly uint64_t first_piece

    def __cinit__(self, P3Worker worker not None, str library not None, uint64_t first_piece):
        """`first_piece`: of larger gradients on a device so many elements are copied first, and leave."""
        self.first_piece = first_piece
        self.api = MXNetApi.find(library.encode())
        self.worker = worker
        # Queued operations hold the bare C++ worker and may outlive every Python object: it is never freed.
        Py_INCREF(worker)

    def same_shape(self, size_t left, size_t right):
        return self.api.same_shape(<void*>left, <void*>right)

    def same_type(self, size_t left, size_t right):
        return self.api.same_type(<void*>left, <void*>right)

    def in_cpu_memory(self, size_t array):
        return self.api.in_cpu_memory(<void*>array)

    def copy(self, size_t source, size_t destination):
        """Without the detour through Python's ctypes."""
        with nogil:
            self.api.copy(<void*>source, <void*>destination)


cdef class Arrival:
    cdef shared_ptr[CMXNetKey.Arrival] state


cdef class MXNetKey:
    """One dense key's operations. `landing` stays alive through the engine's own handles once one is queued."""

    cdef P3Worker worker
    cdef int handle
    cdef shared_ptr[CMXNetKey] key

    def __init__(self, MXNetEngine engine not None, int handle, str name not None, size_t landing):
        self.key.reset(new CMXNetKey(engine.api, engine.worker.core, handle, name.encode(), <void*>landing))
        self.worker, self.handle = engine.worker, handle

    def init(self, size_t value, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().init(<void*>value, urgency)

    def push(self, size_t gradient, scalars, priority):
        cdef RoundSettings round = round_settings(scalars)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().push(<void*>gradient, round, urgency)

    def push_arriving(self, size_t buffer, scalars, priority):
        """Returns the Arrival that tells how far the gradient has come."""
        cdef RoundSettings round = round_settings(scalars)
        cdef Priority urgency = priority_of(priority)
        cdef Arrival arrival = Arrival()
        with nogil:
            arrival.state = self.key.get().push_arriving(<void*>buffer, round, urgency)
        return arrival

    def arrived(self, Arrival arrival not None, size_t buffer, uint64_t elements, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().arrived(arrival.state, <void*>buffer, elements, urgency)

    def skip(self, priority, Completions completions not None, int64_t token):
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.key.get().skip(urgency, done)

    def leave_out(self, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().leave_out(urgency)

    def wait_for(self, size_t array, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().wait_for(<void*>array, urgency)

    def capture(self, uint64_t snapshot, priority, Completions completions not None, int64_t token):
        """Returns what then holds the residual: a CoreArray of float32; None where compression leaves nothing out."""
        cdef CoreArray residual = self.worker.new_residual(self.handle)
        cdef shared_ptr[char] memory
        if residual is not None:
            memory = residual.data
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.key.get().capture(snapshot, memory, urgency, done)
        return residual

    def gather(self, const int64_t[::1] ids not None, size_t source, size_t destination, uint64_t row_bytes, priority):
        cdef vector[int64_t] copied = vector_of(ids)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.key.get().gather(copied, <void*>source, <void*>destination, row_bytes, urgency)


cdef class MXNetNorm:
    """Those of a key of norms, of so many elements."""

    cdef CMXNetNorm* norm
    cdef shared_ptr[CMXNetKey] key
    cdef uint64_t elements

    def __init__(self, MXNetEngine engine not None, int handle, str name not None, uint64_t elements):
        self.norm = new CMXNetNorm(engine.api, engine.worker.core, handle, name.encode())
        self.key.reset(<CMXNetKey*>self.norm)
        self.elements = elements

    def tell(self, size_t before, size_t norm, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.norm.tell(<void*>before, <void*>norm, self.elements, urgency)

    def skip(self, size_t norm, priority, Completions completions not None, int64_t token):
        cdef Priority urgency = priority_of(priority)
        cdef Done done = completions.done_of(token)
        with nogil:
            self.norm.skip(<void*>norm, self.elements, urgency, done)

    def factor(self, size_t norm, size_t factor, double max_norm, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.norm.factor(<void*>norm, <void*>factor, max_norm, urgency)


cdef class MXNetRowsKey(MXNetKey):
    """Those of a key of rows."""

    cdef CMXNetRowsKey* rows

    def __init__(self, MXNetEngine engine not None, int handle, str name not None, size_t landing, uint64_t rows,
                 uint64_t row_bytes, cbool lands):
        self.rows = new CMXNetRowsKey(engine.api, engine.worker.core, handle, name.encode(), <void*>landing, rows,
                                      row_bytes, lands)
        self.key.reset(<CMXNetKey*>self.rows)
        self.worker, self.handle = engine.worker, handle

    def rounds(self):
        return self.rows.rounds()

    def copy_changed(self, size_t weight, uint64_t since, priority):
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.copy_changed(<void*>weight, since, urgency)

    def fetch(self, const int64_t[::1] ids not None, size_t destination, priority):
        cdef vector[int64_t] copied = vector_of(ids)
        cdef Priority urgency = priority_of(priority)
        with nogil:
            self.rows.fetch(copied, <void*>destination, urgency)
