"""`p3 bench NAME`: the paper's experiments, P3 beside MXNet's own stores, on a lab or on real hosts; and smaller
benchmarks, one for each claim.

    sudo p3 bench targets --models vgg19 --regimes slow --out results.jsonl
    sudo p3 bench pushpull --stores dist_sync,p3_sync

docs/benchmarks.md describes them all, and the records. campaign.py runs the experiments; the rest is p3/measure/micro/.
"""

from __future__ import annotations

import argparse
import importlib
from typing import List

from p3.errors import ConfigError
from p3.measure.arguments import list_of, names_among, number, slice_size
from p3.measure.bench import experiments, nets, train
from p3.measure.bench.results import APART
from p3.measure.lab.command import delay, rates, told
from p3.measure.replay import models
from p3.settings import Settings

_MICRO = {
    "pushpull": "how fast stores move gradients, and at what cost",
    "kernels": "how fast one core sums and updates slices",
    "soak": "a million slices with delays and reconnects: sums are exact, memory stays flat",
    "sparsity": "how much sparse gradients save in a language model",
    "partitions": "whether the search for the number of partitions ends near the best",
    "trace_cost": "what P3_TRACE costs",
    "selection": "what choosing the largest elements costs, in deep gradient compression",
    "cards": "bytes of gradients and of their factors on network cards, and whether the rule chooses the fewer",
}


def add_parser(commands) -> None:
    """Adds `bench` to the subparsers of `p3`."""
    bench = commands.add_parser(
        "bench",
        help="run the paper's experiments, P3 beside MXNet's own stores, and smaller benchmarks",
        description="Each run of an experiment is a fresh job on hosts with a slow network: a lab (needs root), or "
        "those of a hostfile.",
    )
    names = bench.add_subparsers(title="experiments and benchmarks", metavar="NAME")
    names.required = True
    for experiment in experiments.EXPERIMENTS:
        _add_experiment(names, experiment)
    for name, sentence in _MICRO.items():
        _add_micro(names, name, sentence)


