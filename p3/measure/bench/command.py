"""`p3 bench NAME`: the paper's experiments, P3 beside MXNet's own stores, on a lab or on real hosts; and smaller
benchmarks, one for each claim.

    sudo p3 bench targets --models vgg19 --regimes slow --out results.jsonl
    sudo p3 bench pushpull --stores dist_sync,p3_sync

docs/benchmarks.md describes them all, and the records. campaign.py runs the experiments; the rest is p3/measure/micro/.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Dict, List

from p3.errors import ConfigError
from p3.measure.arguments import list_of, names_among, names_of, number, slice_size
from p3.measure.bench import experiments
from p3.measure.jobs import stores
from p3.measure.lab.command import SHAPER_HELP, delay, rates, share, told
from p3.measure.lab.shaping import CONGESTION, SHAPERS
from p3.measure.replay import models
from p3.measure.trainings import resnets
from p3.settings import Settings

_MICRO = {
    "pushpull": "how fast stores move gradients, and at what cost",
    "kernels": "how fast one core sums, encodes and updates slices",
    "soak": "a job whose processes die, for minutes or hours: sums are exact, memory stays flat",
    "sparsity": "how much sparse gradients save in a language model",
    "partitions": "whether the search for the number of partitions ends near the best",
    "trace_cost": "what P3_TRACE costs",
    "step_cost": "what a step of many small parameters costs the thread that trains, with PyTorch",
    "memory": "what a step needs of memory, with PyTorch, beside DDP",
    "selection": "what choosing the largest elements costs, in deep gradient compression",
    "control": "how the scheduler stands many nodes: rendezvous, agreement, memory, the loss of a node",
    "deaths": "how long iterations are while a job has no scheduler, or when it loses a worker or a server",
    "outages": "how much of a training's throughput is left if its processes die: P3, torchrun's restarts, torchft",
    "what_if": "whether p3 trace --what-if is right: changes of a recorded run, predicted and measured",
    "late_updates": "how many more batches training needs if updates arrive late: a simulation, after Zhang's thesis",
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
    known = _options(experiment, defaults)
    for name in experiment.options:
        parser.add_argument("--" + name.replace("_", "-"), **known[name])
    # With a hostfile, a rate that is not given is measured; so that is known only later.
    unknown = dict.fromkeys(("rate", "rates", "hostfile", "size"))
    parser.set_defaults(**{**defaults, **unknown, "default_rate": defaults["rate"]})
    parser.set_defaults(experiment=experiment.name, handler=_bench)


def _options(experiment: experiments.Experiment, defaults: Dict) -> Dict[str, Dict]:
    """All that an experiment may have, as argparse takes them; defaults of those that all know are set at once."""

    def option(help: str, type=None, metavar=None, **how) -> Dict:
        return {"help": help, "type": type, "metavar": metavar, **how}

    def flag(help: str) -> Dict:
        return {"help": help, "action": "store_true"}

    def several(name: str) -> str:
        return "[,...]" if name in experiment.several else ""

    compute = ": the regime's" if defaults["compute"] is None else f" {defaults['compute']}"
    rate = ": the regime's" if defaults["rate"] is None else f" {defaults['rate']}"
    if experiment.is_balanced:
        rate = ": at which communication takes as long as computation"
    a_number, whole = number(1e-9, 1e9), number(1, 10000, int)
    return {
        # What is trained.
        "models": option("models, comma-separated (default %(default)s)", names_among(experiment.models)),
        "size": option(f"fraction of a model's parameters (default: some {experiment.megabytes:.0f} MB)",
                       number(1e-6, 1e3)),
        "depth": option("layers of the net, 6n + 2 (default %(default)s)", int, choices=resnets.DEPTHS,
                        default=resnets.DEPTHS[1]),
        "batch": option("rows that each worker's layers see (default %(default)s)", list_of(number(1, 1 << 20, int)),
                        "K[,...]", default="32"),
        "slices": option("most elements of a slice (default %(default)s)", list_of(number(1, 1 << 28, int)),
                         "ELEMENTS[,...]", default=experiments.SLICES),
        "slice_elements": option("most elements of a slice, in P3 (default %(default)s)", slice_size, "N"),
        "without_held_out": flag("only configurations that the simulator may be tuned by"),
        # How long it computes.
        "compute": option(f"seconds of emulated computation in an iteration (default{compute})", number(0, 1e4), "S"),
        "regimes": option("slow: 200 Mbit/s and 4 s of computation; fast: 800 Mbit/s and 1 s; others as 100mbit/1s "
                          "(default: slow,fast)",
                          names_of(experiments.regime_name), default=",".join(experiments.REGIMES)),
        "ratios": option("the values' time in one direction over the computation's (default %(default)s)",
                         list_of(number(0.01, 100)), "R[,...]", default=experiments.RATIOS),
        "shares": option("the computation over the time that the bound's communication takes (default %(default)s)",
                         list_of(number(0.01, 100)), "S[,...]", default=experiments.SHARES),
        "factors": option("by what the links' rate is multiplied while a job runs (default %(default)s)",
                          list_of(number(0.01, 100)), "F[,...]", default=experiments.FACTORS),
        "of": option("whose links those are (default %(default)s)", choices=("all", "last"), default="all"),
        "links": option("kinds of links: equal; slow, the last host's with half the rate; unlike, from 1.25 times the "
                        "rate to half of it (default %(default)s)", names_among(tuple(experiments.LINKS)),
                        default=",".join(experiments.LINKS)),
        "strategies": option("for each model and kind of links (default %(default)s)", number(2, 1000, int), "N",
                             default=40),
        "jitter": option("spread of the computation's length: sigma of a log-normal factor (default %(default)g)",
                         number(0, 2), "SIGMA"),
        "pause": option("mean pause of each worker in each step: steps of varying length (default none)",
                        number(0, 1e3), "S"),
        "release": option("when gradients become ready: each layer's in its turn, or all at the end of the backward "
                          "pass (default layer)", choices=models.RELEASES),
        "clip": option("gradients to this global norm; stores that cannot are left out (default: not clipped)",
                       a_number, "NORM"),
        # How it learns.
        "optimizer": option("optimizer; none: the stores only sum (default %(default)s)", choices=("none", "sgd")),
        "learning_rate": option("learning rate of SGD (default %(default)g)", number(1e-9, 1e3), "L"),
        "momentum": option("momentum of SGD (default %(default)g)", number(0, 0.999), "M"),
        "loss": option("report the steps or seconds to this loss (default: %s)" % (
            ", ".join("%s %g" % one for one in experiments.GOALS.items()) if experiment.is_balanced else "none"
        ), a_number, "L"),
        "device": option("what computes, as torch calls it: cpu, or cuda, which all hosts of a lab share (default cpu)",
                         metavar="DEVICE", default="cpu"),
        "batch_size": option("samples of each worker's batch (default: the training's own)",
                             number(1, 1 << 20, int), "N"),
        # Where.
        "hosts": option("number of hosts, each with one worker and one server (default %(default)s)",
                        list_of(number(1, 200, int)), "N" + several("hosts")),
        "rate": option(f"rate of each host's link, each way, for example 800mbit (default{rate})", rates,
                       "R" + several("rate")),
        "rates": option("a rate for each host, where they differ", rates, "R,R[,...]"),
        "hostfile": option("real hosts over ssh: nothing is throttled, --rate says how fast they are (default: "
                           "measured)", metavar="FILE"),
        "delay": option("delay between hosts, one way, for example 50ms (default: none)", delay, "D"),
        "packet_loss": option("share of the packets between hosts that are lost, for example 0.1%% (default: none)",
                              share, "P"),
        "shaper": option(SHAPER_HELP, choices=SHAPERS),
        "delays": option("delays between hosts, one way (default %(default)s)", list_of(delay), "D[,...]",
                         default="10ms,100ms"),
        "packet_losses": option("shares of the packets that are lost (default 0%%,0.1%%)", list_of(share), "P[,...]",
                                default="0%,0.1%"),
        "congestions": option("TCP's congestion controls (default %(default)s)", names_among(CONGESTION),
                              default="cubic,bbr"),
        # How often.
        "stores": option("stores, comma-separated; those of torch also with a compression, as p3_torch_int8, "
                         "p3_torch_int8-bf16 or ddp_25_fp16 (default %(default)s)",
                         names_of(stores.among(experiment.stores()))),
        "iterations": option("iterations of a run that count (default %(default)s)", whole, "N"),
        "epochs": option("epochs of a run (default %(default)s)", number(2, 10000, int), "N", dest="iterations"),
        # The first iteration waits for nothing, and would be shorter than the bound.
        "warmup": option("iterations before them, at least 1 (default %(default)s)", whole, "N"),
        "repeats": option("runs of each store in each configuration (default %(default)s)", whole, "N"),
        "timeout": option("limit for a run (default: long enough for slow machines)", number(1, 1e6), "S"),
        "out": option("append JSON lines to FILE", metavar="FILE"),
    }  # fmt: skip


def _bench(options: argparse.Namespace, settings: Settings, _command: List[str]) -> int:
    from p3.measure.bench import campaign

    fill_in_rate(options)
    for name in ("hosts", "rate"):
        able = [one.name for one in experiments.EXPERIMENTS if name in one.several]
        if len(getattr(options, name) or []) > 1 and options.experiment not in able:
            raise ConfigError(f"p3 bench {options.experiment} takes one --{name}; several: {', '.join(able)}")
    if options.rates:
        _check_rates(options)
    if options.hostfile is not None and (options.packet_loss or options.shaper):
        raise ConfigError("p3 bench --packet-loss and --shaper are of a lab's links, not of those of a --hostfile")
    if options.clip is not None:
        leave_out_what_cannot_clip(options)
    with told():
        return campaign.bench(options, settings)


def leave_out_what_cannot_clip(options: argparse.Namespace) -> None:
    left_out = [name for name in options.stores if not stores.named(name).clips]
    options.stores = [name for name in options.stores if name not in left_out]
    if not options.stores:
        able = [name for name in experiments.named(options.experiment).stores() if stores.named(name).clips]
        raise ConfigError(
            f"p3 bench {options.experiment} --clip: {', '.join(left_out)} cannot clip here; name others with --stores: "
            + (", ".join(able) or "this experiment has none")
        )
    if left_out:
        print(f"p3 bench --clip: left out, as they cannot clip here: {', '.join(left_out)}", file=sys.stderr)


def _check_rates(options: argparse.Namespace) -> None:
    if options.hostfile is not None:
        raise ConfigError("p3 bench --rates sets the links of a lab; with --hostfile nothing is throttled")
    if options.hosts != [len(options.rates)] or None in options.rates:
        raise ConfigError(f"p3 bench --rates has {len(options.rates)} rates; it needs one for each of the --hosts")


def fill_in_rate(options: argparse.Namespace) -> None:
    if options.rate is None and options.default_rate is not None and options.hostfile is None:
        options.rate = rates(options.default_rate)
