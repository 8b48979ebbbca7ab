"""The command line of `p3 simulate` as settings: every combination of what has several values."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from typing import Callable, Dict, Iterator, List, Tuple

from p3.errors import ConfigError
from p3.measure import compressions
from p3.measure.arguments import list_of, names_among, number, slice_size
from p3.measure.lab.command import delay, rates, share
from p3.measure.replay import groups as trees
from p3.measure.replay import models
from p3.plan import strategy as strategies
from p3.measure.simulate.setting import CLIPPING, CONGESTION, SCHEMES, Network, Setting, can_compress

# What --set sets.
_OF_P3 = ("priorities", "window_kib", "pushes_first")
_OF_NETWORK = ("burst_kib", "queue_ms", "lossless", "ack_bytes", "segment_kib")
_SETTABLE = {
    field.name: field.default
    for kind in (Setting, Network)
    for field in dataclasses.fields(kind)
    if field.name in _OF_P3 + _OF_NETWORK
}
_SETTABLE["pushes_first"] = False  # whose default depends on what is simulated
MOST_HOSTS = 4096
_COMPUTE_S = 4.0


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(option: str, help: str, **how) -> None:
        parser.add_argument(option, help=help, **how)

    add("--models", "models, comma-separated (default %(default)s)", type=names_among(models.NAMES), default="vgg19")
    add("--size", "fraction of a model's parameters (default: the lab's, some 80 MB)", type=number(1e-6, 1e3))
    add("--recorded", "a run that P3_TRACE=DIR recorded, in place of --models and --size", metavar="DIR")
    add("--compute", "of an iteration (default 4, of a recorded run its own)", type=list_of(number(0, 1e6)),
        metavar="S[,S]")
    add("--hosts", "list, as 2,4,8, or range, as 2-8, or doubling, as 2-1024x2 (default %(default)s)",
        type=_hosts, default="2", metavar="N[,N]")
    add("--rate", "of each link, each way, as 200mbit; one for each host: 40mbit:20mbit, the last one for all others "
        "(default %(default)s)", type=_link_rates, default="200mbit", metavar="R[,R]")
    add("--down", "of the downlinks alone, in the same form (default: as --rate)", type=_link_rates, metavar="R")
    add("--delay", "one way between hosts, as 0.1ms (default: 0.05 ms, an idle lab's)", type=list_of(delay),
        default="0.05ms", metavar="D[,D]")
    add("--loss", "share of the packets between hosts that are lost, as 0.1%% (default: none)", type=list_of(share),
        default="0%", metavar="P[,P]")
    add("--congestion", "control: none, cubic or bbr (default %(default)s)", type=names_among(CONGESTION),
        default="cubic")
    add("--scheme", "p3; layers for whole layers, first come, first served, over the same servers; ddp for "
        "DistributedDataParallel's ring (default %(default)s)", type=names_among(SCHEMES),
        default="p3")
    add("--compression", "both ways, as int8; up and down, as int8-bf16; of gradients alone, as int8-exact; of DDP's "
        "ring fp16 and bf16 (default %(default)s)", type=list_of(compressions.parse), default=compressions.EXACT,
        metavar="CODEC[,CODEC]")
    add("--clip", "by the global norm: none; norm, the servers' parts of it come before the values; wait, until all "
        "values have come (default %(default)s)", type=names_among(CLIPPING), default="none")
    add("--set", "of P3: %s; of the network: %s" % (", ".join(_OF_P3), ", ".join(_OF_NETWORK)), type=_assignment,
        action="append", default=[], metavar="NAME=VALUE")
    add("--slice-elements", "of a slice, at most; auto: as P3 chooses (default %(default)s)", type=list_of(slice_size),
        default="auto", metavar="N[,N]")
    add("--strategy", "of P3: which servers hold what, as `p3 plan` writes it (default: without)", type=_strategy,
        default=strategies.Strategy(), metavar="FILE")
    add("--batch", "rows of each worker's, where the strategy sends layers by the route factors",
        type=number(1, 1 << 24, int), metavar="ROWS")
    add("--servers", "on the hosts in turn (default: one on each)", type=number(1, MOST_HOSTS, int), metavar="N")
    add("--workers-per-host", "(default 1)", type=number(1, 64, int), default=1, metavar="N")
    add("--groups", "of hosts, whose members each lead their share of the slices: R, or RxR for groups of groups; "
        "of several those that divide the hosts (default: none)", type=list_of(trees.parse), default=[()],
        metavar="R[xR][,R]")
    add("--no-local-aggregation", "each worker of a host pushes for itself", action="store_true")
    add("--sparse", "a layer of which a step touches this share of the rows", type=_pair(str, number(0, 1)),
        action="append", default=[], metavar="LAYER=ALPHA")
    add("--release", "when gradients become ready: layer, each layer's in its turn, or end, all at the end of the "
        "backward pass (default %(default)s)", type=names_among(models.RELEASES), default="layer")
    add("--jitter", "spread of the computation's length: sigma of a log-normal factor (default 0)",
        type=number(0, 2), default=0.0, metavar="SIGMA")
    add("--seed", "of the jitter and of the losses (default 1)", type=number(0, 1 << 32, int), default=1)
    add("--straggler", "a worker that computes so many times as long", action="append", default=[],
        type=_pair(number(0, 1e6, int), number(0, 1e3)), metavar="WORKER=FACTOR")
    add("--bucket-mb", "of DDP (default 25)", type=number(1e-3, 1e6), default=25.0, metavar="MB")
    add("--iterations", "that count (default %(default)s)", type=number(1, 10000, int), default=5, metavar="N")
    add("--warmup", "iterations before them (default %(default)s)", type=number(1, 10000, int), default=2, metavar="N")


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """In the order of the values given. ConfigError for what does not fit together."""
    loaded, compute = _models(options)
    swept = (loaded, compute, options.release, options.rate, options.delay, options.loss, options.congestion,
             options.slice_elements, options.scheme, options.compression, options.clip, options.hosts,
             options.groups)  # fmt: skip
    if options.down is not None and len(options.down) > 1:
        raise ConfigError("p3 simulate takes one --down")
    for combination in itertools.product(*swept):
        (name, compute_s, release, rate, delay_ms, loss, congestion, elements, scheme, compression, clip,
         hosts, groups) = combination  # fmt: skip
        if scheme != "p3" and (elements, groups) != (options.slice_elements[0], options.groups[0]):
            continue  # they are P3's alone
        firsts = (options.loss[0], options.congestion[0], options.clip[0])
        if scheme == "ddp" and (loss, congestion, clip) != firsts:
            continue  # its ring is ideal, and done before any update
        if len(options.compression) > 1 and not can_compress(scheme, compression):
            continue
        if not trees.fit(groups, hosts) and any(trees.fit(others, hosts) for others in options.groups):
            continue
        down = options.down[0] if options.down else rate
        yield Setting(
            model=loaded[name],
            compute_s=compute_s,
            network=network(options, Network(of_hosts(rate, hosts), of_hosts(down, hosts), delay_ms, loss), congestion),
            scheme=scheme,
            compression=compression,
            clip=clip,
            **of_p3(options),
            workers_per_host=options.workers_per_host,
            servers=options.servers,
            slice_elements=elements,
            strategy=options.strategy if scheme == "p3" else strategies.Strategy(),
            local_aggregation=not options.no_local_aggregation,
            groups=groups if scheme == "p3" or len(options.scheme) == 1 else (),
            sparse=dict(options.sparse),
            batch=options.batch,
            release=release,
            jitter=options.jitter,
            seed=options.seed,
            stragglers=dict(options.straggler),
            bucket_mb=options.bucket_mb,
            iterations=options.iterations,
            warmup=options.warmup,
        )


def _models(options: argparse.Namespace) -> Tuple[Dict[str, models.Model], List[float]]:
    """By name; and the seconds that an iteration computes."""
    if options.recorded is None:
        return {name: models.load(name, options.size) for name in options.models}, options.compute or [_COMPUTE_S]
    from p3.measure.replay.recorded import recorded_model
    from p3.trace.lives import load

    if options.size is not None:
        raise ConfigError("--size is a fraction of a model of --models; a recorded run has its own")
    model, compute_s = recorded_model(load(options.recorded), options.compute[0] if options.compute else None)
    return {model.name: model}, options.compute or [compute_s]


def of_p3(options: argparse.Namespace) -> Dict:
    """Fields of a Setting that --set names."""
    return {name: value for name, value in options.set if name in _OF_P3}


def network(options: argparse.Namespace, of: Network, congestion: str) -> Network:
    given = {name: value for name, value in options.set if name in _OF_NETWORK}
    return dataclasses.replace(of, congestion=congestion, **given)


def of_hosts(rate: Tuple[float, ...], hosts: int) -> Tuple[float, ...]:
    if len(rate) > hosts:
        raise ConfigError(f"{len(rate)} rates are given for {hosts} hosts")
    return rate + rate[-1:] * (hosts - len(rate))


# Parsers of single options. What they raise names the text.


def _hosts(text: str) -> List[int]:
    found: List[int] = []
    for part in text.split(","):
        given = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6})(x2)?)?", part)
        first, last = (int(given.group(1)), int(given.group(2) or given.group(1))) if given else (0, 0)
        if not 1 <= first <= last <= MOST_HOSTS:
            raise argparse.ArgumentTypeError(
                f"{part!r} is neither a number of hosts, nor a range as 2-8, nor doubling as 2-1024x2, of at most "
                f"{MOST_HOSTS}"
            )
        while first <= last:
            found.append(first)
            first = 2 * first if given.group(3) else first + 1
    return found


def _strategy(path: str) -> strategies.Strategy:
    try:
        loaded = strategies.load(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for cut in (loaded.default, *loaded.keys.values()):
        if cut.staleness:
            raise argparse.ArgumentTypeError(
                f"the strategy {path} has staleness, of which the simulator knows nothing: leave that out"
            )
    return loaded


def _link_rates(text: str) -> List[Tuple[float, ...]]:
    return [link_rate(part) for part in text.split(",")]


def link_rate(text: str) -> Tuple[float, ...]:
    """One, or one for each host, the last one for all others."""
    return tuple(rates(text.replace(":", ",")))


def _pair(left: Callable, right: Callable) -> Callable[[str], Tuple]:
    def parse(text: str) -> Tuple:
        name, equals, value = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} has no '='")
        return left(name), right(value)

    return parse


def _assignment(text: str) -> Tuple[str, object]:
    name, _, value = text.partition("=")
    if name not in _SETTABLE:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_SETTABLE)}")
    if isinstance(_SETTABLE[name], bool):
        if value not in ("yes", "no"):
            raise argparse.ArgumentTypeError(f"{text!r}: {name} is yes or no")
        return name, value == "yes"
    return name, number(0, 1e9)(value)
