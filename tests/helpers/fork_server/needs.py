"""Which library's fork server may run what Python is told to run."""

import os
import sys

LIBRARIES = ("mxnet", "torch")
MXNETS_OWN = ("dist_sync", "dist_async")


def arguments(command):
    """Of Python, without its options: a script or -m and a module, and theirs. None with options that it must have."""
    words = command[2:] if command[1:2] == ["-u"] else command[1:]
    return words if words and (words[0] == "-m" or not words[0].startswith("-")) else None


def library(arguments):
    """The one that the script or the module is likely to import, by what it names itself; None if there is no such."""
    name = arguments[1] if arguments[0] == "-m" else ""
    store = arguments[arguments.index("--store") + 1] if "--store" in arguments[:-1] else ""
    if store in MXNETS_OWN:
        return None  # whose worker has to take P3 out of MXNet before it imports that
    if name == "p3.replay":
        return "torch" if store.startswith(("p3_torch", "ddp")) else "mxnet"
    if name.partition(".")[0] in LIBRARIES:
        return name.partition(".")[0]
    paths = [os.path.join(entry, *name.split(".")) + ".py" for entry in sys.path] if name else arguments[:1]
    path = next(filter(os.path.isfile, paths), None)
    if path is None:
        return None
    with open(path, errors="replace") as file:
        found = set(filter(None, map(_imported, file)))
    return found.pop() if len(found) == 1 else None


def _imported(line):
    words = line.replace(",", " ").split(None, 2)
    if len(words) < 2 or words[0] not in ("import", "from"):
        return None
    names = words[1].split(".")
    name = names[1] if names[0] == "p3" and len(names) > 1 else names[0]
    return name if name in LIBRARIES else None
