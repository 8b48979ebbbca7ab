"""The job that this process is a worker of, however it was started: by `p3 run`, torchrun or Ray Train, or alone."""

from __future__ import annotations

import os
import pickle
from typing import Callable, NoReturn

from p3.torch.start import ray_train, torchrun
from p3.worker import open_sessions
from p3.worker.session import Session


class Held:
    """By hooks of a model. A copy of the model has them too, for which they do nothing; a file cannot have them."""

    def __deepcopy__(self, _memo: dict) -> Held:
        return self

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a model that a DistributedOptimizer trains cannot be saved whole, as torch.save(model) does: save "
            "model.state_dict()"
        )


def current() -> Session:
    """Joins it at the first call. ConfigError, RendezvousError or AuthenticationError if that cannot be."""
    return open_sessions.current(_join)


def open_by(join: Callable[[], Session]) -> None:
    """Before this process has joined: how it does."""
    global _join
    _join = join


def _open() -> Session:
    if os.environ.get("DMLC_ROLE"):  # by p3 run or p3 exec, perhaps under torchrun
        return Session.open()
    if ray_train.started(os.environ):
        return ray_train.open_session(os.environ)
    if torchrun.started(os.environ):
        return torchrun.open_session(os.environ)
    return Session.open()


_join = _open
