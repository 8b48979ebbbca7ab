"""The configurations of `p3 bench validation`, which `p3 simulate --validate` predicts: many and unlike, each short.

They spread over what the simulator has in its model: all models, 2 to 8 hosts, 60 to 800 Mbit/s, unequal links, sizes
of the model and of slices; and leave out where the processor of a small machine is the limit. Those that are held out
were not looked at while the simulator was made: how well it does on them says how well it does elsewhere.
"""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

from p3.measure.results.records import Configuration


class Row(NamedTuple):
    model: str
    share: float  # of the lab's size of it
    compute_s: float
    hosts: int
    rates_mbit: Tuple[float, ...]  # one for all, or one for each
    slice_elements: int = 50000
    held_out: bool = False

    def is_of(self, one: Configuration) -> bool:
        same = (self.model, self.compute_s, self.hosts, self.slice_elements)
        if same != (one.model, one.compute_s, one.hosts, one.slice_elements):
            return False
        return (one.rates_mbit or (one.rate_mbit,)) == self.rates_mbit


ROWS: List[Row] = [
    Row("vgg19", 1.0, 1.2, 2, (600,)),
    Row("vgg19", 0.2, 2.0, 2, (60,), held_out=True),
    Row("vgg19", 0.2, 2.0, 3, (80,), held_out=True),
    Row("vgg19", 0.3, 1.5, 4, (150,)),
    Row("vgg19", 0.5, 1.5, 4, (300,), 10000, held_out=True),
    Row("vgg19", 0.2, 2.0, 6, (60,), held_out=True),
    Row("vgg19", 0.2, 2.0, 8, (80,)),
    Row("vgg19", 0.4, 1.5, 3, (200, 200, 100)),
    Row("resnet50", 1.0, 1.2, 2, (500,), held_out=True),
    Row("resnet50", 0.3, 1.5, 3, (120,), held_out=True),
    Row("resnet50", 0.4, 1.5, 4, (200,)),
    Row("resnet50", 0.2, 2.0, 6, (100,)),
    Row("resnet50", 0.2, 2.0, 8, (100,), held_out=True),
    Row("resnet50", 0.5, 1.2, 4, (300,), 20000),
    Row("resnet50", 0.3, 2.0, 4, (150, 150, 150, 75), held_out=True),
    Row("inception_v3", 0.4, 1.5, 2, (200,)),
    Row("inception_v3", 0.3, 1.5, 3, (150,)),
    Row("inception_v3", 0.3, 2.0, 4, (120,), held_out=True),
    Row("inception_v3", 0.2, 2.0, 6, (100,), held_out=True),
    Row("inception_v3", 0.6, 1.2, 2, (400,), 200000, held_out=True),
    Row("inception_v3", 0.3, 1.5, 2, (200, 100), held_out=True),
    Row("sockeye", 0.5, 1.0, 2, (400,)),
    Row("sockeye", 0.3, 1.0, 3, (200,), held_out=True),
    Row("sockeye", 0.3, 1.5, 4, (150,)),
    Row("sockeye", 0.2, 1.5, 6, (100,)),
    Row("sockeye", 0.2, 1.5, 8, (120,), held_out=True),
    Row("sockeye", 0.4, 1.0, 3, (300, 200, 300), 100000, held_out=True),
    Row("bert", 0.8, 1.0, 2, (800,)),
    Row("bert", 0.3, 1.5, 3, (200,), held_out=True),
    Row("bert", 0.3, 1.5, 4, (200,), held_out=True),
    Row("bert", 0.2, 1.5, 6, (100,)),
    Row("bert", 0.2, 1.5, 8, (120,)),
    Row("bert", 0.4, 1.2, 4, (250, 250, 250, 125), 25000),
    Row("bert", 0.5, 1.0, 2, (250,), 500000, held_out=True),
]


def is_held_out(one: Configuration) -> bool:
    """Whether what was measured is a configuration that the simulator was not tuned to."""
    return any(row.held_out and row.is_of(one) for row in ROWS)
