"""One worker of a job: worker.py REPORT STORE CASE... runs the cases and appends a line of JSON for what each came to.

It goes on to the next case only while all is well, because after a failure the workers may be at different places.
"""

import json
import os
import sys

from compatibility.cases import CASES
from compatibility.registry import WrongResult


def main():
    path, store, *names = sys.argv[1:]
    with open(path, "a", buffering=1, encoding="utf-8") as report:

        def say(name, outcome, reason=""):
            report.write(json.dumps([name, outcome, reason]) + "\n")

        for name in names:
            try:
                import mxnet as mx

                case = CASES[name]
                if case.creates_store:
                    say(name, "started")
                    case.run(mx, store)
                else:
                    kv = mx.kv.create(store)
                    say(name, "started")
                    case.run(mx, kv)
            except Exception as error:  # pylint: disable=broad-except
                say(name, *outcome(error))
                sys.stdout.flush()
                os._exit(1)  # the store's own end may hang
            say(name, "yes")
            if name != names[-1]:
                mx.kv.create(store)._barrier()  # or a failure in the next case could reach a worker still in this one


def outcome(error):
    text = " ".join(str(error).split("Stack trace")[0].split()) or type(error).__name__
    if isinstance(error, WrongResult):
        return "wrong result", text
    if isinstance(error, AttributeError) and "KVStore' object has no attribute" in text:
        return "no such interface", text
    kind = type(error).__name__
    return "refused", text if text.startswith(kind) else "%s: %s" % (kind, text)


main()
