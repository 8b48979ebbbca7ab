"""`p3 plan --judge`: strategies that `p3 bench verdict --out` has measured, as the simulator predicts them now.

So a change of the simulator, or of what it is told by --set, is judged without measuring anything again.
"""

from __future__ import annotations

import argparse

from p3.errors import ConfigError
from p3.measure.results import records, tables
from p3.measure.simulate import validate


def text(options: argparse.Namespace) -> str:
    found = records.read(options.judge)
    found = found._replace(runs=[run for run in found.runs if run.strategy is not None])
    predicted = {one.summary.configuration: one.predicted_s for one in validate.compare(found, options)}
    if not predicted:
        raise ConfigError("no run in %s has a strategy" % ", ".join(options.judge))
    return tables.text(tables.judged(found, predicted))
