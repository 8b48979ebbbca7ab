"""One run: a fresh job of one store, a few iterations, and the record that comes of it.

What is right is told by the workers themselves: they know what every weight must be (replay.py), or say what they have
(train.py, learn_train.py), and then all must have the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from p3.errors import ConfigError
from p3.measure.bench import jobs, nets, nic, train
from p3.measure.bench.cpu import JobCpu
from p3.measure.bench.experiments import Configuration
from p3.measure.bench.memory import JobMemory
from p3.measure.lab import hosts
from p3.measure.replay import bound, models
from p3.measure.replay.payloads import Compression

START_TIMEOUT_S = 60.0
START_TIMEOUT_PER_HOST_S = 15.0  # importing MXNet twice on a core that is shared
PATIENCE = 4  # how much longer than without any overlap an iteration may take
NIC_INTERVAL_S = 0.01
COMPUTED_ITERATIONS, COMPUTED_WARMUP = 12, 3  # by which the computation is measured
_WATCHED = ("dgc", "factors")  # experiments that tell of bytes on the cards, and of memory


class Course(NamedTuple):
    """How each run is made."""

    iterations: int
    warmup: int
    jitter: float
    optimizer: str
    omp_threads: int
    timeout_s: Optional[float]
    sample_nics: bool
    # Of `compute`.
    pause_s: float = 0.0  # of a worker in each step, in the mean
    learning_rate: float = train.LEARNING_RATE
    momentum: float = train.MOMENTUM


class Site(NamedTuple):
    """Where jobs run. The scheduler's port must be free on `root`."""

    hosts: Sequence
    root: object
    ports: Iterator[int]


@contextlib.contextmanager
def lab_site(configuration: Configuration) -> Iterator[Site]:
    """A lab of its own for each comparison. Nothing else listens there, so any ports will do."""
    rates = configuration.rates_mbit or configuration.rate_mbit
    with hosts.lab(configuration.hosts, rates, configuration.delay_ms, configuration.path.shaping) as made:
        yield Site(made, made[0], iter(range(9100, 65536)))


def run(store: jobs.Store, configuration: Configuration, course: Course, site: Site, repeat: int) -> List[Dict]:
    """The record of the run and, if asked for, one of each network card. Never raises for what a job does wrong."""
    limit = goal(configuration, store.compression) if store.route is None else None
    identity = {
        "store": store.name,
        **configuration.identity(),
        "slice_elements": configuration.slice_elements if store.is_p3 else None,
        "bytes": _model_bytes(configuration),
        "repeat": repeat,
    }
    record = {
        "kind": "run",
        **identity,
        "iteration_s": [],
        "median_s": None,
        "bound_s": limit.seconds if limit else None,
        "bound_reason": limit.reason if limit else _why_no_bound(configuration),
        "stall_s": None,
        "worst_layer": None,
        "cpu_s": None,
        "result": "failed",
        "error": None,
    }
    with tempfile.TemporaryDirectory(prefix="p3-bench-") as name:
        folder = Path(name)
        command = worker_command(store, configuration, course, repeat)
        with jobs.Job(
            store, site.hosts, command, root=site.root, port=next(site.ports),
            folder=folder, omp_threads=course.omp_threads, workers=configuration.workers,
            environment=_environment(configuration) if store.is_p3 else {},
        ) as job, _sampled_nics(site.hosts if course.sample_nics else [], folder) as samples:  # fmt: skip
            error = cpu = None
            try:
                job.start()
                cpu, memory = JobCpu(job), JobMemory(job)
                watched = [cpu.sample] + [memory.sample] * (configuration.experiment in _WATCHED)
                job.wait(course.timeout_s or _timeout_s(configuration, course), lambda: [watch() for watch in watched])
            except jobs.JobError as failure:
                error = str(failure)
            workers = [job.lines(f"worker {number}") for number in range(job.num_workers)]
    if not all(lines and lines[-1].get("kind") == "result" for lines in workers):
        return [dict(record, error=error or f"{store.name}: a worker has ended without a result")]
    record.update(_summary(workers), cpu_s=_cpu_s(workers, cpu))
    if configuration.experiment == "dgc":
        model = models.load(configuration.model, configuration.size)
        cluster, elements = _cluster(configuration), configuration.slice_elements
        sent = bound.card_bytes(model, cluster, elements, compression=store.compression)
        record.update(card_bytes=round(sent))
    if store.route is not None:
        record.update(card_bytes=round(_sent_by_factored(store, configuration)))
    if configuration.experiment in _WATCHED:
        record.update({f"{role}_peak_bytes": memory.peak_bytes(role) for role in ("worker", "server")})
    if configuration.experiment == "staleness" or course.pause_s > 0:
        record.update(_pace(workers))
    if configuration.experiment == "accuracy":
        record.update(_accuracies(workers))
    elif not configuration.is_emulated:
        record.update(_curve(workers, store.may_be_apart))
    record["error"] = error = error or next((one["error"] for one in samples if "error" in one), None)
    if error is not None:
        if record["result"] == "right":
            record["result"] = "failed"  # at its end
        return [record]
    return [record, *({"kind": "nic", **identity, **card} for card in _cards(workers, samples))]


