# distutils: language = c++
"""The C++ core as Python sees it; _core.pyi is the documentation.

This file converts, checks and releases the GIL; it decides nothing. Each buffer view is held until the core is done
with the memory: an Operation that is dropped early lives on in its worker until then.
"""

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

include "_optimizer_spec.pxi"

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}


class P3Error(RuntimeError):
    """The job has failed. `kind` is one of usage, disagreement, peer_lost, peer_silent, protocol, remote, stopped."""

    def __init__(self, text, kind="remote"):
        super().__init__(text)
        self.kind = kind


cdef extern from "p3/worker.h" namespace "p3" nogil:
    cdef cppclass Done "p3::Worker::Done":
        pass
    cdef cppclass optional_error "std::optional<p3::Error>":
        pass


cdef extern from "p3/node.h" namespace "p3" nogil:
    cdef cppclass NodeOptions:
        string label
        double heartbeat_s
        double timeout_s
    cdef cppclass Counters:
        uint64_t bytes_sent, bytes_received, slices_sent, slices_received, rounds, buffer_bytes, peak_buffer_bytes


cdef extern from "p3/server.h" namespace "p3" nogil:
    cdef cppclass ServerOptions:
        pass


cdef extern from "p3/stream.h" namespace "p3" nogil:
    cdef cppclass Stream:
        pass


cdef extern from *:
    """
    #include <chrono>
    #include <condition_variable>
    #include <memory>
    #include <mutex>
    #include <optional>
    #include <string>

    #include "p3/error.h"
    #include "p3/ring_stream.h"
    #include "p3/server.h"
    #include "p3/socket_stream.h"
    #include "p3/worker.h"

    namespace {

    PyObject* p3_error_type = nullptr;

    const char* kind_name(p3::ErrorKind kind) {
      switch (kind) {
        case p3::ErrorKind::kUsage: return "usage";
        case p3::ErrorKind::kDisagreement: return "disagreement";
        case p3::ErrorKind::kPeerLost: return "peer_lost";
        case p3::ErrorKind::kPeerSilent: return "peer_silent";
        case p3::ErrorKind::kProtocol: return "protocol";
        case p3::ErrorKind::kRemote: return "remote";
        case p3::ErrorKind::kStopped: return "stopped";
      }
      return "unknown";
    }

    PyObject* new_p3_error(const p3::Error& error) {
      // Texts can come from other nodes: whatever their bytes, they become a string.
      PyObject* text = PyUnicode_DecodeUTF8(error.what(), static_cast<Py_ssize_t>(strlen(error.what())), "replace");
      if (text == nullptr) return nullptr;
      PyObject* made = PyObject_CallFunction(p3_error_type, "Os", text, kind_name(error.kind()));
      Py_DECREF(text);
      return made;
    }

    // The one place where the core's exceptions become Python's. Called with the GIL held.
    void raise_as_python() {
      try {
        throw;
      } catch (const p3::Error& error) {
        if (error.kind() == p3::ErrorKind::kUsage) {
          PyErr_SetString(PyExc_ValueError, error.what());
        } else if (PyObject* made = new_p3_error(error)) {
          PyErr_SetObject(p3_error_type, made);
          Py_DECREF(made);
        }
      } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
      } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
      }
    }

    PyObject* error_or_none(const std::optional<p3::Error>& error) {
      if (error) return new_p3_error(*error);
      Py_RETURN_NONE;
    }

    // How a Python thread waits for a `Done`.
    class Completion {
     public:
      static p3::Worker::Done done_of(std::shared_ptr<Completion> self) {
        return [self](const p3::Error* error) {
          {
            std::lock_guard<std::mutex> lock(self->mutex_);
            self->done_ = true;
            if (error != nullptr) self->error_ = *error;
          }
          self->changed_.notify_all();
        };
      }
      bool done() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return done_;
      }
      // False after timeout_s. Throws the operation's error.
      bool wait(double timeout_s) {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool in_time =
            changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done_; });
        if (error_) throw *error_;
        return in_time;
      }

     private:
      mutable std::mutex mutex_;
      std::condition_variable changed_;
      bool done_ = false;
      std::optional<p3::Error> error_;
    };

    // The core's end of a van: a bare socket, or shared memory that a socket keeps watch over.
    std::unique_ptr<p3::Stream> stream_of(int fd, int notsent_low_water_bytes, const std::vector<int>& ring,
                                          bool is_maker) {
      if (ring.empty()) return std::make_unique<p3::SocketStream>(fd, notsent_low_water_bytes);
      p3::RingStream::Descriptors descriptors;
      if (ring.size() != descriptors.size())
        throw p3::Error(p3::ErrorKind::kUsage, "a ring has " + std::to_string(descriptors.size()) + " descriptors");
      std::copy(ring.begin(), ring.end(), descriptors.begin());
      return std::make_unique<p3::RingStream>(fd, descriptors, is_maker);
    }

    std::vector<int> make_ring_descriptors(size_t bytes_each_way) {
      const auto made = p3::RingStream::make(bytes_each_way);
      return {made.begin(), made.end()};
    }

    p3::Error remote_error(const std::string& text) { return p3::Error(p3::ErrorKind::kRemote, text); }

    p3::ServerOptions server_options(p3::NodeOptions node, bool by_arrival, int threads) {
      p3::ServerOptions options;
      options.node = std::move(node);
      options.sum_order = by_arrival ? p3::SumOrder::kArrival : p3::SumOrder::kRank;
      options.threads = threads;
      return options;
    }

    }  // namespace
    """
    PyObject* p3_error_type
    void raise_as_python()
    object error_or_none(const optional_error&)
    cppclass Completion:
        @staticmethod
        Done done_of(shared_ptr[Completion]) nogil
        cbool done() nogil
        cbool wait(double) except +raise_as_python nogil
    cdef cppclass CError "p3::Error":
        pass
    CError remote_error(const string&) nogil
    unique_ptr[Stream] stream_of(int, int, const vector[int]&, cbool)
    vector[int] make_ring_descriptors(size_t) except +raise_as_python
    ServerOptions server_options(NodeOptions, cbool, int)


