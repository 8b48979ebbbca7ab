"""The binding: a job of P3Workers and P3Servers in one process, over real sockets, with NumPy alone."""

import itertools
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import numpy as np
import pytest
from compressions import sender
from core_jobs import DEADLINE_S, HALF, SGD, Job, bfloat16_bits, of_bfloat16_bits, wait_all

import p3
from p3 import codecs
from p3._core import DTYPES, MASTER, P3Error, P3Worker
from p3.plan.key_plan import KeyPlan

PACKAGE = Path(p3.__file__).parent


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"bfloat16"}))
@pytest.mark.parametrize("elements", [0, 1, 999, 1000, 1001, 12345])
@pytest.mark.parametrize("ring_bytes", [None, 4096])
def test_every_worker_receives_the_first_value_and_then_the_sums(dtype, elements, ring_bytes):
    random = np.random.RandomState(elements)
    with Job(num_workers=3, ring_bytes=ring_bytes) as job:
        key = job.key(elements, dtype)
        value = (random.randn(elements) * 10).astype(dtype)
        for landing in job.init(key, value):
            np.testing.assert_array_equal(landing, value)
        for _ in range(3):
            gradients = [(random.randn(elements) * 10).astype(dtype) for _ in job.workers]
            wide = np.float32 if dtype == "float16" else dtype
            expected = (gradients[0].astype(wide) + gradients[1].astype(wide) + gradients[2].astype(wide)).astype(dtype)
            for landing in job.push(key, gradients):
                np.testing.assert_array_equal(landing, expected)


@pytest.mark.parametrize("optimizer", [None, SGD, HALF])
def test_bfloat16_travels_as_its_bits(optimizer):
    random = np.random.RandomState(0)
    with Job(num_workers=3) as job:
        if optimizer is not None:
            job.set_optimizer(dict(optimizer, momentum=0))
        key = job.key(12345, "bfloat16")
        value = bfloat16_bits(random.randn(12345))
        for landing in job.init(key, value):
            np.testing.assert_array_equal(landing, value)
        weight = of_bfloat16_bits(value)
        for _ in range(3):
            gradients = [bfloat16_bits(random.randn(12345)) for _ in job.workers]
            total = sum(map(of_bfloat16_bits, gradients[1:]), of_bfloat16_bits(gradients[0]))
            weight = total if optimizer is None else weight - total
            for landing in job.push(key, gradients, (1, 0, 1, 0, 1)):
                np.testing.assert_array_equal(landing, bfloat16_bits(weight))
            if optimizer is not HALF:
                weight = of_bfloat16_bits(landing)


def test_the_first_value_may_be_sent_from_the_landing_array():
    with Job() as job:
        key = job.key(12345)
        value = np.random.RandomState(0).randn(12345).astype("float32")
        landings = [value.copy(), np.zeros_like(value)]
        wait_all([worker.init(key, landing, landing) for worker, landing in zip(job.workers, landings)])
        np.testing.assert_array_equal(landings, [value, value])


def test_the_server_updates_the_weight():
    with Job() as job:
        for server in job.servers:
            server.set_optimizer(0, {"name": "sgd", "momentum": 0.9, "clip_gradient": -1.0, "multi_precision": False})
        key = job.key(2500)
        weight = np.random.RandomState(0).randn(2500).astype("float32")
        job.init(key, weight)
        momentum = np.zeros_like(weight)
        for step in range(5):
            gradients = [np.full(2500, rank + step, "float32") for rank in range(2)]
            lr = 0.1 / (step + 1)
            landings = job.push(key, gradients, (lr, 0.01, 0.5, 0, 1))
            rescaled = 0.5 * (gradients[0] + gradients[1])
            momentum = 0.9 * momentum - np.float32(lr) * (rescaled + np.float32(0.01) * weight)
            weight = weight + momentum
            for landing in landings:
                np.testing.assert_allclose(landing, weight, rtol=1e-6, atol=1e-6)


