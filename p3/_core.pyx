# distutils: language = c++
"""The C++ core as Python sees it; _core.pyi is the documentation.

This file converts, checks and releases the GIL; it decides nothing. Each buffer view is held until the core is done
with the memory: an Operation that is dropped early lives on in its worker until then.

Every function from C++ says `except +`, or `noexcept` where it has nothing that could fail: an exception that Cython was
not told of ends the process.
"""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo,
    PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move, pair
from libcpp.vector cimport vector

include "_optimizer_spec.pxi"

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class P3Error(RuntimeError):
    """The job has failed. `kind` is one of usage, disagreement, peer_lost, peer_silent, protocol, remote, stopped."""

    def __init__(self, text, kind="remote"):
        super().__init__(text)
        self.kind = kind


cdef extern from "p3/worker.h" namespace "p3" nogil:
    cdef cppclass Done "p3::Worker::Done":
        pass
    cdef cppclass RowsDone "p3::Worker::RowsDone":
        pass
    cdef cppclass optional_error "std::optional<p3::Error>":
        pass


cdef extern from "p3/node.h" namespace "p3" nogil:
    cdef cppclass NodeOptions:
        string label
        cbool checksums
        double heartbeat_s
        double timeout_s
    cdef cppclass Traffic:
        uint64_t bytes_sent, bytes_received, slices_sent, slices_received, queued_slices, peak_queued_slices
        uint64_t held_bytes, peak_held_bytes
        double queued_s
    cdef cppclass Counters:
        Traffic traffic, local
        uint64_t rounds, received_slices, peak_received_slices, buffer_bytes, peak_buffer_bytes


cdef extern from "p3/compression.h" namespace "p3" nogil:
    cdef cppclass Compression:
        Compression() noexcept


cdef extern from "p3/server.h" namespace "p3" nogil:
    cdef cppclass ServerOptions:
        pass


cdef extern from "p3/tls_stream.h" namespace "p3" nogil:
    cdef cppclass TlsStream


cdef extern from "p3/stream.h" namespace "p3" nogil:
    cdef cppclass Stream:
        int read_fd() noexcept
        int write_fd() noexcept


cdef extern from "p3/captured.h" namespace "p3" nogil:
    shared_ptr[char] new_bytes(size_t) except +
    cdef cppclass CapturedArray:
        uint32_t wire_key, slice
        uint8_t part
        DType dtype
        uint64_t elements
        shared_ptr[char] data


