"""The experiments of `p3 bench`: an entry in EXPERIMENTS is all that anybody knows of one.

An experiment is a list of configurations, in each of which all stores are run. What differs from one configuration to
the next is told by their labels. Its entry says which configurations, with which options and defaults, what the workers
compute, what is measured besides times, and how tables and figures show it.
"""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError, Namespace
from functools import partial
from typing import TYPE_CHECKING, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3.errors import ConfigError
from p3.measure.arguments import number
from p3.measure.bench import limits
from p3.measure.bench import validation as validated
from p3.measure.bench.changes import LEAST
from p3.measure.bench.computations import (
    CONVNET, LESSON, LOCAL_LESSON, REPLAY, RESNET, SEEDED_LESSON, Computation,
)  # fmt: skip
from p3.measure.bench.configuration import Configuration, rate_text
from p3.measure.bench.paths import PATHS, TOLERANCES, Path
from p3.measure.jobs.stores import OURS, Store, names, of_codecs, of_torch
from p3.measure.lab.command import rates
from p3.measure.replay import models
from p3.measure.results import records, tables, views
from p3.measure.results.tables import Table, times
from p3.measure.trainings import mxnet_convnet, resnets
from p3.plan.strategy import Strategy

if TYPE_CHECKING:
    from p3.measure.simulate.setting import Setting

RATIOS = "0.6,1.0,1.4"
SLICES = "5000,10000,20000,50000,100000,200000,500000,1000000"
SHARES = "0.25,0.5,1"
FACTORS = "2,0.5"
LINKS = {"equal": (1, 1), "slow": (1, 0.5), "unlike": (1.25, 1, 0.75, 0.5)}  # times the rate: see _of_links()
REGIMES = {"slow": (200.0, 4.0), "fast": (800.0, 1.0)}  # Mbit/s, seconds of computation
TRAINED = "convnet"  # the model of trainings/mxnet_convnet.py
GOALS = {"gpt": 2.5, "convnet": 0.4}  # of trainings/lessons.py: the losses that they shall reach
LESSONS = (*GOALS, "words")  # all that are there
CLIPS = {"gpt": 1.0}  # the norms to which `codecs` and `local_steps` clip their gradients, unless told


def _replayed() -> Tuple[str, ...]:
    """All stores that a replay drives."""
    return names("main", "groups", "apart") + of_codecs() + names("dgc", "torch", "auto", "alone")


# Options, as command.py has them.
_LINKS = ("delay", "packet_loss", "shaper")
_PLACE = ("hosts", "rate", "rates", "hostfile", *_LINKS)
_COURSE = ("iterations", "warmup", "repeats", "timeout", "out")
_REPLAYED = (
    "models", "jitter", "optimizer", "release", "clip", "compute", "slice_elements", "stores", "size", *_PLACE, *_COURSE
)  # fmt: skip


class Experiment(NamedTuple):
    name: str
    help: str
    configurations: Callable[[Namespace], List[Configuration]]
    defaults: Mapping[str, object] = {}  # where COMMON_DEFAULTS do not suit; as on the command line, or made when asked
    options: Sequence[str] = _REPLAYED
    several: Sequence[str] = ()  # of the options hosts and rate, those that take several values
    stores: Callable[[], Sequence[str]] = _replayed  # that may be chosen
    models: Sequence[str] = models.NAMES
    megabytes: float = 80  # about, of a model whose --size is not given
    computation: Computation = REPLAY
    samples_nics: bool = False
    counts_bytes: bool = False  # on the cards, beside the formula, and of memory
    is_paced: bool = False  # an iteration is each worker's own, in the mean
    is_balanced: bool = False  # the rate, if none is given, is that at which values take as long as the computation
    # Runs of one key must lose the same in each step; None: there are no losses, or they may differ.
    agreement: Optional[Callable[[Configuration, int, Store], Hashable]] = None
    tables: Sequence[Callable[[records.Results], List[Table]]] = (partial(times, tables.MODEL),)
    figure: Optional[views.Figure] = None
    is_held_out: Callable[[records.Configuration], bool] = lambda _one: False  # of what simulates it


def named(name: str) -> Experiment:
    """Of a name that is none of EXPERIMENTS', as results of other versions may have: one without a figure."""
    unknown = Experiment(name, "", lambda _options: [])
    return next((one for one in EXPERIMENTS if one.name == name), unknown)


