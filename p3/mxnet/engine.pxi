# The bridge to MXNet's dependency engine, as kvstore.py uses it. Included by _core.pyx.
# Handles are addresses: NDArray.handle.value. Nothing here waits.

from cpython.ref cimport Py_INCREF

cdef extern from "mxnet/api.h" namespace "p3" nogil:
    cdef cppclass MXNetApi:
        pass

cdef extern from "mxnet/engine.h" namespace "p3" nogil:
    cdef cppclass CMXNetEngine "p3::MXNetEngine":
        CMXNetEngine(const string& library) except +
        void init(Worker* worker, const CMXNetKey& key) except +
        void push(Worker* worker, const CMXNetKey& key, void* gradient, const RoundScalars& scalars) except +
        void skip(Worker* worker, const CMXNetKey& key, Done done) except +
        void capture(Worker*, const CMXNetKey&, uint64_t snapshot, shared_ptr[char] residual, Done) except +
        void copy(void* source, void* destination) except +
        bint same_shape(void* left, void* right) except +
        bint same_type(void* left, void* right) except +
        bint in_cpu_memory(void* array) except +
        const MXNetApi& api() noexcept

    cdef cppclass CMXNetKey "p3::MXNetEngine::Key":
        int handle
        string name
        int32_t priority
        int engine_priority
        void* landing


cdef class MXNetEngine:
    """Queues a worker's rounds in MXNet's engine. `library`: path of the libmxnet that this process has loaded."""

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
        """MXNet's own copy from one array to another, which casts; without the detour through Python's ctypes."""
        with nogil:
            self.engine.copy(<void*>source, <void*>destination)

    def in_cpu_memory(self, size_t array):
        return self.engine.in_cpu_memory(<void*>array)


cdef class MXNetKey:
    """One key's operations. `landing` stays alive through the engine's own handles once an operation is queued."""

    cdef MXNetEngine engine
    cdef CMXNetKey key

    def __cinit__(self, MXNetEngine engine not None, int handle, str name not None, size_t landing):
        self.engine = engine
        self.key.handle = handle
        self.key.name = name.encode()
        self.key.landing = <void*>landing

    def set_priority(self, int priority, int engine_priority):
        """`priority`: in P3's queues. `engine_priority`: distinct per key, as MXNet scrambles equals."""
        self.key.priority = priority
        self.key.engine_priority = engine_priority

    def init(self):
        """The first value: on rank 0 what the landing array holds; on all ranks what it will hold."""
        with nogil:
            self.engine.engine.init(self.engine.worker.core, self.key)

    def push(self, size_t gradient, scalars):
        """The next round: sends the array `gradient`, receives into the landing array. `scalars`: RoundScalars' five."""
        cdef RoundScalars round = round_scalars(scalars)
        with nogil:
            self.engine.engine.push(self.engine.worker.core, self.key, <void*>gradient, round)

    def skip(self, Completions completions not None, int64_t token):
        """The next round without a gradient, past the engine: nothing queued there may use the landing array.

        `completions` gets `token` when it is complete.
        """
        with nogil:
            self.engine.engine.skip(self.engine.worker.core, self.key, CCompletions.done_of(completions.queue, token))

    def capture(self, uint64_t snapshot, Completions completions not None, int64_t token):
        """P3Worker.capture() after the rounds queued so far, and before the next one, which does not wait for it.

        `completions` gets `token` when it is done. Returns what then holds the residual: a buffer of float32, or None.
        """
        cdef Worker* worker = self.engine.worker.core
        cdef shared_ptr[char] residual
        cdef cbool keeps = worker.keeps_residual(self.key.handle)
        if keeps:
            residual = new_bytes(self.engine.worker.residual_bytes(self.key.handle))
        with nogil:
            self.engine.engine.capture(worker, self.key, snapshot, residual,
                                       CCompletions.done_of(completions.queue, token))
        if not keeps:
            return None
        return CoreArray.over(residual, self.engine.worker.sizes[self.key.handle][0], <DType>0)
