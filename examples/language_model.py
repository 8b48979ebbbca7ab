"""Trains a recurrent network to predict the next word of Python's own documentation.

    python examples/language_model.py                      # alone, in one process
    p3 run -n 2 -s 2 python examples/language_model.py     # two workers and two servers

The vocabulary is large, and a batch contains few of its words. So the words' vectors, and those that score the next
word, are `row_sparse`: each worker fetches only the rows that its batch needs and sends only their gradients, while the
recurrent layer's weights are synchronised whole. The next word is scored against a sample of other words only (sampled
softmax); otherwise all rows would be needed.
"""

import argparse
import collections
import math
import re
from pydoc_data.topics import topics

import p3
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

SEED = 1  # all workers start with the same weights
STREAMS = 16  # read in parallel, by all workers together
SEGMENT = 16  # words that back-propagation reaches back
SAMPLES = 128  # other words that the next one is scored against


class Text:
    """The words as numbers, the most frequent first, in rows: each row a continuous piece."""

    def __init__(self, streams):
        words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)).lower())
        counts = collections.Counter(words)
        by_count = sorted(counts.items(), key=lambda one: (-one[1], one))
        numbers = {word: number for number, (word, _) in enumerate(by_count)}
        length = len(words) // streams
        self.words = len(numbers)
        self.streams = np.array([numbers[word] for word in words[: length * streams]], "int32").reshape(streams, length)


def segments(streams):
    """(words, the words after them), each time x streams, one segment after the other."""
    for start in range(0, streams.shape[1] - SEGMENT, SEGMENT):
        piece = streams[:, start : start + SEGMENT + 1].T
        yield piece[:-1], piece[1:]


class Words(gluon.Block):
    """A vector per word. `sparse`: a row_sparse weight; a worker holds only the rows that it uses."""

    def __init__(self, vocabulary, size, sparse):
        super().__init__()
        self.vocabulary, self.size, self.sparse = vocabulary, size, sparse
        stype = "row_sparse" if sparse else "default"
        with self.name_scope():
            self.weight = self.params.get(
                "weight", shape=(vocabulary, size), init=mx.init.Normal(0.1), stype=stype, grad_stype=stype
            )

    def forward(self, words):
        weight = self.weight.row_sparse_data(words) if self.sparse else self.weight.data()
        return mx.nd.Embedding(
            words, weight, input_dim=self.vocabulary, output_dim=self.size, sparse_grad=self.sparse
        )


class LanguageModel(gluon.Block):
    def __init__(self, vocabulary, size=64, hidden=64, sparse=True):
        super().__init__()
        with self.name_scope():
            self.embedding = Words(vocabulary, size, sparse)
            self.lstm = gluon.rnn.LSTM(hidden, input_size=size)
            self.output = Words(vocabulary, hidden, sparse)

    def forward(self, words, following, others, state):
        """`words` and `following` are time x streams. Scores: of the following word first, then of the others."""
        hidden, state = self.lstm(self.embedding(words), state)
        hidden = hidden.reshape((-1, hidden.shape[-1]))
        following = following.reshape((-1,))
        scoring = self.output(mx.nd.concat(following, others, dim=0))  # one look-up: it fetches rows
        right, wrong = scoring[: following.size], scoring[following.size :]
        right = (hidden * right).sum(axis=1, keepdims=True)
        return mx.nd.concat(right, mx.nd.dot(hidden, wrong, transpose_b=True), dim=1), state


def log_expected(words, vocabulary, samples):
    """Log of the expected count of a word in a sample: for word n, log((n+2)/(n+1)) / log(vocabulary+1)."""
    chance = np.log((words + 2.0) / (words + 1.0)) / math.log(vocabulary + 1)
    return np.log(samples * chance)


def draw(random, vocabulary, samples):
    """Words to score against, drawn by a numpy.random.RandomState."""
    return (np.exp(random.uniform(0, math.log(vocabulary + 1), samples)) - 1).astype("int32").clip(0, vocabulary - 1)


def sampled_loss(net, words, following, others, state, vocabulary):
    """The loss of each following word against the others, and the new state."""
    samples = len(others)
    scores, state = net(*(mx.nd.array(one, dtype="int32") for one in (words, following, others)), state)
    correction = np.concatenate(
        [
            log_expected(following.reshape(-1, 1), vocabulary, samples),
            np.where(  # a sample that is the right word does not count
                others == following.reshape(-1, 1), 1e4, log_expected(others, vocabulary, samples)
            ),
        ],
        axis=1,
    )
    chances = mx.nd.log_softmax(scores - mx.nd.array(correction))
    return -chances[:, 0], state


def perplexity(net, stream, words):
    """Of one stream, against all words of the text."""
    state = net.lstm.begin_state(1)
    everything = np.arange(words)
    total = count = 0
    for text, following in segments(stream[np.newaxis]):
        scores, state = net(*(mx.nd.array(one, dtype="int32") for one in (text, following, everything)), state)
        chances = mx.nd.log_softmax(scores[:, 1:])
        total -= mx.nd.pick(chances, mx.nd.array(following.reshape(-1))).sum().asscalar()
        count += following.size
    return math.exp(total / count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--vocabulary", type=int, default=50000, help="rows; the text has fewer words")
    parser.add_argument("--dense", action="store_true", help="synchronise every row in every step")
    options = parser.parse_args()

    kv = mx.kv.create("p3_sync")
    text = Text(STREAMS + 1)
    mine, unseen = np.asarray(p3.shard(text.streams[:-1])), text.streams[-1]
    mx.random.seed(SEED)
    random = np.random.RandomState(SEED)
    net = LanguageModel(options.vocabulary, sparse=not options.dense)
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv, update_on_kvstore=True)

    step = 0
    while step < options.steps:
        state = net.lstm.begin_state(len(mine))
        for words, following in segments(mine):
            state = [part.detach() for part in state]  # back-propagation stops here; the state's values carry over
            with autograd.record():
                others = draw(random, options.vocabulary, SAMPLES)
                losses, state = sampled_loss(net, words, following, others, state, options.vocabulary)
            losses.backward()
            trainer.step(losses.size * kv.num_workers)
            if step % 50 == 0 and kv.rank == 0:
                print(f"step {step}: loss {losses.mean().asscalar():.2f} against {SAMPLES} other words")
            step += 1
            if step == options.steps:
                break
    result = perplexity(net, unseen, text.words)
    print(f"worker {kv.rank} of {kv.num_workers}: perplexity {result:.4f} of unseen text")


if __name__ == "__main__":
    main()
