"""Random programs, as plain data: what hypothesis draws and shrinks, and what JSON can hold.

A program is a dict: how the model and its optimizers are made, and `operations`, each [name, arguments]: a method of
Arena. Among them is one "distribute", which makes the optimizers P3's.
"""

from __future__ import annotations

import math

from hypothesis import strategies as st
from programs import stale
from programs.model import LETTERS
from programs.optimizers import ON_SERVERS, OPTIMIZERS, SCHEDULERS

PLAINEST = {
    "optimizer": "momentum", "synchronous": False, "max_grad_norm": None, "compression": None, "staleness": None,
    "check": 0, "dtype": "float64", "compiled": "", "optimizers": 1, "left_out": False,
}  # fmt: skip

# Most programs are of these letters, so that one part is used again and again; the others have all.
_ways = st.one_of(st.text("abeA", min_size=1, max_size=3), st.text(LETTERS, min_size=1, max_size=4))
_way = st.shared(_ways, key="way") | _ways
_pair = st.one_of(_way.map(lambda way: [way, way]), st.lists(_way, min_size=2, max_size=2))  # one for each worker
_seed = st.integers(0, 9)
_flag = st.booleans()
_zero = st.sampled_from(["none", "zeros", "model_none", "model_zeros"])
_entry = st.sampled_from(["forward"] * 5 + ["other"])
_mode = st.sampled_from(["no_grad", "inference", "grad"])
_which = st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True)
_of = st.sampled_from(["parameters", "named", "kept"])


def _operation(name, **arguments):
    return st.fixed_dictionaries(arguments).map(lambda drawn: [name, drawn])


_samples = st.sampled_from([None, None, None, [1, 3], [2, 1], [0, 2]])  # of each worker's batch, for weigh()
_train = _operation(
    "train", ways=_pair, seed=_seed, zero=_zero, first=_flag, closure=_flag, entry=_entry, samples=_samples
)
_plain_train = _operation("train", ways=_pair, seed=_seed)
_evaluate = _operation(
    "evaluate", way=_way, seed=_seed, mode=_mode, entry=_entry, of=st.sampled_from(["model", "inner"])
)
_look = _operation(
    "look", at=st.sampled_from("model inner block part optimizer parameters named kept gradients lr".split())
)
_load = _operation(
    "load", slot=st.integers(-1, 3), what=st.sampled_from(["both", "model", "optimizer", "layer"]),
    part=st.sampled_from(["all", "some"]), through=st.sampled_from(["memory", "file"]),
)  # fmt: skip
_write = _operation(
    "write", which=_which, how=st.sampled_from(["no_grad", "data"]), sync=_flag, broadcast=_flag, of=_of
)
_ema = _operation(
    "ema", action=st.sampled_from(["update", "copy_to", "restore"]), sync=_flag, broadcast=_flag, of=_of
)
_backward = _operation(
    "backward", ways=_pair, seed=_seed, no_sync=_flag, scale=st.sampled_from([1.0, 0.5]), entry=_entry
)
_clip = _operation("clip", how=st.sampled_from(["norm", "value", "data"]), sync=_flag)
_set = st.one_of(
    _operation("set", field=st.sampled_from(["lr", "weight_decay"]), value=st.sampled_from([0.0, 0.01, 0.2])),
    _operation("set", field=st.just("momentum"), value=st.sampled_from([0.0, 0.3, 0.7])),
    _operation("set", field=st.just("dampening"), value=st.sampled_from([0.0, 0.3])),
    _operation("set", field=st.just("betas"), value=st.sampled_from([[0.8, 0.9], [0.5, 0.99]])),
    _operation("set", field=st.just("alpha"), value=st.sampled_from([0.5, 0.9])),
    _operation("set", field=st.just("eps"), value=st.sampled_from([1e-4, 1e-2])),
    _operation("set", field=st.sampled_from(["maximize", "nesterov"]), value=st.booleans()),
)
_rest = st.one_of(
    _operation("forward", ways=_pair, seed=_seed), _operation("backward_of_forward"),
    _operation("step", which=st.sampled_from(["all", "all", 0, 1])), _operation("zero_grad", zero=_zero),
    _operation("train_clipped", ways=_pair, seed=_seed, norm=st.sampled_from([0.1, 10.0, math.inf]),
               kind=st.sampled_from([2.0, math.inf]), reads=st.sampled_from(["before", "after", "never"])),
    _operation("scaled", ways=_pair, seed=_seed, overflow=_flag), _set,
    _operation("requires_grad", which=_which, on=_flag),
    _operation("scheduler", kind=st.sampled_from(sorted(SCHEDULERS))), _operation("schedule"),
    _operation("hook", kind=st.sampled_from("tensor accumulated forward forward_pre step_pre step_post".split())),
    _operation("unhook"), _operation("copy", sync=_flag), _operation("average_weights", sync=_flag),
    _operation("pickle", what=st.sampled_from(["model", "optimizer", "states"])), _operation("distributed_checkpoint"),
    _operation("fork", way=_way, seed=_seed, mode=_mode), _operation("release"),
)  # fmt: skip
# As often as it stands here: most of a program trains, so that there is something to lose.
_any = st.sampled_from(
    [_plain_train] * 6 + [_train] * 4 + [_look] * 3 + [_evaluate] * 2 + [_operation("save"), _load, _load]
    + [_operation("synchronize"), _operation("broadcast"), _write, _ema, _backward, _clip] + [_rest] * 5
).flatmap(lambda one: one)  # fmt: skip


@st.composite
def programs(draw):
    drawn = {
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "synchronous": draw(st.sampled_from([False, False, False, True])),
        "max_grad_norm": draw(st.sampled_from([None] * 5 + [0.5])),
        "compression": draw(st.sampled_from([None] * 15 + ["fp16"])),
        "check": draw(st.sampled_from([0, 1000, 1])),
        "dtype": draw(st.sampled_from(["float64", "float64", "float64", "float32"])),
        "compiled": draw(st.sampled_from([""] * 12 + ["block", "block_in_place", "whole"])),
        "optimizers": draw(st.sampled_from([1, 1, 1, 2])),
        "left_out": draw(st.sampled_from([False, False, True])),
    }
    if drawn["compression"]:  # of float32; and no rule that makes much of small differences
        drawn.update(dtype="float32", optimizer="momentum")
    drawn["staleness"] = draw(st.sampled_from([None] * 15 + [1, "inf"]))
    operations = draw(st.lists(_any, min_size=1, max_size=12))
    if drawn["staleness"]:
        drawn.update(synchronous=False, max_grad_norm=None, compression=None, check=0, left_out=False)
        if drawn["optimizer"] not in ON_SERVERS:
            drawn["optimizer"] = "adam"
        operations = [one for one in operations if one[0] in stale.OPERATIONS]
    if drawn["compression"]:  # gradients whose sum may be too large for float16
        scale = draw(st.sampled_from([1.0, 150000.0, 200000.0, 250000.0, 300000.0]))
        operations = [[name, {**given, "scale": scale} if name == "backward" else given] for name, given in operations]
    late = draw(st.integers(0, 2)) if draw(st.integers(0, 3)) == 3 else 0
    return {**drawn, "operations": [*operations[:late], ["distribute", {}], *operations[late:]]}


def shown(program):
    """As JSON, an operation on each line."""
    import json

    head = json.dumps({key: value for key, value in program.items() if key != "operations"})
    lines = ",\n".join("  " + json.dumps(operation) for operation in program["operations"])
    return '%s, "operations": [\n%s]}' % (head[:-1], lines)
