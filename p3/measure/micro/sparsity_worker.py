"""One worker of `p3 bench sparsity`: it trains examples/language_model.py's network with a vocabulary padded to a size.

    python -m p3.measure.micro.sparsity_worker p3_sync rows --vocabulary 40000 --steps 5

Writes JSON lines to standard output: a header, one line for each step, from one loss that can be read to the next, and
the result. Words beyond the vocabulary are folded into it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

STREAMS = 32  # of one worker
SEGMENT = 64
SAMPLES = 1024
SIZE = 128  # of a word's vector, and of the recurrent layer
DENSE_ELEMENTS = 4 * SIZE * (2 * SIZE + 2)  # of the recurrent layer
BATCH = STREAMS * SEGMENT


def batches(text_of, workers: int, rank: int):
    """(words, the words after them), each time x streams, of one worker; without end."""
    streams = text_of(STREAMS * workers).streams[rank::workers]
    while True:
        for start in range(0, streams.shape[1] - SEGMENT, SEGMENT):
            piece = streams[:, start : start + SEGMENT + 1].T
            yield piece[:-1], piece[1:]


def alpha_of_model(touched_words: int, touched_outputs: int, vocabulary: int) -> float:
    """The share of the model's elements that a step of one worker touches (Parallax, section 2.2)."""
    touched = (touched_words + touched_outputs) * SIZE + DENSE_ELEMENTS
    return touched / (2 * vocabulary * SIZE + DENSE_ELEMENTS)


def run(options) -> None:
    from p3.mxnet import hooks

    if options.store not in hooks.NAMES:
        hooks.withdraw()  # the others shall run in an untouched MXNet
    import mxnet as mx
    from mxnet import autograd, gluon

    import language_model as example

    def write(**fields) -> None:
        print(json.dumps(fields), flush=True)

    store = mx.kv.create(options.store)
    mx.random.seed(1)
    random = np.random.RandomState(1 + store.rank)
    net = example.LanguageModel(options.vocabulary, SIZE, SIZE, sparse=options.weights == "rows")
    net.initialize(mx.init.Xavier())
    # MXNet refuses another batch size than the first step's, which with row_sparse weights it takes to be 1.
    trainer = gluon.Trainer(
        net.collect_params(), "adam", {"learning_rate": 0.002, "rescale_grad": 1.0}, kvstore=store,
        update_on_kvstore=True,
    )  # fmt: skip
    scale = 1.0 / (BATCH * store.num_workers)
    losses, alphas, start = [], [], None
    state = net.lstm.begin_state(STREAMS)
    source = batches(example.Text, store.num_workers, store.rank)
    for number in range(-1, options.warmup + options.steps):
        words, following = (one % options.vocabulary for one in next(source))
        state = [part.detach() for part in state]
        with autograd.record():
            others = example.draw(random, options.vocabulary, SAMPLES)
            each, state = example.sampled_loss(net, words, following, others, state, options.vocabulary)
            loss = each.sum() * scale
        loss.backward()
        trainer.step(1)
        losses.append(each.mean().asscalar())
        end = time.monotonic()
        if start is not None:
            write(kind="step", step=number, warmup=number < options.warmup, seconds=end - start, loss=float(losses[-1]))
        start = end
        outputs = np.union1d(following, others)
        alphas.append(alpha_of_model(len(np.unique(words)), len(outputs), options.vocabulary))
    mx.nd.waitall()
    fallen = bool(losses[-1] < losses[0])
    elements = 2 * options.vocabulary * SIZE + DENSE_ELEMENTS
    write(
        kind="result", result="right" if fallen else "wrong", losses=[float(losses[0]), float(losses[-1])],
        alpha=float(np.mean(alphas)), bytes=4 * elements, words=BATCH, workers=store.num_workers,
        stats=store.stats() if hasattr(store, "stats") else None,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a language model on a KVStore.")
    parser.add_argument("store", help="what mx.kv.create is given")
    parser.add_argument("weights", choices=("rows", "whole"), help="of words: row_sparse, or all dense")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5, help="that count (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    run(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
