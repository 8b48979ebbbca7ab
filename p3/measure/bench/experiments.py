"""What each experiment of `p3 bench` compares: its defaults, and its configurations.

An experiment is a list of configurations, in each of which all stores are run. What differs from one configuration to
the next is told by their labels.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from p3 import codecs
from p3.errors import ConfigError, NotBuilt
from p3.measure.bench import nets
from p3.measure.bench import validation as validated
from p3.measure.bench.paths import PATHS, Path
from p3.measure.bench.results import APART
from p3.measure.replay import models
from p3.plan import key_plan

ALL = ("dist_sync", "mxnet_p3", "p3_slicing", "p3_sync")
COMPRESSED = ("p3_dgc_0.01", "p3_dgc_0.001")  # by deep gradient compression
FACTORED = ("p3_dense", "p3_factors", "p3_rule")  # whose fully connected layers are real
OF_TORCH = ("ddp_1", "ddp_5", "ddp_25", "p3_torch")
REGIMES = {"slow": (200.0, 4.0), "fast": (800.0, 1.0)}  # Mbit/s, seconds of computation
RATIOS = "0.6,1.0,1.4"
SLICES = "5000,10000,20000,50000,100000,200000,500000,1000000"
TRAINED = "convnet"  # the model of `compute`; see train.py
GOALS = {"gpt": 2.5, "convnet": 0.4}  # of `learn`, see lessons.py: the losses that they shall reach
REAL = ("compute", "learn", "accuracy")  # what emulates nothing


def encoded() -> Tuple[str, ...]:
    """Stores of compressed gradients. None without the core: no job runs then, but `p3 --help` does."""
    try:
        return tuple("p3_" + name for name in codecs.of_gradients())
    except NotBuilt:
        return ()


class Configuration(NamedTuple):
    """What is the same for all stores that are compared."""

    experiment: str
    model: str
    size: float
    compute_s: Optional[float]  # emulated; or of a real iteration, None where that was not measured
    rate_mbit: Optional[float]
    delay_ms: float
    hosts: int
    slice_elements: int
    label: str = ""  # what sets it apart, in words, besides the model
    goal_loss: Optional[float] = None  # that a training shall reach
    rates_mbit: Optional[Tuple[float, ...]] = None  # of each host, where they differ; then rate_mbit is the greatest
    path_name: Optional[str] = None  # of `paths`
    release: str = "layer"  # when gradients become ready: of models.RELEASES
    batch: Optional[int] = None  # of real fully connected layers

    @property
    def path(self) -> Path:
        return Path() if self.path_name is None else PATHS[self.path_name]

    @property
    def workers(self) -> int:
        return self.hosts * self.path.workers_per_host

    @property
    def is_emulated(self) -> bool:
        return self.experiment not in REAL

    @property
    def title(self) -> str:
        return f"{self.model} {self.label}".strip()

    def identity(self) -> Dict:
        return {
            "experiment": self.experiment,
            "model": self.model,
            "size": self.size,
            "computation": "emulated" if self.is_emulated else "real",
            "compute_s": self.compute_s,
            "rate_mbit": self.rate_mbit,
            "rates_mbit": self.rates_mbit and list(self.rates_mbit),
            "delay_ms": self.delay_ms,
            "hosts": self.hosts,
            "workers": self.workers,
            "servers": self.hosts,
            "slice_elements": self.slice_elements,
            "label": self.label,
            **({} if self.goal_loss is None else {"goal_loss": self.goal_loss}),
            **({} if self.path_name is None else {"path": self.path_name}),
            **({} if self.release == "layer" else {"release": self.release}),
            **({} if self.batch is None else {"batch": self.batch}),
        }


class Experiment(NamedTuple):
    name: str
    help: str
    configurations: Callable[[Namespace], List[Configuration]]
    defaults: Dict = {}
    samples_nics: bool = False


def targets(options: Namespace) -> List[Configuration]:
    return [
        _configuration(
            options, model, compute_s=_one(options.compute, compute_s), rate_mbit=_one(options.rate, rate_mbit),
            label=regime,
        )
        for regime, (rate_mbit, compute_s) in ((name, REGIMES[name]) for name in options.regimes)
        for model in options.models
    ]  # fmt: skip


def bandwidth(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, model, rate_mbit=rate, label=rate_text(rate))
        for model in options.models
        for rate in options.rate
    ]


def utilization(options: Namespace) -> List[Configuration]:
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
    if options.rate[0] is None:
        raise ConfigError("p3 bench ratio needs a --rate: on one host there is none to measure")
    made = []
    for model in options.models:
        communication_s = models.load(model, _size(options, model)).bytes * 8 / (options.rate[0] * 1e6)
        for one in options.ratios:
            made.append(_configuration(options, model, compute_s=communication_s / one, label=f"ratio {one:g}"))
    return made


def staleness(options: Namespace) -> List[Configuration]:
    """Links alike, and one of half the rate."""
    if options.rate[0] is None:
        raise ConfigError("p3 bench staleness needs a --rate: on one host there is none to measure")
    rate, hosts = options.rate[0], options.hosts[0]
    unlike = (rate,) * (hosts - 1) + (rate / 2,)
    return [
        _configuration(options, model, rates_mbit=rates, label="one slow link" if rates else "equal links")
        for model in options.models
        for rates in ([options.rates and tuple(options.rates)] if options.rates else [None, unlike])
    ]


def dgc(options: Namespace) -> List[Configuration]:
    if options.rate[0] is None or options.optimizer != "sgd":
        raise ConfigError("p3 bench dgc needs a --rate, and --optimizer sgd: it counts what SGD's steps send")
    return [_configuration(options, model, label=rate_text(options.rate[0])) for model in options.models]


def factors(options: Namespace) -> List[Configuration]:
    if options.rate[0] is None:
        raise ConfigError("p3 bench factors needs a --rate: on one host there is none to measure")
    return [
        _configuration(options, "vgg19", hosts=count, batch=batch, label=f"{count} hosts, batches of {batch}")
        for count in options.hosts
        for batch in options.batch
    ]


def paths(options: Namespace) -> List[Configuration]:
    return [_configuration(options, model, path_name=name, label=name) for model in options.models for name in PATHS]


def compute(options: Namespace) -> List[Configuration]:
    return [
        _configuration(options, TRAINED, rate_mbit=rate, label=rate_text(rate))._replace(
            compute_s=None, goal_loss=options.loss
        )
        for rate in options.rate
    ]


def learn(options: Namespace) -> List[Configuration]:
    """Without --rate, it is chosen when the computation has been measured: `balanced`."""
    rate_mbit = options.rate[0] if options.rate else None
    return [
        _configuration(
            options, model, compute_s=None, rate_mbit=rate_mbit, label="" if rate_mbit is None else rate_text(rate_mbit)
        )._replace(size=options.size or options.shrink, goal_loss=options.loss or GOALS[model])
        for model in options.models
    ]


def accuracy(options: Namespace) -> List[Configuration]:
    rate_mbit, workers = options.rate[0], options.hosts[0]
    if nets.steps_of_an_epoch(workers) == 0:
        raise ConfigError(f"p3 bench accuracy has too few pictures for {workers} --hosts: no batch would be full")
    return [_configuration(options, nets.name(options.depth), compute_s=None, label=rate_text(rate_mbit))]


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


# Defaults are written as on the command line, or made when they are asked for.
EXPERIMENTS: Tuple[Experiment, ...] = (
    Experiment(
        "targets", "each model at a slow and a fast rate: speedups over MXNet's stores, distance to the bound", targets,
        {"stores": "dist_sync,mxnet_p3,p3_sync", "rate": None, "compute": None},
    ),
    Experiment(
        "bandwidth", "throughput against the rate of the network (paper, Fig. 7)", bandwidth,
        {"rate": "100mbit,200mbit,300mbit,400mbit,600mbit,800mbit,1200mbit"},
    ),
    Experiment(
        "utilization", "bytes in and out of each network card, every 10 ms (Fig. 8 and 9)", utilization,
        {"repeats": 1}, samples_nics=True,
    ),
    # On one machine all hosts share its cores: a fifth of the bytes at a fifth of the rate.
    Experiment(
        "scale", "throughput against the number of hosts (Fig. 10)", scale,
        {"hosts": "2,4,8,16", "rate": "40mbit", "compute": 4.0, "shrink": 0.2},
    ),
    Experiment(
        "slices", "throughput against the size of a slice (Fig. 12)", slices, {"stores": "p3_sync"},
    ),
    Experiment(
        "ratio", "throughput against the ratio of communication to computation", ratio,
        {"rate": "200mbit", "compute": None},
    ),
    Experiment(
        "paths", "other queues, shapers and congestion controls, TLS, several workers on a host", paths,
        {"stores": "p3_sync", "hosts": "4", "rate": "200mbit", "compute": 4.0, "models": "vgg19", "iterations": 3,
         "warmup": 1},
    ),
    Experiment(
        "staleness", "workers that may be rounds apart, beside dist_async: steps of varying length, a slow link",
        staleness,
        {"stores": ",".join(("dist_sync", "p3_sync", *APART)), "models": "resnet50", "hosts": "4", "rate": "200mbit",
         "compute": 4.0, "iterations": 12, "jitter": 0.3, "optimizer": "sgd"},
    ),
    Experiment(
        "dgc", "deep gradient compression on a slow network, and encodings: seconds, and bytes on the cards beside the "
        "formula",
        dgc,
        {"stores": lambda: ",".join(("p3_sync", *encoded(), *COMPRESSED)), "models": "vgg19", "hosts": "4",
         "rate": "100mbit", "optimizer": "sgd"},
        samples_nics=True,
    ),
    Experiment(
        "factors", "real fully connected layers: gradients as they are, as sufficient factors, or as the rule says",
        factors,
        {"stores": ",".join(FACTORED), "hosts": "2,4,8", "rate": "40mbit", "compute": 2.0, "shrink": 0.2,
         "optimizer": "sgd", "warmup": 2},
        samples_nics=True,
    ),
    Experiment(
        "compute", "a real training with Gluon, nothing emulated", compute,
        {"rate": "100mbit", "compute": None, "iterations": 20, "warmup": 5},
    ),
    Experiment(
        "learn", "seconds to a given loss: a GPT and a convolutional net trained with PyTorch, nothing emulated", learn,
        {"models": ",".join(GOALS), "stores": ",".join(OF_TORCH), "rate": None, "compute": None, "iterations": 150},
    ),
    Experiment(
        "accuracy", "test accuracy of a real residual net against epochs and seconds, a seed for each repeat (Fig. 11)",
        accuracy,
        {"stores": ",".join(("dist_sync", "p3_sync", *COMPRESSED)), "hosts": "4", "rate": "100mbit", "compute": None,
         "iterations": 30, "warmup": 1, "repeats": 5},
    ),
    Experiment(
        "validation", "many different configurations, each short, for `p3 simulate --validate`", validation,
        {"stores": "p3_sync", "hosts": "2,3,4,6,8", "rate": None, "compute": None, "iterations": 3, "repeats": 1},
    ),
)  # fmt: skip

COMMON_DEFAULTS: Dict = {
    "models": ",".join(models.NAMES),
    "stores": ",".join(ALL),
    "hosts": "2",
    "rate": "800mbit",
    "compute": 1.0,
    "delay": 0.0,
    "slice_elements": "auto",
    "iterations": 5,
    "warmup": 2,
    "repeats": 3,
    "shrink": 1.0,
}


def rate_text(rate_mbit: Optional[float]) -> str:
    return "no limit" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"


def _configuration(options: Namespace, model: str, label: str, **differing) -> Configuration:
    """Of the options, but for what differs."""
    fields = {
        "compute_s": options.compute,
        "rate_mbit": options.rate[0] if options.rate else None,
        "rates_mbit": options.rates and tuple(options.rates),
        "hosts": options.hosts[0],
        "slice_elements": options.slice_elements,
        "release": options.release,
        **differing,
    }
    fields["slice_elements"] = key_plan.slice_elements(fields["slice_elements"], num_servers=fields["hosts"])
    if fields["rates_mbit"]:
        fields["rate_mbit"] = max(fields["rates_mbit"])
    return Configuration(
        experiment=options.experiment, model=model, delay_ms=options.delay, label=label,
        **{"size": _size(options, model), **fields},
    )  # fmt: skip


def _size(options: Namespace, model: str) -> float:
    if options.size is not None:
        return options.size
    return models.LAB_SIZES.get(model, 1.0) * options.shrink


def _one(given, default):
    """Of an option that may be a list."""
    if given is None:
        return default
    return given[0] if isinstance(given, list) else given