def _environment(configuration: Configuration) -> Dict[str, str]:
    return {"P3_SLICE_ELEMENTS": str(configuration.slice_elements), **configuration.path.environment}


def computation(configuration: Configuration, course: Course, site: Site) -> Tuple[float, int]:
    """Seconds that an iteration of a real training takes if all workers compute at the same time and send nothing, and
    the model's bytes. JobError if that fails."""
    course = course._replace(iterations=COMPUTED_ITERATIONS, warmup=COMPUTED_WARMUP)
    with tempfile.TemporaryDirectory(prefix="p3-bench-") as name:
        with jobs.Job(
            jobs.ALONE, site.hosts, worker_command(jobs.ALONE, configuration, course), root=site.root,
            port=next(site.ports), folder=Path(name), omp_threads=course.omp_threads,
        ) as job:  # fmt: skip
            job.start()
            job.wait(course.timeout_s or _timeout_s(configuration, course))
            workers = [job.lines(f"worker {number}") for number in range(job.num_workers)]
    return statistics.median(_iteration_s(workers)), workers[0][0]["bytes"]


def goal(configuration: Configuration, compression: Optional[Compression] = None) -> Optional[bound.Bound]:
    """No store can be faster that compresses gradients in that way. None where that cannot be computed."""
    if not configuration.is_emulated or configuration.rate_mbit is None:
        return None
    cluster = _cluster(configuration)
    return bound.bound(
        models.load(configuration.model, configuration.size),
        configuration.compute_s,
        cluster,
        configuration.slice_elements,
        delay_s=configuration.delay_ms / 1e3,
        release=configuration.release,
        compression=compression,
    )


def _cluster(configuration: Configuration) -> bound.Cluster:
    cluster = bound.one_of_each(configuration.hosts, configuration.rate_mbit)
    if configuration.rates_mbit:
        cluster = cluster._replace(up_mbit=configuration.rates_mbit, down_mbit=configuration.rates_mbit)
    return cluster


def _sent_by_factored(store: jobs.Store, configuration: Configuration) -> float:
    from p3.measure.replay import factored

    def dense_bytes(model: models.Model) -> float:
        return bound.card_bytes(model, _cluster(configuration), configuration.slice_elements)

    model = models.load(configuration.model, configuration.size)
    return factored.sent_by_a_card(
        model, configuration.hosts, configuration.slice_elements, configuration.batch, store.route, dense_bytes
    )


