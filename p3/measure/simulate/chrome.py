"""The last iteration of a simulation as a Chrome trace file (Trace Event Format, JSON), as `p3 trace` writes one of a
real job; https://ui.perfetto.dev opens it.

Processes are workers, with the computation and the waits of each, and hosts, with a thread for each host to which they
send. A frame's bar lasts from its first byte in a socket to its last one at the other end; those of one thread overlap,
so they are asynchronous ones.
"""

from __future__ import annotations

from typing import Iterator, List

from p3.measure._simulator import FOR_CLIPPING, SPANS
from p3.measure.simulate.predict import NEEDED_TO_CLIP, Prediction
from p3.measure.simulate.setting import Setting, job
from p3.trace.chrome import meta, write_events

_COMPUTES, _WAITS = 0, 1  # threads of a worker


def write(setting: Setting, prediction: Prediction, path: str) -> int:
    """Returns the number of events. OSError as open() gives it."""
    return write_events(_events(setting, prediction), path)


def _events(setting: Setting, prediction: Prediction) -> Iterator[dict]:
    workers, hosts = len(setting.workers), setting.network.hosts
    for worker, host in enumerate(setting.workers):
        yield meta("process_name", worker, 0, name=f"worker {worker} on host {host}")
        yield meta("process_sort_index", worker, 0, sort_index=2 * host)
        yield meta("thread_name", worker, _COMPUTES, name="computation")
        yield meta("thread_name", worker, _WAITS, name="forward waits")
    for host in range(hosts):
        yield meta("process_name", workers + host, 0, name=f"host {host} sends")
        yield meta("process_sort_index", workers + host, 0, sort_index=2 * host + 1)
    for node, peer in sorted({(span["node"], span["peer"]) for span in prediction.spans if span["peer"] >= 0}):
        yield meta("thread_name", workers + node, peer, name=f"to host {peer}")
    start = min((span["begin_s"] for span in prediction.spans), default=0.0)
    names = _frame_names(setting)
    for number, span in enumerate(prediction.spans):
        yield from _bar(setting, span, number, start, names, workers)


def _bar(setting: Setting, span: dict, number: int, start: float, names: List[str], workers: int) -> Iterator[dict]:
    kind = SPANS[span["kind"]]
    begin, end = (round((span[name] - start) * 1e6, 3) for name in ("begin_s", "end_s"))
    details = {"round": span["round"]}
    if kind in ("push", "value"):
        common = {"cat": kind, "name": f"{kind} {names[span['item']]}", "id": number, "pid": workers + span["node"],
                  "tid": span["peer"]}  # fmt: skip
        yield {**common, "ph": "b", "ts": begin, "args": details}
        yield {**common, "ph": "e", "ts": end}
        return
    if kind == "wait":
        name = f"waits for {_waited_for(setting, span['item'])}"
    else:
        name = f"{kind} {setting.model.layers[span['item']].name}"
    yield {"ph": "X", "name": name, "cat": kind, "pid": span["node"], "tid": _WAITS if kind == "wait" else _COMPUTES,
           "ts": begin, "dur": round(end - begin, 3), "args": details}  # fmt: skip


def _waited_for(setting: Setting, item: int) -> str:
    if setting.scheme == "ddp":
        return "all buckets"
    return NEEDED_TO_CLIP[setting.clip] if item == FOR_CLIPPING else setting.model.layers[item].name


def _frame_names(setting: Setting) -> List[str]:
    """Of slices; of buckets where those are sent."""
    slices = job(setting)["slices"]
    if setting.scheme == "ddp":
        return [f"bucket {number}" for number in range(len(slices))]
    tensors = [tensor.name for tensor in setting.model.tensors]
    counts: dict = {}
    names = []
    for one in slices:
        counts[one["key"]] = counts.get(one["key"], -1) + 1
        names.append(f"{tensors[one['key']]} [{counts[one['key']]}]")
    return names
