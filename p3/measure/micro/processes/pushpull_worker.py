"""One worker of `p3 bench pushpull`, the same for every store: only the name given to `mx.kv.create` differs.

    python -m p3.measure.micro.processes.pushpull_worker STORE SIZES        SIZES as 20x1000000,400x50000

It does what it is asked by its benchmark (p3/measure/workers/control.py):

    (once it is ready)   -> {"ready": true}
    {"rounds": N}        -> {"seconds": [...], "added_bytes": B}   N rounds, back to back; their peak resident size
                                                                   over what was resident before the store was opened
    {"check": true}      -> {"wrong": [keys]}                      one more round, from fresh values; keys whose sums
                                                                   are not what they must be
    {"count": true}      -> {"system_calls": N}                    so far, of this worker's core, and on rank 0 of the
                                                                   servers' as well; null: nobody counts them
    (the socket closes)     closes the store and ends

A round pushes and pulls every key once, key 0 most urgent, and lasts from the first call until all outputs can be read.
"""

from __future__ import annotations

import sys
import time
from typing import Callable, List, Optional

import numpy as np

from p3.measure.jobs.usage import own_peak_rss, own_rss, reset_own_peak_rss
from p3.measure.micro.processes.raw_tcp import RawTcp
from p3.measure.workers.control import Control
from p3.measure.workers.mxnet_store import import_mxnet


def main(store: str, sizes: List[int]) -> None:
    control = Control()
    worker = (RawWorker if store == "raw_tcp" else StoreWorker)(store, sizes)
    control.say(ready=True)
    while True:
        request = control.hear()
        if request is None:
            return worker.close()
        if "rounds" in request:
            reset_own_peak_rss()
            seconds = [timed(worker.round) for _ in range(request["rounds"])]
            control.say(seconds=seconds, added_bytes=own_peak_rss() - worker.own_bytes)
        elif "count" in request:
            control.say(system_calls=worker.system_calls())
        else:
            control.say(wrong=worker.wrong_keys())


def timed(round_: Callable[[], None]) -> float:
    start = time.perf_counter()
    round_()
    return time.perf_counter() - start


def pattern(key: int, size: int) -> np.ndarray:
    """A gradient that tells a wrong key or a shifted slice, with sums that float32 holds exactly."""
    return ((np.arange(size) + key) % 1000).astype(np.float32)


class StoreWorker:
    """An MXNet KVStore, used as it would be without `update_on_kvstore`: the sum of all workers' arrays comes back."""

    def __init__(self, store: str, sizes: List[int]):
        mx = import_mxnet(store)
        self._sizes = sizes
        # Ascending from 0: MXNet's P3 stops for ever if keys are initialised in descending order.
        self._values = [mx.nd.array(pattern(key, size)) for key, size in enumerate(sizes)]
        self._outputs = [mx.nd.zeros(size) for size in sizes]
        mx.nd.waitall()
        self.own_bytes = own_rss()

        self._kv = mx.kv.create(store)
        for key, size in enumerate(sizes):
            self._kv.init(key, mx.nd.zeros(size))
        mx.nd.waitall()

    def round(self) -> None:
        for key, (value, output) in enumerate(zip(self._values, self._outputs)):
            self._kv.pushpull(key, value, out=output, priority=-key)
        for output in self._outputs:
            output.wait_to_read()

    def wrong_keys(self) -> List[int]:
        # Fresh values, because MXNet's own stores leave the sum in a single device's `value` as well as in `out`, so
        # that what is pushed grows from round to round.
        for key, (size, value, output) in enumerate(zip(self._sizes, self._values, self._outputs)):
            value[:] = pattern(key, size) + self._kv.rank
            output[:] = -1
        self.round()
        workers = self._kv.num_workers
        sum_of_ranks = workers * (workers - 1) // 2
        return [
            key for key, (size, output) in enumerate(zip(self._sizes, self._outputs))
            if not np.array_equal(output.asnumpy(), pattern(key, size) * workers + sum_of_ranks)
        ]

    def system_calls(self) -> Optional[int]:
        if not hasattr(self._kv, "stats"):
            return None
        counters = self._kv.stats(servers=self._kv.rank == 0)
        servers = [server["itself"] for server in counters["servers"] if "itself" in server]
        return sum(node["system_calls"] for node in [counters, *servers])

    def close(self) -> None:
        del self._kv


class RawWorker:
    """No store at all; see raw_tcp.py."""

    def __init__(self, _store: str, sizes: List[int]):
        self._outgoing = pattern(0, sum(sizes))
        self._landing = np.zeros_like(self._outgoing)
        self._landing.fill(-1)
        self.own_bytes = own_rss()
        self._tcp = RawTcp(memoryview(self._outgoing).cast("B"), memoryview(self._landing).cast("B"))

    def round(self) -> None:
        self._tcp.exchange()

    def wrong_keys(self) -> List[int]:
        self._landing.fill(-1)
        self.round()
        return [] if np.array_equal(self._landing, self._outgoing) else [0]

    def system_calls(self) -> None:
        return None

    def close(self) -> None:
        self._tcp.close()


def parse_sizes(text: str) -> List[int]:
    """The elements of each key: '2x10,3' is [10, 10, 3]. Raises ValueError."""
    sizes: List[int] = []
    for group in text.split(","):
        count, times, elements = group.rpartition("x")
        sizes += [int(elements)] * (int(count) if times else 1)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"keys must look like 20x1000000,400x50000, not {text!r}")
    return sizes


if __name__ == "__main__":
    main(sys.argv[1], parse_sizes(sys.argv[2]))