def test_two_runs_give_the_same_bits_though_arrivals_differ():
    def run(order):
        with Job(num_workers=3, num_servers=1, threads=2) as job:
            random = np.random.RandomState(1)
            key = job.key(5000)
            job.init(key, np.zeros(5000, "float32"))
            gradients = [random.randn(5000).astype("float32") * 10.0**rank for rank in range(3)]
            landings = [np.empty(5000, "float32") for _ in range(3)]
            operations = []
            for rank in order:
                threads_before = job.servers[0].counters()["slices_received"]
                operations.append(job.workers[rank].push(key, gradients[rank], landings[rank]))
                wait_until(lambda: job.servers[0].counters()["slices_received"] >= threads_before + 5)
            wait_all(operations)
            return landings[0].tobytes()

    assert run([0, 1, 2]) == run([2, 1, 0]) == run([1, 2, 0])


def wait_until(holds):
    """Polls with a deadline."""
    event = threading.Event()
    for _ in range(int(DEADLINE_S / 0.001)):
        if holds():
            return
        event.wait(0.001)
    raise AssertionError("the condition did not come true in time")


def test_slices_are_spread_evenly_over_the_servers():
    with Job(num_workers=1, num_servers=4) as job:
        for _ in range(100):
            job.init(job.key(10), np.zeros(10, "float32"))
        assert [server.counters()["slices_received"] for server in job.servers] == [25] * 4


def test_an_array_of_another_size_or_read_only_is_refused():
    with Job() as job:
        key = job.key(10)
        good = np.zeros(10, "float32")
        with pytest.raises(ValueError, match="landing array has 36 bytes; the key has 40"):
            job.workers[0].push(key, good, np.zeros(9, "float32"))
        with pytest.raises(ValueError, match="gradient array has 80 bytes; the key has 40"):
            job.workers[0].push(key, np.zeros(10, "float64"), good)
        with pytest.raises(ValueError, match="read-only|not writable"):
            locked = np.zeros(10, "float32")
            locked.flags.writeable = False
            job.workers[0].push(key, good, locked)
        with pytest.raises(ValueError, match="no key with handle 5"):
            job.workers[0].push(5, good, good)


def until_done(operation):
    deadline = time.monotonic() + DEADLINE_S
    while not operation.done:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("until", [until_done, lambda operation: operation.wait(DEADLINE_S)])
def test_an_operation_that_is_known_to_be_done_lets_go_of_its_arrays(until):
    """Though the worker keeps the operation: the next gradient is computed in the same memory."""
    with Job() as job:
        key = job.key(2500)
        job.init(key, np.zeros(2500, "float32"))
        arrays = [np.ones(2500, "float32") for _ in job.workers]
        landings = [np.empty(2500, "float32") for _ in job.workers]
        operations = [worker.push(key, *both) for worker, *both in zip(job.workers, arrays, landings)]
        known = [weakref.ref(array) for array in (*arrays, *landings)]
        for operation in operations:
            until(operation)
        del arrays, landings
        assert [one() for one in known] == [None] * 4


def test_an_operation_that_is_dropped_keeps_its_arrays_until_it_is_done():
    with Job(num_workers=2, num_servers=1) as job:
        key = job.key(200_000)
        job.init(key, np.zeros(200_000, "float32"))
        landing = np.empty(200_000, "float32")
        job.workers[0].push(key, np.ones(200_000, "float32"), np.empty(200_000, "float32"))  # dropped at once
        job.workers[1].push(key, np.ones(200_000, "float32"), landing).wait(DEADLINE_S)
        np.testing.assert_array_equal(landing, 2)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
def test_who_waits_for_ever_does(timeout_s):
    with Job() as job, ThreadPoolExecutor() as pool:
        key = job.key(10)
        ones = np.ones(10, "float32")
        job.init(key, ones)
        waiting = pool.submit(job.workers[0].push(key, ones, ones.copy()).wait, timeout_s)
        with pytest.raises(FutureTimeout):
            waiting.result(0.1)
        job.workers[1].push(key, ones, ones.copy()).wait(DEADLINE_S)
        waiting.result(DEADLINE_S)


