"""Trains a small GPT to predict the next byte of Python's own documentation, with PyTorch.

    python examples/torch/gpt.py                         # alone, in one process
    p3 run -n 2 -s 2 python examples/torch/gpt.py        # two workers and two servers
    torchrun --nproc-per-node 2 examples/torch/gpt.py    # two workers, which start a server themselves

The learning rate follows a cosine, gradients are accumulated over two passes, and with P3_SNAPSHOT_DIR set, an
interrupted job continues from its last snapshot.
"""

import argparse
import math
from pydoc_data.topics import topics

import p3.torch
import torch
from torch import nn

CONTEXT = 64  # bytes that the model sees


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        split = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width=96, heads=4, layers=3):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 256, bias=False)
        self.score.weight = self.bytes.weight  # one tensor for both
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, x):
        x = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x))


def load():
    """The text's bytes: nine tenths for training, and the rest."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def batch(data, count, generator):
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=generator)
    pieces = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text per step, of all workers together")
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    first, state = p3.torch.resume()
    train, test = load()
    torch.manual_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    )
    optimizer = p3.torch.DistributedOptimizer(optimizer, model)
    if state is not None:
        schedule.load_state_dict(state["schedule"])

    passes = 2
    share = max(1, options.batch_size // size // passes)
    for step in range(first, options.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        with optimizer.no_sync():
            for _ in range(passes - 1):
                (loss_of(model, *batch(train, share, generator)) / passes).backward()
        loss = loss_of(model, *batch(train, share, generator))
        (loss / passes).backward()
        optimizer.step()
        schedule.step()
        p3.torch.snapshot(step + 1, {"schedule": schedule.state_dict()})
        if rank == 0 and (step + 1) % 20 == 0:
            print("step %d: loss %.3f" % (step + 1, loss.item()), flush=True)

    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        loss = sum(loss_of(model, *batch(test, 32, generator)) for _ in range(8)) / 8
    print("worker %d of %d: loss %.4f of unseen text, per byte" % (rank, size, loss))


if __name__ == "__main__":
    main()
