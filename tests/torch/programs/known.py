"""Programs on which P3 and plain torch have not agreed once, as small as hypothesis has made them, and alike ones."""

import math

from programs.operations import PLAINEST


def _program(*operations, **fields):
    return {**PLAINEST, "operations": [["distribute", {}], *operations], **fields}


def _train(way, seed=0, **arguments):
    return ["train", {"ways": [way, way], "seed": seed, **arguments}]


def _do(name, **arguments):
    return [name, arguments]


_save, _copy = _do("save"), _do("copy")
_clamp = _do("write", which=[0, 1, 2, 3], how="data")

KNOWN = {
    "the state from before the first step is loaded": _program(
        _train("a"), _train("a"), _do("load", slot=0), _train("a", 1), _train("a"), optimizer="adam"
    ),
    "the same, of Adagrad": _program(
        _train("a"), _do("load", slot=0, what="optimizer"), _train("a", 1), optimizer="adagrad"
    ),
    "a state that lacks some parameters is loaded": _program(
        _train("ab"), _save, _train("ab", 1), _do("load", slot=1, what="optimizer", part="some"), _train("ab", 2)
    ),
    "weights alone are loaded": _program(_train("ab"), _save, _train("a"), _do("load", slot=1, what="model")),
    "some weights alone are loaded": _program(
        _train("ab"), _save, _train("ab"), _do("load", slot=1, what="model", part="some")
    ),
    "broadcast after a step": _program(_train("a"), _do("broadcast")),
    "the same, which Adam counts": _program(_train("a"), _do("broadcast"), _train("a", 1), optimizer="adam"),
    "a weight is used before its module": _program(_train("Aa"), _train("Aa", 1)),
    "a tied weight is used before its module": _program(_train("Eh"), _train("Eh", 1)),
    "the inner module of a compiled one is read": _program(_train("ad"), _do("look", at="inner"), compiled="whole"),
    "the inner module of a compiled block is read": _program(_train("ad"), _do("look", at="block"), compiled="block"),
    "the inner module of a compiled block runs": _program(_train("ad"), _train("aD", 1), compiled="block"),
    "weights are clamped through data": _program(_train("a"), _clamp, _train("a", 1)),
    "the same, with P3_CHECK": _program(_train("a"), _clamp, _train("a", 1), check=1000),
    "a moving average takes the weights' place": _program(
        _do("ema", action="update"), _train("a"), _do("ema", action="copy_to"), _do("evaluate", way="a", seed=1),
        _do("ema", action="restore"), _train("a", 1),
    ),
    "the model is copied with a step under way": _program(_train("a"), _copy),
    "the model's average is taken with a step under way": _program(_train("a"), _do("average_weights")),
    "a weight is used early in no_sync": _program(
        _train("a"), _do("backward", ways=["A", "A"], seed=1, no_sync=True), _do("backward", ways=["a", "a"], seed=2),
        _do("step"),
    ),
    "a gradient has left one worker alone when the step is left out": _program(
        ["train", {"ways": ["b", "A"], "seed": 0}], _do("backward", ways=["A", "A"], seed=0), _train("ab"),
        _do("look", at="part"),
    ),
    "gradients of zero without a backward pass": _program(
        _train("ab"), _train("a", 1, zero="zeros"), _train("a", zero="zeros")
    ),
    "a state is loaded between backward and step": _program(
        _train("a"), _do("backward", ways=["a", "a"], seed=0), _do("load", slot=0), _train("a", 1)
    ),
    "a distributed checkpoint is taken between backward and step": _program(
        _train("A"), _do("backward", ways=["A", "A"], seed=0), _do("distributed_checkpoint"), _train("A", 1),
        optimizer="adagrad",
    ),
    "a closure's loss is of float32": _program(_train("a", closure=True), optimizer="own", dtype="float32"),
    "gradients whose sum float16 does not hold": _program(
        _do("backward", ways=["sa", "sa"], seed=5, scale=300000.0), _do("step"),
        max_grad_norm=0.5, compression="fp16", dtype="float32",
    ),
    "a step of one worker's gradients behind synchronize() without any": _program(
        _do("synchronize"), _do("backward", ways=["aeA", "abb"], seed=6), optimizers=2, synchronous=True
    ),
    "a step of one worker's gradients behind synchronize() of the last step's": _program(
        _train("A"), _do("synchronize"), _do("train", ways=["e", "A"], seed=0), optimizers=2, synchronous=True
    ),
    "a step of one worker's gradients behind synchronize() of the last step's, on nobody else": {
        **_program(optimizer="rmsprop", synchronous=True),
        "operations": [
            _do("distribute"), _train("A"), _do("synchronize"),
            _do("train", first=False, ways=["A", "r"], seed=0, zero="none"), _do("synchronize"), _train("A"),
        ],
    },
    "no worker has samples, and one has a gradient behind zeros": {
        **_program(optimizer="adam", synchronous=True),
        "operations": [
            _do("distribute"), _train("A"),
            _do("train", ways=["A", "A"], seed=1, zero="zeros", samples=[2, 1]), _do("synchronize"), _train("A", 2),
        ],
    },
    "a worker without samples": _program(
        _train("ab"), _do("train", ways=["ab", "a"], seed=1, samples=[2, 1]),
        _do("train", ways=["b", "a"], seed=2, samples=[0, 2]), _train("ab", 3), optimizer="adam",
    ),
    "the same of a synchronous closure": _program(
        _do("train", ways=["ab", "a"], seed=1, samples=[2, 1], closure=True),
        _do("train", ways=["b", "a"], seed=2, samples=[0, 2], closure=True, zero="zeros"), _train("ab", 3),
        optimizer="own",
    ),
    "Adam with staleness": _program(_train("a"), _train("a", 1), _train("a"), optimizer="adam", staleness=1),
    "a momentum with staleness": _program(_train("a"), _train("a", 1), _train("a"), staleness="inf"),
    "released and distributed again, of Adam": _program(
        _train("ab"), _do("release"), _train("ab", 1), _do("release"), _train("a", 2), optimizer="adam", left_out=True
    ),
    "the same of two synchronous optimizers, from a saved state": _program(
        _train("ab"), _save, _do("release"), _train("ab", 1), _do("load", slot=1), _train("a", 2),
        optimizers=2, synchronous=True,
    ),
    "one of the optimizers steps": _program(
        _do("backward", ways=["ab", "ab"], seed=0), _do("step", which=0), _do("step"), optimizers=2
    ),
    "a gradient is clipped before the first step": _program(
        _do("backward", ways=["A", "A"], seed=0), _do("clip", how="norm"), optimizer="adagrad"
    ),
    "the same past torch's notice, of a weight that the step before did not use": _program(
        _train("B"), _do("backward", ways=["A", "A"], seed=0), _do("clip", how="data"), optimizer="adagrad"
    ),
    "a gradient is added up in no_sync() when it has left": _program(
        _train("A"), _do("backward", ways=["A", "A"], seed=0), _do("backward", ways=["A", "A"], seed=0, no_sync=True)
    ),
    "a momentum that begins behind steps without it": _program(
        _train("b"), _do("set", field="momentum", value=0.0), _train("A"), _train("ab", 1),
        _do("set", field="momentum", value=0.9), _train("A", 2), _train("ab"), optimizer="dampened", dtype="float64",
    ),
    "a velocity of before stays where there is no momentum": {
        **_program(optimizer="dampened", dtype="float64"),
        "operations": [_train("A"), _do("distribute"), _do("set", field="momentum", value=0.0), _train("ab")],
    },
    "a first update without momentum": {
        **_program(optimizer="rmsprop_centered"),
        "operations": [
            _do("distribute"), _train("A"), _do("set", field="momentum", value=0.0), _train("b"), _train("Ab"),
        ],
    },
    "the same of a synchronous optimizer": _program(
        _train("A"), _do("backward", ways=["b", "b"], seed=0), _do("clip", how="norm"), optimizer="own"
    ),
    "the same past torch's notice": _program(
        _train("A"), _do("backward", ways=["b", "b"], seed=0), _do("clip", how="data"), optimizer="own"
    ),
    "samples are told when a gradient has left": _program(
        _train("A"), _do("backward", ways=["c", "c"], seed=9),
        _do("train", ways=["b", "b"], seed=8, zero="model_none", samples=[0, 2], closure=True), optimizer="adagrad",
    ),
    "a step is clipped by two types of norm": _program(
        _train("A"), _do("train_clipped", ways=["A", "A"], seed=0, norm=0.1, kind=math.inf, reads="before"),
        max_grad_norm=0.5,
    ),
    "a forked child runs the model": _program(_train("a"), _do("fork", way="a", seed=0)),
}  # fmt: skip
