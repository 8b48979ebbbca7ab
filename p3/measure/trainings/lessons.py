"""What `p3 bench learn` trains: a small GPT and a convolutional net, on data that every host has; nothing is fetched.

    lesson = LESSONS["gpt"]
    net = lesson.make_net(1.0)
    loss = lesson.loss(net, *lesson.batch(lesson.data(), number=0, rank=1, seed=0))

Every batch follows from its number, the worker's rank and the seed, so all stores train on the same ones. `data()` is
read from Python's own help texts (gpt) and from scikit-learn's handwritten digits (convnet), and differs only between
versions of these.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple, Tuple

import torch
from torch import nn

from p3.errors import ConfigError

CONTEXT = 64  # bytes that the GPT sees
SIDE = 32  # of the convnet's pictures

Data = Tuple[torch.Tensor, ...]


class Lesson(NamedTuple):
    make_net: Callable[[float], nn.Module]  # of a size: about the fraction of the parameters
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[], Data]
    batch: Callable[[Data, int, int, int], Data]  # of the data, a step's number, a rank and a seed: inputs and targets

    @staticmethod
    def loss(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean of the cross entropy, in nats."""
        scores = net(inputs)
        return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


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


def _help_texts() -> Data:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return (torch.frombuffer(bytearray(text), dtype=torch.uint8),)


def _pieces_of_text(data: Data, number: int, rank: int, seed: int, count: int = 16) -> Data:
    (text,) = data
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=_generator(number, rank, seed))
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


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
    return nn.functional.interpolate(small, size=SIDE, mode="bilinear"), torch.tensor(digits.target)


def _disturbed_digits(data: Data, number: int, rank: int, seed: int, count: int = 128) -> Data:
    generator = _generator(number, rank, seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    pictures, labels = data
    chosen = torch.randint(len(labels), (count,), generator=generator)
    turn, scale, across, down = uniform(-0.4, 0.4), uniform(0.9, 1.3), uniform(-0.2, 0.2), uniform(-0.2, 0.2)
    cosine, sine = scale * turn.cos(), scale * turn.sin()
    moves = torch.stack([torch.stack([cosine, -sine, across], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = nn.functional.affine_grid(moves, [count, 1, SIDE, SIDE], align_corners=False)
    moved = nn.functional.grid_sample(pictures[chosen], grid, padding_mode="border", align_corners=False)
    return moved + 0.5 * torch.randn(moved.shape, generator=generator), labels[chosen]


LESSONS: Dict[str, Lesson] = {
    "gpt": Lesson(
        _GPT, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01), _help_texts, _pieces_of_text
    ),
    "convnet": Lesson(
        _convnet, lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), _digits, _disturbed_digits
    ),
}