cdef extern from *:
    """
    #include <chrono>
    #include <condition_variable>
    #include <deque>
    #include <memory>
    #include <mutex>
    #include <optional>
    #include <string>

    #include "p3/error.h"
    #include "p3/machines.h"
    #include "p3/ring_stream.h"
    #include "p3/server.h"
    #include "p3/socket_stream.h"
    #include "p3/tls_stream.h"
    #include "p3/trace.h"
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
        return [self](const p3::Error* error, bool updated) {
          {
            std::lock_guard<std::mutex> lock(self->mutex_);
            self->done_ = true;
            self->updated_ = updated;
            if (error != nullptr) self->error_ = *error;
          }
          self->changed_.notify_all();
        };
      }
      // Of an operation on rows: also keeps which rows have changed.
      static p3::Worker::RowsDone rows_done_of(std::shared_ptr<Completion> self) {
        return [self](const p3::Error* error, const p3::RowsView& changed) {
          self->changed_rows_.assign(changed.ids, changed.ids + changed.count);  // before anybody may look
          done_of(self)(error, true);
        };
      }
      bool done() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return done_;
      }
      // Once it is done.
      const std::vector<int64_t>& changed_rows() const { return changed_rows_; }
      bool updated() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return updated_;
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
      bool updated_ = false;
      std::vector<int64_t> changed_rows_;
      std::optional<p3::Error> error_;
    };

    // How a Python thread waits for whichever of many operations completes next.
    class Completions {
     public:
      static p3::Worker::Done done_of(std::shared_ptr<Completions> self, int64_t token) {
        return [self, token](const p3::Error* error, bool updated) {
          {
            std::lock_guard<std::mutex> lock(self->mutex_);
            self->done_.push_back({token, updated});
            if (error != nullptr && !self->error_) self->error_ = *error;
          }
          self->changed_.notify_all();
        };
      }
      // {token, updated}, or {-1, false} after timeout_s. Throws the first error of any operation.
      std::pair<int64_t, bool> next(double timeout_s) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return !done_.empty(); });
        if (error_) throw *error_;
        if (done_.empty()) return {-1, false};
        const auto result = done_.front();
        done_.pop_front();
        return result;
      }

     private:
      std::mutex mutex_;
      std::condition_variable changed_;
      std::deque<std::pair<int64_t, bool>> done_;
      std::optional<p3::Error> error_;
    };

    // The core's end of a van: a TLS connection, a bare socket, or shared memory that a socket keeps watch over.
    std::unique_ptr<p3::Stream> stream_of(int fd, int notsent_low_water_bytes, const std::vector<int>& ring,
                                          bool is_maker, p3::TlsStream* tls) {
      if (tls != nullptr) return std::unique_ptr<p3::Stream>(tls);
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

    p3::Compression compression_of(const std::string& type, double threshold) {
      p3::Compression compression;
      if (type == "2bit") {
        compression.encoding = p3::Encoding::kTwoBit;
        compression.threshold = static_cast<float>(threshold);
      } else if (type == "fp16") {
        compression.encoding = p3::Encoding::kFloat16;
      } else {
        throw p3::Error(p3::ErrorKind::kUsage, "compression: there is no type '" + type + "'");
      }
      return compression;
    }

    p3::Worker::MoveDone moved(std::shared_ptr<Completion> completion) {
      return [done = Completion::done_of(completion)](uint32_t) { done(nullptr, true); };
    }

    // The parts of a value of that type and of the state that the optimizer keeps for it.
    std::vector<uint8_t> parts_of(const p3::OptimizerSpec& spec, p3::DType dtype) {
      const auto optimizer = p3::Optimizer::make(spec);
      std::vector<uint8_t> parts{0};
      for (int i = 1; i <= optimizer->state_count(); ++i) parts.push_back(static_cast<uint8_t>(i));
      if (optimizer->needs_master(dtype)) parts.push_back(p3::kMaster);
      return parts;
    }

    // False if the key was never captured.
    bool captured_plan_of(const p3::Worker& worker, int key, p3::KeyPlan* plan) {
      const auto captured = worker.captured_plan(key);
      if (captured) *plan = *captured;
      return captured.has_value();
    }

    template <typename Node>
    void fail_node(Node& node, const std::string& text) {
      node.fail(p3::Error(p3::ErrorKind::kRemote, text));
    }

    p3::NodeOptions traced(p3::NodeOptions options, int fd) {
      if (fd >= 0) options.trace = std::make_shared<p3::Recorder>(fd);
      return options;
    }

    p3::ServerOptions server_options(p3::NodeOptions node, bool by_arrival, int threads,
                                     const std::vector<int>& machines, bool local_aggregation, bool outlives_workers) {
      p3::ServerOptions options;
      options.node = std::move(node);
      options.sum_order = by_arrival ? p3::SumOrder::kArrival : p3::SumOrder::kRank;
      options.threads = threads;
      options.machines = p3::Machines(machines);
      options.local_aggregation = local_aggregation;
      options.outlives_workers = outlives_workers;
      return options;
    }

    }  // namespace
    """
    PyObject* p3_error_type
    void raise_as_python() noexcept
    object error_or_none(const optional_error&) except +raise_as_python
    cppclass Completion:
        @staticmethod
        Done done_of(shared_ptr[Completion]) except +raise_as_python nogil
        @staticmethod
        RowsDone rows_done_of(shared_ptr[Completion]) except +raise_as_python nogil
        cbool done() noexcept nogil
        const vector[int64_t]& changed_rows() noexcept nogil
        cbool updated() noexcept nogil
        cbool wait(double) except +raise_as_python nogil
    cppclass CCompletions "Completions":
        @staticmethod
        Done done_of(shared_ptr[CCompletions], int64_t) except +raise_as_python nogil
        pair[int64_t, cbool] next(double) except +raise_as_python nogil
    Compression compression_of(const string&, double) except +raise_as_python
    cdef cppclass MoveDone "p3::Worker::MoveDone":
        pass
    MoveDone moved(shared_ptr[Completion]) except +raise_as_python nogil
    cbool captured_plan_of(const Worker&, int, KeyPlan*) except +raise_as_python
    vector[uint8_t] parts_of(const OptimizerSpec&, DType) except +raise_as_python
    unique_ptr[Stream] stream_of(int, int, const vector[int]&, cbool, TlsStream*) except +raise_as_python
    vector[int] make_ring_descriptors(size_t) except +raise_as_python
    NodeOptions traced(NodeOptions, int) except +raise_as_python
    ServerOptions server_options(
        NodeOptions, cbool, int, const vector[int]&, cbool, cbool
    ) except +raise_as_python


