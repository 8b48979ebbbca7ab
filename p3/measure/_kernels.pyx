# distutils: language = c++
"""The core's kernels (sums, optimizer updates, codecs, deep gradient compression) on arrays, without workers, servers or sockets:
for benchmarks and tests.

An array is anything with the buffer protocol and C order whose elements have one of P3's types (NumPy arrays,
memoryviews); bfloat16, which neither knows, is 16-bit integers. Types and lengths are checked: TypeError and ValueError. The GIL is released in C++; calls may run at the
same time on different arrays.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libcpp.memory cimport unique_ptr
from libcpp.utility cimport move

from p3._core cimport CodecOptions, Compression, DType, compression_from, OptimizerSpec, RoundScalars, optimizer_spec

cdef extern from "p3/dtype.h" namespace "p3" nogil:
    DType sum_type(DType type) noexcept
    bint is_float(DType type) noexcept
    const char* name_of(DType type) noexcept

cdef extern from "numeric/sum.h" namespace "p3" nogil:
    void c_start_sum "p3::start_sum"(DType type, void* accumulator, const void* source, size_t elements) except +
    void c_add_to_sum "p3::add_to_sum"(DType type, void* accumulator, const void* source, size_t elements) except +
    void c_finish_sum "p3::finish_sum"(DType type, void* destination, const void* accumulator, size_t elements) except +

cdef extern from "base/simd.h" namespace "p3" nogil:
    bint cpu_has_avx2() noexcept
    cdef cppclass Flag "std::atomic<bool>":
        bint load() noexcept
        void store(bint value) noexcept
    Flag c_use_avx2 "p3::use_avx2"

cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef cppclass Optimizer "const p3::Optimizer":
        int state_count() noexcept
        bint needs_master(DType type) noexcept
        void start_state(DType type, const void* weight, void** state, size_t elements) except +
        void update(DType type, void* weight, void* master, void** state, const void* gradient, size_t elements,
                    const RoundScalars& round) except +

    cdef enum:
        MOST_STATES "p3::Optimizer::kMostStates"

    unique_ptr[Optimizer] make_optimizer "p3::Optimizer::make"(const OptimizerSpec& spec) except +ValueError


cdef extern from "p3/codec.h" nogil:
    size_t c_payload_bytes "p3::codec_of(p3::Encoding::kTopK)->bytes_with"(const CodecOptions& options, size_t count,
                                                                           size_t elements) noexcept


cdef extern from "p3/codec.h" namespace "p3" nogil:
    size_t c_bytes "p3::encoded_bytes"(const Compression& how, DType type, size_t elements) except +
    void c_encode "p3::encode"(const Compression& how, const float* gradient, float* residual, void* payload,
                               size_t elements) except +
    void c_start_encoded_sum "p3::start_encoded_sum"(const Compression& how, float* accumulator, const void* payload,
                                                     size_t elements) except +
    void c_add_encoded_to_sum "p3::add_encoded_to_sum"(const Compression& how, float* accumulator, const void* payload,
                                                       size_t elements) except +

cdef extern from "codec/dgc.h" namespace "p3" nogil:
    cdef cppclass DgcStep:
        float momentum
        float rate
        bint masks
        size_t sent
    void c_encode_step "p3::encode_step"(const DgcStep& step, const float* gradient, float* u, float* v, void* payload,
                                         size_t elements) except +


# struct's letter for each type code of p3/dtype.h; bfloat16 is held as its bits.
cdef dict _CODES = {"f": 0, "d": 1, "e": 2, "B": 3, "i": 4, "b": 5, "q": 6, "l": 6, "H": 12, "h": 12}


cdef class _Array:
    """A borrowed buffer; released with the object."""
    cdef Py_buffer view
    cdef DType dtype
    cdef size_t elements

    def __cinit__(self, str role, object array, bint writable=False):
        cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT
        PyObject_GetBuffer(array, &self.view, flags | PyBUF_WRITABLE if writable else flags)
        letter = self.view.format.decode() if self.view.format is not NULL else "B"
        code = _CODES.get(letter.lstrip("@=<"))
        if code is None or (code == 6 and self.view.itemsize != 8):
            raise TypeError(f"{role}: elements of format {letter!r} are none of P3's types")
        self.dtype = <DType> <int> code
        self.elements = <size_t> (self.view.len // self.view.itemsize)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef int expect(self, str role, DType dtype, size_t elements) except -1:
        if self.dtype != dtype:
            raise TypeError(f"{role} has type {name_of(self.dtype).decode()}; it must be {name_of(dtype).decode()}")
        if self.elements != elements:
            raise ValueError(f"{role} has {self.elements} elements; it must have {elements}")
        return 0


def start_sum(accumulator, source):
    """accumulator = source. The accumulator of half precision is float32, of any other source its own type."""
    cdef _Array from_ = _Array("source", source), to = _Array("accumulator", accumulator, True)
    to.expect("accumulator", sum_type(from_.dtype), from_.elements)
    with nogil:
        c_start_sum(from_.dtype, to.view.buf, from_.view.buf, from_.elements)


def add_to_sum(accumulator, source):
    """accumulator += source; types as in start_sum."""
    cdef _Array from_ = _Array("source", source), to = _Array("accumulator", accumulator, True)
    to.expect("accumulator", sum_type(from_.dtype), from_.elements)
    with nogil:
        c_add_to_sum(from_.dtype, to.view.buf, from_.view.buf, from_.elements)


def finish_sum(destination, accumulator):
    """destination = accumulator, rounded to nearest even if the destination is of half precision."""
    cdef _Array from_ = _Array("accumulator", accumulator), to = _Array("destination", destination, True)
    from_.expect("accumulator", sum_type(to.dtype), to.elements)
    with nogil:
        c_finish_sum(to.dtype, to.view.buf, from_.view.buf, to.elements)


def use_avx2(wanted=None):
    """Whether the AVX2 builds of the kernels run. Give False to compare them with the baseline, True to go back."""
    if wanted is not None:
        c_use_avx2.store(bool(wanted) and cpu_has_avx2())
    return bool(c_use_avx2.load())


def encode_step(gradient, u, v, payload, size_t sent, float momentum, float rate=1.0, bint masks=True):
    """What a worker does with a slice's gradient: u and v in place, and `sent` elements into `payload` (uint8), which
    has the bytes that p3.codecs.payload_bytes says; of as many as the slice has, all."""
    cdef _Array g = _Array("gradient", gradient), m = _Array("u", u, True), kept = _Array("v", v, True)
    cdef _Array to = _Array("payload", payload, True)
    for array in (g, m, kept):
        (<_Array> array).expect("an array", DType.kFloat32, g.elements)
    to.expect("payload", <DType> <int> _CODES["B"], c_payload_bytes(CodecOptions(), sent, g.elements))
    if not 0 < sent <= g.elements:
        raise ValueError(f"{sent} elements cannot be sent of {g.elements}")
    cdef DgcStep step
    step.momentum, step.rate, step.masks, step.sent = momentum, rate, masks, sent
    with nogil:
        c_encode_step(step, <const float*> g.view.buf, <float*> m.view.buf, <float*> kept.view.buf, to.view.buf, g.elements)


cdef class NativeCodec:
    """What workers and servers do with a slice of float32, by a compression as a store has it (ValueError if that makes
    no sense); of those that encode gradients as they are. A payload is uint8, and sound."""
    cdef Compression how
    cdef readonly size_t residuals  # floats that are kept for each element: 0 or 1

    def __cinit__(self, compression not None):
        self.how = compression_from(compression)
        if self.how.codec().makes_steps():
            raise ValueError("dgc encodes steps: encode_step()")
        self.residuals = self.how.codec().residuals()

    def bytes(self, size_t elements):
        return c_bytes(self.how, DType.kFloat32, elements)

    def encode(self, gradient, residual, payload):
        """Fills the payload and changes the residual, which is None where nothing is kept."""
        cdef _Array g = _floats("gradient", gradient), kept = None, to = self.payload(payload, g.elements, True)
        if (residual is not None) != (self.residuals > 0):
            raise ValueError("a residual goes with codecs that keep one, and only with them")
        if residual is not None:
            kept = _Array("residual", residual, True)
            kept.expect("residual", DType.kFloat32, g.elements)
        cdef float* left = NULL
        if kept is not None:
            left = <float*> kept.view.buf
        with nogil:
            c_encode(self.how, <const float*> g.view.buf, left, to.view.buf, g.elements)

    def start_sum(self, accumulator, payload):
        """accumulator = what the payload stands for."""
        cdef _Array to = _floats("accumulator", accumulator, True), from_ = self.payload(payload, to.elements)
        with nogil:
            c_start_encoded_sum(self.how, <float*> to.view.buf, from_.view.buf, to.elements)

    def add_to_sum(self, accumulator, payload):
        cdef _Array to = _floats("accumulator", accumulator, True), from_ = self.payload(payload, to.elements)
        with nogil:
            c_add_encoded_to_sum(self.how, <float*> to.view.buf, from_.view.buf, to.elements)

    cdef _Array payload(self, payload, size_t elements, bint writable=False):
        cdef _Array array = _Array("payload", payload, writable)
        array.expect("payload", <DType> <int> _CODES["B"], self.bytes(elements))
        return array


cdef _Array _floats(role, values, bint writable=False):
    cdef _Array array = _Array(role, values, writable)
    array.expect(role, DType.kFloat32, array.elements)
    return array


cdef class NativeOptimizer:
    """The optimizer that a server would run, from its description (ValueError if that makes no sense)."""
    cdef unique_ptr[Optimizer] optimizer

    def __cinit__(self, description):
        self.optimizer = move(make_optimizer(optimizer_spec(description)))

    @property
    def state_count(self):
        """Number of state arrays: the weight's length, its type (float32 for half precision). start_state fills them."""
        return self.optimizer.get().state_count()

    def needs_master(self, int dtype_code):
        """Whether weights of this type keep a float32 master copy."""
        return bool(self.optimizer.get().needs_master(<DType> dtype_code))

    def start_state(self, weight, states):
        """Fills `states` as they must be before the first update of `weight`."""
        cdef _Array w = _floating(weight)
        cdef void* pointers[MOST_STATES]
        arrays = self._states(w, states, pointers)
        with nogil:
            self.optimizer.get().start_state(w.dtype, w.view.buf, pointers, w.elements)

    def update(self, weight, master, states, gradient, double lr, double wd, double rescale,
               double updates=0.0, double schedule=1.0):
        """One update of `weight` in place, by the sum of gradients (the weight's type, float32 for half precision)."""
        cdef _Array w = _floating(weight), g = _Array("gradient", gradient), m = None
        g.expect("gradient", sum_type(w.dtype), w.elements)

        if (master is not None) != bool(self.optimizer.get().needs_master(w.dtype)):
            raise ValueError("a master copy goes with weights of half precision and multi_precision, and only with them")
        if master is not None:
            m = _Array("master", master, True)
            m.expect("master", DType.kFloat32, w.elements)

        cdef void* pointers[MOST_STATES]
        arrays = self._states(w, states, pointers)
        cdef RoundScalars scalars
        scalars.lr, scalars.wd, scalars.rescale = lr, wd, rescale
        scalars.updates, scalars.schedule = updates, schedule
        cdef void* master_data = NULL if m is None else m.view.buf
        with nogil:
            self.optimizer.get().update(w.dtype, w.view.buf, master_data, pointers, g.view.buf, w.elements, scalars)

    cdef list _states(self, _Array weight, states, void** pointers):
        """Their addresses in `pointers`, good for as long as what is returned lives."""
        if len(states) != self.state_count:
            raise ValueError(f"{len(states)} states given; this optimizer has {self.state_count}")
        arrays = [_Array("state", state, True) for state in states]
        cdef int i
        for i in range(len(arrays)):
            (<_Array> arrays[i]).expect("state", sum_type(weight.dtype), weight.elements)
            pointers[i] = (<_Array> arrays[i]).view.buf
        return arrays


cdef _Array _floating(weight):
    cdef _Array array = _Array("weight", weight, True)
    if not is_float(array.dtype):
        raise TypeError(f"weight has type {name_of(array.dtype).decode()}; it must be float32, float64, float16 or bfloat16")
    return array
