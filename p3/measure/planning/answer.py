"""The process that plans for a job which trains (p3/frontend/planner.py): a question in JSON from its standard input,
the answer on its output.

    {"rates_mbit": [40, 40, 20],          of each host's link
     "workers": [0, 1, 2], "servers": [0, 1, 2],                       the host of each, by rank
     "compute_s": 0.5, "layers": [["fc.weight", [100, 20], 0.1], ...], of a step; and of each key, in the order of the
                                                                       forward pass, its shape and backward seconds
     "slice_elements": "auto", "keeps_slices": false,                  as P3_SLICE_ELEMENTS; whether that must stay so
     "clip": "none",                                                   or "norm", "wait": see simulate/setting.py
     "compression": {"up": {"type": "int8"}, "down": null},            of the largest key
     "adds_up": true, "strategy": "{...}", "budget_s": 3}              local aggregation; what is in use; for the search

    {"strategy": "{...}", "seconds": 7.3, "before_s": 10.8}            of a step, simulated: with it, and as it is

It runs at the lowest priority: the job's own processes go first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List, Sequence

from p3.codecs import Ways
from p3.errors import NotBuilt
from p3.measure.compressions import Compression
from p3.measure.replay.models import Layer, Model, Tensor
from p3.measure.simulate.setting import Network, Setting
from p3.plan import strategy

_NICE = 19
_LEAST_SHARE = 1e-6  # of a layer, of the computation


def answer(question: Dict[str, Any]) -> Dict[str, Any]:
    """NotBuilt without the simulator."""
    from p3.measure.planning.search import SLICES, Search

    rates = tuple(question["rates_mbit"])
    setting = Setting(
        model=_model(question["layers"], question["compute_s"]),
        compute_s=question["compute_s"],
        network=Network(rates, rates),
        placed=(tuple(question["workers"]), tuple(question["servers"])),
        slice_elements=question["slice_elements"],
        local_aggregation=question["adds_up"],
        clip=question["clip"],
        compression=Compression.of_ways(Ways(**question["compression"])),
        warmup=1,
        iterations=2,
    )
    search = Search(setting, () if question["keeps_slices"] else SLICES)
    before_s = search.of(strategy.parse(question["strategy"])).mean_s
    best = search.best(question["budget_s"])
    return {"strategy": best.strategy.text(), "seconds": best.seconds, "before_s": before_s}


def _model(layers: Sequence[List[Any]], compute_s: float) -> Model:
    """The forward pass has what the backward pass leaves, and each layer of it the same share as of that."""
    backward_s = [max(seconds, _LEAST_SHARE * compute_s) for _, _, seconds in layers]
    total_s = sum(backward_s)
    backward = min(total_s / compute_s, 0.9) if compute_s > 0 else 2 / 3
    shares = [seconds / total_s if total_s > 0 else 1 / len(layers) for seconds in backward_s]
    return Model("the job's", 1.0, tuple(
        Layer(name, (Tensor(name, tuple(shape)),), (1 - backward) * share, backward * share)
        for (name, shape, _), share in zip(layers, shares)
    ))  # fmt: skip


def main() -> int:
    os.nice(_NICE)
    try:
        found = answer(json.load(sys.stdin))
    except NotBuilt as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
