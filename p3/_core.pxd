"""The C++ core as Cython sees it, and what a front end's extension shares of _core.pyx.

Every function from C++ says `except +`, or `noexcept` where it has nothing that could fail: an exception that Cython
was not told of ends the process.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector
from posix.types cimport pid_t


cdef extern from "p3/error.h" namespace "p3" nogil:
    cdef cppclass Error:
        pass


cdef extern from "binding/python_errors.h" namespace "p3::binding":
    void raise_as_python() noexcept
    object error_or_none(const optional[Error]&) except +raise_as_python


cdef extern from "p3/dtype.h" namespace "p3" nogil:
    cdef enum class DType(unsigned char):
        kFloat32
    size_t size_of(DType) noexcept


cdef extern from "p3/codec.h" namespace "p3" nogil:
    cdef cppclass CodecOptions "p3::Codec::Options":
        CodecOptions() noexcept
    cdef enum class CodecOptionKind "p3::Codec::Option::Kind"(unsigned char):
        kNumber, kWhole, kTruth
    cdef cppclass CodecOption "p3::Codec::Option":
        const char* name
        const char* allowed
        double standard, least, most
        cbool is_above_least, is_mxnets
        CodecOptionKind kind
    cdef cppclass Codec "const p3::Codec":
        const char* name
        const char* effect
        vector[CodecOption] options
        cbool is_for(DType, cbool) noexcept
        size_t residuals() noexcept
        cbool carries_sums() noexcept
        cbool makes_steps() noexcept
        cbool encodes_values() noexcept
        size_t sent(const CodecOptions&, uint64_t, size_t) noexcept
        size_t bytes_with(const CodecOptions&, size_t, size_t) noexcept
    cdef cppclass Compression:
        Compression() noexcept
        CodecOptions options
        Codec* codec() noexcept
        Compression if_shorter(size_t) noexcept
        size_t bytes(size_t) noexcept
    const vector[Codec*]& c_codecs "p3::codecs"() noexcept


cdef extern from "p3/slicing.h" namespace "p3" nogil:
    cdef enum class Reduction(unsigned char):
        pass
    cdef enum class Update(unsigned char):
        pass
    cdef cppclass CKeyPlan "p3::KeyPlan":
        uint32_t wire_key
        DType dtype
        uint64_t elements
        uint32_t slice_elements
        uint64_t first_slice
        uint32_t row_elements, partitions
        uint32_t parts
        vector[uint16_t] servers
        uint64_t staleness
        Compression codec
        Compression value_codec
        uint32_t quorum
        double grace_s
        Reduction reduction
        Update update
        cbool adds_up_on_machine() noexcept
    uint32_t c_slice_count "p3::slice_count"(const CKeyPlan&) noexcept


cdef extern from "p3/rows.h" namespace "p3" nogil:
    cdef struct RowRange:
        uint64_t first, count
    cdef cppclass RowsView:
        const int64_t* ids
        uint64_t count
        const void* values


cdef extern from "codec/dgc.h" namespace "p3" nogil:
    size_t kRoundFloats

cdef extern from "base/digest.h" namespace "p3" nogil:
    uint64_t digest_of "p3::digest"(const void* memory, size_t bytes) noexcept


cdef extern from "numeric/products/low_rank.h" namespace "p3" nogil:
    void c_orthonormalise "p3::orthonormalise"(float*, size_t, size_t, const float*) except +
    void c_multiply_thin "p3::multiply_thin"(const float*, const float*, size_t, size_t, size_t, float*) except +


cdef extern from "p3/wire.h" namespace "p3" nogil:
    cdef struct Header:
        pass


cdef extern from "p3/optimizer.h" namespace "p3" nogil:
    cdef cppclass OptimizerSpec:
        string name
        cmap[string, double] fields
    cdef struct RoundScalars:
        double lr, wd, rescale, updates, schedule
    cdef cppclass SharedFields:
        pass
    cdef cppclass RoundSettings:
        RoundScalars scalars
        SharedFields fields


cdef extern from "p3/rule.h" namespace "p3" nogil:
    cdef struct Field:
        const char* name
        double standard, least, most
        const char* allowed
        cbool is_flag, per_round
    cdef cppclass Rule:
        const char* name
        vector[Field] fields() except +raise_as_python
    const vector[Rule]& all_rules() except +raise_as_python


cdef extern from "p3/factors.h" namespace "p3" nogil:
    cdef struct FactorShape:
        uint64_t rows, outputs, inputs


cdef extern from "p3/stream.h" namespace "p3" nogil:
    cdef cppclass Stream:
        int read_fd() noexcept
        int write_fd() noexcept


cdef extern from "p3/tls_stream.h" namespace "p3" nogil:
    cdef cppclass TlsStream(Stream):
        @staticmethod
        cbool built_in() noexcept
        void end_writing() noexcept
        void close() noexcept


cdef extern from "p3/node.h" namespace "p3" nogil:
    cdef cppclass NodeOptions:
        pass
    cdef struct Traffic:
        uint64_t bytes_sent, bytes_received, slices_sent, slices_received, queued_slices, peak_queued_slices
        uint64_t held_bytes, peak_held_bytes
        double queued_s
    cdef struct Counters:
        Traffic traffic, local
        uint64_t rounds, last_round, received_slices, buffer_bytes, peak_buffer_bytes
        uint64_t system_calls, keys, value_bytes


cdef extern from "p3/lateness.h" namespace "p3" nogil:
    cdef struct Late:
        int worker
        cbool of_machine
        string key
        uint64_t round
        double waited_s
        int waiting


cdef extern from "p3/captured.h" namespace "p3" nogil:
    shared_ptr[char] new_bytes(size_t) except +
    cdef cppclass CapturedArray:
        uint32_t wire_key, slice
        uint8_t part
        DType dtype
        uint64_t elements
        shared_ptr[char] data


cdef extern from "p3/groups.h" namespace "p3" nogil:
    cdef cppclass Groups:
        int workers
        vector[int] sizes, homes


cdef extern from "p3/worker.h" namespace "p3" nogil:
    cdef struct KeyCounters:
        uint64_t rounds
        double completed_s, waited_s, longest_wait_s
        cbool has_rows, as_slices
        uint64_t own_rows, pushed_rows, touched_rows, row_bytes_sent, row_bytes_received
    cdef cppclass Done "p3::Worker::Done":
        pass
    cdef cppclass LandedRound:
        uint64_t round, least_clock
    cdef cppclass Worker:
        Worker(int, int, NodeOptions) except +raise_as_python
        void add_server(int, unique_ptr[Stream], string) except +raise_as_python
        void add_heir(int, int, string) except +raise_as_python
        void add_local(int, unique_ptr[Stream], string) except +raise_as_python
        void add_member(int, unique_ptr[Stream], string) except +raise_as_python
        void join_groups(const Groups&) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void replace_watch(unique_ptr[Stream]) except +raise_as_python
        void inherit(int, int, const vector[int]&) except +raise_as_python
        void take_back(int, unique_ptr[Stream]) except +raise_as_python
        vector[int] lost_servers() except +raise_as_python
        void become_first() noexcept
        void come_later() noexcept
        void start() except +raise_as_python
        int declare(string, uint64_t, DType, const Compression&) except +raise_as_python
        void set_momentum(int, double, double) except +raise_as_python
        void agree(int, const CKeyPlan&, cbool) except +raise_as_python
        size_t bytes(int, uint8_t) except +raise_as_python
        size_t row_bytes(int, uint8_t) except +raise_as_python
        size_t landing_bytes(int) except +raise_as_python
        int declare_factors(string, const FactorShape&, int) except +raise_as_python
        void set_optimizer(int, const OptimizerSpec&) except +raise_as_python
        void init(int, const void*, void*, int32_t, Completion) except +raise_as_python
        void hand_over(int) except +raise_as_python
        void ask_for_round_alone(int) except +raise_as_python
        void push(int, const void*, void*, int32_t, const RoundSettings&, Completion, cbool, cbool) except +raise_as_python
        void flush() except +raise_as_python
        void skip(int, void*, int32_t, Completion, cbool, cbool) except +raise_as_python
        void ready(int, uint64_t) except +raise_as_python
        void fetch(int, uint8_t, void*, Completion) except +raise_as_python
        void store(int, uint8_t, const void*, Completion, uint64_t) except +raise_as_python
        uint64_t updates(int) except +raise_as_python
        LandedRound landed_round(int) except +raise_as_python
        int declare_rows(string, uint64_t, uint64_t, DType) except +raise_as_python
        void push_rows(int, const RowsView&, void*, int32_t, const RoundSettings&, Completion) except +raise_as_python
        void fetch_rows(int, uint8_t, const int64_t*, uint64_t, void*, int32_t, Completion) except +raise_as_python
        void store_rows(int, uint8_t, const RowsView&, Completion, uint64_t) except +raise_as_python
        void choose_route(int, int, cbool) except +raise_as_python
        cbool is_idle(int) except +raise_as_python
        void release(int) except +raise_as_python
        void recut(int, const CKeyPlan&) except +raise_as_python
        uint64_t round(int) except +raise_as_python
        void move_rows(int, const CKeyPlan&, vector[uint8_t], const RowRange&, Completion) except +raise_as_python
        void capture(int, uint64_t, float*, Completion) except +raise_as_python
        cbool keeps_residual(int) except +raise_as_python
        size_t residual_floats(int) except +raise_as_python
        void restore_residual(int, const float*) except +raise_as_python
        void keep_former_residual(int) except +raise_as_python
        void change_residual(int, cbool, double) except +raise_as_python
        optional[CKeyPlan] captured_plan(int) except +raise_as_python
        optional[Error] error() except +raise_as_python
        int event_fd() except +raise_as_python
        Counters counters() except +raise_as_python
        vector[Late] late() except +raise_as_python
        Traffic traffic_with(int) except +raise_as_python
        uint64_t take_full_rate() except +raise_as_python
        KeyCounters key_counters(int) except +raise_as_python
        void mark_stall(int, int64_t, int64_t) except +raise_as_python
        cbool close(double) except +raise_as_python
        void abandon_after_fork() noexcept


cdef extern from "p3/server.h" namespace "p3" nogil:
    cdef cppclass ServerOptions:
        pass
    cdef cppclass Server:
        @staticmethod
        unique_ptr[Server] make(int, int, int, ServerOptions) except +raise_as_python
        void add_worker(int, unique_ptr[Stream], string) except +raise_as_python
        void add_watch(unique_ptr[Stream], string) except +raise_as_python
        void leave_empty(int, string) except +raise_as_python
        void expect_worker(int, string) except +raise_as_python
        void replace_watch(unique_ptr[Stream]) except +raise_as_python
        void start() except +raise_as_python
        void define(const CKeyPlan&, string, int) except +raise_as_python
        void define_successor(const CKeyPlan&, uint32_t) except +raise_as_python
        void recut(const CKeyPlan&, uint32_t, uint64_t) except +raise_as_python
        void drop(uint32_t) except +raise_as_python
        cbool drop_store(int) except +raise_as_python
        void load(uint32_t, uint32_t, uint8_t, const void*, size_t) except +raise_as_python
        void set_optimizer(int, const OptimizerSpec&) except +raise_as_python
        void dismiss_worker(int) except +raise_as_python
        void inherit(int) except +raise_as_python
        void open(const vector[int]&) except +raise_as_python
        cbool awaits_claims() except +raise_as_python
        void hand_over(int) except +raise_as_python
        string admit_worker(int) except +raise_as_python
        void connect_worker(int, unique_ptr[Stream]) except +raise_as_python
        optional[Error] error() except +raise_as_python
        int event_fd() noexcept
        cbool finished() noexcept
        vector[CapturedArray] take_captured(uint64_t) except +raise_as_python
        Counters counters() except +raise_as_python
        vector[Late] late() except +raise_as_python
        vector[double] mean_lateness_s() except +raise_as_python
        void stop() except +raise_as_python
        void abandon_after_fork() noexcept


cdef extern from "binding/arguments.h" namespace "p3::binding" nogil:
    unique_ptr[Stream] stream_of(int, const vector[int]&, cbool, TlsStream*) except +raise_as_python
    TlsStream* new_tls_stream(int, const string&, cbool) except +raise_as_python
    vector[int] c_make_ring "p3::binding::make_ring"(size_t) except +raise_as_python
    Compression compression_of(const string&, const cmap[string, double]&) except +raise_as_python
    NodeOptions node_options(string, double, double, cbool, int, cbool, cbool) except +raise_as_python
    ServerOptions server_options(
        NodeOptions, cbool, int, const vector[int]&, cbool, const vector[int]&, int, cbool
    ) except +raise_as_python
    SharedFields shared_fields(const vector[double]&) except +raise_as_python
    vector[uint8_t] parts_of(const OptimizerSpec&, DType) except +raise_as_python
    vector[string] c_state_names "p3::binding::state_names"(const OptimizerSpec&) except +raise_as_python
    void fail_worker "p3::binding::fail"(Worker&, const string&) except +raise_as_python
    void fail_server "p3::binding::fail"(Server&, const string&) except +raise_as_python
    int shake_hands(TlsStream&) except +raise_as_python
    int64_t read_some(TlsStream&, char*, size_t) except +raise_as_python
    int64_t write_some(TlsStream&, const char*, size_t) except +raise_as_python


cdef extern from "binding/completion.h" namespace "p3::binding" nogil:
    cdef cppclass Completion:
        Completion() except +raise_as_python
        cbool done() noexcept
        cbool updated() noexcept
        const vector[int64_t]& changed_rows() noexcept
        cbool wait(double) except +raise_as_python
        void also(Done) except +raise_as_python
    cdef cppclass CCompletions "p3::binding::Completions":
        CCompletions() except +raise_as_python
        Done done_of(int64_t) except +raise_as_python
        pair[int64_t, cbool] next(double) except +raise_as_python


cdef OptimizerSpec optimizer_spec(description) except *
cdef Compression compression_from(description) except *
cdef RoundSettings round_settings(scalars) except *


cdef class CoreArray:
    cdef shared_ptr[char] data
    cdef Py_ssize_t elements, itemsize
    cdef bytes format

    @staticmethod
    cdef CoreArray over(shared_ptr[char] data, Py_ssize_t elements, DType dtype)


cdef class Memory:
    cdef object owner
    cdef void* address
    cdef Py_ssize_t nbytes


cdef class Completions:
    cdef CCompletions* queue

    cdef Done done_of(self, int64_t token) except *


cdef class Operation:
    cdef Completion* completion
    cdef Py_buffer source
    cdef Py_buffer landing
    cdef Py_buffer ids
    cdef cbool tells_changed

    cdef announce(self, tell)
    cdef take_landing(self, landing, size_t nbytes, rows=*)
    cdef take_source(self, source, size_t nbytes, rows=*)
    cdef RowsView take_rows(self, ids, values, size_t row_bytes) except *
    cdef void let_go(self) noexcept


cdef class P3Worker:
    cdef Worker* core
    cdef pid_t process
    cdef cbool is_first
    cdef list unfinished  # operations that the core may still borrow from
    cdef Py_ssize_t sweep_at

    cdef size_t residual_bytes(self, int key) except *
    cdef CoreArray new_residual(self, int key)
    cdef Operation begin(self, int key, uint8_t part, source, landing)
    cdef Operation skip_any(self, int key, landing, int32_t priority, cbool gated, cbool goes_on, tell)
    cdef Operation keep(self, Operation operation)
