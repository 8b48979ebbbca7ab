"""What the workers of tests/jobs/aggregated.py have printed."""

import json


def results(output):
    """What each worker printed, by rank."""
    found = [json.loads(line[line.index("{"):]) for line in output.splitlines() if '"landed"' in line]
    return sorted(found, key=lambda result: result["rank"])


def exact(landed):
    """Without what is rounded on its way: once for a machine, or once for each worker."""
    return {what: digest for what, digest in landed.items() if not what.startswith("compressed")}
