"""A tree-shaped recurrent net that learns the values of formulas, with PyTorch. Its graph differs in each step.

    p3 run -n 2 -s 2 python examples/torch/trees.py

Each formula is a tree, such as min(7, max(2, right(4, 9))), and each operator has its own weights, which a Tree-LSTM
applies from the leaves upwards (Tai et al. 2015): to all nodes of one height and operator at once, across trees, as
Cavs and DyNet batch them. A step's formulas use 3 of 8 operators. So a worker has gradients for some weights only; for
the others it sends nothing, and nobody waits for weights that no worker has touched.
"""

import argparse
import random
from collections import defaultdict

import p3.torch
import torch
from torch import nn

OPERATORS = {
    "min": min,
    "max": max,
    "left": lambda a, b: a,
    "right": lambda a, b: b,
    "nor": lambda a, b: 0 if a or b else 9,
    "mirror": lambda a, b: 9 - a,
    "less": lambda a, b: 9 if a < b else 0,
    "equal": lambda a, b: 9 if a == b else 0,
}
KNOWN = 3  # operators in a step
DEPTH = 4
WIDTH = 64


class Node:
    def __init__(self, value, operator=None, arguments=(), height=0):
        self.value, self.operator, self.arguments, self.height = value, operator, arguments, height


def formula(draw, operators, depth=DEPTH):
    """Its nodes, each after its arguments."""
    if depth == 0 or depth < DEPTH and draw.random() < 0.2:
        return [Node(draw.randrange(10))]
    operator = draw.choice(operators)
    left, right = (formula(draw, operators, depth - 1) for _ in range(2))
    arguments = left[-1], right[-1]
    value = OPERATORS[operator](*(node.value for node in arguments))
    return [*left, *right, Node(value, operator, arguments, 1 + max(node.height for node in arguments))]


def batch(draw, formulas):
    operators = draw.sample(list(OPERATORS), KNOWN)
    return [node for _ in range(formulas) for node in formula(draw, operators)]


class Composition(nn.Module):
    """One operator: maps the states and memories of its two arguments, as rows, to those of the result."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 5 * WIDTH)

    def forward(self, left, right):
        (left, left_memory), (right, right_memory) = left.chunk(2, 1), right.chunk(2, 1)
        new, take, keep_left, keep_right, show = self.gates(torch.cat([left, right], 1)).chunk(5, 1)
        memory = take.sigmoid() * new.tanh() + keep_left.sigmoid() * left_memory + keep_right.sigmoid() * right_memory
        return torch.cat([show.sigmoid() * memory.tanh(), memory], 1)


class TreeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.digits = nn.Embedding(10, 2 * WIDTH)
        self.compositions = nn.ModuleDict({operator: Composition() for operator in OPERATORS})
        self.worth = nn.Linear(WIDTH, 10)

    def forward(self, nodes):
        """For each inner node, the scores of the digits that may be its value, and its value."""
        leaves = [node for node in nodes if node.operator is None]
        states = dict(zip(leaves, self.digits(torch.tensor([node.value for node in leaves])).unbind()))
        alike = defaultdict(list)
        for node in nodes:
            if node.operator is not None:
                alike[node.height, node.operator].append(node)
        for (_, operator), group in sorted(alike.items()):
            left, right = (torch.stack([states[node.arguments[side]] for node in group]) for side in range(2))
            states.update(zip(group, self.compositions[operator](left, right).unbind()))
        inner = [node for group in alike.values() for node in group]
        rows = torch.stack([states[node] for node in inner])
        return self.worth(rows[:, :WIDTH]), torch.tensor([node.value for node in inner])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="formulas per step, of all workers together")
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    torch.manual_seed(1)
    net = TreeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    optimizer = p3.torch.DistributedOptimizer(optimizer, net)

    draw = random.Random(100 + rank)
    elements = sum(weight.numel() for weight in net.parameters())
    touched = 0
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(*net(batch(draw, max(1, options.batch_size // size))))
        loss.backward()
        touched += sum(weight.numel() for weight in net.parameters() if weight.grad is not None)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print("step %d: loss %.3f" % (step, loss.item()), flush=True)

    unseen, right, count = random.Random(3), 0, 0
    with torch.no_grad():
        for _ in range(20):
            scores, worth = net(batch(unseen, 20))
            right, count = right + (scores.argmax(1) == worth).sum().item(), count + len(worth)
    order = optimizer.order_stats()
    print("worker %d of %d: %.1f%% of %d unseen formulas and their parts right; a step touched %.0f%% of the weights, "
          "%.1f%% of their pairs in the order that was foreseen, %.1f%% by the first step's order alone"
          % (rank, size, 100 * right / count, count, 100 * touched / options.steps / elements, 100 * order["followed"],
             100 * order["first"]))  # fmt: skip


if __name__ == "__main__":
    main()
