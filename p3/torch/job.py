"""The job that this process is a worker of, however it was started: by `p3 run`, by torchrun, or alone."""

from __future__ import annotations

import os

from p3.settings import in_job
from p3.torch import torchrun
from p3.worker import open_sessions
from p3.worker.session import Session


def current() -> Session:
    """Joins it at the first call. ConfigError, RendezvousError or AuthenticationError if that cannot be."""
    return open_sessions.current(_open)


def _open() -> Session:
    if torchrun.started(os.environ) and not in_job(os.environ):
        return Session.open(torchrun.settings(os.environ))
    return Session.open()
