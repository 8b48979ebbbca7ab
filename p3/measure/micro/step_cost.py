"""What a step of many small parameters costs the thread that trains, in PyTorch: processor time, no network.

    p3 bench step_cost [--parameters 161] [--steps 40] [--repeats 5]

A model of small layers trains with SGD with momentum, by turns in plain torch and with P3, a worker and a server within
this process. Between two steps the thread rests until new values have come, as they have on a real network where the
forward pass does not wait. Given is the median step's processor time of this thread alone, in each repeat, and their
median and range: all of the step, and what it takes beyond the forward and the backward pass. Plain torch has its own
update there, P3 has it made by the servers, or with clipping and `synchronous` by the workers. The last column is what
all other threads of the process take for a step: those of the worker's core, and the server's.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Callable, Dict, List, Sequence, Tuple

from p3.measure import arguments as given
from p3.measure.jobs import machine

WIDTH = 16
PAUSE_S = 0.02  # several times what the core takes for all rounds of a step
WARMUP = 10
NORM = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = given.parser("step_cost", __doc__)
    parser.add_argument("--parameters", type=given.number(1, 1e5, int), default=161,
                        help="of the model (default %(default)s, as ResNet-50 has)")  # fmt: skip
    parser.add_argument("--steps", type=given.number(1, 1e6, int), default=40,
                        help="that count, in each repeat (default %(default)s)")  # fmt: skip
    parser.add_argument("--repeats", type=given.number(1, 1e6, int), default=5, help="default %(default)s")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    times: Dict[str, List[float]] = {name: [] for name in WAYS}
    others: Dict[str, List[float]] = {name: [] for name in WAYS}
    for _ in range(options.repeats):
        for name, make in WAYS.items():
            own, other = _ms_a_step(torch, make, options.parameters, options.steps)
            times[name].append(own)
            others[name].append(other)
    print("%s; torch %s; %d parameters of at most %d elements, one thread"
          % (machine.in_a_line(), torch.__version__, options.parameters, WIDTH * WIDTH))  # fmt: skip
    print("%-34s%-24s%-24s%-16s%s" % ("ms a step", "all", "beyond both passes", "us a parameter", "other threads"))
    passes = statistics.median(times[PASSES])
    for name, repeats in times.items():
        beyond = [one - passes for one in repeats]
        each = "%.1f" % (1e3 * statistics.median(beyond) / options.parameters)
        cost = ("", "") if name == PASSES else (_in_words(beyond), each)
        print("%-34s%-24s%-24s%-16s%s" % (name, _in_words(repeats), *cost, _in_words(others[name])))
    return 0


def _in_words(values: Sequence[float]) -> str:
    return "%.2f (%.2f..%.2f)" % (statistics.median(values), min(values), max(values))


def _model(torch, parameters: int):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)]
    return torch.nn.Sequential(*layers, *[torch.nn.Linear(WIDTH, 1, bias=False)] * (parameters % 2))


def _ms_a_step(torch, make: Callable, parameters: int, steps: int) -> Tuple[float, float]:
    """Of this thread, and of all others."""
    model, batch = _model(torch, parameters), torch.randn(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer, update = make(torch, optimizer, model)
    spent, elsewhere = [], []
    gc.collect()
    for number in range(-WARMUP, steps):
        began, of_all = time.thread_time(), time.process_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        update()
        took = time.thread_time() - began
        time.sleep(PAUSE_S)
        if number >= 0:
            spent.append(1e3 * took)
            others = (time.process_time() - of_all) - (time.thread_time() - began)
            elsewhere.append(1e3 * max(others, 0.0))
    if hasattr(optimizer, "release"):
        optimizer.release()
    return statistics.median(spent), statistics.median(elsewhere)


# What is done with optimizer and model, to get the optimizer to train with and what stands behind backward().


def _passes(_torch, optimizer, _model):
    return optimizer, lambda: None


def _plain(_torch, optimizer, _model):
    return optimizer, optimizer.step


def _plain_clipped(torch, optimizer, model):
    parameters = list(model.parameters())

    def update():
        torch.nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()

    return optimizer, update


def _p3(**options):
    def make(_torch, optimizer, model):
        import p3.torch

        optimizer = p3.torch.DistributedOptimizer(optimizer, model, **options)
        return optimizer, optimizer.step

    return make


PASSES = "forward and backward alone"
WAYS = {
    PASSES: _passes,
    "torch": _plain,
    "torch, clipped": _plain_clipped,
    "P3": _p3(),
    "P3, max_grad_norm": _p3(max_grad_norm=NORM),
    "P3, synchronous": _p3(synchronous=True),
}
