"""Where a training's workers stand between two steps, and a process may take the place of a lost server."""

import p3.torch
from p3.torch.start import job


def mark(steps: int) -> None:
    """On every worker, so many steps of the optimizer being behind all of them. Where servers may be lost waits for the
    others, and for what is under way; else it does nothing."""
    if job.current().outlives_servers:
        p3.torch.members(steps)
