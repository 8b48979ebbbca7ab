cdef class P3Server:
    """include/p3/server.h says what its options and methods do; as P3Worker where the names are the same.

    `machines`: of each worker; None: each has one of its own. `groups`: the group of each worker, if there are any, and
    `group_leader`, who leads them for this server, by place.
    """

    cdef Server* core
    cdef pid_t process

    def __cinit__(self, int rank, int num_servers, int num_workers, label, *, sum_order="rank", int threads=0,
                  machines=None, cbool local_aggregation=True, groups=(), int group_leader=0,
                  cbool outlives_workers=False, double heartbeat_s=1.0, double timeout_s=10.0, int trace_fd=-1,
                  cbool checksums=False, cbool outlives_scheduler=False):
        if sum_order not in ("rank", "arrival"):
            raise ValueError(f"sum_order is 'rank' or 'arrival', not {sum_order!r}")
        if threads < 0:
            raise ValueError(f"threads must not be negative ({threads})")
        cdef unique_ptr[Server] core = Server.make(
            rank, num_servers, num_workers,
            server_options(options_of(label, heartbeat_s, timeout_s, trace_fd, checksums, outlives_scheduler),
                           sum_order == "arrival", threads,
                           range(max(num_workers, 0)) if machines is None else machines, local_aggregation, groups,
                           group_leader, outlives_workers))
        self.core = core.release()
        self.process = getpid()

    def __dealloc__(self):
        cdef Server* core = self.core
        if self.process != getpid():  # as P3Worker
            return
        with nogil:
            del core

    cdef Server* running(self) except NULL nogil:
        """Throws in the child of a fork, which has none of the server's threads."""
        if self.core == NULL:
            with gil:
                raise P3Error("this process was forked from a worker and is no part of the job; use P3 in the parent "
                              "only", "stopped")
        return self.core

    def add_worker(self, int worker, int fd, str label not None, *, ring=(), Tls tls=None):
        self.running().add_worker(worker, stream_of(fd, ring, False, released(tls)), label)

    def leave_empty(self, int worker, str label not None):
        """No process has this rank yet."""
        self.running().leave_empty(worker, label)

    def expect_worker(self, int worker, str label not None):
        """Its connection comes later, by connect_worker(): this server comes back to a job that runs."""
        self.running().expect_worker(worker, label)

    def add_watch(self, int fd, str label not None, *, Tls tls=None):
        self.running().add_watch(stream_of(fd, (), False, released(tls)), label)

    def replace_watch(self, int fd, *, Tls tls=None):
        cdef unique_ptr[Stream] stream = stream_of(fd, (), False, released(tls))
        with nogil:
            self.running().replace_watch(move(stream))

    def start(self):
        self.running().start()

    def define(self, plan not None, str name not None, int store=0):
        cdef CKeyPlan core_plan = key_plan(plan)
        cdef string text = name
        with nogil:
            self.running().define(core_plan, text, store)

    def define_successor(self, plan not None, uint32_t predecessor):
        cdef CKeyPlan core_plan = key_plan(plan)
        with nogil:
            self.running().define_successor(core_plan, predecessor)

    def recut(self, plan not None, uint32_t predecessor, uint64_t round):
        cdef CKeyPlan core_plan = key_plan(plan)
        with nogil:
            self.running().recut(core_plan, predecessor, round)

    def drop(self, uint32_t wire_key):
        with nogil:
            self.running().drop(wire_key)

    def drop_store(self, int store):
        """Call it again until it returns True: see p3/server.h."""
        cdef cbool is_gone
        with nogil:
            is_gone = self.running().drop_store(store)
        return is_gone

    def load(self, uint32_t wire_key, uint32_t slice, uint8_t part, content not None):
        cdef const unsigned char[::1] memory = content
        cdef const void* data = &memory[0] if memory.shape[0] > 0 else NULL
        cdef size_t size = memory.shape[0]
        with nogil:
            self.running().load(wire_key, slice, part, data, size)

    def set_optimizer(self, int store, description):
        """`description` as p3.plan.optimizers has them: {"name": "sgd", "momentum": 0.9, ...}"""
        self.running().set_optimizer(store, optimizer_spec(description))

    def dismiss_worker(self, int worker):
        """It is lost, and the others go on without it."""
        with nogil:
            self.running().dismiss_worker(worker)

    def inherit(self, int lost):
        """That server is lost, and this one serves what it did."""
        with nogil:
            self.running().inherit(lost)

    def open(self, seniority not None):
        """This server has come back, and the workers, in the order of coming, will say what they have of its slices."""
        cdef vector[int] workers = seniority
        with nogil:
            self.running().open(workers)

    def hand_over(self, int rank):
        """Another process is the server again that this one has inherited from."""
        with nogil:
            self.running().hand_over(rank)

    def awaits_claims(self):
        """Whether any worker may still say what it has of a server that this one has inherited from, or of its own slices."""
        cdef cbool awaits
        with nogil:
            awaits = self.core.awaits_claims()
        return awaits

    def admit_worker(self, int worker):
        """Takes dismiss_worker() back, for another process of that rank; why it cannot be, or ""."""
        cdef string problem
        with nogil:
            problem = self.running().admit_worker(worker)
        return problem

    def connect_worker(self, int worker, int fd, *, ring=(), Tls tls=None):
        cdef unique_ptr[Stream] stream = stream_of(fd, ring, False, released(tls))
        with nogil:
            self.running().connect_worker(worker, move(stream))

    def fail(self, str text not None):
        cdef string told = text
        with nogil:
            fail_server(self.running()[0], told)

    @property
    def error(self):
        return error_or_none(self.running().error())

    @property
    def event_fd(self):
        """Readable once failed or finished."""
        return self.running().event_fd()

    @property
    def finished(self):
        """Every worker has said goodbye."""
        return self.running().finished()

    def take_captured(self, uint64_t snapshot):
        """What rank 0 has had captured for that snapshot, ordered; of earlier ones nothing is left.

        (wire_key, slice or partition, part, type's name, elements, memory). Part 0 is the value; 1, 2 ... and MASTER
        are the optimizer's state, as far as there is any.
        """
        cdef CapturedArray array
        return [
            (array.wire_key, array.slice, array.part, DTYPE_NAMES[<int>array.dtype], array.elements,
             CoreArray.over(array.data, array.elements, array.dtype))
            for array in self.running().take_captured(snapshot)
        ]

    def counters(self):
        """Traffic with all workers, and what else p3/node.h has for a server; `late_s`: of each worker."""
        cdef dict counters = self.running().counters()
        del counters["local"]
        return {**counters.pop("traffic"), **counters, "late_s": self.running().mean_lateness_s()}

    def late(self):
        return self.running().late()

    def stop(self):
        with nogil:
            self.running().stop()

    def abandon_after_fork(self):
        self.core.abandon_after_fork()
        self.core = NULL
