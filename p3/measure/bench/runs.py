"""One run: a fresh job of one store, a few iterations, and the record that comes of it."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from p3.measure.bench import limits, measured
from p3.measure.bench.changes import LinkChange
from p3.measure.bench.configuration import Configuration, Course
from p3.measure.bench.experiments import named
from p3.measure.jobs import job as jobs
from p3.measure.jobs.stores import STORES, Store
from p3.measure.jobs.watched import Watched
from p3.measure.lab import hosts

START_TIMEOUT_S = 60.0
START_TIMEOUT_PER_HOST_S = 15.0  # importing MXNet twice on a core that is shared
PATIENCE = 4  # how much longer than without any overlap an iteration may take
COMPUTED_ITERATIONS, COMPUTED_WARMUP = 12, 3  # by which the computation is measured


class Site(NamedTuple):
    """Where jobs run. The scheduler's port must be free on `root`."""

    hosts: Sequence
    root: object
    ports: Iterator[int]


@contextlib.contextmanager
def lab_site(configuration: Configuration) -> Iterator[Site]:
    """A lab of its own for each comparison. Nothing else listens there, so any ports will do."""
    rates = configuration.rates_mbit or configuration.from_mbit or configuration.rate_mbit
    how = (configuration.delay_ms, configuration.shaping, configuration.packet_loss)
    with hosts.lab(configuration.hosts, rates, *how) as made:
        yield Site(made, made[0], iter(range(9100, 65536)))


def run(store: Store, configuration: Configuration, course: Course, site: Site, repeat: int) -> List[Dict]:
    """The record of the run and, if asked for, one of each network card. Never raises for what a job does wrong."""
    experiment = named(configuration.experiment)
    limit = limits.goal(configuration, store.compression)
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
        "bound_reason": limit.reason if limit else limits.why_unknown(configuration, store.compression),
        "stall_s": None,
        "worst_layer": None,
        "cpu_s": None,
        "result": "failed",
        "error": None,
    }
    sampled = site.hosts if experiment.samples_nics else []
    with tempfile.TemporaryDirectory(prefix="p3-bench-") as name:
        folder = Path(name)
        with _job(store, configuration, course, site, folder, repeat) as job, _sampled_nics(sampled, folder) as samples:
            error = hung = watched = change = None
            try:
                if configuration.from_mbit is not None:
                    hosts.change(site.hosts, configuration.from_mbit)  # a run before may have changed it
                    change = LinkChange(job, site.hosts, configuration.rates_mbit or configuration.rate_mbit)
                job.start()
                watched = Watched(job, memory=experiment.counts_bytes)
                looks = [watched.sample] if change is None else [watched.sample, change.look]
                job.wait(course.timeout_s or _timeout_s(configuration, course), lambda: [look() for look in looks])
            except jobs.JobHung as failure:
                hung = str(failure)
            except jobs.JobError as failure:
                error = str(failure)
            workers = _lines(job)
    if not all(lines and lines[-1].get("kind") == "result" for lines in workers):
        return [dict(record, error=error or hung or f"{store.name}: a worker has ended without a result")]
    if hung and store.may_hang_at_end:
        print(f"{hung}\n  All results were written before, and count.", file=sys.stderr)
    else:
        error = error or hung
    if change is not None and not change.is_done:
        return [dict(record, error=f"{store.name}: the job ended before its links changed: choose a larger --size")]
    if change is not None:
        record.update(change.told(workers))
        workers = change.settled(workers)
    used_s = watched.cpu_s(*measured.span(workers))
    record.update(measured.summary(workers))
    record["cpu_s"] = None if used_s is None else round(used_s / len(record["iteration_s"]), 6)
    if experiment.counts_bytes:
        card_bytes = limits.card_bytes(store, configuration)
        record["card_bytes"] = None if card_bytes is None else round(card_bytes)
        record.update({f"{role}_peak_bytes": watched.peak_bytes(role) for role in ("worker", "server")})
    if experiment.is_paced or course.pause_s > 0:
        record.update(measured.pace(workers))
    record.update(experiment.computation.tells(workers, store))
    record["error"] = error = error or next((one["error"] for one in samples if "error" in one), None)
    if error is not None:
        if record["result"] == "right":
            record["result"] = "failed"  # at its end
        return [record]
    counted = measured.cards(workers, samples, one_clock=job.is_local)
    return [record, *({"kind": "nic", **identity, **card} for card in counted)]


