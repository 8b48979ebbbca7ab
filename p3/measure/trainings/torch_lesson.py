"""One worker of `p3 bench learn`: trains a lesson with PyTorch, nothing emulated; only the name of the store differs.

    python -m p3.measure.trainings.torch_lesson --store p3_torch --model gpt --iterations 150

Stores are those of p3/measure/workers/torch_store.py. It writes the lines of p3/measure/workers/lines.py,
and in each iteration's the loss and the accuracy of this worker's own batch. An iteration lasts from one loss that has
been read to the next; the first begins when all workers have come.
`digest` is of the weights, which all workers must have alike, and the result is wrong if the loss has not fallen. With
it stand the loss and the accuracy of what no batch has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Optional, Sequence

import torch

from p3.measure.trainings.lessons import LESSONS, bytes_of
from p3.measure.workers import torch_store
from p3.measure.workers.lines import Lines, digest


def run(options, out) -> bool:
    lines = Lines(out, "real", options.store)
    lesson = LESSONS[options.model]
    data = lesson.data()
    torch.manual_seed(1 + options.seed)  # the same first weights on every worker
    net = lesson.make_net(options.size).to(options.device)
    optimizer = lesson.make_optimizer(net)
    rank, workers, net = torch_store.distribute(options.store, net, optimizer, options.clip)
    torch_store.wait_for_all(options.store)
    lines.header(
        {"torch": torch.__version__}, rank=rank, workers=workers, model=options.model, bytes=bytes_of(net),
        device=torch_store.device_name(options.device),
        data=digest(part.numpy() for part in data),
    )  # fmt: skip
    count = {} if options.batch_size is None else {"count": options.batch_size}
    losses, start = [], time.monotonic()
    for number in range(options.warmup + options.iterations):
        batch = lesson.batch(data, number, rank, options.seed, **count)
        inputs, targets = (part.to(options.device) for part in batch)
        optimizer.zero_grad()
        loss, accuracy = lesson.loss(net, inputs, targets)
        losses.append(loss.item())
        end = time.monotonic()
        lines.iteration(number, number < options.warmup, start, end, loss=losses[-1], accuracy=accuracy)
        start = end
        loss.backward()
        torch_store.clip_as_usual(options.store, net, options.clip)
        optimizer.step()
    torch_store.end_training(options.store, optimizer)
    few = max(1, len(losses) // 10)
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    right = last < first or options.store == torch_store.ALONE  # so few steps may not have learnt
    heldout_loss, heldout_accuracy = lesson.heldout(net, data)
    lines.result(right, digest=digest(torch_store.weights(net)), heldout_loss=heldout_loss,
                 heldout_accuracy=heldout_accuracy)  # fmt: skip
    print(f"{options.store}: the loss went from {first:.3f} to {last:.3f}", file=sys.stderr)
    torch_store.leave(right)
    return right


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m p3.measure.trainings.torch_lesson", description="Trains a lesson.")
    parser.add_argument("--store", required=True, help="p3_torch, p3_local:30 with an exchange every 30 steps, "
                        "or ddp:25 for buckets of 25 MB, these also with a compression, as p3_torch+int8; or alone")
    parser.add_argument("--model", required=True, choices=tuple(LESSONS))
    parser.add_argument("--size", type=float, default=1.0, help="about the fraction of the parameters (default 1)")
    parser.add_argument("--iterations", type=int, default=150, help="that count (default 150)")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before them (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the batches (default 0)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="gradients to that global norm (default: not)")
    parser.add_argument("--device", default="cpu", help="that computes, as torch calls it (default cpu)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples in a batch (default: the lesson's)")
    options = parser.parse_args(argv)
    if options.iterations < 1 or options.warmup < 0:
        parser.error("--iterations must be at least 1, --warmup at least 0")
    try:
        torch.empty(0, device=options.device)
    except (AssertionError, RuntimeError) as error:  # which torch raises depends on how it was built
        parser.error(f"--device {options.device}: {error}")
    return 0 if run(options, sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
