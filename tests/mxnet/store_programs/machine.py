"""Runs a program in one worker: each operation with P3 and with the reference, and then compares what can be read.

The reference also says whether P3 must refuse the operation, and why: another error, or none, is a finding, and what
P3 refuses must have changed nothing.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
from mxnet.base import MXNetError
from random_programs import Answer
from store_programs import values
from store_programs.store_pair import StorePair
from store_programs.trainer_pair import TrainerPair

# What P3 refuses, and what its error says of the cause and of what to do.
REFUSALS = {
    "unknown key": r"key .* was not initialised on this store; call init or broadcast first",
    "another shape": r"key .* has shape .* it cannot be \w+ (with|into an array of) shape",
    "another type": r"key .* has shape .* it cannot be pushed with shape .* and type float(16|64)",
    "two first values": r"key .* takes one first value, not 2",
    "row out of range": r"row_sparse_pull of key .*: row id \d+ is out of range; the key has \d+ rows",
    "dense rows": r"row_sparse_pull of key .*: `out` must be row_sparse, not dense; use pull",
    "dense gradient": r"key .* has a row_sparse weight; it takes row_sparse gradients, not dense ones",
    "float key": r"a key is a string or a whole number, not 1.5",
    "keys already": r"store \d+ has keys already; its (reduction|compression) .* must be set before the first init",
    "settled": r"store \d+ has the (reduction|compression) .* already; it cannot become .*: make a new store",
    "other optimizer": r"store \d+ has the optimizer .* already; it cannot become .*: make a new store",
    "on servers": r"the servers update this store's weights with \w+ already; set another optimizer on a new store",
    "no optimizer": r"no optimizer was set on this store, so no states can be (saved|loaded); call set_optimizer",
    "missing file": r"optimizer states cannot be read from .*: No such file",
    "cut file": r"is truncated or holds no optimizer states",
    "other kind": r"holds the state of .*, but this store's optimizer is",
    "all rows": r"holds the state of a \w+ that updates all rows, but this store's optimizer is one that has updated",
    "other model": r"holds the state of another model: this store has no key",
    "other state": r"state of key .* has .* here, and the file .*; it is of another model, or of an optimizer",
    "no keys": r"join: this worker has no keys to serve the others' rounds with",
    # MXNet's own, of its Trainer
    "on the store": r"when parameters are updated on kvstore is not supported",
}


def run(program, rank, workers):
    """The Answer."""
    answer = Answer()
    with tempfile.TemporaryDirectory() as folder:
        machine = _Machine(program, rank, workers, Path(folder), answer)
        for number, operation in enumerate(program["operations"]):
            machine.step(number, operation)
            if answer.is_broken:
                return answer
        machine.look_at_all("at the end")
    return answer


class Slots(dict):
    """What was saved in the program: slot -> Saved."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder


class _Machine:
    def __init__(self, program, rank, workers, folder, answer):
        self._answer, self._looks = answer, program["looks"]
        slots, apis = Slots(folder), {"store": StorePair, "trainer": TrainerPair}
        self._pairs = [apis[spec["api"]](spec, rank, workers, slots, self) for spec in program["stores"]]

    def others(self, pair):
        return [one for one in self._pairs if one is not pair]

    def update_while_joined(self, store):
        for pair in self._pairs:
            if pair.kv is store:
                pair.update_while_joined()

    def step(self, number, operation):
        pair, do = self._pairs[operation["store"]], operation["do"]
        where = "operation %d, %s" % (number, operation)
        refusal = pair.refusal(operation)
        try:
            pair.run(operation)
        except (MXNetError, AssertionError) as error:
            text = " ".join(str(error).split("Stack trace")[0].split())
            if refusal is None or not re.search(REFUSALS[refusal], text):
                self._answer.wrong("%s: %s, instead of %s" % (where, text, refusal or "no error"))
                self._answer.is_broken = True  # the workers may be at different places
                return
            self._answer.count("refused: " + refusal)
            pair.follow_refused(operation)
        except Exception as error:
            self._answer.wrong("%s: %s: %s" % (where, type(error).__name__, error))
            self._answer.is_broken = True
            return
        else:
            if refusal is not None:
                self._answer.wrong("%s: no error, but expected: %s" % (where, refusal))
                self._answer.is_broken = True
                return
            try:
                pair.follow(operation)
            except Exception as error:
                raise RuntimeError("the reference failed in %s, of %s" % (where, pair.spec)) from error
            self._answer.count(do)
        for name, got, expected in pair.seen:
            self._compare(where, name, got, expected)
        pair.seen.clear()
        if self._looks:
            self.look_at_all(where)

    def look_at_all(self, where):
        for number, pair in enumerate(self._pairs):
            for name, got, expected in pair.look():
                self._compare(where, "store %d, %s" % (number, name), got, expected)

    def _compare(self, where, name, got, expected):
        difference = values.differ(got, expected)
        if "own parameter" not in name:
            self._answer.note_alike("%s: %s" % (where, name), np.ascontiguousarray(got).tobytes())
        self._answer.count("compared")
        if difference is not None:
            self._answer.wrong("%s: %s: %s" % (where, name, difference))
