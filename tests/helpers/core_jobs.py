"""Jobs of P3Workers and P3Servers in one process, over real sockets, with NumPy alone."""

import os
import socket

import numpy as np

from p3._core import DTYPES, NO_SCALARS, P3Server, P3Worker, make_ring, state_parts
from p3.plan import planner
from p3.plan.key_plan import KeyPlan

DEADLINE_S = 20
SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}
MOMENTUM = dict(SGD, momentum=0.9)
HALF = dict(MOMENTUM, multi_precision=True)
ADAM = {"name": "adam", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_gradient": -1.0, "multi_precision": False}
LR = (0.5, 0.0, 1.0, 0.0, 1.0)
SKIP = None


class Job:
    """Workers and servers joined by socket pairs. Keys are agreed at once, round robin as the scheduler would."""

    def __init__(self, num_workers=2, num_servers=2, slice_elements=1000, ring_bytes=None, machines=None,
                 local_aggregation=True, worker_options=None, **server_options):  # fmt: skip
        self.slice_elements = slice_elements
        self.keys = 0
        self.slices = 0
        self.plans = []
        self.workers = [
            P3Worker(rank, num_servers, f"worker {rank} (here)", **(worker_options or {}))
            for rank in range(num_workers)
        ]
        self.servers = [
            P3Server(rank, num_servers, num_workers, f"server {rank} (here)", machines=machines,
                     local_aggregation=local_aggregation, **server_options)  # fmt: skip
            for rank in range(num_servers)
        ]
        if machines and local_aggregation:
            self._join_neighbours(machines)
        for rank, worker in enumerate(self.workers):
            for number, server in enumerate(self.servers):
                ours, its = socket.socketpair()
                ring = make_ring(ring_bytes) if ring_bytes else []
                passed = [os.dup(fd) for fd in ring]  # as the other process would get them
                worker.add_server(number, ours.detach(), f"server {number} (here)", ring=ring)
                server.add_worker(rank, its.detach(), f"worker {rank} (here)", ring=passed)
        for node in self.servers + self.workers:
            node.start()

    def _join_neighbours(self, machines):
        for rank, worker in enumerate(self.workers):
            leader = machines.index(machines[rank])
            if leader == rank:
                continue
            ours, its = socket.socketpair()
            worker.add_local(leader, ours.detach(), f"worker {leader} (here)")
            self.workers[leader].add_local(rank, its.detach(), f"worker {rank} (here)")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.workers:
            node.close(0)
        for node in self.servers:
            node.stop()

    def key(self, elements, dtype="float32", compression=None, reduction="sum", down=None):
        """The handle of a new key, the same on every worker."""
        wire_key = self.keys
        options = {"compression": compression, "value_compression": down, "reduction": {"type": reduction}}
        axes = planner.axes((elements, 1), dtype, options)
        plan = KeyPlan(wire_key, dtype, elements, self.slices, self.slice_elements, **axes._asdict())
        self.keys += 1
        self.slices += plan.slices
        self.plans.append(plan)
        for server in self.servers:
            server.define(plan, f"key{wire_key}")
        handles = set()
        for worker in self.workers:
            handle = worker.declare(f"key{wire_key}", elements, DTYPES[dtype], compression)
            worker.agree(handle, plan)
            handles.add(handle)
        (handle,) = handles
        return handle

    def init(self, key, value):
        landings = [np.empty_like(value) for _ in self.workers]
        operations = [
            worker.init(key, value if rank == 0 else None, landing)
            for rank, (worker, landing) in enumerate(zip(self.workers, landings))
        ]
        wait_all(operations)
        return landings

    def push(self, key, gradients, scalars=NO_SCALARS):
        landings = [np.empty_like(gradient) for gradient in gradients]
        wait_all([
            worker.push(key, gradient, landing, 0, scalars)
            for worker, gradient, landing in zip(self.workers, gradients, landings)
        ])
        return landings

    def push_or_skip(self, key, gradients, like):
        """A gradient of None is a skip. (landing, whether it was updated) of each worker."""
        landings = [like.copy() for _ in gradients]
        operations = [
            worker.skip(key, landing) if gradient is None else worker.push(key, gradient, landing)
            for worker, gradient, landing in zip(self.workers, gradients, landings)
        ]
        wait_all(operations)
        return [(landing, operation.updated) for landing, operation in zip(landings, operations)]

    def set_optimizer(self, description):
        for server in self.servers:
            server.set_optimizer(0, description)


def bfloat16_bits(floats):
    """As uint16, rounded to nearest even."""
    bits = np.asarray(floats, "float32").view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


def of_bfloat16_bits(bits):
    return (bits.astype("uint32") << 16).view("float32")


def wait_all(operations):
    for operation in operations:
        operation.wait(DEADLINE_S)
        assert operation.done


class RowsJob(Job):
    """A job with one key of rows; what each worker keeps of it is in `landings`."""

    def __init__(self, value, workers=2, servers=2, partitions=2, slice_elements=8, optimizer=None, average=False,
                 **server_options):
        super().__init__(workers, servers, slice_elements, **server_options)
        rows, row_elements = value.shape
        code = DTYPES[value.dtype.name]
        self.plan = KeyPlan(
            0, value.dtype.name, value.size, 0, slice_elements, row_elements, partitions,
            reduction="average" if average else "sum",
        )  # fmt: skip
        for server in self.servers:
            server.define(self.plan, "emb")
        for worker in self.workers:
            assert worker.declare_rows("emb", rows, row_elements, code) == 0
            worker.agree(0, self.plan)
        if optimizer is not None:
            self.set_optimizer(optimizer)
        self.init_rows(value)

    def init_rows(self, value):
        self.landings = [np.full_like(value, 99) for _ in self.workers]
        wait_all([
            worker.init_rows(0, value if rank == 0 else None, landing)
            for rank, (worker, landing) in enumerate(zip(self.workers, self.landings))
        ])

    def round(self, gradients, scalars=LR, lands=True):
        """One round: ids and values of each worker, or SKIP. What changed, which is the same on all that pushed."""
        operations = []
        for worker, gradient, landing in zip(self.workers, gradients, self.landings):
            landing = landing if lands else None
            if gradient is SKIP:
                operations.append(worker.skip_rows(0, landing))
            else:
                operations.append(worker.push_rows(0, *gradient, landing, 0, scalars))
        wait_all(operations)
        changed = [operation.changed.tolist() for operation in operations if operation.changed is not None]
        assert all(one == changed[0] for one in changed)
        return changed[0] if changed else [operation.updated for operation in operations]

    def fetch(self, ids, like, worker=0, part=0):
        landing = np.empty((len(ids), like.shape[1]), np.float32 if part and like.dtype == np.float16 else like.dtype)
        self.workers[worker].fetch_rows(0, part, rows_of(ids), landing).wait(DEADLINE_S)
        return landing


def rows_of(ids):
    return np.array(ids, np.int64)


def sum_of(gradients, value):
    """Touched rows and their sums: of one worker's rows in their order, then of the workers by rank."""
    totals = {}
    for gradient in gradients:
        own = {}
        for row, values in zip(*gradient) if gradient is not SKIP else ():
            own[row] = own[row] + values if row in own else values.copy()
        for row, values in own.items():
            totals[row] = totals[row] + values if row in totals else values
    return {int(row): totals[row] for row in sorted(totals)}


def random_gradient(random, shape, dtype="float32"):
    count = random.choice([0, 1, 3, shape[0], 2 * shape[0]])
    ids = random.randint(0, shape[0], count) if random.rand() < 0.7 else np.arange(min(count, shape[0]))
    return rows_of(ids), (random.randn(len(ids), shape[1]) * 10).astype(dtype)


class MovingJob(RowsJob):
    wire_keys = 1

    def move(self, value, partitions, optimizer, before_round):
        """All workers go over to so many partitions behind the round that `before_round` runs."""
        key, former = self.wire_keys, self.wire_keys - 1
        first_slice = 100 * key + 1  # not the servers' former order
        plan = self.plan._replace(wire_key=key, first_slice=first_slice, partitions=partitions)
        for server in self.servers:
            server.define_successor(plan, former)
        moves = []
        # Rank 0 last: others may know of the plan before they are told to take it.
        for rank in reversed(range(len(self.workers))):
            first, end = (len(value) * edge // len(self.workers) for edge in (rank, rank + 1))
            parts = state_parts(optimizer, DTYPES[value.dtype.name])
            moves.append(self.workers[rank].move_rows(0, plan, parts, first, end - first))
        before_round()
        for move in moves:
            move.wait(DEADLINE_S)
        for server in self.servers:
            server.drop(former)
        self.wire_keys += 1