@pytest.mark.parametrize("ring_bytes", [None, 4096])
def test_a_failure_reaches_every_node_and_every_later_call(ring_bytes):
    with Job(ring_bytes=ring_bytes) as job:
        key = job.key(10)
        zeros = np.zeros(10, "float32")
        job.init(key, zeros)
        pending = job.workers[0].push(key, zeros, zeros.copy())
        with pytest.raises(TimeoutError):
            pending.wait(0.01)
        job.workers[1].fail("worker 1 (here): it went wrong")
        with pytest.raises(P3Error, match="it went wrong") as caught:
            pending.wait(DEADLINE_S)
        assert caught.value.kind == "remote"
        with pytest.raises(P3Error, match="it went wrong"):
            job.workers[0].push(key, zeros, zeros.copy()).wait(DEADLINE_S)
        wait_until(lambda: all(node.error is not None for node in job.workers + job.servers))


def test_an_error_says_in_fields_whom_and_what_it_is_about():
    worker = P3Worker(0, 1, "worker 0 (here)")
    ours, its = socket.socketpair()
    worker.add_server(0, ours.detach(), "server 0 (10.0.0.8)")
    worker.start()
    key, zeros = worker.declare("w", 10, DTYPES["float32"]), np.zeros(10, "float32")
    worker.agree(key, KeyPlan(0, "float32", 10, 0, 1000))
    push = worker.push(key, zeros, zeros.copy())
    its.close()
    with pytest.raises(P3Error, match="lost server 0 .*while waiting for round 1 of key 'w'") as caught:
        push.wait(DEADLINE_S)
    assert (caught.value.kind, caught.value.peer, caught.value.host) == ("peer_lost", "server 0", "10.0.0.8")
    assert (caught.value.key, caught.value.round) == ("w", 1)
    worker.close(0)


def test_an_orderly_end_finishes_the_servers():
    with Job() as job:
        job.init(job.key(10), np.zeros(10, "float32"))
        assert all([worker.close(DEADLINE_S) for worker in job.workers])
        wait_until(lambda: all(server.finished for server in job.servers))
        assert all(server.error is None for server in job.servers)


