"""A worker that runs programs as they come: worker.py SOCKET, alone or by `p3 run`.

Each line is a program, as JSON. The answer says whether P3 and plain torch have agreed, operation by operation:
"same": in all; "undefined": up to operation `at`, which plain torch refuses; "refused": P3 has raised a ValueError or a
RuntimeError there; "failed": anything else; "differs": what a script reads there is not the same.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import sys
import traceback

import torch
from programs.arena import Arena
from programs.stale import StaleArena

import p3.torch

TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
OF_FLOAT16 = 1e-2  # of compressed gradients, after some steps


def main() -> None:
    logging.getLogger("p3.torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rank, workers = p3.torch.rank(), p3.torch.size()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as lines:
            print(json.dumps({"rank": rank}), file=lines, flush=True)
            for line in lines:
                print(json.dumps(run(json.loads(line), rank, workers)), file=lines, flush=True)


def run(program, rank, workers):
    os.environ["P3_CHECK"] = str(program["check"])
    if program["compiled"]:
        torch._dynamo.reset()
    operations = [*program["operations"], ["everything", {}]]
    expected, undefined = _in_plain_torch(program, operations, rank, workers)
    tolerance = OF_FLOAT16 if program["compression"] else TOLERANCE[program["dtype"]]
    at, text = 0, ""
    try:
        arena = _kind(program)(program, p3.torch, rank, workers)
        for at, (operation, wanted) in enumerate(zip(operations, expected)):
            text = difference(arena.run(operation), wanted, tolerance)
            if text:
                return _answer("differs", at, text)
    except (ValueError, RuntimeError, pickle.PicklingError) as error:
        return _answer("refused", at, str(error), traceback.format_exc())
    except Exception as error:
        return _answer("failed", at, repr(error), traceback.format_exc())
    return _answer("undefined", len(expected), undefined) if undefined else _answer("same", len(operations), "")


def _kind(program):
    return StaleArena if program["staleness"] else Arena


def _answer(outcome, at, text, trace=""):
    return {"outcome": outcome, "at": at, "text": text, "trace": trace}


def _in_plain_torch(program, operations, rank, workers):
    """(What a script reads in each operation, up to the first that torch refuses; why it refuses that)"""
    arena, read = _kind(program)(program, None, rank, workers), []
    for operation in operations:
        try:
            read.append(arena.run(operation))
        except Exception as error:
            return read, repr(error)
        if not all(torch.isfinite(value).all() for value in read[-1].values() if isinstance(value, torch.Tensor)):
            return read[:-1], "numbers that are not finite"
    return read, ""


def difference(read, wanted, tolerance):
    """The first, in words, or "". `tolerance`: as a share of a tensor's largest value."""
    if read.keys() != wanted.keys():
        only = sorted(wanted.keys() - read.keys()), sorted(read.keys() - wanted.keys())
        return "P3 lacks %s and has %s, which plain torch does not" % only
    for where, value in wanted.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        here, there = (torch.as_tensor(one) if is_number else one for one in (read[where], value))
        if not isinstance(there, torch.Tensor):
            if here != there:
                return "%s is %r, and in plain torch %r" % (where, here, there)
            continue
        if here.shape != there.shape or here.dtype != there.dtype:
            return "%s is %s %s, and in plain torch %s %s" % (where, here.dtype, here.shape, there.dtype, there.shape)
        if there.numel():
            scale = max(there.abs().max().item(), 1e-3)
            apart = (here.double() - there.double()).abs().max().item() / scale
            if not apart <= tolerance:
                return "%s is %.2g of its largest value off" % (where, apart)
    return ""


if __name__ == "__main__":
    main()
