"""Has hypothesis draw programs for a while; what it finds, it makes as small as it can."""

from __future__ import annotations

import time

import hypothesis
from programs.machine import Finding
from programs.operations import PLAINEST, programs


class _Over(BaseException):
    """The time is over. Not an Exception: hypothesis would take it for a finding."""


def search(machine, workers, seconds, seed, without=(), letters=None):
    """Raises Finding. `without`: fields of programs, operations, arguments of any; `letters`: the layers to use."""
    end, found = time.monotonic() + seconds, None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        deadline=None, database=None, max_examples=1_000_000, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(programs())
    def agree(program):
        nonlocal found
        if time.monotonic() > end and found is None:
            raise _Over
        try:
            machine.check(_restricted(program, without, letters), workers)
        except Finding as finding:
            found = finding
            raise

    try:
        agree()
    except _Over:
        pass
    except hypothesis.errors.Flaky:
        raise Finding("the same program does not always do the same: %s" % found) from None


def _restricted(program, without, letters):
    def way(text):
        kept = "".join(letter for letter in text if letters is None or letter in letters)
        return kept or letters[0]

    operations = [
        [name, dict(arguments)]
        for name, arguments in program["operations"]
        if not any(word in without for word in (name, *map(str, arguments.values())))
    ]
    for _, arguments in operations:
        if "ways" in arguments:
            arguments["ways"] = [way(text) for text in arguments["ways"]]
        if "way" in arguments:
            arguments["way"] = way(arguments["way"])
    fields = {key: PLAINEST[key] for key in without if key in PLAINEST}
    return {**program, **fields, "operations": operations}
