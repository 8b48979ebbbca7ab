"""Trains a recurrent network to predict the next character of Python's own documentation.

    python examples/characters.py                      # alone, in one process
    p3 run -n 2 -s 2 python examples/characters.py     # two workers and two servers

Gradients of recurrent nets sometimes explode, so they are clipped by their global norm. The norm is that of the joined
batch: the servers tell it before the summed gradients have come, and each of these is clipped as it comes.
"""

import argparse
import math
from pydoc_data.topics import topics

import p3
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

SEED = 1  # all workers start with the same weights
STREAMS = 32  # read in parallel, by all workers together
SEGMENT = 32  # characters that back-propagation reaches back
LARGEST_NORM = 1.0  # of the gradient per character


class LanguageModel(gluon.HybridBlock):
    def __init__(self, characters, hidden=128):
        super().__init__()
        with self.name_scope():
            self.embedding = gluon.nn.Embedding(characters, 32)
            self.lstm = gluon.rnn.LSTM(hidden, input_size=32)
            self.output = gluon.nn.Dense(characters, flatten=False, in_units=hidden)

    def forward(self, text, state):
        """`text` is time x streams."""
        hidden, state = self.lstm(self.embedding(text), state)
        return self.output(hidden), state


def read_streams():
    """The text as rows of character numbers, each row a continuous piece, and how many characters there are."""
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(character) for character in text], dtype="float32")
    length = len(numbers) // (STREAMS + 1)
    return numbers[: length * (STREAMS + 1)].reshape(STREAMS + 1, length), len(alphabet)


def segments(streams):
    """(characters, the characters after them), each time x streams, one segment after the other."""
    streams = mx.nd.array(streams).T
    for start in range(0, len(streams) - SEGMENT, SEGMENT):
        yield streams[start : start + SEGMENT], streams[start + 1 : start + 1 + SEGMENT]


def perplexity(net, loss_of, stream):
    state = net.lstm.begin_state(1)
    losses = []
    for text, following in segments(stream[np.newaxis]):
        output, state = net(text, state)
        losses.append(loss_of(output, following).mean())
    return math.exp(mx.nd.concat(*losses, dim=0).mean().asscalar())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    kv.set_clipping()
    streams, characters = read_streams()
    mine, unseen = np.asarray(p3.shard(streams[:-1])), streams[-1]
    mx.random.seed(SEED)
    net = LanguageModel(characters)
    net.initialize(mx.init.Xavier())
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    parameters = net.collect_params()
    trainer = gluon.Trainer(parameters, "adam", {"learning_rate": 0.004}, kvstore=kv, update_on_kvstore=False)

    characters_of_all = SEGMENT * len(mine) * kv.num_workers
    step = 0
    while step < options.steps:
        state = net.lstm.begin_state(len(mine))
        for text, following in segments(mine):
            state = [part.detach() for part in state]  # back-propagation stops here; the state's values carry over
            with autograd.record():
                output, state = net(text, state)
                loss = loss_of(output, following).mean() * text.size
            loss.backward()
            trainer.allreduce_grads()
            p3.mxnet.clip_global_norm(trainer, LARGEST_NORM * characters_of_all)
            trainer.update(characters_of_all)
            if step % 50 == 0 and kv.rank == 0:
                print(f"step {step}: perplexity {math.exp(loss.asscalar() / text.size):.2f} while learning")
            step += 1
            if step == options.steps:
                break
    print(f"worker {kv.rank} of {kv.num_workers}: perplexity {perplexity(net, loss_of, unseen):.4f} of unseen text")


if __name__ == "__main__":
    main()
