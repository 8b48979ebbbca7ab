"""What P3 may refuse, when, and what its error says to do: an error that is not here is a failure.

`because`: what a program must have done before, at the latest in the operation that was refused. `remedy`: the program
as the error's text says to change it. It is run again, and must not meet the same error at the same place.
"""

from __future__ import annotations

import re
from typing import Callable, NamedTuple, Optional


class Refusal(NamedTuple):
    name: str
    text: str  # a regular expression, with the remedy in it
    because: Callable  # (program, place of the refused operation) -> whether this is a reason
    remedy: Optional[Callable] = None  # the same -> another program; None: leave out the operation


def find(text):
    return next((one for one in REFUSALS if re.search(one.text, text, re.DOTALL)), None)


def remedied(refusal, program, at):
    return refusal.remedy(program, at) if refusal.remedy else without(program, at)


def without(program, at):
    operations = program["operations"]
    return dict(program, operations=operations[:at] + operations[at + 1 :])


def _before(program, at, *names):
    """Places of these operations, up to `at`, the last first."""
    return [i for i in range(min(at, len(program["operations"]) - 1), -1, -1) if program["operations"][i][0] in names]


def _has(*names, **arguments):
    def because(program, at):
        return any(
            all(program["operations"][i][1].get(key) in wanted for key, wanted in arguments.items())
            for i in _before(program, at, *names)
        )

    return because


def _is_between_backward_and_step(program, at):
    """Some gradient has left, and its step has not ended."""
    if program["operations"][at : at + 1] and program["operations"][at][0] == "scaled":
        return True
    for i in _before(program, at - 1, *_STEPS, *_BACKWARD):
        name, arguments = program["operations"][i]
        if name in _BACKWARD:
            return True
        if arguments.get("which", "all") == "all" or program["optimizers"] == 1:
            return False
    return False


_BACKWARD, _STEPS = ("backward", "backward_of_forward"), ("train", "train_clipped", "step", "scaled")


def _synchronous(program, _at):
    return dict(program, synchronous=True)


def _is_stale_and_synchronous(program, _at):
    return program["staleness"] and (program["synchronous"] or program["max_grad_norm"] is not None)


def _clips(program, _at):
    return dict(program, max_grad_norm=0.5, staleness=None)


def _clips_by_one_type(program, at):
    return _with(program, [at], kind=2.0)  # max_grad_norm's


def _common_steps(program, _at):
    return dict(program, staleness=None)


def _behind_synchronize(program, at):
    """synchronous=True, and then synchronize() before the operation."""
    return _insert("synchronize", {})(program, at) if program["synchronous"] else _synchronous(program, at)


def _insert(*operation):
    def remedy(program, at):
        if program["operations"][at - 1 : at] == [list(operation)]:
            return program  # it does not help
        return dict(program, operations=[*program["operations"][:at], list(operation), *program["operations"][at:]])

    return remedy


def _with(program, places, **arguments):
    operations = [
        [name, {**given, **arguments}] if i in places else [name, given]
        for i, (name, given) in enumerate(program["operations"])
    ]
    return dict(program, operations=operations)


def _in_no_sync(program, at):
    """All but the last backward pass of a step; or without the older kind of checkpointing, whose parts are many."""
    refused = program["operations"][at : at + 1]
    if refused and "r" in str(refused[0][1].get("ways")):
        return _with(program, [at], ways=[way.replace("r", "b") for way in refused[0][1]["ways"]])
    if not _is_between_backward_and_step(program, at):
        return without(program, at)
    before = [i for i in _before(program, at - 1, "backward") if not program["operations"][i][1].get("no_sync")]
    if not before:
        return _behind_synchronize(program, at)
    return _with(program, before[:1], no_sync=True)


def _write_behind_synchronize(program, at):
    return _with(program, _before(program, at, "write", "ema", "load"), sync=True, broadcast=True)


def _change_behind_synchronize(program, at):
    if _is_between_backward_and_step(program, at):
        program = _behind_synchronize(program, at)  # a step is left out
    return _synchronous(_with(program, _before(program, at, "clip"), sync=True), at)


def _changes_gradients(program, at):
    return _has("clip", "zero_grad")(program, at) or _is_between_backward_and_step(program, at)


def _sends_early(program, at):
    """The older kind of checkpointing computes gradients in parts: how many, is learned from earlier steps."""
    return _is_between_backward_and_step(program, at) or "r" in str(program["operations"][at][1].get("ways"))


_writes = _has("write", "ema", "load")
_OUTSIDE = "ABCEHDmd"  # letters whose weights are used where their own module does not run


def _uses_weights_outside(program, at):
    used = str([program["operations"][i] for i in range(at + 1) if program["operations"][i][0] != "evaluate"])
    return any(letter in used for letter in _OUTSIDE) or "other" in used


REFUSALS = [
    Refusal("under way", r"gradient of .* is under way, and step\(\) has not ended.*synchronous=True",
            _is_between_backward_and_step, _behind_synchronize),
    Refusal("computed again", "computed again after it had been sent.*no_sync.*use_reentrant", _sends_early,
            _in_no_sync),
    Refusal("weighed late", r"weigh\(\) comes before the step's last backward pass.*no_sync",
            _is_between_backward_and_step, _in_no_sync),
    Refusal("used early", r"used before its new value had been waited for.*Call optimizer.synchronize\(\)",
            _uses_weights_outside, _insert("synchronize", {})),
    Refusal("written", r"was written by the script.*synchronize\(\) before.*broadcast\(\)", _writes,
            _write_behind_synchronize),
    Refusal("gradient changed", "gradient of .* was changed .*(synchronous=True|call that before)",
            _changes_gradients, _change_behind_synchronize),
    Refusal("rate changed", "learning rate or weight decay of .* was changed between.*before backward",
            _has("set", "schedule", "scheduler", "load", "distributed_checkpoint"), _synchronous),
    Refusal("numbers changed", "optimizer's numbers for .* were changed between.*before backward",
            _has("set", "schedule", "scheduler", "load", "distributed_checkpoint"), _synchronous),
    Refusal("momentum begun", "momentum has become .* in a param group that began with 0.*synchronous=True",
            _has("set", "schedule", "scheduler", "load"), _synchronous),
    Refusal("no mean", "staleness and sums handed .*(synchronous=True|max_grad_norm).*set staleness to 0",
            _is_stale_and_synchronous, _common_steps),
    Refusal("not told of clipping", "to clip by the global norm, pass max_grad_norm to DistributedOptimizer",
            _has("train_clipped"), _clips),
    Refusal("clipped otherwise", "clipped by a norm of type .* already.*clip by one type only", _has("train_clipped"),
            _clips_by_one_type),
    Refusal("scaler", "GradScaler must see the mean gradients.*synchronous=True", _has("scaled"), _synchronous),
    Refusal("forked", "forked from a worker.*use P3 in the parent only", _has("fork")),
    Refusal("saved whole", "cannot be (copied or )?saved whole.*state_dict", _has("pickle")),
]  # fmt: skip
