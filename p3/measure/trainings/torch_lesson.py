"""One worker of `p3 bench learn`: trains a lesson with PyTorch, nothing emulated; only the name of the store differs.

    python -m p3.measure.bench.learn_train --store p3_torch --model gpt --iterations 150

Stores are those of p3.measure.replay.torch_replay, and `alone`: rank RANK of WORLD_SIZE, which talks to nobody. It
writes the lines of p3.replay, and in each iteration's the loss of this worker's own batch. An iteration lasts from one
loss that has been read to the next; the first begins when all workers have come. `digest` is of the weights, which all
workers must have alike, and the result is wrong if the loss has not fallen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from typing import Optional, Sequence

import torch

import p3
from p3.measure.bench.jobs import ALONE
from p3.measure.bench.lessons import LESSONS, bytes_of, data_digest
from p3.measure.replay import torch_replay


def run(options, out) -> bool:
    def write(**fields) -> None:
        print(json.dumps(fields), file=out, flush=True)

    lesson = LESSONS[options.model]
    data = lesson.data()
    torch.manual_seed(1)  # the same first weights on every worker
    net = lesson.make_net(options.size)
    optimizer = lesson.make_optimizer(net)
    if options.store == ALONE.kvstore:
        rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        rank, workers, net = torch_replay.distribute(options.store, net, optimizer)
        torch_replay.wait_for_all(options.store)
    write(
        kind="header", computation="real", store=options.store, rank=rank, workers=workers, model=options.model,
        bytes=bytes_of(net), data=data_digest(data),
        versions={"p3": p3.__version__, "torch": torch.__version__},
    )  # fmt: skip
    losses, start = [], time.monotonic()
    for number in range(options.warmup + options.iterations):
        inputs, targets = lesson.batch(data, number, rank)
        optimizer.zero_grad()
        loss = lesson.loss(net, inputs, targets)
        losses.append(loss.item())
        end = time.monotonic()
        write(
            kind="iteration", iteration=number, warmup=number < options.warmup, start=start, seconds=end - start,
            loss=losses[-1],
        )  # fmt: skip
        start = end
        loss.backward()
        optimizer.step()
    weights = [value.numpy().tobytes() for value in getattr(net, "module", net).state_dict().values()]
    digest = hashlib.sha256(b"".join(weights)).hexdigest()
    few = max(1, len(losses) // 10)
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    right = last < first or options.store == ALONE.kvstore  # so few steps may not have learnt
    write(kind="result", computation="real", result="right" if right else "wrong", digest=digest)
    print(f"{options.store}: the loss went from {first:.3f} to {last:.3f}", file=sys.stderr)
    torch_replay.leave(right)
    return right


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.bench.learn_train", description="Trains a lesson.")
    parser.add_argument("--store", required=True, help="p3_torch, or ddp:25 for buckets of 25 MB, or alone")
    parser.add_argument("--model", required=True, choices=tuple(LESSONS))
    parser.add_argument("--size", type=float, default=1.0, help="about the fraction of the parameters (default 1)")
    parser.add_argument("--iterations", type=int, default=150, help="that count (default 150)")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before them (default 2)")
    options = parser.parse_args(argv)
    if options.iterations < 1 or options.warmup < 0:
        parser.error("--iterations must be at least 1, --warmup at least 0")
    return 0 if run(options, sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
