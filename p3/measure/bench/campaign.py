"""An experiment from its first run to its table: whose turn it is, where, and what is written down.

In each repeat, and there in each configuration, the stores have their turns one after the other, in an order that
rotates: so whatever slows the machine for a while hits all alike. Every record is written when its run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import sys
import time
from typing import Callable, ContextManager, Dict, Iterator, List, Optional, Tuple

from p3.errors import ConfigError
from p3.launch.engines import root_address
from p3.launch.placement import read_hostfile
from p3.measure.bench import experiments, report, runs
from p3.measure.bench.configuration import Configuration, Course
from p3.measure.bench.runs import Site
from p3.measure.jobs import job as jobs
from p3.measure.jobs import machine, stores
from p3.measure.jobs.ssh_host import SshHost
from p3.measure.lab import transfer
from p3.measure.lab.hosts import why_unavailable
from p3.measure.results import records as written
from p3.measure.results import tables
from p3.measure.results.curves import Agreement
from p3.settings import Settings

RATE_CHECK_S = 1.0
FIRST_GUESS_MBIT = 100.0
INTERRUPTED = 130


def bench(options: argparse.Namespace, settings: Settings) -> int:
    """0 if every run was right."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise ConfigError("p3 bench needs tqdm: pip install tqdm") from None
    experiment = experiments.named(options.experiment)
    site_of = _sites(options, settings)
    configurations = experiment.configurations(options)
    threads = machine.omp_threads(max(options.hosts) if options.hostfile is None else 1)
    course = Course(
        options.iterations, options.warmup, options.jitter, options.optimizer, threads, options.timeout, options.pause,
        options.learning_rate, options.momentum,
    )  # fmt: skip
    records = [_settings_record(options, course)]
    total = len(configurations) * len(options.stores) * options.repeats
    with _output(options.out) as write, tqdm(total=total, unit="run", disable=None) as progress, _sigterm_raises():
        write(records[0])
        agreement = Agreement()
        try:
            if experiment.is_balanced and options.rate is None:
                configurations = [_balanced(one, course, site_of) for one in configurations]
            with contextlib.closing(_turns(configurations, options.stores, options.repeats, site_of)) as turns:
                for store, configuration, repeat, site in turns:
                    progress.set_description(f"{configuration.title} {store.name}")
                    for record in runs.run(store, configuration, course, site, repeat):
                        if experiment.agreement is not None:
                            agreement.check(experiment.agreement(configuration, repeat, store), record)
                        write(record)
                        records.append(record)
                        if record["kind"] == "run" and record["result"] != "right":
                            what = record["error"] or f"{store.name}: wrong"
                            tqdm.write(f"{configuration.title}: {what}", file=sys.stderr)
                    progress.update()
        except KeyboardInterrupt:
            progress.close()
            print("p3 bench: interrupted; what had ended:", file=sys.stderr)
            status = INTERRUPTED
        else:
            status = 0 if all(record.get("result", "right") == "right" for record in records) else 1
    print(tables.text(report.tables(written.of_records(records))) or "no run has ended")
    return status


def _balanced(configuration: Configuration, course: Course, site_of: Callable) -> Configuration:
    """At the rate that its computation calls for, which is measured first. ConfigError if that fails."""
    with site_of(configuration) as site:
        try:
            seconds, bytes_ = runs.computation(configuration, course, site)
        except jobs.JobError as error:
            raise ConfigError(f"the computation of {configuration.model} cannot be measured: {error}") from None
    made = experiments.balanced(configuration, bytes_, seconds)
    print(f"{made.title}: an iteration computes for {seconds:.3f} s, and {bytes_ / 1e6:.1f} MB take as long",
          file=sys.stderr)  # fmt: skip
    return made


def _turns(
    configurations: List[Configuration], names: List[str], repeats: int, site_of: Callable
) -> Iterator[Tuple[stores.Store, Configuration, int, Site]]:
    for repeat in range(repeats):
        shift = repeat % len(names)
        for configuration in configurations:
            with site_of(configuration) as site:
                for name in names[shift:] + names[:shift]:
                    yield stores.named(name), configuration, repeat, site


# Where: a lab for each configuration, or the hosts of a hostfile for all.


def _sites(options: argparse.Namespace, settings: Settings) -> Callable[[Configuration], ContextManager[Site]]:
    if options.hostfile is None:
        reason = why_unavailable()
        if reason is not None:
            raise ConfigError(f"p3 bench: {reason}; or name real hosts with --hostfile")
        return runs.lab_site
    hosts, root = _real_hosts(options.hostfile, settings)
    if max(options.hosts) > len(hosts):
        raise ConfigError(f"{options.hostfile} has {len(hosts)} hosts; --hosts {max(options.hosts)} needs more")
    if options.rate is None:
        options.rate = [_measured_rate(hosts) if len(hosts) > 1 else None]
    if len(options.rate) > 1:
        raise ConfigError("with --hostfile nothing is throttled: give one --rate, that of the network as it is")

    @contextlib.contextmanager
    def site_of(configuration: Configuration) -> Iterator[Site]:
        yield Site(hosts[: configuration.hosts], root, _free_ports())

    return site_of


def _real_hosts(hostfile: str, settings: Settings):
    """The hosts, and this one as the scheduler's."""
    listed = read_hostfile(hostfile)
    root = jobs.LocalHost(root_address(settings, listed))
    hosts: List = []
    for host in listed:
        if host.is_local:
            hosts.append(root)
            continue
        try:
            address = socket.gethostbyname(host.name.rpartition("@")[2])
        except OSError as error:
            raise ConfigError(f"{hostfile}: host {host.name} has no address that is known here: {error}") from None
        hosts.append(SshHost(host.name, address, settings))
    return hosts, root


def _measured_rate(hosts: List) -> float:
    """Mbit/s from the first host to the second; twice, as the first try cannot know how much to send."""
    rate = FIRST_GUESS_MBIT
    for _ in range(2):
        source, sink = (host._replace(rate_mbit=rate) for host in hosts[:2])
        try:
            rate = transfer.measure(source, sink, RATE_CHECK_S)
        except OSError as error:
            raise ConfigError(f"the rate between the hosts cannot be measured: {error}; give it with --rate") from None
    print(f"measured from {hosts[0].name} to {hosts[1].name}: {rate:.0f} Mbit/s", file=sys.stderr)
    return rate


def _free_ports() -> Iterator[int]:
    """Of this machine. The kernel does not hand one out again soon."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        yield port


# What is written


@contextlib.contextmanager
def _output(path: Optional[str]) -> Iterator[Callable[[Dict], None]]:
    if path is None:
        yield lambda record: None
        return
    try:
        file = open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from None
    with file:
        yield lambda record: print(json.dumps(record), file=file, flush=True)


def _settings_record(options: argparse.Namespace, course: Course) -> Dict:
    return {
        "kind": "settings",
        "experiment": options.experiment,
        "command": " ".join(["p3", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "options": {
            **{name: value for name, value in vars(options).items() if name not in ("handler", "default_rate")},
            "omp_threads": course.omp_threads,
            "throttled": options.hostfile is None,
            "inherited": machine.inherited_settings(),
        },
    }


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends a bench as Ctrl-C does, with everything put away."""

    def raise_(*_ignored) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raise_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