cdef extern from "p3/dtype.h" namespace "p3" nogil:
    cdef enum class DType(unsigned char):
        pass
    size_t size_of(DType) noexcept
    DType sum_type(DType) noexcept


cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef cppclass RoundScalars:
        double lr, wd, rescale, updates, schedule


cdef extern from "p3/slicing.h" namespace "p3" nogil:
    cdef cppclass KeyPlan:
        uint32_t wire_key
        DType dtype
        uint64_t elements
        uint32_t slice_elements
        uint64_t first_slice
        uint32_t row_elements, partitions
    uint32_t core_slice_count "p3::slice_count"(const KeyPlan&) noexcept


cdef extern from "p3/rows.h" namespace "p3" nogil:
    cdef cppclass RowRange:
        uint64_t first
        uint64_t count
    cdef cppclass RowsView:
        const int64_t* ids
        uint64_t count
        const void* values


cdef extern from "p3/lateness.h" namespace "p3" nogil:
    cdef cppclass Late:
        int worker
        cbool of_machine
        string key
        uint64_t round
        double waited_s
        int waiting


cdef extern from "p3/worker.h" namespace "p3" nogil:
    cdef cppclass KeyCounters:
        uint64_t rounds
        double completed_s, waited_s, longest_wait_s
        cbool as_slices
        uint64_t own_rows, pushed_rows, touched_rows, row_bytes_sent, row_bytes_received
    cdef cppclass Worker:
        Worker(int, int, NodeOptions) except +raise_as_python
        void add_server(int, unique_ptr[Stream], string) except +raise_as_python
        void add_local(int, unique_ptr[Stream], string) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void start() except +raise_as_python
        int declare(string, uint64_t, DType, const Compression&) except +raise_as_python
        void agree(int, const KeyPlan&, cbool) except +raise_as_python
        void init(int, const void*, void*, int32_t, Done) except +raise_as_python
        void push(int, const void*, void*, int32_t, const RoundScalars&, Done) except +raise_as_python
        void skip(int, void*, int32_t, Done) except +raise_as_python
        void fetch(int, uint8_t, void*, Done) except +raise_as_python
        void store(int, uint8_t, const void*, Done) except +raise_as_python
        int declare_rows(string, uint64_t, uint64_t, DType) except +raise_as_python
        void init_rows(int, const void*, void*, int32_t, Done) except +raise_as_python
        void push_rows(int, const RowsView&, void*, int32_t, const RoundScalars&, RowsDone) except +raise_as_python
        void skip_rows(int, void*, int32_t, Done) except +raise_as_python
        void fetch_rows(int, uint8_t, const int64_t*, uint64_t, void*, int32_t, Done) except +raise_as_python
        void store_rows(int, uint8_t, const RowsView&, Done) except +raise_as_python
        void choose_route(int, int) except +raise_as_python
        void move_rows(int, const KeyPlan&, vector[uint8_t], const RowRange&, MoveDone) except +raise_as_python
        void route_rows(int, cbool) except +raise_as_python
        void capture(int, uint64_t, float*, Done) except +raise_as_python
        cbool keeps_residual(int) except +raise_as_python
        void restore_residual(int, const float*) except +raise_as_python
        optional_error error() except +raise_as_python
        int event_fd() noexcept
        Counters counters() except +raise_as_python
        vector[Late] late() except +raise_as_python
        Traffic traffic_with(int) except +raise_as_python
        KeyCounters key_counters(int) except +raise_as_python
        void mark_stall(int, int64_t, int64_t) except +raise_as_python
        cbool close(double) except +raise_as_python
        void abandon_after_fork() noexcept
    void fail_worker "fail_node"(Worker&, const string&) except +raise_as_python


