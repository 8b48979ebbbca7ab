# Keys of rows in MXNet's dependency engine, as row_keys.py uses them. Included by _core.pyx.
# Handles are addresses: NDArray.handle.value. Nothing here waits.

cdef extern from "mxnet/rows.h" namespace "p3" nogil:
    cdef cppclass CMXNetRows "p3::MXNetRows":
        CMXNetRows(const CMXNetEngine*, Worker*, uint64_t rows, uint64_t row_bytes, cbool lands) except +
        CMXNetKey key
        void init(void* value, uint64_t round) except +
        void push(void* gradient, cbool is_sparse, uint64_t round, const RoundScalars&) except +
        void skip(uint64_t round, Done) except +
        void capture(uint64_t snapshot, Done) except +
        void copy_changed(void* weight, uint64_t begin, uint64_t end) except +
        void fetch(vector[int64_t] ids, void* destination) except +
    void* make_rows(const MXNetApi&, int dtype, const vector[int64_t]& shape, const int64_t* ids,
                    uint64_t count) except +
    void c_gather_rows "p3::gather_rows"(const CMXNetEngine&, Worker*, const CMXNetKey&, uint64_t row_bytes,
                                         vector[int64_t] ids, void* source, void* destination) except +


def new_rows(MXNetEngine engine not None, int dtype, shape, const int64_t[::1] ids not None):
    """The handle, to be freed, of a row_sparse array with these rows: ascending, each once, at least one.

    Its values are to be written by gather_rows() or MXNetRowsKey.fetch().
    """
    if len(ids) == 0:
        raise ValueError("new_rows: at least one row is needed")
    return <size_t>make_rows(engine.engine.api(), dtype, shape, &ids[0], len(ids))


cdef vector[int64_t] vector_of(const int64_t[::1] ids):
    cdef vector[int64_t] copied
    if len(ids):
        copied.assign(&ids[0], &ids[0] + len(ids))
    return copied


def gather_rows(MXNetEngine engine not None, str name not None, size_t source, uint64_t row_bytes,
                const int64_t[::1] ids not None, size_t destination):
    """Writes the values of an array of new_rows() with the same ids, as the dense array `source` will hold them."""
    cdef CMXNetKey key
    key.name = name.encode()
    cdef vector[int64_t] copied = vector_of(ids)
    with nogil:
        c_gather_rows(engine.engine[0], engine.worker.core, key, row_bytes, copied, <void*>source, <void*>destination)


cdef class MXNetRowsKey:
    """As MXNetKey, of a key of rows. `landing`: of all rows; or, if not `lands`, an array that orders its operations.

    Rounds of the landing array are numbered by the caller, from 1: each init, push and skip is one.
    """

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

    def set_priority(self, int priority, int engine_priority):
        self.rows.key.priority = priority
        self.rows.key.engine_priority = engine_priority

    def init(self, size_t value, uint64_t round):
        """The first value: on rank 0 what the landing array holds, or `value`, if that is not 0."""
        with nogil:
            self.rows.init(<void*>value, round)

    def push(self, size_t gradient, cbool is_sparse, uint64_t round, scalars):
        """The next round. `gradient`: in CPU memory; row_sparse, or dense for all rows."""
        cdef RoundScalars numbers = round_scalars(scalars)
        with nogil:
            self.rows.push(<void*>gradient, is_sparse, round, numbers)

    def skip(self, uint64_t round, Completions completions not None, int64_t token):
        """As MXNetKey.skip."""
        with nogil:
            self.rows.skip(round, CCompletions.done_of(completions.queue, token))

    def capture(self, uint64_t snapshot, Completions completions not None, int64_t token):
        """As MXNetKey.capture; nothing is left out of rows."""
        with nogil:
            self.rows.capture(snapshot, CCompletions.done_of(completions.queue, token))

    def copy_changed(self, size_t weight, uint64_t begin, uint64_t end):
        """Brings an array that is as the landing array was after round `begin` up to round `end`."""
        with nogil:
            self.rows.copy_changed(<void*>weight, begin, end)

    def fetch(self, const int64_t[::1] ids not None, size_t destination):
        """Writes the values of an array of new_rows() with the same ids, as on the servers after the last round."""
        cdef vector[int64_t] copied = vector_of(ids)
        with nogil:
            self.rows.fetch(copied, <void*>destination)