# Configurations


def targets(options: Namespace) -> List[Configuration]:
    return [
        _configuration(
            options, model, compute_s=_one(options.compute, compute_s), rate_mbit=_one(options.rate, rate_mbit),
            label=regime,
        )
        for regime, (rate_mbit, compute_s) in ((name, _regime(name)) for name in options.regimes)
        for model in options.models
    ]  # fmt: skip


def regime_name(text: str) -> str:
    """As argparse's `type`: of REGIMES, or a rate and the seconds of computation, as 100mbit/1s."""
    _regime(text)
    return text


def _regime(name: str) -> Tuple[float, float]:
    """Mbit/s, and seconds of computation."""
    if name in REGIMES:
        return REGIMES[name]
    rate, slash, seconds = name.partition("/")
    if not slash or not seconds.endswith("s"):
        raise ArgumentTypeError(f"{name!r} is none of {', '.join(REGIMES)}, nor a rate and a time, as 100mbit/1s")
    return rates(rate)[0], number(0, 1e4)(seconds[:-1])


def bandwidth(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, model, rate_mbit=rate, label=rate_text(rate))
        for model in options.models
        for rate in options.rate
    ]


def utilization(options: Namespace) -> List[Configuration]:
    _need_hosts(options)
    return [_configuration(options, model, label=rate_text(options.rate[0])) for model in options.models]


def scale(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, model, hosts=count, label=f"{count} hosts")
        for model in options.models
        for count in options.hosts
    ]


def slices(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, model, slice_elements=elements, label=f"slices of {elements}")
        for model in options.models
        for elements in options.slices
    ]


def ratio(options: Namespace) -> List[Configuration]:
    """Communication is what the values alone take in one direction."""
    _need_rate(options)
    made = []
    for model in options.models:
        communication_s = models.load(model, _size(options, model)).bytes * 8 / (options.rate[0] * 1e6)
        for one in options.ratios:
            made.append(_configuration(options, model, compute_s=communication_s / one, label=f"ratio {one:g}"))
    return made


def sweep(options: Namespace) -> List[Configuration]:
    """Communication is what the bound takes if nothing is computed."""
    _need_hosts(options)
    _need_rate(options)
    made = []
    for model in options.models:
        for share in options.shares:
            for rate_mbit in options.rate:
                label = f"{rate_text(rate_mbit)}, computation {share:g} of communication"
                one = _configuration(options, model, label, compute_s=0.0, rate_mbit=rate_mbit, compute_share=share)
                made.append(one._replace(compute_s=float(f"{share * limits.goal(one).seconds:.4g}")))
    return made


def changes(options: Namespace) -> List[Configuration]:
    """From the same rate to others, of all links or of the last host's."""
    _need_rate(options)
    hosts = options.hosts[0]

    def unlike(factor: float) -> Optional[Tuple[float, ...]]:
        links = (options.rate[0],) * (hosts - 1)
        return (*links, options.rate[0] * factor) if options.of == "last" else None

    if options.iterations < LEAST:
        raise ConfigError(f"p3 bench changes needs at least {LEAST} --iterations, of which the last count, not fewer")
    return [
        _configuration(
            options, model, rate_mbit=options.rate[0] * factor, from_mbit=options.rate[0],
            rates_mbit=unlike(factor),
            label=f"{rate_text(options.rate[0])}, then {rate_text(options.rate[0] * factor)}"
                  + (" of the last host" if options.of == "last" else ""),
        )
        for model in options.models
        for factor in options.factors
    ]  # fmt: skip


def staleness(options: Namespace) -> List[Configuration]:
    """Links alike, and one of half the rate."""
    _need_rate(options)
    rate, hosts = options.rate[0], options.hosts[0]
    unlike = (rate,) * (hosts - 1) + (rate / 2,)
    return [
        _configuration(options, model, rates_mbit=rates, label="one slow link" if rates else "equal links")
        for model in options.models
        for rates in ([options.rates and tuple(options.rates)] if options.rates else [None, unlike])
    ]