def test_a_forked_child_may_drop_cores_whose_threads_it_does_not_have():
    with Job() as job:
        job.init(job.key(10), np.zeros(10, "float32"))
        child = os.fork()
        if child == 0:
            job.workers.clear()
            job.servers.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(job.workers) > 0 < len(job.servers)


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0.0}, {"heartbeat_s": 3.0, "timeout_s": 2.0}, {"heartbeat_s": float("nan")}]
)
def test_impossible_times_are_refused(options):
    with pytest.raises(ValueError, match="timeout_s"):
        P3Worker(0, 1, "worker 0", **options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reduction", ["sum", "average"])
def test_workers_may_skip_rounds_in_every_mixture(dtype, reduction):
    random = np.random.RandomState(3)
    with Job(num_workers=3) as job:
        key = job.key(2500, dtype, reduction=reduction)
        job.init(key, np.zeros(2500, dtype))
        before = np.full(2500, 7, dtype)
        for present in itertools.product([False, True], repeat=3):
            gradients = [random.randn(2500).astype(dtype) if here else None for here in present]
            expected = before
            if any(present):
                total = sum(gradient.astype("float32") for gradient in gradients if gradient is not None)
                expected = (total / np.float32(sum(present) if reduction == "average" else 1)).astype(dtype)
            for landing, updated in job.push_or_skip(key, gradients, before):
                np.testing.assert_array_equal(landing, expected)
                assert updated == any(present)


@pytest.mark.parametrize("kind", codecs.of_gradients())
@pytest.mark.parametrize("elements", [0, 1, 1003, 12345])
@pytest.mark.parametrize("ring_bytes", [None, 4096])
def test_sums_of_compressed_gradients_are_those_of_numpy(kind, elements, ring_bytes):
    random = np.random.RandomState(elements)
    options = {"threshold": 0.3} if kind == "2bit" else {}
    compression = {"type": kind, **options}
    with Job(ring_bytes=ring_bytes) as job:
        key = job.key(elements, compression=compression)
        first = random.randn(elements).astype("float32")
        for landing in job.init(key, first):
            np.testing.assert_array_equal(landing, first)
        sent = [sender(kind, 1000, **options) for _ in job.workers]
        for _ in range(4):
            gradients = [random.randn(elements).astype("float32") for _ in job.workers]
            expected = sent[0](gradients[0]) + sent[1](gradients[1])
            is_shorter = codecs.push_bytes(codecs.complete(compression), elements) < 4 * elements
            if codecs.of(compression).carries_sums and is_shorter:
                expected = sent[0](expected)
            for landing in job.push(key, gradients):
                np.testing.assert_array_equal(landing, expected)


@pytest.mark.parametrize(
    "compression, message",
    [
        ({"type": "3bit"}, "no type '3bit'"),
        ({"type": "2bit", "threshold": 0.0}, "threshold"),
        ({"type": "2bit", "threshold": float("nan")}, "threshold"),
    ],
)
def test_an_impossible_compression_is_refused(compression, message):
    with Job() as job:
        with pytest.raises(ValueError, match=message):
            job.workers[0].declare("x", 10, DTYPES["float32"], compression)


def test_rank_zero_may_give_new_values_at_any_time():
    with Job() as job:
        key = job.key(2500)
        for step in range(4):
            for landing in job.init(key, np.full(2500, step, "float32")):
                np.testing.assert_array_equal(landing, step)
            for landing in job.push(key, [np.ones(2500, "float32")] * 2) if step % 2 else []:
                np.testing.assert_array_equal(landing, 2)


MOMENTUM = {"name": "sgd", "momentum": 0.5, "clip_gradient": -1.0, "multi_precision": True}


def test_state_of_the_optimizer_is_fetched_by_anyone_and_stored_by_rank_zero():
    with Job() as job:
        job.set_optimizer(MOMENTUM)
        key = job.key(2500, "float16")
        job.init(key, np.full(2500, 1.5, "float16"))
        ones = np.ones(2500, "float16")
        job.push(key, [ones, ones], (1.0, 0.0, 1.0, 0, 1))

        def fetched(part):
            contents = [np.empty(2500, "float32") for _ in job.workers]
            wait_all([worker.fetch(key, part, content) for worker, content in zip(job.workers, contents)])
            np.testing.assert_array_equal(*contents)
            return contents[0]

        np.testing.assert_array_equal(fetched(1), -2)
        np.testing.assert_array_equal(fetched(MASTER), -0.5)
        content = np.arange(2500, dtype="float32")
        content.flags.writeable = False  # it is only read
        wait_all([job.workers[0].store(key, 1, content)])
        np.testing.assert_array_equal(fetched(1), content)
        landings = job.push(key, [ones, ones], (1.0, 0.0, 1.0, 0, 1))
        np.testing.assert_array_equal(landings[1], (-0.5 + 0.5 * content - 2).astype("float16"))


def test_what_cannot_be_fetched_or_stored_is_refused():
    with Job() as job:
        key = job.key(10, "float16")
        wide, narrow = np.zeros(10, "float32"), np.zeros(10, "float16")
        with pytest.raises(ValueError, match="landing array has 20 bytes; the key has 40"):
            job.workers[0].fetch(key, 1, narrow)
        with pytest.raises(ValueError, match="array has 20 bytes; the key has 40"):
            job.workers[0].store(key, 1, narrow)
        with pytest.raises(ValueError, match="store needs a content"):
            job.workers[0].store(key, 1, None)
        with pytest.raises(OverflowError):
            job.workers[0].fetch(key, 257, wide)
        with pytest.raises(TypeError):
            job.workers[0].skip(key, None)
        with pytest.raises(TypeError):
            job.workers[0].fetch(key, 1, None)
        assert job.workers[0].error is None


@pytest.mark.parametrize(
    "rank, part, message",
    [
        (1, 1, "worker 1 .* sent a slice that is unexpected"),
        (0, 2, "of a state that its key's optimizer does not have"),
    ],
)
def test_a_store_that_the_server_refuses_fails_the_job(rank, part, message):
    with Job() as job:
        job.set_optimizer(MOMENTUM)
        key = job.key(10)
        job.init(key, np.zeros(10, "float32"))
        with pytest.raises(P3Error, match=message):
            job.workers[rank].store(key, part, np.zeros(10, "float32")).wait(DEADLINE_S)
        refused = next(server.error for server in job.servers if server.error.kind == "protocol")
        assert (refused.peer, refused.host, refused.key, refused.round) == (f"worker {rank}", "here", "key0", 0)


def test_counters_tell_of_each_key_and_each_server():
    with Job(num_workers=1) as job:
        key, idle = job.key(2500), job.key(10)
        zeros = np.zeros(2500, "float32")
        job.init(key, zeros)
        for _ in range(3):
            job.push(key, [zeros])
        (worker,) = job.workers
        counters = worker.key_counters(key)
        assert counters["rounds"] == 3 and 0 < counters["longest_wait_s"] <= counters["waited_s"]
        assert worker.key_counters(idle) == {"rounds": 0, "waited_s": 0, "longest_wait_s": 0}
        assert [worker.traffic_with(server)["slices_received"] for server in range(2)] == [8, 4]  # slices 0, 2 and 1
        with pytest.raises(ValueError, match="no server 2"):
            worker.traffic_with(2)
        wait_until(lambda: worker.counters()["slices_sent"] == 12)
        assert worker.counters()["queued_slices"] == 0


def extern_functions():
    """Each declaration of a C++ function in the binding, on one line: {"file:line": text}."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")]):
        in_block = False
        open_text, opened_at = "", 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = line.split("#")[0].strip()
            if text and not line[0].isspace():
                in_block = text.startswith("cdef extern")
            elif in_block and text:
                opened_at = number if not open_text else opened_at
                open_text += " " + text
                if open_text.count("(") == open_text.count(")"):
                    if "(" in re.sub(r'"[^"]*"', "", open_text) and "class " not in open_text:
                        found[f"{path.name}:{opened_at}"] = open_text.strip()
                    open_text = ""
    return found


def test_every_function_from_cpp_says_what_becomes_of_exceptions():
    """One that Cython was not told of ends the process instead of the call."""
    functions = extern_functions()
    assert len(functions) > 60  # or they were not found
    silent = {
        place: text for place, text in functions.items() if not re.search(r"\) (except \+\w*|noexcept)( nogil)?$", text)
    }
    assert not silent


def test_a_van_for_which_there_are_no_descriptors_is_an_error():
    script = """
import os, resource, socket
from p3._core import P3Error, P3Server, P3Worker, make_ring
worker, server = P3Worker(0, 1, "worker 0 (here)"), P3Server(0, 1, 2, "server 0 (here)")
survivor = P3Server(0, 1, 1, "server 0 (here)", local_aggregation=False, outlives_workers=True)
survivor.add_worker(0, socket.socketpair()[0].detach(), "worker 0 (there)")
survivor.start()
survivor.dismiss_worker(0)
calls = [
    lambda fd, ring: worker.add_server(0, fd, "server 0 (there)", ring=ring),
    lambda fd, ring: server.add_worker(0, fd, "worker 0 (there)", ring=ring),
    lambda fd, ring: survivor.connect_worker(0, fd, ring=ring),
]
vans = [(call, socket.socketpair()[0].detach(), make_ring(4096)) for call in calls]
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # what is open stays
for call, fd, ring in vans:
    try:
        call(fd, ring)
        raise AssertionError("no error")
    except P3Error as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("shared memory between two processes: epoll_create1: Too many open files") == 3


def test_a_job_without_servers_is_refused():
    with pytest.raises(ValueError, match="at least one server, not 0"):
        P3Worker(0, 0, "worker 0")