def _add_micro(names, name: str, sentence: str) -> None:
    """Its module, which parses its own options, is not imported before it runs."""
    # No character starts an option here: all that follows the name, --help too, is left to the module.
    parser = names.add_parser(name, help=sentence, add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(experiment=name, handler=_run_micro)


def _run_micro(options: argparse.Namespace, _settings: Settings, _command: List[str]) -> int:
    module = importlib.import_module("p3.measure.micro." + options.experiment)
    with told():
        return module.main(options.arguments)


def _add_experiment(names, experiment: experiments.Experiment) -> None:
    defaults = {**experiments.COMMON_DEFAULTS, **experiment.defaults}
    defaults = {name: value() if callable(value) else value for name, value in defaults.items()}
    sentence = experiment.help[0].upper() + experiment.help[1:] + "."
    parser = names.add_parser(experiment.name, help=experiment.help, description=sentence)
    is_emulated = experiment.name not in experiments.REAL
    is_learn, is_accuracy = experiment.name == "learn", experiment.name == "accuracy"
    is_open = experiment.name != "validation"  # else its configurations are what they are

    def add(option: str, help: str, **how) -> None:
        parser.add_argument(option, help=help, **how)

    if experiment.name == "factors":
        add("--batch", "rows that each worker's layers see (default %(default)s)",
            type=list_of(number(1, 1 << 20, int)), default="32", metavar="K[,...]")
        parser.set_defaults(models=["vgg19"], jitter=0.0, optimizer="sgd")
    elif is_emulated:
        add("--models", "models, comma-separated (default %(default)s)", type=names_among(models.NAMES))
        add("--jitter", "spread of the computation's length: sigma of a log-normal factor (default %(default)g)",
            type=number(0, 2), metavar="SIGMA", default=0.0)
        add("--optimizer", "optimizer; none: the stores only sum (default %(default)s)", choices=("none", "sgd"),
            default="none")
    else:
        parser.set_defaults(jitter=0.0, optimizer="sgd")
    parser.set_defaults(release="layer", pause=0.0, learning_rate=train.LEARNING_RATE,
                        momentum=train.MOMENTUM)
    if is_emulated and is_open and experiment.name != "factors":
        add("--release", "when gradients become ready: each layer's in its turn, or all at the end of the backward "
            "pass (default layer)", choices=models.RELEASES)
    if experiment.name == "compute":
        add("--pause", "mean pause of each worker in each step: steps of varying length (default none)",
            type=number(0, 1e3), metavar="S", default=0.0)
        add("--learning-rate", "learning rate of SGD (default %(default)g)", type=number(1e-9, 1e3), metavar="L",
            default=train.LEARNING_RATE)
        add("--momentum", "momentum of SGD (default %(default)g)", type=number(0, 0.999), metavar="M",
            default=train.MOMENTUM)
        add("--loss", "report the steps and seconds to this loss (default: none)", type=number(1e-9, 1e9), metavar="L")
    if is_learn:
        add("--models", "models, comma-separated (default %(default)s)", type=names_among(tuple(experiments.GOALS)))
        add("--loss", "report the seconds to this loss (default %s)"
            % ", ".join("%s %g" % one for one in experiments.GOALS.items()), type=number(1e-9, 1e9), metavar="L")
    if is_emulated and is_open and experiment.name != "ratio":
        add("--compute", "seconds of emulated computation in an iteration (default%s)" % _told(defaults["compute"]),
            type=number(0, 1e4), metavar="S")
    if not is_open:
        add("--without-held-out", "only configurations that the simulator may be tuned by", action="store_true")
    if experiment.name == "targets":
        add("--regimes", "slow: 200 Mbit/s and 4 s of computation; fast: 800 Mbit/s and 1 s (default: both)",
            type=names_among(tuple(experiments.REGIMES)), default=",".join(experiments.REGIMES))
    if experiment.name == "slices":
        add("--slices", "most elements of a slice (default %(default)s)",
            type=list_of(number(1, 1 << 28, int)), default=experiments.SLICES, metavar="ELEMENTS[,...]")
    elif is_open:
        add("--slice-elements", "most elements of a slice, in P3 (default %(default)s)", type=slice_size, metavar="N")
    if experiment.name == "ratio":
        add("--ratios", "the values' time in one direction over the computation's (default %(default)s)",
            type=list_of(number(0.01, 100)), default=experiments.RATIOS, metavar="R[,...]")
    mxnets = experiments.ALL + (() if is_accuracy else APART)
    mxnets += experiments.encoded() if is_emulated else ()
    mxnets += experiments.COMPRESSED if is_emulated or is_accuracy else ()
    torchs = () if is_accuracy else experiments.OF_TORCH
    known = names_among(torchs if is_learn else mxnets + torchs)
    if experiment.name == "factors":
        known = names_among(experiments.FACTORED)
    add("--stores", "stores, comma-separated (default %(default)s)", type=known)
    megabytes = 80 * defaults["shrink"] if is_emulated else 10 if is_learn else 13
    if is_accuracy:
        add("--depth", "layers of the net, 6n + 2 (default %(default)s)", type=int, choices=nets.DEPTHS,
            default=nets.DEPTHS[1])
    elif is_open:
        add("--size", "fraction of a model's parameters (default: some %.0f MB)" % megabytes, type=number(1e-6, 1e3))
    add("--hosts", "number of hosts, each with one worker and one server (default %(default)s)",
        type=list_of(number(1, 200, int)), metavar="N" + _more(experiment, "hosts"))
    told_rate = ": at which communication takes as long as computation" if is_learn else _told(defaults["rate"])
    if is_open:
        add("--rate", "rate of each host's link, each way, for example 800mbit (default%s)" % told_rate,
            type=rates, metavar="R" + _more(experiment, "rate"))
        add("--rates", "a rate for each host, where they differ", type=rates, metavar="R,R[,...]")
        add("--hostfile", "real hosts over ssh: nothing is throttled, --rate says how fast they are "
            "(default: measured)", metavar="FILE")
    add("--delay", "delay between hosts, one way, for example 0.1ms (default: none)", type=delay, metavar="D")
    if is_accuracy:
        add("--epochs", "epochs of a run (default %(default)s)", type=number(2, 10000, int), metavar="N",
            dest="iterations")
    else:
        add("--iterations", "iterations of a run that count (default %(default)s)",
            type=number(1, 10000, int), metavar="N")
        # The first iteration waits for nothing, and would be shorter than the bound.
        add("--warmup", "iterations before them, at least 1 (default %(default)s)",
            type=number(1, 10000, int), metavar="N")
    add("--repeats", "runs of each store in each configuration%s (default %%(default)s)"
        % (", each with a seed of its own" if is_accuracy else ""), type=number(1, 10000, int), metavar="N")
    add("--timeout", "limit for a run (default: long enough for slow machines)", type=number(1, 1e6), metavar="S")
    add("--out", "append JSON lines to FILE", metavar="FILE")
    # With a hostfile, a rate that is not given is measured; so that is known only later.
    parser.set_defaults(**dict(defaults, rate=None, rates=None, hostfile=None, size=None,
                               default_rate=defaults["rate"]))
    parser.set_defaults(experiment=experiment.name, handler=_bench)


def _told(default) -> str:
    return ": the regime's" if default is None else f" {default}"


# Of which options an experiment takes several values.
_SWEPT = {"hosts": ("scale", "validation", "factors"), "rate": ("bandwidth", "compute")}


def _more(experiment: experiments.Experiment, option: str) -> str:
    return "[,...]" if experiment.name in _SWEPT[option] else ""


def _bench(options: argparse.Namespace, settings: Settings, _command: List[str]) -> int:
    from p3.measure.bench import campaign

    fill_in_rate(options)
    for name, experiments_ in _SWEPT.items():
        if len(getattr(options, name) or []) > 1 and options.experiment not in experiments_:
            raise ConfigError(f"p3 bench {options.experiment} takes one --{name}; several: {', '.join(experiments_)}")
    if options.rates:
        _check_rates(options)
    if options.experiment == "utilization" and options.hosts[0] < 2:
        raise ConfigError("p3 bench utilization needs at least 2 --hosts: what one sends to itself crosses no card")
    with told():
        return campaign.bench(options, settings)


def _check_rates(options: argparse.Namespace) -> None:
    if options.hostfile is not None:
        raise ConfigError("p3 bench --rates sets the links of a lab; with --hostfile nothing is throttled")
    if options.hosts != [len(options.rates)] or None in options.rates:
        raise ConfigError(f"p3 bench --rates has {len(options.rates)} rates; it needs one for each of the --hosts")


def fill_in_rate(options: argparse.Namespace) -> None:
    if options.rate is None and options.default_rate is not None and options.hostfile is None:
        options.rate = rates(options.default_rate)