def plan(options: Namespace) -> List[Configuration]:
    """Without a strategy, and with those of `p3 plan`; unless told, the last of the links has half the rate."""
    _need_rate(options)
    from p3.measure.planning import BUDGET_S
    from p3.measure.planning.search import Search

    made, rates = [], tuple(options.rates or _of_links(options, LINKS["slow"]))
    for model in options.models:
        one = _configuration(options, model, label="", rates_mbit=rates)
        search = Search(_simulated(one))
        tried = {"none": search.without(), "proportional": search.proportional(), "found": search.best(BUDGET_S)}
        made += [
            one._replace(
                label=f"strategy {name}", strategy=name, predicted_s=round(its.seconds, 6),
                strategy_text="" if name == "none" else its.strategy.text(),
            )
            for name, its in tried.items()
        ]  # fmt: skip
    return made


def verdict(options: Namespace) -> List[Configuration]:
    """As many strategies for each model and kind of links."""
    _need_rate(options)
    from p3.measure.planning import BUDGET_S
    from p3.measure.planning.candidates import candidates
    from p3.measure.planning.names import by_number
    from p3.measure.planning.search import Search
    from p3.measure.simulate.predict import predict

    made = []
    for model in options.models:
        for kind in options.links:
            one = _configuration(options, model, label="", rates_mbit=_of_links(options, LINKS[kind]))
            setting = _simulated(one)
            of_it = candidates(setting, Search(setting).best(BUDGET_S), options.strategies)
            for name, its in of_it.items():
                predicted_s = predict(dataclasses.replace(setting, strategy=its)).mean_s
                made.append(one._replace(
                    label=f"{kind} links, strategy {name}", strategy=name, predicted_s=round(predicted_s, 6),
                    strategy_text=by_number(its, setting.model).text() if its != Strategy() else "",
                ))  # fmt: skip
    return made


def _of_links(options: Namespace, factors: Sequence[float]) -> Tuple[float, ...]:
    """Of each host: those of `factors` in turn to the first hosts, the last one's to the last."""
    hosts = options.hosts[0]
    return tuple(options.rate[0] * factors[-1 if host == hosts - 1 else host % (len(factors) - 1)]
                 for host in range(hosts))  # fmt: skip


def _simulated(one: Configuration) -> Setting:
    from p3.measure.simulate.setting import Setting, links

    rates = one.rates_mbit or (one.rate_mbit,) * one.hosts
    return Setting(
        models.load(one.model, one.size), one.compute_s, links(one.hosts, *rates, delay_ms=one.delay_ms or 0.05),
        slice_elements=one.slice_elements, clip="none" if one.clip is None else "norm", release=one.release,
    )  # fmt: skip


def dgc(options: Namespace) -> List[Configuration]:
    if options.rate[0] is None or options.optimizer != "sgd":
        raise ConfigError("p3 bench dgc needs a --rate, and --optimizer sgd: it counts what SGD's steps send")
    return [_configuration(options, model, label=rate_text(options.rate[0])) for model in options.models]


def factors(options: Namespace) -> List[Configuration]:
    _need_rate(options)
    return [
        _configuration(options, "vgg19", hosts=count, batch=batch, label=f"{count} hosts, batches of {batch}")
        for count in options.hosts
        for batch in options.batch
    ]


def paths(those: Mapping[str, Path], options: Namespace) -> List[Configuration]:
    return [_configuration(options, model, path_name=name, label=name) for model in options.models for name in those]


def distance(options: Namespace) -> List[Configuration]:
    _need_hosts(options)
    _need_rate(options)
    return [
        _configuration(
            options, model, delay_ms=delay_ms, packet_loss=loss, congestion=congestion,
            label=f"{delay_ms:g} ms one way, {100 * loss:g}% lost, {congestion}",
        )
        for model in options.models
        for delay_ms in options.delays
        for loss in options.packet_losses
        for congestion in options.congestions
    ]  # fmt: skip


def compute(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, TRAINED, rate_text(rate), compute_s=None, rate_mbit=rate, goal_loss=options.loss)
        for rate in options.rate
    ]


def learn(options: Namespace) -> List[Configuration]:
    """Without --rate, it is chosen when the computation has been measured: `balanced`."""
    rate_mbit = options.rate[0] if options.rate else None
    label = "" if rate_mbit is None else rate_text(rate_mbit)
    return [
        _configuration(
            options, model, label, compute_s=None, rate_mbit=rate_mbit, size=options.size or options.shrink,
            goal_loss=options.loss or GOALS[model], device=options.device, batch_size=options.batch_size,
        )
        for model in options.models
    ]  # fmt: skip


