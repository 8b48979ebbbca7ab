"""What `p3 bench learn` and `codecs` train: a small GPT, a convolutional net, and a language model of words, whose
embedding has gradients of rows. All on data that every host has; nothing is fetched.

    lesson = LESSONS["gpt"]
    net = lesson.make_net(1.0)
    loss, accuracy = lesson.loss(net, *lesson.batch(lesson.data(), number=0, rank=1, seed=0))
    loss, accuracy = lesson.heldout(net, lesson.data())

Every batch follows from its number, the worker's rank and the seed, so all stores train on the same ones. `data()` is
read from Python's own help texts (gpt, words) and from scikit-learn's handwritten digits (convnet), and differs only
between versions of these. Its last tenth is in no batch, and is what heldout() is of; of the texts without the lines
that stand before it, too.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Callable, Dict, NamedTuple, Tuple

import torch
from torch import nn

from p3.errors import ConfigError

CONTEXT = 64  # bytes that the GPT sees
SIDE = 32  # of the convnet's pictures
WORDS, BEFORE = 4000, 4  # that the language model knows, and that it sees

Data = Tuple[torch.Tensor, ...]  # what batches are of, then what is held out


class Lesson(NamedTuple):
    make_net: Callable[[float], nn.Module]  # of a size: about the fraction of the parameters
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[], Data]
    # Inputs and targets, of the data, a step's number, a rank, a seed and, if not the lesson's own, a count of samples.
    batch: Callable[..., Data]
    test: Callable[[Data], Data]  # inputs and targets that no batch has

    @staticmethod
    def loss(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Tuple[torch.Tensor, float]:
        """Mean of the cross entropy, in nats, and the share of targets that have the highest score."""
        scores, targets = net(inputs).flatten(0, -2), targets.flatten()
        right = (scores.detach().argmax(1) == targets).double().mean()
        return nn.functional.cross_entropy(scores, targets), right.item()

    def heldout(self, net: nn.Module, data: Data) -> Tuple[float, float]:
        """Both of what no batch has; on the device that has the net."""
        device = next(net.parameters()).device
        with torch.no_grad():
            loss, accuracy = self.loss(net, *(part.to(device) for part in self.test(data)))
        return loss.item(), accuracy


def model_bytes(name: str, size: float) -> int:
    return bytes_of(LESSONS[name].make_net(size))


def bytes_of(net: nn.Module) -> int:
    return sum(4 * weights.numel() for weights in net.parameters())


def _generator(number: int, rank: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 32) + 1000 * number + rank)


# GPT: predicts the next byte


class _GPT(nn.Module):
    def __init__(self, size: float, layers: int = 4, heads: int = 8) -> None:
        super().__init__()
        width = heads * max(1, round(256 / heads * math.sqrt(size)))
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.score(self.norm(x))


def _topics() -> Tuple[str, str]:
    from pydoc_data.topics import topics

    lines = "\n".join(topics[name] for name in sorted(topics)).splitlines(keepends=True)
    trained = lines[: len(lines) * 9 // 10]
    seen = set(trained)
    return "".join(trained), "".join(line for line in lines[len(trained) :] if line not in seen)


def _help_texts() -> Data:
    return tuple(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for text in _topics())


def _pieces(text: torch.Tensor, starts: torch.Tensor) -> Data:
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def _pieces_of_text(data: Data, number: int, rank: int, seed: int, count: int = 16) -> Data:
    text, _ = data
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=_generator(number, rank, seed))
    return _pieces(text, starts)


def _pieces_held_out(data: Data, count: int = 128) -> Data:
    _, text = data
    return _pieces(text, torch.linspace(0, len(text) - CONTEXT - 1, count).long())


# Words: predicts the next one


class _WordModel(nn.Module):
    """Bengio's: the words before, as they are embedded, through one hidden layer."""

    def __init__(self, size: float) -> None:
        super().__init__()
        width = max(1, round(64 * math.sqrt(size)))
        self.words = nn.Embedding(WORDS, width, sparse=True)
        self.hidden, self.score = nn.Linear(BEFORE * width, 2 * width), nn.Linear(2 * width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(torch.tanh(self.hidden(self.words(x).flatten(1))))


def _words() -> Data:
    """The text, each word as its place among the most frequent ones; 0: any other."""
    texts = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in _topics()]
    frequent = sorted(collections.Counter(texts[0]).items(), key=lambda one: (-one[1], one[0]))[: WORDS - 1]
    places = {word: place for place, (word, _) in enumerate(frequent, 1)}
    return tuple(torch.tensor([places.get(word, 0) for word in text]) for text in texts)


def _pieces_of_words(text: torch.Tensor, starts: torch.Tensor) -> Data:
    return text[starts[:, None] + torch.arange(BEFORE)], text[starts + BEFORE]


def _places_in_words(data: Data, number: int, rank: int, seed: int, count: int = 256) -> Data:
    text, _ = data
    starts = torch.randint(len(text) - BEFORE, (count,), generator=_generator(number, rank, seed))
    return _pieces_of_words(text, starts)


def _words_held_out(data: Data) -> Data:
    _, text = data
    return _pieces_of_words(text, torch.arange(len(text) - BEFORE))


# Convnet: reads a digit that is shifted, turned, scaled and noisy


def _convnet(size: float) -> nn.Module:
    hidden = max(1, round(512 * size))
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip
    for weight in net.parameters():
        if weight.dim() > 1:
            nn.init.kaiming_normal_(weight)
    return net


def _digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(f"the convnet's digits are scikit-learn's ({error}): pip install scikit-learn") from None
    digits = load_digits()
    small = torch.tensor(digits.images[:, None], dtype=torch.float32) / 8 - 1
    pictures, labels = nn.functional.interpolate(small, size=SIDE, mode="bilinear"), torch.tensor(digits.target)
    seen = len(labels) * 9 // 10
    return pictures[:seen], labels[:seen], pictures[seen:], labels[seen:]


def _disturbed_digits(data: Data, number: int, rank: int, seed: int, count: int = 128) -> Data:
    generator = _generator(number, rank, seed)
    pictures, labels, *_ = data
    chosen = torch.randint(len(labels), (count,), generator=generator)
    return _disturbed(pictures[chosen], labels[chosen], generator)


def _digits_held_out(data: Data) -> Data:
    return _disturbed(*data[2:], torch.Generator().manual_seed(0))


def _disturbed(pictures: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> Data:
    count = len(labels)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    turn, scale, across, down = uniform(-0.4, 0.4), uniform(0.9, 1.3), uniform(-0.2, 0.2), uniform(-0.2, 0.2)
    cosine, sine = scale * turn.cos(), scale * turn.sin()
    moves = torch.stack([torch.stack([cosine, -sine, across], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = nn.functional.affine_grid(moves, [count, 1, SIDE, SIDE], align_corners=False)
    moved = nn.functional.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    return moved + 0.5 * torch.randn(moved.shape, generator=generator), labels


LESSONS: Dict[str, Lesson] = {
    "gpt": Lesson(
        _GPT, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01), _help_texts, _pieces_of_text,
        _pieces_held_out,
    ),  # fmt: skip
    "convnet": Lesson(
        _convnet, lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), _digits, _disturbed_digits,
        _digits_held_out,
    ),  # fmt: skip
    "words": Lesson(
        _WordModel, lambda net: torch.optim.Adagrad(net.parameters(), lr=0.05), _words, _places_in_words,
        _words_held_out,
    ),  # fmt: skip
}
