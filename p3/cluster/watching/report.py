"""What a worker and a server tell of themselves when the scheduler asks (`report` of messages.py): totals since they
began, and what is so now. To make one waits for nobody."""

from __future__ import annotations

import resource
from typing import Dict, Mapping, Optional

from p3.cluster.messages import MAX_GROUPS, sendable

_MAX_NAME = 80  # characters
_PAGE_BYTES = resource.getpagesize()


def of_worker(core, servers: int, at_s: float, waited: Optional[Mapping[str, float]]) -> dict:
    """`at_s`: since it began. `waited`: how long its script has waited for values, by groups of layers; None if nobody
    can tell."""
    counters, waits = core.counters(), waited or {}
    of_vans = (counters, counters["local"])
    longest = sorted(waits, key=lambda name: -waits[name])[:MAX_GROUPS]
    return {
        "kind": "worker_reported",
        "at_s": at_s,
        **_common(of_vans),
        "last_round": counters["last_round"],
        "waited_s": None if waited is None else sum(waits.values()),
        "waits": {sendable(name)[:_MAX_NAME]: waits[name] for name in longest},
        "servers": [_towards(core.traffic_with(server)) for server in range(servers)],
    }


def of_server(core, at_s: float) -> dict:
    counters = core.counters()
    kept = ("last_round", "received_slices", "value_bytes", "buffer_bytes", "late_s")
    return {
        "kind": "server_reported",
        "at_s": at_s,
        **_common((counters,)),
        **{name: counters[name] for name in kept},
    }


def _common(of_vans) -> Dict[str, int]:
    names = ("bytes_sent", "bytes_received", "queued_slices")
    return {**{name: sum(traffic[name] for traffic in of_vans) for name in names}, "memory_bytes": memory_bytes()}


def _towards(traffic: dict) -> list:
    """What `servers` of a worker's report has for each."""
    return [traffic["bytes_sent"], traffic["bytes_received"], traffic["slices_sent"], traffic["queued_s"]]


def memory_bytes() -> int:
    """That this process has in memory, as the system counts; 0 where it does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