def codecs(options: Namespace) -> List[Configuration]:
    return [
        _configuration(
            options, model, rate_text(options.rate[0]), compute_s=None, clip=options.clip or CLIPS.get(model)
        )
        for model in options.models
    ]  # fmt: skip


def local_steps(options: Namespace) -> List[Configuration]:
    return [
        _configuration(
            options, model, f"{count} workers", compute_s=None, hosts=count, clip=options.clip or CLIPS.get(model)
        )
        for model in options.models
        for count in options.hosts
    ]  # fmt: skip


def _every_period() -> str:
    """Stores: all in each step, and local steps by their number and codec."""
    codecs_ = ("", "_int8", "_int4")
    return ",".join(["p3_torch", *(name + codec for name in names("local") for codec in codecs_)])


def _every_codec() -> str:
    """Stores: exact training, DDP's hooks, and P3 with each codec that is for any optimizer; 2bit with a threshold of
    about what an element of a gradient of norm 1 has."""
    ddp = ["ddp_1", "ddp_1_fp16", "ddp_25_powersgd", "ddp_25_powersgd:2"]
    return ",".join([*ddp, "p3_torch", *(f"p3_torch_{codec}" for codec in of_torch()), "p3_torch_2bit:0.001"])


def accuracy(options: Namespace) -> List[Configuration]:
    rate_mbit, workers = options.rate[0], options.hosts[0]
    if resnets.steps_of_an_epoch(workers) == 0:
        raise ConfigError(f"p3 bench accuracy has too few pictures for {workers} --hosts: no batch would be full")
    return [_configuration(options, resnets.name(options.depth), compute_s=None, label=rate_text(rate_mbit))]


def balanced(configuration: Configuration, bytes_: int, compute_s: float) -> Configuration:
    """At the rate where the values take as long in one direction as an iteration computes."""
    rate_mbit = float(f"{bytes_ * 8 / 1e6 / compute_s:.3g}")
    return configuration._replace(rate_mbit=rate_mbit, compute_s=round(compute_s, 4), label=rate_text(rate_mbit))


def validation(options: Namespace) -> List[Configuration]:
    """Those of the chosen models and numbers of hosts."""
    made = []
    for row in validated.ROWS:
        if row.model not in options.models or row.hosts not in options.hosts:
            continue
        if row.held_out and options.without_held_out:
            continue
        equal = len(row.rates_mbit) == 1
        label = f"{row.hosts} hosts, {' '.join(map(rate_text, row.rates_mbit))}, slices of {row.slice_elements}"
        made.append(_configuration(
            options, row.model, size=models.LAB_SIZES[row.model] * row.share, compute_s=row.compute_s,
            rate_mbit=float(row.rates_mbit[0]), hosts=row.hosts, slice_elements=row.slice_elements,
            label=label + (", held out" if row.held_out else ""), rates_mbit=None if equal else row.rates_mbit,
        ))  # fmt: skip
    if not made:
        raise ConfigError("p3 bench validation has no configuration of these --models with these --hosts")
    return made


def _configuration(options: Namespace, model: str, label: str, **differing) -> Configuration:
    """Of the options, but for what differs."""
    fields = {
        "compute_s": options.compute,
        "rate_mbit": options.rate[0] if options.rate else None,
        "rates_mbit": options.rates and tuple(options.rates),
        "hosts": options.hosts[0],
        "slice_elements": options.slice_elements,
        "release": options.release,
        "clip": options.clip,
        "delay_ms": options.delay,
        "packet_loss": options.packet_loss,
        "shaper": options.shaper,
        **differing,
    }
    if fields["rates_mbit"]:
        fields["rate_mbit"] = max(fields["rates_mbit"])
    return Configuration(
        experiment=options.experiment, model=model, label=label,
        computation=named(options.experiment).computation.name, **{"size": _size(options, model), **fields},
    )  # fmt: skip


def _need_hosts(options: Namespace) -> None:
    if options.hosts[0] < 2:
        raise ConfigError(
            f"p3 bench {options.experiment} needs at least 2 --hosts: what one sends to itself crosses no card"
        )


def _need_rate(options: Namespace) -> None:
    if None in options.rate:
        raise ConfigError(f"p3 bench {options.experiment} needs a --rate: on one host there is none to measure")


