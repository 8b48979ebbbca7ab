"""One worker that trains a model of the lab with emulated computation, the same for every store: only the name differs.

    python -m p3.replay --store p3_sync --model vgg19 --compute 4.0 --iterations 12 --out worker{rank}.jsonl

Real tensors of the real shapes go through the store's public API, as Gluon's Trainer would send them. An iteration:

    forward, layer by layer:    waits until the layer's weights can be read, then for the layer's forward time
    backward, from the end:     waits for the layer's backward time, then hands its gradients to the store

With `--release end` the backward pass first ends, and then hands over all gradients, in forward order, as Trainer does.

All waiting is done by the training thread, in sleep; as an operation of MXNet's engine it would keep a CPU-only MXNet
from running its own stores' operations. So a machine without GPU behaves as one whose GPU computes.

Gradients are small whole numbers that change with worker, key and iteration; at the end every weight must be exactly
what they add up to, or the result is "wrong" and the exit status 1. With `--dgc` they are random, with
`--compression` all +1/2 or -1/2: compressed.py; with compressed stores of torch random: torch_compressed.py; with
`--factors` fully connected layers are real: factored.py. With `--departing` nobody can know what they add up to, as a
worker may have left: a digest of the weights is told, which all who are left must have alike. With `--clip` they are
clipped by their global norm, which is computed for real, and so weights may differ by its rounding.
docs/replay.md describes the output.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from typing import Optional, Sequence

from p3 import codecs
from p3.measure import arguments, compressions
from p3.measure.replay import gpu_clock, models
from p3.measure.workers.lines import Lines, digest
from p3.measure.workers.mxnet_store import import_mxnet
from p3.mxnet import hooks
from p3.frontend.factors import ROUTES


# Of the options, those that the header repeats.
_TOLD = (
    "optimizer", "dgc", "compression", "factors", "batch", "release", "clip", "departing", "jitter", "seed",
    "iterations", "warmup",
)  # fmt: skip


def _header(options, model, replay) -> dict:
    import numpy

    return {
        "versions": {**replay.versions, "numpy": numpy.__version__, "python": platform.python_version()},
        "store_type": replay.store_type,
        "van": os.environ.get("DMLC_PS_VAN_TYPE", ""),
        "rank": replay.rank,
        "workers": replay.num_workers,
        "model": model.name,
        "size": model.size,
        "bytes": model.bytes,
        "updates": replay.updates,
        "compute_s": options.compute,
        **{name: getattr(options, name) for name in _TOLD},
        "layers": [[layer.name, layer.bytes] for layer in model.layers],
    }


def _is_torch(store: str) -> bool:
    return store.startswith(("p3_torch", "ddp:")) or store == "alone"


def _replay(options, model: models.Model):
    if _is_torch(options.store):
        from p3.measure.replay.torch_compressed import CompressedTorchReplay
        from p3.measure.replay.torch_replay import TorchReplay

        kind = CompressedTorchReplay if compressions.split(options.store)[1] else TorchReplay
        return kind(options.store, model, options.release, options.clip)
    mxnet = import_mxnet(options.store)
    if options.dgc is not None:
        from p3.measure.replay.compressed import CompressedReplay

        return CompressedReplay(mxnet, options.store, model, options.dgc, options.release)
    if options.compression is not None:
        from p3.measure.replay.compressed import EncodedReplay

        return EncodedReplay(mxnet, options.store, model, options.compression, options.release)
    if options.factors is not None:
        from p3.measure.replay.factored import FactoredReplay

        return FactoredReplay(mxnet, options.store, model, options.factors, options.batch, options.release)
    from p3.measure.replay.mxnet_replay import Replay

    return Replay(mxnet, options.store, model, options.optimizer, options.release)


def run(options, model: models.Model, out) -> bool:
    """Replays, writes JSON lines to `out`, and returns whether the weights are right. `out` opens with the rank."""
    replay = _replay(options, model)
    seconds = []
    with out(replay.rank) as file:
        lines = Lines(file, "emulated", options.store)
        lines.header(**_header(options, model, replay))
        factors = gpu_clock.factors(options.jitter, options.seed, replay.rank)
        clock, start = gpu_clock.Clock(), time.monotonic()
        for number, factor in zip(range(options.warmup + options.iterations), factors):
            stalls = replay.iterate(model, options.compute * factor, clock)
            end = time.monotonic()
            is_warmup = number < options.warmup
            if not is_warmup:
                seconds.append(end - start)
            told = [round(stall, 6) for stall in stalls]
            lines.iteration(number, is_warmup, start, end, factor=factor, stall_s=sum(stalls), stalls=told)
            start = end  # writing counts, as the network goes on meanwhile
        wrong = [] if options.departing else replay.wrong_keys()
        told = digest(replay.last_weights()) if options.departing else replay.digest
        lines.result(not wrong, wrong_keys=wrong, digest=told, median_s=statistics.median(seconds))
    print(
        f"{model.name} ({model.bytes / 1e6:.1f} MB), {options.store}, emulated computation of {options.compute:g} s: "
        f"median of {len(seconds)} iterations {statistics.median(seconds):.4f} s; "
        f"weights {'wrong' if wrong else 'told by a digest' if options.departing else 'right'}",
        file=sys.stderr,
    )
    replay.leave(not wrong)
    return not wrong


def _opener(path: str):
    """rank -> where the JSON lines go."""
    if path == "-":
        return lambda rank: os.fdopen(os.dup(sys.stdout.fileno()), "w")
    return lambda rank: open(path.replace("{rank}", str(rank)), "w")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m p3.replay",
        description="Train a model's shapes through a KVStore, with emulated computation. One worker; DMLC_* says of "
        "which job.",
    )
    parser.add_argument("--store", required=True, help="what mx.kv.create is given, e.g. p3_sync or dist_sync; "
                        "or with torch p3_torch, p3_torch:4 with a staleness of 4, or ddp:25 for buckets of 25 MB, "
                        "these also with a compression, as p3_torch+int8 or ddp:25+fp16; or alone: no store")
    parser.add_argument("--model", required=True, choices=models.NAMES)
    parser.add_argument("--size", type=float, help="fraction of the model's parameters (default: the lab's)")
    parser.add_argument(
        "--compute", type=float, required=True, metavar="SECONDS", help="of an iteration, forward and backward"
    )
    parser.add_argument("--iterations", type=int, default=12, help="that count (default 12)")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before them (default 2)")
    parser.add_argument(
        "--optimizer", choices=("none", "sgd"), default="none",
        help="none: every store only sums; sgd: updates where Trainer has them done with this store (default none)",
    )  # fmt: skip
    parser.add_argument(
        "--dgc", type=arguments.number(1e-9, 1), metavar="RATIO",
        help="random gradients, with deep gradient compression of that ratio: needs --optimizer sgd",
    )  # fmt: skip
    parser.add_argument(
        "--compression", type=arguments.name_among(codecs.of_gradients), metavar="TYPE",
        help="gradients of +1/2 and -1/2, encoded by any codec of docs/compression.md but dgc: needs "
        "--optimizer sgd",
    )  # fmt: skip
    parser.add_argument(
        "--factors", choices=ROUTES, metavar="ROUTE",
        help="of vgg19: fully connected layers are real, and their gradients take that route of p3.factors (%s): needs "
        "--optimizer sgd" % ", ".join(ROUTES),
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=arguments.number(1, 1 << 20, int), default=32, metavar="K", help="of real layers (default 32)"
    )
    parser.add_argument(
        "--release", choices=models.RELEASES, default="layer",
        help="when gradients become ready: each layer's in its turn, or all at the end of the backward pass, as those "
        "of lazily batched graphs (default layer)",
    )  # fmt: skip
    parser.add_argument(
        "--clip", type=arguments.number(1e-9, 1e9), metavar="NORM",
        help="the mean gradients, to that global norm: for stores of torch (default: not clipped)",
    )  # fmt: skip
    parser.add_argument(
        "--departing", action="store_true",
        help="workers may depart (P3_ON_WORKER_LOSS=continue): do not compare the weights, tell their digest",
    )  # fmt: skip
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="SIGMA",
        help="spread of the computation's length, by worker and iteration: sigma of a log-normal factor (default 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the jitter (default 1)")
    parser.add_argument("--out", default="-", metavar="FILE", help="for JSON lines; {rank} in it becomes the worker's")
    options = parser.parse_args(argv)
    if not 0 <= options.compute < float("inf"):
        parser.error(f"--compute {options.compute}: must be seconds, 0 or more")
    if options.optimizer == "none" and hooks.may_be_apart(options.store):
        parser.error(f"--store {options.store} updates at each push: it needs --optimizer sgd")
    ways = [way for way in ("dgc", "compression", "factors") if getattr(options, way) is not None]
    if ways and (options.optimizer != "sgd" or options.store not in hooks.NAMES):
        parser.error(f"--{ways[0]} is for stores of P3's in MXNet, and needs --optimizer sgd")
    if ways and options.departing:
        parser.error(f"--departing goes without --{ways[0]}")
    if len(ways) > 1:
        parser.error("only one of " + ", ".join("--" + way for way in ways))
    if options.factors is not None and (options.model != "vgg19" or options.release != "layer"):
        parser.error("--factors is for vgg19, without --release")
    if options.clip is not None and not _is_torch(options.store):
        parser.error(f"--clip is for p3_torch and ddp; the replay of --store {options.store} cannot clip")
    if not 0 <= options.jitter <= 2:
        parser.error(f"--jitter {options.jitter}: must be from 0 to 2")
    if options.iterations < 1 or options.warmup < 0:
        parser.error("--iterations must be at least 1, --warmup at least 0")
    try:
        model = models.load(options.model, options.size)
    except ValueError as error:
        parser.error(str(error))
    return 0 if run(options, model, _opener(options.out)) else 1