cdef extern from "p3/dtype.h" namespace "p3" nogil:
    cdef enum class DType(unsigned char):
        pass
    size_t size_of(DType)


cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef cppclass RoundScalars:
        double lr, wd, rescale


cdef extern from "p3/slicing.h" namespace "p3" nogil:
    cdef cppclass KeyPlan:
        uint32_t wire_key
        DType dtype
        uint64_t elements
        uint32_t slice_elements
        uint64_t first_slice
    uint32_t core_slice_count "p3::slice_count"(const KeyPlan&)


cdef extern from "p3/worker.h" namespace "p3" nogil:
    cdef cppclass Worker:
        Worker(int, int, NodeOptions) except +raise_as_python
        void add_server(int, unique_ptr[Stream], string) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void start() except +raise_as_python
        int declare(string, uint64_t, DType) except +raise_as_python
        void agree(int, const KeyPlan&) except +raise_as_python
        void init(int, const void*, void*, int32_t, Done) except +raise_as_python
        void push(int, const void*, void*, int32_t, const RoundScalars&, Done) except +raise_as_python
        void fail(const CError&)
        optional_error error()
        int event_fd()
        Counters counters()
        cbool close(double)
        void abandon_after_fork()


cdef extern from "p3/server.h" namespace "p3" nogil:
    cdef cppclass Server:
        Server(int, int, int, ServerOptions) except +raise_as_python
        void add_worker(int, unique_ptr[Stream], string) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void start() except +raise_as_python
        void define(const KeyPlan&, string, int) except +raise_as_python
        void set_optimizer(int, const OptimizerSpec&) except +raise_as_python
        void fail(const CError&)
        optional_error error()
        int event_fd()
        cbool finished()
        Counters counters()
        void stop()
        void abandon_after_fork()


p3_error_type = <PyObject*>P3Error  # the module keeps it alive


cdef string utf8(text) except *:
    return (<str?>text).encode()


cdef NodeOptions node_options(label, double heartbeat_s, double timeout_s) except *:
    if not heartbeat_s > 0 or not timeout_s > heartbeat_s:
        raise ValueError(f"timeout_s ({timeout_s}) must be larger than heartbeat_s ({heartbeat_s}), and both positive")
    cdef NodeOptions options
    options.label = utf8(label)
    options.heartbeat_s = heartbeat_s
    options.timeout_s = timeout_s
    return options