def _size(options: Namespace, model: str) -> float:
    if options.size is not None:
        return options.size
    return models.LAB_SIZES.get(model, 1.0) * options.shrink


def _one(given, default):
    """Of an option that may be a list."""
    if given is None:
        return default
    return given[0] if isinstance(given, list) else given


def _but(left_out: Sequence[str], *instead: str) -> Tuple[str, ...]:
    """A replay's options."""
    return tuple(name for name in _REPLAYED if name not in left_out) + instead


EXPERIMENTS: Tuple[Experiment, ...] = (
    Experiment(
        "targets", "each model at a slow and a fast rate: speedups over MXNet's stores, distance to the bound", targets,
        {"stores": "dist_sync,mxnet_p3,p3_sync", "rate": None, "compute": None},
        options=("regimes", *_REPLAYED),
        tables=(partial(tables.times_by_compression, tables.MODEL),),
        figure=views.Figure("bars", "Iteration time"),
    ),
    Experiment(
        "bandwidth", "throughput against the rate of the network (paper, Fig. 7)", bandwidth,
        {"rate": "100mbit,200mbit,300mbit,400mbit,600mbit,800mbit,1200mbit"},
        several=("rate",),
        tables=(partial(times, tables.RATE), tables.best_speedups),
        figure=views.Figure("lines", "Throughput against bandwidth", views.RATE, views.THROUGHPUT),
    ),
    Experiment(
        "utilization", "bytes in and out of each network card, every 10 ms (Fig. 8 and 9)", utilization,
        {"repeats": 1},
        samples_nics=True,
        tables=(partial(times, tables.MODEL), tables.idle_shares),
        figure=views.Figure("cards"),
    ),
    # On one machine all hosts share its cores: a fifth of the bytes at a fifth of the rate.
    Experiment(
        "scale", "throughput against the number of hosts (Fig. 10)", scale,
        {"hosts": "2,4,8,16", "rate": "40mbit", "compute": 4.0, "shrink": 0.2},
        several=("hosts",), megabytes=16,
        tables=(partial(times, tables.HOSTS),),
        figure=views.Figure("lines", "Throughput against the number of hosts", views.HOSTS, views.BATCHES),
    ),
    Experiment(
        "slices", "throughput against the size of a slice (Fig. 12)", slices, {"stores": OURS},
        options=_but(["slice_elements"], "slices"),
        tables=(partial(times, tables.SLICE),),
        figure=views.Figure("lines", "Throughput against the size of a slice", views.SLICE, views.THROUGHPUT),
    ),
    Experiment(
        "ratio", "throughput against the ratio of communication to computation", ratio,
        {"rate": "200mbit", "compute": None},
        options=_but(["compute"], "ratios"),
        tables=(partial(times, tables.RATIO),),
        figure=views.Figure("lines", "Iteration time against the ratio of communication to computation", views.RATIO,
                            views.TIME),
    ),
    Experiment(
        "sweep", "distance to the bound against the rate, at several shares of computation", sweep,
        {"stores": f"{OURS},p3_torch", "models": "vgg19,resnet50", "hosts": "4", "compute": None, "shrink": 0.5,
         "rate": "30mbit,50mbit,80mbit,120mbit,200mbit,300mbit,450mbit,700mbit,1000mbit",
         "iterations": 4, "warmup": 1},
        options=_but(["compute", "rates"], "shares"), several=("rate",), megabytes=40,
        tables=(partial(times, tables.RATE), tables.far_from_bound),
        figure=views.Figure("shares", "Distance to the bound against bandwidth", views.RATE_OF_SHARES,
                            views.OVER_BOUND),
    ),
    Experiment(
        "changes", "links whose rate changes while a job runs: iterations before, just after and ten later", changes,
        {"stores": OURS, "models": "vgg19", "hosts": "4", "rate": "200mbit", "shrink": 0.5, "iterations": 24},
        options=_but(["rates", "hostfile"], "factors", "of"), megabytes=40,
        tables=(tables.changed,),
    ),
    Experiment(
        "paths", "other queues, shapers and congestion controls, TLS, several workers on a host", partial(paths, PATHS),
        {"stores": OURS, "hosts": "4", "rate": "200mbit", "compute": 4.0, "models": "vgg19", "iterations": 3,
         "warmup": 1},
        tables=(partial(times, tables.PATH),),
    ),
    Experiment(
        "fault_tolerance", "settings with which a job goes on without lost processes, while none is lost",
        partial(paths, TOLERANCES),
        {"stores": f"{OURS},p3_torch", "hosts": "4", "rate": "200mbit", "compute": 1.0, "models": "vgg19",
         "shrink": 0.5},
        megabytes=40, tables=(partial(times, tables.TOLERANCE),),
    ),
    Experiment(
        "distance", "hosts far from each other: delays, losses and congestion controls, and the bound with that delay",
        distance,
        {"stores": OURS, "models": "vgg19", "rate": "100mbit", "shrink": 0.2, "iterations": 4, "repeats": 1},
        options=_but(["rates", "hostfile", "delay", "packet_loss"], "delays", "packet_losses", "congestions"),
        megabytes=16,
        tables=(partial(times, tables.DISTANCE),),
    ),
    Experiment(
        "staleness", "workers that may be rounds apart, beside dist_async: steps of varying length, a slow link",
        staleness,
        {"stores": ",".join(("dist_sync", OURS, *names("apart"))), "models": "resnet50", "hosts": "4",
         "rate": "200mbit", "compute": 4.0, "iterations": 12, "jitter": 0.3, "optimizer": "sgd"},
        is_paced=True,
        tables=(partial(times, tables.RATES),),
    ),
    Experiment(
        "plan", "links that differ: with equal shares of the servers, and with those of `p3 plan`", plan,
        {"stores": OURS, "models": "vgg19", "hosts": "4", "rate": "40mbit", "compute": 4.0, "shrink": 0.2},
        options=_but(["hostfile"]), megabytes=16,
        tables=(tables.planned,),
    ),
    Experiment(
        "verdict", "many strategies, each predicted and measured: how much longer an iteration is with what `p3 plan` "
        "would take than with the best",
        verdict,
        {"stores": OURS, "models": "vgg19,sockeye", "hosts": "4", "rate": "200mbit", "shrink": 0.2, "iterations": 3,
         "warmup": 1, "repeats": 1},
        options=_but(["hostfile", "rates", "clip"], "links", "strategies"), megabytes=16,
        stores=lambda: (OURS,),  # whose keys by_number() knows
        tables=(tables.judged,),
    ),
    Experiment(
        "dgc", "deep gradient compression on a slow network, and encodings: seconds, and bytes on the cards beside the "
        "formula",
        dgc,
        {"stores": lambda: ",".join((OURS, *of_codecs(), *names("dgc"))), "models": "vgg19", "hosts": "4",
         "rate": "100mbit", "optimizer": "sgd"},
        samples_nics=True, counts_bytes=True,
        tables=(partial(tables.counted, OURS),),
    ),
    Experiment(
        "factors", "real fully connected layers: gradients as they are, as sufficient factors, or as the rule says",
        factors,
        {"stores": ",".join(names("factored")), "hosts": "2,4,8", "rate": "40mbit", "compute": 2.0, "shrink": 0.2,
         "models": ["vgg19"], "optimizer": "sgd", "warmup": 2},
        options=("batch", "compute", "slice_elements", "stores", "size", *_PLACE, *_COURSE),
        several=("hosts",), stores=lambda: names("factored"), megabytes=16,
        samples_nics=True, counts_bytes=True,
        tables=(partial(tables.counted, "p3_dense"),),
    ),
    Experiment(
        "compute", "a real training with Gluon, nothing emulated", compute,
        {"rate": "100mbit", "compute": None, "iterations": 20, "warmup": 5, "optimizer": "sgd"},
        options=(
            "pause", "learning_rate", "momentum", "loss", "clip", "slice_elements", "stores", "size", *_PLACE, *_COURSE
        ),
        several=("rate",), stores=lambda: names("main", "apart", "torch"), megabytes=13, computation=CONVNET,
        tables=(partial(times, tables.RATE), tables.last_losses, tables.ways_to_goals),
        figure=views.Figure("bars", "Iteration time of real training"),
    ),
    Experiment(
        "learn", "seconds to a given loss: a GPT and a convolutional net trained with PyTorch, nothing emulated", learn,
        {"models": ",".join(GOALS), "stores": ",".join(names("torch")), "rate": None, "compute": None,
         "iterations": 150, "optimizer": "sgd"},
        options=(
            "models", "loss", "clip", "device", "batch_size", "slice_elements", "stores", "size", *_PLACE, *_COURSE
        ),
        stores=lambda: names("torch", "local"), models=tuple(GOALS), megabytes=10, computation=LESSON,
        is_balanced=True,
        agreement=lambda configuration, _repeat, store: (configuration, None if store.trains_exactly else store.name),
        tables=(partial(times, tables.MODEL), tables.seconds_to_goals),
        figure=views.Figure("curves", "Loss over seconds of real training"),
    ),
    Experiment(
        "codecs", "what compression costs in learning: losses of a GPT, clipped, of a convolutional net and of a "
        "language model with rows, trained with PyTorch, with every codec both ways and with DDP's hooks; a seed for "
        "each repeat",
        codecs,
        {"models": ",".join(LESSONS), "stores": _every_codec, "rate": "200mbit", "compute": None, "shrink": 0.3,
         "iterations": 197, "warmup": 3, "optimizer": "sgd"},
        options=("models", "clip", "slice_elements", "stores", "size", *_PLACE, *_COURSE),
        stores=lambda: names("torch"), models=LESSONS, megabytes=3, computation=SEEDED_LESSON,
        agreement=lambda configuration, repeat, store: (configuration, repeat, store.compression and store.name),
        tables=(tables.losses_of_seeds,),
        figure=views.Figure("losses", "Loss with and without compression"),
    ),
    Experiment(
        "local_steps", "what local steps cost in learning: the loss of held out data after as many steps, by workers, "
        "steps between two exchanges, and codec; a seed for each repeat",
        local_steps,
        {"models": "gpt", "stores": _every_period, "hosts": "2,4", "rate": "1000mbit", "compute": None, "shrink": 0.3,
         "iterations": 300, "warmup": 0, "optimizer": "sgd"},
        options=("models", "clip", "slice_elements", "stores", "size", *_PLACE, *_COURSE), several=("hosts",),
        stores=lambda: names("torch", "local"), models=LESSONS, megabytes=3, computation=LOCAL_LESSON,
        agreement=lambda configuration, repeat, store: (
            configuration, repeat, None if store.trains_exactly else store.name
        ),
        tables=(tables.of_local_steps,),
    ),
    Experiment(
        "accuracy", "test accuracy of a real residual net against epochs and seconds, a seed for each repeat (Fig. 11)",
        accuracy,
        {"stores": ",".join(("dist_sync", OURS, *names("dgc"))), "hosts": "4", "rate": "100mbit", "compute": None,
         "iterations": 30, "warmup": 1, "repeats": 5, "optimizer": "sgd"},
        options=("depth", "slice_elements", "stores", *_PLACE, "epochs", "repeats", "timeout", "out"),
        stores=lambda: names("main", "dgc"), computation=RESNET,
        agreement=lambda configuration, repeat, store: (configuration, repeat, store.compression),
        tables=(tables.final_accuracies, partial(times, tables.MODEL)),
        figure=views.Figure("accuracies", "Accuracy with and without lost gradients"),
    ),
    Experiment(
        "validation", "many different configurations, each short, for `p3 simulate --validate`", validation,
        {"stores": OURS, "hosts": "2,3,4,6,8", "rate": None, "compute": None, "iterations": 3, "repeats": 1},
        options=("models", "jitter", "optimizer", "without_held_out", "stores", "hosts", *_LINKS, *_COURSE),
        several=("hosts",),
        tables=(partial(times, tables.ALL),),
        is_held_out=validated.is_held_out,
    ),
)  # fmt: skip

COMMON_DEFAULTS: Dict = {
    "models": ",".join(models.NAMES),
    "stores": ",".join(names("main")),
    "hosts": "2",
    "rate": "800mbit",
    "compute": 1.0,
    "delay": 0.0,
    "packet_loss": 0.0,
    "shaper": None,
    "slice_elements": "auto",
    "iterations": 5,
    "warmup": 2,
    "repeats": 3,
    "shrink": 1.0,
    "jitter": 0.0,
    "optimizer": "none",
    "release": "layer",
    "clip": None,
    "pause": 0.0,
    "learning_rate": mxnet_convnet.LEARNING_RATE,
    "momentum": mxnet_convnet.MOMENTUM,
}