cdef extern from "p3/server.h" namespace "p3" nogil:
    cdef cppclass Pushed "p3::LostWorker::Pushed":
        uint32_t wire_key
        uint64_t round

    cdef cppclass LostWorker:
        string problem
        vector[Pushed] pushed

    cdef cppclass Server:
        Server(int, int, int, ServerOptions) except +raise_as_python
        void add_worker(int, unique_ptr[Stream], string) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void start() except +raise_as_python
        void define(const KeyPlan&, string, int) except +raise_as_python
        void define_successor(const KeyPlan&, uint32_t) except +raise_as_python
        void drop(uint32_t) except +raise_as_python
        void set_optimizer(int, const OptimizerSpec&) except +raise_as_python
        void set_compression(int, const Compression&) except +raise_as_python
        void set_average(int, cbool) except +raise_as_python
        LostWorker lose_worker(int) except +raise_as_python
        void fill(int, const vector[Pushed]&, cbool) except +raise_as_python
        void replace_worker(int, unique_ptr[Stream]) except +raise_as_python
        optional_error error() except +raise_as_python
        int event_fd() noexcept
        cbool finished() noexcept
        vector[CapturedArray] take_captured(uint64_t) except +raise_as_python
        Counters counters() except +raise_as_python
        vector[Late] late() except +raise_as_python
        vector[double] mean_lateness_s() except +raise_as_python
        void stop() except +raise_as_python
        void abandon_after_fork() noexcept
    void fail_server "fail_node"(Server&, const string&) except +raise_as_python


p3_error_type = <PyObject*>P3Error  # the module keeps it alive


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


cdef KeyPlan key_plan(uint32_t wire_key, uint64_t elements, int dtype, uint64_t first_slice, uint32_t slice_elements,
                      uint32_t row_elements=0, uint32_t partitions=0) except *:
    if slice_elements == 0:
        raise ValueError("slice_elements must be at least 1")
    cdef KeyPlan plan
    plan.wire_key = wire_key
    plan.dtype = dtype_of(dtype)
    plan.elements = elements
    plan.slice_elements = slice_elements
    plan.first_slice = first_slice
    plan.row_elements = row_elements
    plan.partitions = partitions
    return plan


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


include "_tls.pxi"


def make_ring(bytes_each_way):
    """Descriptors of new shared memory for one van, to be passed to the other side and to add_server / add_worker."""
    return list(make_ring_descriptors(bytes_each_way))


def state_parts(description, int dtype):
    """The parts that move with the rows of a key of that type: 0, the value; and what the optimizer keeps for them."""
    if description is None:
        return [0]
    return list(parts_of(optimizer_spec(description), dtype_of(dtype)))


def slice_count(elements, slice_elements):
    """How many slices a key of `elements` has."""
    return core_slice_count(key_plan(0, elements, 0, 0, slice_elements))