def _job(
    store: Store, configuration: Configuration, course: Course, site: Site, folder: Path, repeat: int = 0
) -> jobs.Job:
    environment = {"P3_SLICE_ELEMENTS": str(configuration.slice_elements), **configuration.path.environment}
    if configuration.strategy_text:
        environment["P3_STRATEGY"] = str(folder / "strategy.json")
        (folder / "strategy.json").write_text(configuration.strategy_text, encoding="utf-8")
    command = named(configuration.experiment).computation.command(store, configuration, course, repeat)
    return jobs.Job(
        store, site.hosts, command, root=site.root, port=next(site.ports), folder=folder,
        omp_threads=course.omp_threads, workers=configuration.workers, environment=environment if store.is_p3 else {},
    )  # fmt: skip


def _lines(job: jobs.Job) -> measured.Workers:
    return [job.lines(f"worker {number}") for number in range(job.num_workers)]


def computation(configuration: Configuration, course: Course, site: Site) -> Tuple[float, int]:
    """Seconds that an iteration of a real training takes if all workers compute at the same time and send nothing, and
    the model's bytes. JobError if that fails."""
    course = course._replace(iterations=COMPUTED_ITERATIONS, warmup=COMPUTED_WARMUP)
    with tempfile.TemporaryDirectory(prefix="p3-bench-") as name:
        with _job(STORES["alone"], configuration, course, site, Path(name)) as job:
            job.start()
            job.wait(course.timeout_s or _timeout_s(configuration, course))
            workers = _lines(job)
    return statistics.median(measured.iteration_s(workers)), workers[0][0]["bytes"]


@functools.lru_cache(maxsize=None)
def _model_bytes(configuration: Configuration) -> int:
    return named(configuration.experiment).computation.model_bytes(configuration)


def _timeout_s(configuration: Configuration, course: Course) -> float:
    """Generous: a slow machine is no failure, a hanging one is."""
    start_s = START_TIMEOUT_S + START_TIMEOUT_PER_HOST_S * configuration.hosts
    rate = min(configuration.rates_mbit or [configuration.rate_mbit or 100.0])
    transfer_s = 4 * _model_bytes(configuration) * 8 / (rate * 1e6)
    steps = named(configuration.experiment).computation.steps(configuration)
    iteration_s = max(configuration.compute_s or 5.0, 0.5 * steps) + steps * transfer_s
    return start_s + PATIENCE * (course.iterations + course.warmup) * iteration_s


@contextlib.contextmanager
def _sampled_nics(sampled: Sequence, folder: Path) -> Iterator[List[Dict]]:
    """Yields a list that has each host's samples after the block."""
    samples: List[Dict] = []
    running = []
    try:
        for number, host in enumerate(sampled):
            peer = sampled[1 if number == 0 else 0].address
            command = [sys.executable, "-m", "p3.measure.jobs.nic", peer, repr(measured.NIC_INTERVAL_S)]
            with open(folder / f"nic-{number}.out", "wb") as out, open(folder / f"nic-{number}.log", "wb") as log:
                running.append(jobs.start(host, command, {}, "", out, log))
        yield samples
    finally:
        for process in running:
            jobs.end(process, jobs.STOP_TIMEOUT_S)
    for number, host in enumerate(sampled):
        text, log = ((folder / f"nic-{number}").with_suffix(suffix).read_text() for suffix in (".out", ".log"))
        samples.append(json.loads(text) if text else {"error": f"no samples from host {host.name}: {log}"})