def worker_command(store: jobs.Store, configuration: Configuration, course: Course, repeat: int = 0) -> List[str]:
    compression = []
    if store.compression is not None:
        kind, ratio = store.compression
        compression = ["--dgc", repr(ratio)] if kind == "dgc" else ["--compression", kind]
    if configuration.experiment == "accuracy":
        depth, epochs = nets.depth_of(configuration.model), course.iterations
        return [
            sys.executable, "-m", "p3.measure.bench.accuracy_train", "--store", store.kvstore, *compression,
            "--depth", str(depth), "--epochs", str(epochs), "--seed", str(repeat),
        ]  # fmt: skip
    common = ["--store", store.kvstore, "--size", repr(configuration.size), "--iterations", str(course.iterations),
              "--warmup", str(course.warmup)]  # fmt: skip
    if configuration.experiment == "learn":
        return [sys.executable, "-m", "p3.measure.bench.learn_train", *common, "--model", configuration.model]
    if not configuration.is_emulated:
        return [sys.executable, "-m", "p3.measure.bench." + ("torch_train" if store.is_torch else "train"), *common,
                "--pause", repr(course.pause_s), "--learning-rate", repr(course.learning_rate),
                "--momentum", repr(course.momentum)]  # fmt: skip
    return [
        sys.executable, "-m", "p3.replay", *common, "--model", configuration.model,
        "--compute", repr(configuration.compute_s), "--jitter", repr(course.jitter), "--optimizer", course.optimizer,
        "--release", configuration.release, *compression,
        *([] if store.route is None else ["--factors", store.route, "--batch", str(configuration.batch)]),
    ]  # fmt: skip


@functools.lru_cache(maxsize=None)
def _model_bytes(configuration: Configuration) -> int:
    if configuration.experiment == "accuracy":
        return nets.model_bytes(nets.depth_of(configuration.model))
    if configuration.experiment == "learn":
        try:
            from p3.measure.bench import lessons
        except ImportError as error:
            raise ConfigError(f"p3 bench learn needs PyTorch ({error}): pip install 'p3-training[torch]'") from None
        return lessons.model_bytes(configuration.model, configuration.size)
    if not configuration.is_emulated:
        return train.model_bytes(configuration.size)
    return models.load(configuration.model, configuration.size).bytes


def _why_no_bound(configuration: Configuration) -> str:
    if not configuration.is_emulated or configuration.batch is not None:
        return "unknown: the computation is real, and its layers' times are not measured"
    return "unknown: no rate is given"


def _timeout_s(configuration: Configuration, course: Course) -> float:
    """Generous: a slow machine is no failure, a hanging one is."""
    start_s = START_TIMEOUT_S + START_TIMEOUT_PER_HOST_S * configuration.hosts
    rate = min(configuration.rates_mbit or [configuration.rate_mbit or 100.0])
    transfer_s = 4 * _model_bytes(configuration) * 8 / (rate * 1e6)
    iteration_s = (configuration.compute_s or 5.0) + transfer_s
    if configuration.experiment == "accuracy":  # an iteration of whose course is an epoch
        iteration_s = nets.steps_of_an_epoch(configuration.workers) * (0.5 + transfer_s)
    return start_s + PATIENCE * (course.iterations + course.warmup) * iteration_s


def _summary(workers: List[List[dict]]) -> Dict:
    """Of the lines of all workers of a run that came to its end."""
    header = workers[0][0]
    counted, iteration_s = _counted(workers), _iteration_s(workers)
    results = [lines[-1] for lines in workers]
    alike = len({(lines[0].get("data"), lines[-1].get("digest")) for lines in workers}) == 1
    together = all(lines[0]["workers"] == len(workers) for lines in workers)  # MXNet opens a local store for any name
    right = alike and together and all(result["result"] == "right" for result in results)
    summary = {
        "bytes": header["bytes"],
        "iteration_s": [round(seconds, 6) for seconds in iteration_s],
        "median_s": statistics.median(iteration_s),
        "result": "right" if right else "wrong",
    }
    if "layers" in header:
        summary["stall_s"] = statistics.median(max(one["stall_s"] for one in same) for same in zip(*counted))
        by_layer = [sum(stalls) for stalls in zip(*(one["stalls"] for lines in counted for one in lines))]
        worst = max(range(len(by_layer)), key=by_layer.__getitem__)
        summary["worst_layer"] = header["layers"][worst][0] if by_layer[worst] > 0 else None
    return summary


def _iterations(lines: List[dict]) -> List[dict]:
    return [line for line in lines if line.get("kind") == "iteration"]


def _counted(workers: List[List[dict]]) -> List[List[dict]]:
    """By worker, by iteration that counts."""
    return [[line for line in _iterations(lines) if not line["warmup"]] for lines in workers]