cdef check_size(name, size_t nbytes, size_t expected, rows):
    if nbytes == expected:
        return
    whole = "the key has" if rows is None else f"{rows} rows have"
    raise ValueError(f"the {name} array has {nbytes} bytes; {whole} {expected}")


cdef class CoreArray:
    """An array of the core's, which lives as long as this or the core needs it: read it with memoryview or NumPy."""

    cdef shared_ptr[char] data
    cdef Py_ssize_t elements, itemsize
    cdef bytes format

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

    cdef shared_ptr[Completion] completion
    cdef Py_buffer source
    cdef Py_buffer landing
    cdef Py_buffer ids
    cdef cbool holds_source, holds_landing, holds_ids
    cdef cbool tells_changed

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

    cdef shared_ptr[CCompletions] queue

    def __cinit__(self):
        self.queue = make_shared[CCompletions]()

    def next(self, double timeout_s):
        cdef CCompletions* queue = self.queue.get()
        cdef pair[int64_t, cbool] result
        with nogil:
            result = queue.next(timeout_s)
        return None if result.first < 0 else (result.first, result.second)


cdef class P3Worker:
    cdef Worker* core
    cdef int rank
    cdef int notsent_low_water_bytes
    cdef list unfinished  # operations that the core may still borrow from
    cdef Py_ssize_t sweep_at
    # Of each key, by handle: elements, type, bytes, bytes of a state, elements of a row (0: a dense key).
    cdef list sizes

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

    def agree(self, int key, uint32_t wire_key, uint64_t first_slice, uint32_t slice_elements, uint32_t partitions=0,
              cbool catches_up=False):
        elements, dtype, _, _, row_elements = self.sizes[key]
        cdef KeyPlan plan = key_plan(
            wire_key, elements, dtype, first_slice, slice_elements, row_elements, partitions
        )
        with nogil:
            self.core.agree(key, plan, catches_up)

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
        cdef const int64_t* wished = <const int64_t*>operation.ids.buf
        self.keep(operation)
        with nogil:
            self.core.fetch_rows(key, part, wished, count, operation.landing.buf, priority,
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

    def move_rows(self, int key, uint32_t wire_key, uint64_t first_slice, uint32_t slice_elements, uint32_t partitions,
                  parts, uint64_t first_row, uint64_t rows):
        self.row_bytes(key, 0)
        elements, dtype, _, _, row_elements = self.sizes[key]
        cdef KeyPlan plan = key_plan(
            wire_key, elements, dtype, first_slice, slice_elements, row_elements, partitions
        )
        cdef vector[uint8_t] moving = parts
        cdef RowRange share
        share.first = first_row
        share.count = rows
        cdef Operation operation = Operation()
        with nogil:
            self.core.move_rows(key, plan, moving, share, moved(operation.completion))
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
        cdef KeyPlan plan
        if not captured_plan_of(self.core[0], key, &plan):
            return None
        return {
            "wire_key": plan.wire_key,
            "first_slice": plan.first_slice,
            "slice_elements": plan.slice_elements,
            "row_elements": plan.row_elements,
            "partitions": plan.partitions,
        }

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

    def define(self, uint32_t wire_key, name, uint64_t elements, int dtype, uint64_t first_slice,
               uint32_t slice_elements, int store=0, uint32_t row_elements=0, uint32_t partitions=0):
        cdef KeyPlan plan = key_plan(
            wire_key, elements, dtype, first_slice, slice_elements, row_elements, partitions
        )
        cdef string text = utf8(name)
        with nogil:
            self.core.define(plan, text, store)

    def define_successor(self, uint32_t predecessor, uint32_t wire_key, uint64_t elements, int dtype,
                         uint64_t first_slice, uint32_t slice_elements, uint32_t row_elements, uint32_t partitions):
        cdef KeyPlan plan = key_plan(
            wire_key, elements, dtype, first_slice, slice_elements, row_elements, partitions
        )
        with nogil:
            self.core.define_successor(plan, predecessor)

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


include "mxnet/engine.pxi"
include "mxnet/rows.pxi"