cdef KeyPlan key_plan(uint32_t wire_key, uint64_t elements, int dtype, uint64_t first_slice,
                      uint32_t slice_elements) except *:
    if slice_elements == 0:
        raise ValueError("slice_elements must be at least 1")
    cdef KeyPlan plan
    plan.wire_key = wire_key
    plan.dtype = dtype_of(dtype)
    plan.elements = elements
    plan.slice_elements = slice_elements
    plan.first_slice = first_slice
    return plan


cdef DType dtype_of(int code) except *:
    if not 0 <= code <= 6:
        raise ValueError(f"{code} is no element type; DTYPES lists them")
    return <DType>code


cdef dict counters_dict(const Counters& counters):
    return {
        "bytes_sent": counters.bytes_sent,
        "bytes_received": counters.bytes_received,
        "slices_sent": counters.slices_sent,
        "slices_received": counters.slices_received,
        "rounds": counters.rounds,
    }


def make_ring(bytes_each_way):
    """Descriptors of new shared memory for one van, to be passed to the other side and to add_server / add_worker."""
    return list(make_ring_descriptors(bytes_each_way))


def slice_count(elements, slice_elements):
    """How many slices a key of `elements` has."""
    return core_slice_count(key_plan(0, elements, 0, 0, slice_elements))


cdef class Operation:
    """One round of one key under way. Holds its arrays until the core is done with them."""

    cdef shared_ptr[Completion] completion
    cdef Py_buffer source
    cdef Py_buffer landing
    cdef int views  # how many of the two are held: landing first

    def __cinit__(self):
        self.completion = make_shared[Completion]()
        self.views = 0

    cdef take_views(self, source, landing, size_t nbytes):
        PyObject_GetBuffer(landing, &self.landing, PyBUF_WRITABLE)
        self.views = 1
        if source is not None:
            PyObject_GetBuffer(source, &self.source, PyBUF_SIMPLE)
            self.views = 2
        for name, size in (("landing", self.landing.len), ("value or gradient", self.source.len)):
            if name == "landing" or self.views == 2:
                if <size_t>size != nbytes:
                    raise ValueError(f"the {name} array has {size} bytes; the key has {nbytes}")

    def __dealloc__(self):
        # The worker keeps unfinished operations alive, so nothing is borrowed any more.
        if self.views >= 1:
            PyBuffer_Release(&self.landing)
        if self.views >= 2:
            PyBuffer_Release(&self.source)

    @property
    def done(self):
        return self.completion.get().done()

    def wait(self, double timeout_s):
        cdef Completion* completion = self.completion.get()
        cdef cbool in_time
        with nogil:
            in_time = completion.wait(timeout_s)
        if not in_time:
            raise TimeoutError(f"the operation was not complete after {timeout_s:g} s")


