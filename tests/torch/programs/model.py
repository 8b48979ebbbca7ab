"""The model that the programs train: its layers run as a string says, one letter each.

a b c      a Linear layer; A B C: its weight used from outside of it
e E        adds the rows of an embedding; E: F.embedding with its weight
h H        a Linear layer whose weight is the embedding's; H: from outside of it
s          a parameter of the model itself
m          attention, whose `out_proj` never runs
d D        a block, which may be compiled; D: what was compiled
k r        the layers a and b under activation checkpointing, of torch's newer kind and of the older
"""

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

F = nn.functional
LETTERS = "abcABCeEhHsmdDkr"
WIDTH, ROWS, WORDS = 4, 3, 5


class Net(nn.Module):
    def __init__(self, compiled=""):
        """`compiled`: "block", "block_in_place", or anything else for neither."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        # Without biases: the gradient of that of the keys is rounding alone, of which Adam makes steps.
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        if compiled == "block":
            self.block = torch.compile(self.block, backend="eager")
        elif compiled == "block_in_place":
            self.block.compile(backend="eager")

    def forward(self, way, x, ids):
        for letter in way:
            x = torch.tanh(self._run(letter, x, ids))
        return x

    def other(self, way, x, ids):
        """The same by another method than forward, so that no hook of the model itself runs."""
        return self.forward(way, x, ids)

    def _run(self, letter, x, ids):
        if letter in "abc":
            return getattr(self, letter)(x)
        if letter in "ABC":
            layer = getattr(self, letter.lower())
            return F.linear(x, layer.weight, layer.bias)
        if letter in "eE":
            return x + (self.table(ids) if letter == "e" else F.embedding(ids, self.table.weight))
        if letter in "hH":
            return (self.head(x) if letter == "h" else F.linear(x, self.head.weight))[..., :WIDTH]
        if letter == "s":
            return x * self.scale
        if letter == "m":
            return x + self.attention(x[None], x[None], x[None])[0][0]
        if letter in "dD":
            return (self.block if letter == "d" else inner(self.block))(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an input that needs no gradient
            return checkpoint(self.a if letter == "k" else self.b, x, use_reentrant=letter == "r")


def inner(module):
    """What torch.compile has wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def batch(seed, worker, dtype):
    """(inputs, ids) of one worker."""
    random = torch.Generator().manual_seed(1000 * seed + worker)
    return torch.randn(ROWS, WIDTH, generator=random, dtype=dtype), torch.randint(0, WORDS, (ROWS,), generator=random)
