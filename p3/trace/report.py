"""A trace in words: whose it is, how well the clocks agree, and what the forward passes waited for and why."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Iterator, List, Optional

from p3.errors import ConfigError
from p3.trace import waits
from p3.trace.lives import Trace

_SHOWN_KEYS = 10


def lines(trace: Trace, only_round: Optional[int] = None) -> Iterator[str]:
    """The report. ConfigError if there is no such round."""
    yield from _who(trace)
    found = waits.waits(trace)
    if only_round is not None:
        if only_round not in trace.lives["round"]:
            raise ConfigError("the trace holds no round %d; its rounds are %s" % (only_round, _rounds(trace)))
        found = [wait for wait in found if wait.round == only_round]
    if not found:
        yield "No forward pass waited for a value."
        return
    yield ""
    if found[0].marked:
        yield "For each round and worker, the value that the forward pass waited for longest:"
    else:
        yield "No waits are marked. For each round and worker, the value for which the forward pass would have waited"
        yield "longest after its last gradient was ready, if it took no time itself:"
    yield ""
    if only_round is None:
        yield from _totals(trace, found)
        found = [max(found, key=lambda wait: wait.wait_s)]
        yield ""
        yield "The longest of all:"
    for wait in found:
        yield ""
        yield from _explain(trace, wait)


def _who(trace) -> Iterator[str]:
    first = trace.processes[0]
    began = (first.wall_ns - first.monotonic_ns + trace.start_ns) / 1e9
    yield "%d processes, %d keys, rounds %s, from %s" % (
        len(trace.processes), len(trace.keys), _rounds(trace), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    )  # fmt: skip
    for process, offset in zip(trace.processes, trace.offsets):
        if process.boot != first.boot:
            yield "clock of %s: %+.6f s from that of %s, within %.6f s" % (
                process.label, -offset.ns / 1e9, first.label, offset.uncertainty_ns / 1e9
            )  # fmt: skip
        if not process.complete:
            yield "%s did not end normally: its last events are missing" % process.label
    known = {(process.role, process.rank) for process in trace.processes}
    for process in trace.processes:
        other = "server" if process.role == "worker" else "worker"
        for rank in sorted({peer for peer in process.events["peer"].tolist() if peer >= 0}):
            if (other, rank) not in known:
                known.add((other, rank))
                yield "%s %d has no files here: add them, or what follows is wrong" % (other, rank)


def _rounds(trace) -> str:
    if len(trace.lives) == 0:
        return "none"
    return "%d to %d" % (trace.lives["round"].min(), trace.lives["round"].max())


def _totals(trace, found: List[waits.Wait]) -> Iterator[str]:
    """The keys that were waited for longest, and what held them up, in order of the time lost."""
    by_key = defaultdict(list)
    for wait in found:
        by_key[wait.key].append(wait)
    ranked = sorted(by_key, key=lambda key: -sum(wait.wait_s for wait in by_key[key]))
    yield "%-32s %6s %9s %9s  %s" % ("key", "times", "total s", "longest", "held up most by")
    for key in ranked[:_SHOWN_KEYS]:
        of_key = by_key[key]
        stage = max(waits.STAGE_NAMES, key=lambda name: sum(wait.stages[name] for wait in of_key))
        yield "%-32s %6d %9.4f %9.4f  %s" % (
            name_of(trace, key), len(of_key), sum(wait.wait_s for wait in of_key),
            max(wait.wait_s for wait in of_key), stage,
        )  # fmt: skip
    if len(ranked) > _SHOWN_KEYS:
        yield "and %d more keys" % (len(ranked) - _SHOWN_KEYS)


def _explain(trace, wait) -> Iterator[str]:
    life, stages = wait.life, wait.stages
    yield "round %d, worker %d: %s %.2f ms for %s; its slice %d of %d landed last" % (
        wait.round, wait.worker, "waited" if wait.marked else "would have waited", wait.wait_s * 1e3,
        name_of(trace, wait.key), life["slice"] + 1, _slices(trace, wait),
    )  # fmt: skip
    for name in waits.STAGE_NAMES:
        yield ("  %9.2f ms  %-30s %s" % (stages[name] * 1e3, name, _why(trace, wait, name))).rstrip()


def _why(trace, wait, stage) -> str:
    life = wait.life
    if stage == waits.WORKERS_QUEUE:
        return _behind(waits.ahead(trace, life, "leaving"))
    if stage == waits.SERVERS_QUEUE:
        return _behind(waits.ahead(trace, life, "returning"))
    if stage in (waits.WIRE_UP, waits.WIRE_DOWN):
        before = waits.on_their_way(trace, life, "leaving" if stage == waits.WIRE_UP else "returning")
        return "%.1f kB; %.1f kB sent before were still on their way" % (life["bytes"] / 1e3, before / 1e3)
    if stage == waits.OTHERS and life["last_worker"] != wait.worker:
        last = waits.last_push(trace, life)
        later_s = last["ready"] - life["ready"]
        return "worker %d's came last: ready %.2f ms %s, %.2f ms in its queue, %.2f ms on the wire" % (
            last["worker"], abs(later_s) * 1e3, "later" if later_s >= 0 else "earlier",
            (last["leaving"] - last["ready"]) * 1e3, (last["received"] - last["leaving"]) * 1e3,
        )  # fmt: skip
    return ""


def _behind(queue: waits.Queue) -> str:
    parts = [
        "%.1f kB of %s priority" % (size / 1e3, name)
        for name, size in zip(("higher", "equal", "lower"), queue)
        if size > 0
    ]
    return "while %s left" % ", ".join(parts) if parts else "nothing else left meanwhile"


def name_of(trace: Trace, key: int) -> str:
    known = trace.keys.get(key)
    if known is None:
        return "key %d" % key
    return known.name if known.store == 0 else "%s (store %d)" % (known.name, known.store)


def _slices(trace, wait) -> int:
    """In that round: a key of rows may have had other partitions before."""
    of_round = trace.lives[(trace.lives["key"] == wait.key) & (trace.lives["round"] == wait.round)]
    return 1 + int(of_round["slice"].max())