cdef class P3Worker:
    cdef Worker* core
    cdef int notsent_low_water_bytes
    cdef list unfinished  # operations that the core may still borrow from
    cdef Py_ssize_t sweep_at
    cdef list sizes         # bytes of each key, by handle

    def __cinit__(self, int rank, int num_servers, label, *, double heartbeat_s=1.0, double timeout_s=10.0,
                  int notsent_low_water_bytes=131072):
        self.core = new Worker(rank, num_servers, node_options(label, heartbeat_s, timeout_s))
        self.notsent_low_water_bytes = notsent_low_water_bytes
        self.unfinished = []
        self.sweep_at = 64
        self.sizes = []

    def __dealloc__(self):
        cdef Worker* core = self.core
        with nogil:
            del core

    def add_server(self, int server, int fd, label, *, ring=()):
        self.core.add_server(server, stream_of(fd, self.notsent_low_water_bytes, ring, True), utf8(label))

    def add_watch(self, int fd, label):
        self.core.add_watch(stream_of(fd, self.notsent_low_water_bytes, (), False), utf8(label))

    def start(self):
        self.core.start()

    def declare(self, name, uint64_t elements, int dtype):
        cdef int key = self.core.declare(utf8(name), elements, dtype_of(dtype))
        self.sizes.append((elements, dtype, elements * size_of(dtype_of(dtype))))
        return key

    def agree(self, int key, uint32_t wire_key, uint64_t first_slice, uint32_t slice_elements):
        elements, dtype, _ = self.sizes[key]
        cdef KeyPlan plan = key_plan(wire_key, elements, dtype, first_slice, slice_elements)
        with nogil:
            self.core.agree(key, plan)

    def init(self, int key, value, landing, int32_t priority=0):
        cdef Operation operation = self.begin(key, value, landing)
        cdef const void* source = operation.source.buf if operation.views == 2 else NULL
        with nogil:
            self.core.init(key, source, operation.landing.buf, priority, Completion.done_of(operation.completion))
        return operation

    def push(self, int key, gradient, landing, int32_t priority=0, double lr=0.0, double wd=0.0, double rescale=1.0):
        if gradient is None:
            raise ValueError("push needs a gradient")
        cdef Operation operation = self.begin(key, gradient, landing)
        cdef RoundScalars scalars
        scalars.lr = lr
        scalars.wd = wd
        scalars.rescale = rescale
        with nogil:
            self.core.push(key, operation.source.buf, operation.landing.buf, priority, scalars,
                           Completion.done_of(operation.completion))
        return operation

    cdef Operation begin(self, int key, source, landing):
        if not 0 <= key < len(self.sizes):
            raise ValueError(f"there is no key with handle {key}")
        cdef Operation operation = Operation()
        operation.take_views(source, landing, self.sizes[key][2])
        if len(self.unfinished) >= self.sweep_at:  # seldom enough that it costs nothing per operation
            self.unfinished = [one for one in self.unfinished if not one.done]
            self.sweep_at = 2 * len(self.unfinished) + 64
        self.unfinished.append(operation)
        return operation

    def fail(self, text):
        cdef string told = utf8(text)
        with nogil:
            self.core.fail(remote_error(told))

    @property
    def error(self):
        return error_or_none(self.core.error())

    @property
    def event_fd(self):
        return self.core.event_fd()

    def counters(self):
        return counters_dict(self.core.counters())

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
                  double heartbeat_s=1.0, double timeout_s=10.0, int notsent_low_water_bytes=131072):
        if sum_order not in ("rank", "arrival"):
            raise ValueError(f"sum_order is 'rank' or 'arrival', not {sum_order!r}")
        if threads < 0:
            raise ValueError(f"threads must not be negative ({threads})")
        self.notsent_low_water_bytes = notsent_low_water_bytes
        self.core = new Server(rank, num_servers, num_workers,
                               server_options(node_options(label, heartbeat_s, timeout_s),
                                              sum_order == "arrival", threads))

    def __dealloc__(self):
        cdef Server* core = self.core
        with nogil:
            del core

    def add_worker(self, int worker, int fd, label, *, ring=()):
        self.core.add_worker(worker, stream_of(fd, self.notsent_low_water_bytes, ring, False), utf8(label))

    def add_watch(self, int fd, label):
        self.core.add_watch(stream_of(fd, self.notsent_low_water_bytes, (), False), utf8(label))

    def start(self):
        self.core.start()

    def define(self, uint32_t wire_key, name, uint64_t elements, int dtype, uint64_t first_slice,
               uint32_t slice_elements, int store=0):
        cdef KeyPlan plan = key_plan(wire_key, elements, dtype, first_slice, slice_elements)
        cdef string text = utf8(name)
        with nogil:
            self.core.define(plan, text, store)

    def set_optimizer(self, int store, description):
        self.core.set_optimizer(store, optimizer_spec(description))

    def fail(self, text):
        cdef string told = utf8(text)
        with nogil:
            self.core.fail(remote_error(told))

    @property
    def error(self):
        return error_or_none(self.core.error())

    @property
    def event_fd(self):
        return self.core.event_fd()

    @property
    def finished(self):
        return self.core.finished()

    def counters(self):
        cdef Counters counters = self.core.counters()
        return dict(counters_dict(counters), buffer_bytes=counters.buffer_bytes,
                    peak_buffer_bytes=counters.peak_buffer_bytes)

    def stop(self):
        with nogil:
            self.core.stop()

    def abandon_after_fork(self):
        self.core.abandon_after_fork()


include "worker/mxnet_engine.pxi"