def _iteration_s(workers: List[List[dict]]) -> List[float]:
    """Of those that count; each is as long as its slowest worker's."""
    return [max(one["seconds"] for one in same) for same in zip(*_counted(workers))]


def _pace(workers: List[List[dict]]) -> Dict:
    """Of workers whose n-th iterations are at different times: how long one took each of them, in the mean."""
    paces = [round(statistics.fmean(one["seconds"] for one in counted), 6) for counted in _counted(workers)]
    return {"iteration_s": paces, "median_s": statistics.median(paces)}


def _cpu_s(workers: List[List[dict]], cpu: JobCpu) -> Optional[float]:
    """Of all processes, for an iteration that counts."""
    counted = _counted(workers)
    begin = min(lines[0]["start"] for lines in counted)
    end = max(lines[-1]["start"] + lines[-1]["seconds"] for lines in counted)
    used_s = cpu.between(begin, end)
    return None if used_s is None else round(used_s / len(counted[0]), 6)


def _curve(workers: List[List[dict]], are_apart: bool) -> Dict:
    """Each step's loss, the mean over the workers, and when all had read it; warm-up counts. Of workers that are rounds
    apart, a step is as many losses as there are workers, in the order in which they were read, whoever read them."""
    read = [[(one["start"] + one["seconds"] - lines[0]["start"], one["loss"]) for one in lines]
            for lines in map(_iterations, workers)]  # fmt: skip
    steps = zip(*read)  # every host has a clock of its own
    if are_apart:
        in_order = iter(sorted(itertools.chain(*read)))
        steps = zip(*[in_order] * len(workers))
    steps = list(steps)
    return {
        "losses": [statistics.fmean(loss for _, loss in step) for step in steps],
        "loss_at_s": [round(max(at_s for at_s, _ in step), 6) for step in steps],
    }


def _accuracies(workers: List[List[dict]]) -> Dict:
    """After each epoch: the mean over the workers, and when the last of them had all weights. Of the first epoch, whose
    rounding has had no time to grow, also each step's loss."""
    epochs = list(zip(*([line for line in lines if line.get("kind") == "epoch"] for lines in workers)))
    steps = len(_iterations(workers[0])) // len(epochs)
    return {
        **{name: values[:steps] for name, values in _curve(workers, are_apart=False).items()},
        "accuracies": [round(statistics.fmean(one["accuracy"] for one in same), 6) for same in epochs],
        "accuracy_at_s": [round(max(one["at_s"] for one in same), 6) for same in epochs],
    }


@contextlib.contextmanager
def _sampled_nics(sampled: Sequence, folder: Path) -> Iterator[List[Dict]]:
    """Yields a list that has each host's samples after the block."""
    samples: List[Dict] = []
    running = []
    try:
        for number, host in enumerate(sampled):
            peer = sampled[1 if number == 0 else 0].address
            command = [sys.executable, "-m", "p3.measure.bench.nic", peer, repr(NIC_INTERVAL_S)]
            with open(folder / f"nic-{number}.out", "wb") as out, open(folder / f"nic-{number}.log", "wb") as log:
                running.append(jobs.start(host, command, {}, "", out, log))
        yield samples
    finally:
        for process in running:
            jobs.end(process, jobs.STOP_TIMEOUT_S)
    for number, host in enumerate(sampled):
        text, log = ((folder / f"nic-{number}").with_suffix(suffix).read_text() for suffix in (".out", ".log"))
        samples.append(json.loads(text) if text else {"error": f"no samples from host {host.name}: {log}"})


def _cards(workers: List[List[dict]], samples: List[Dict]) -> Iterator[Dict]:
    """Each host's bytes while iterations that count went on. A host's worker has its clock."""
    for host, (counted, sampled) in enumerate(zip(_counted(workers), samples)):
        if counted:
            end = counted[-1]["start"] + counted[-1]["seconds"]
            intervals = nic.per_interval(sampled, counted[0]["start"], end, NIC_INTERVAL_S)
            if intervals["bytes_in"]:
                yield {"host": host, "interval_s": NIC_INTERVAL_S, **intervals}
