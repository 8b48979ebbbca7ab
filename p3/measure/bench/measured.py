"""What the lines of a run's workers (p3/measure/workers/lines.py) add up to: fields of its record."""

from __future__ import annotations

import itertools
import statistics
from typing import Dict, Iterator, List, Tuple

from p3.measure.jobs import nic

NIC_INTERVAL_S = 0.01

Workers = List[List[dict]]  # the lines of each


def summary(workers: Workers) -> Dict:
    """Of workers that came to their end."""
    header = workers[0][0]
    by_worker, seconds = counted(workers), iteration_s(workers)
    results = [lines[-1] for lines in workers]
    alike = len({(lines[0].get("data"), lines[-1].get("digest")) for lines in workers}) == 1
    together = all(lines[0]["workers"] == len(workers) for lines in workers)  # MXNet opens a local store for any name
    right = alike and together and all(result["result"] == "right" for result in results)
    found = {
        "bytes": header["bytes"],
        "iteration_s": [round(one, 6) for one in seconds],
        "median_s": statistics.median(seconds),
        "result": "right" if right else "wrong",
    }
    if "layers" in header:
        found["stall_s"] = statistics.median(max(one["stall_s"] for one in same) for same in zip(*by_worker))
        by_layer = [sum(stalls) for stalls in zip(*(one["stalls"] for lines in by_worker for one in lines))]
        worst = max(range(len(by_layer)), key=by_layer.__getitem__)
        found["worst_layer"] = header["layers"][worst][0] if by_layer[worst] > 0 else None
    return found


def _iterations(lines: List[dict]) -> List[dict]:
    return [line for line in lines if line.get("kind") == "iteration"]


def counted(workers: Workers) -> Workers:
    """By worker, by iteration that counts."""
    return [[line for line in _iterations(lines) if not line["warmup"]] for lines in workers]


def iteration_s(workers: Workers) -> List[float]:
    """Of those that count; each is as long as its slowest worker's."""
    return [max(one["seconds"] for one in same) for same in zip(*counted(workers))]


def span(workers: Workers) -> Tuple[float, float]:
    """From the first worker's first iteration that counts to the last one's end. Of workers with one clock."""
    by_worker = counted(workers)
    return min(lines[0]["start"] for lines in by_worker), max(map(_end, by_worker))


def _end(lines: List[dict]) -> float:
    return lines[-1]["start"] + lines[-1]["seconds"]


def pace(workers: Workers) -> Dict:
    """Of workers whose n-th iterations are at different times: how long one took each of them, in the mean."""
    paces = [round(statistics.fmean(one["seconds"] for one in lines), 6) for lines in counted(workers)]
    return {"iteration_s": paces, "median_s": statistics.median(paces)}


def curve(workers: Workers, are_apart: bool) -> Dict:
    """Each step's loss, the mean over the workers, and when all had read it; warm-up counts. Of workers that are rounds
    apart, a step is as many losses as there are workers, in the order in which they were read, whoever read them. Where
    workers tell it, the accuracy too, of the same batches."""
    read = [[(one["start"] + one["seconds"] - lines[0]["start"], one["loss"], one.get("accuracy")) for one in lines]
            for lines in map(_iterations, workers)]  # fmt: skip
    steps = zip(*read)  # every host has a clock of its own
    if are_apart:
        in_order = iter(sorted(itertools.chain(*read)))
        steps = zip(*[in_order] * len(workers))
    at_s, losses, accuracies = zip(*(zip(*step) for step in steps))
    found = {"losses": list(map(statistics.fmean, losses)), "loss_at_s": [round(max(step), 6) for step in at_s]}
    if accuracies[0][0] is not None:
        found["batch_accuracies"] = [round(statistics.fmean(step), 6) for step in accuracies]
    return found


def heldout(workers: Workers) -> Dict:
    """Of the first worker: all have the same weights, and the same data that no batch has."""
    result = workers[0][-1]
    return {name: result[name] for name in ("heldout_loss", "heldout_accuracy")}


def accuracies(workers: Workers) -> Dict:
    """After each epoch: the mean over the workers, and when the last of them had all weights. Of the first epoch, whose
    rounding has had no time to grow, also each step's loss."""
    epochs = list(zip(*([line for line in lines if line.get("kind") == "epoch"] for lines in workers)))
    steps = len(_iterations(workers[0])) // len(epochs)
    return {
        **{name: values[:steps] for name, values in curve(workers, are_apart=False).items()},
        "accuracies": [round(statistics.fmean(one["accuracy"] for one in same), 6) for same in epochs],
        "accuracy_at_s": [round(max(one["at_s"] for one in same), 6) for same in epochs],
    }


def cards(workers: Workers, samples: List[Dict], one_clock: bool) -> Iterator[Dict]:
    """Each host's bytes while iterations that count went on: anybody's, if all hosts have one clock; else those of its
    own worker, whose clock is the host's."""
    for host, (lines, sampled) in enumerate(zip(workers, samples)):
        intervals = nic.per_interval(sampled, *span(workers if one_clock else [lines]), NIC_INTERVAL_S)
        if intervals["bytes_in"]:
            yield {"host": host, "interval_s": NIC_INTERVAL_S, **intervals}
