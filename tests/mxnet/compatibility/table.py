"""docs/compatibility.json: what came out. docs/compatibility.md: the same, as tables for people."""

import json
from pathlib import Path

from compatibility.cases import CASES
from compatibility.registry import STORES

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS = DOCS / "compatibility.json"
PAGE = DOCS / "compatibility.md"

INTRODUCTION = """\
# Compatibility

What works with MXNet's `dist_sync`, with MXNet's own P3 (`dist_sync` with `DMLC_PS_VAN_TYPE=p3`) and with `p3_sync`.
Each cell is the result of a job of 2 workers and 2 servers in which every store ran the same code, a function in
`tests/mxnet/compatibility/`; "yes" means that the values were right, too. Numbers refer to the [reasons](#reasons).
`make compatibility` runs all of them again; the tests run the `p3_sync` column and compare.
%s
- *wrong result*: it ran, but a value was wrong, or an expected error did not occur
- *refused*: an exception on every worker; *no such interface*: the method is missing
- *crash*: a process died; *hang*: not finished after 20 s

"""


def load():
    if RESULTS.exists():
        return json.loads(RESULTS.read_text(encoding="utf-8"))
    return {"ran": {}, "cells": {}}


def save(results):
    cells = {name: results["cells"][name] for name in CASES if name in results["cells"]}
    for name, row in cells.items():
        cells[name] = {store: row[store] for store in STORES if store in row}
    ran = {store: results["ran"][store] for store in STORES if store in results["ran"]}
    RESULTS.write_text(json.dumps({"ran": ran, "cells": cells}, indent=1) + "\n", encoding="utf-8")


def write(results):
    PAGE.write_text(page(results), encoding="utf-8")


def page(results):
    """The Markdown of the results; a pure function of them and of the cases' rows."""
    notes = {}  # reason -> number, in order of appearance
    circumstances = {}
    for store, ran in results["ran"].items():
        text = "MXNet %(mxnet)s, Python %(python)s, %(date)s" % ran
        circumstances.setdefault(text, []).append(STORES[store])
    ran = "; ".join("%s: %s" % (", ".join(stores), text) for text, stores in circumstances.items())
    parts = [INTRODUCTION % ("Last run: %s.\n" % ran)]
    for title in dict.fromkeys(case.table for case in CASES.values()):
        parts.append("## %s\n\n| | %s |\n|---|%s\n" % (title, " | ".join(STORES.values()), "---|" * len(STORES)))
        for name, case in CASES.items():
            if case.table == title:
                row = results["cells"].get(name, {})
                cells = [_cell(row.get(store), notes) for store in STORES]
                parts.append("| %s | %s |\n" % (case.row, " | ".join(cells)))
        parts.append("\n")
    parts.append("## Reasons\n\n")
    parts.extend("%d. %s\n" % (number, _literal(reason)) for reason, number in notes.items())
    return "".join(parts)


def _cell(cell, notes):
    if cell is None:
        return "not run"
    if not cell["reason"]:
        return cell["outcome"]
    return "%s (%d)" % (cell["outcome"], notes.setdefault(cell["reason"], len(notes) + 1))


def _literal(reason):
    return "`` %s ``" % reason.replace("``", "''")
