"""The job that this process is a worker of, however it was started: by `p3 run`, torchrun or Ray Train, or alone."""

from __future__ import annotations

import math
import os
import pickle
from typing import Any, NoReturn

import numpy as np

from p3._core import P3Error
from p3.torch import ray_train, torchrun
from p3.worker import open_sessions
from p3.worker.control import Patience
from p3.worker.key import Key
from p3.worker.session import Session

_LOOK_UP_S = 0.5  # so often a script that waits can be interrupted


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
    return open_sessions.current(_open)


def _open() -> Session:
    if os.environ.get("DMLC_ROLE"):  # by p3 run or p3 exec, perhaps under torchrun
        return Session.open()
    if ray_train.started(os.environ):
        return ray_train.open_session(os.environ)
    if torchrun.started(os.environ):
        return torchrun.open_session(os.environ)
    return Session.open()


def wait(session: Session, operation: Any, timeout_s: float = math.inf) -> bool:
    """Until the operation is done; False if nothing has moved for that time. P3Error if the job fails meanwhile."""
    patience = Patience(session, timeout_s)
    while True:
        try:
            operation.wait(_LOOK_UP_S)
            return True
        except TimeoutError:
            session.check()
            if patience.left_s() <= 0:
                return False
        except P3Error:
            session.check()  # which also notes that the script knows
            raise


def from_rank_0(session: Session, key: Key, value: np.ndarray) -> np.ndarray:
    """Rank 0's `value`, on every worker at the same point: the key's first value, or another one. Waits for it."""
    landing = np.empty_like(value)
    session.wait([session.init(key, value if session.rank == 0 else None, landing)])
    return landing
