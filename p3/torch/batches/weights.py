"""weigh(): how many samples stand behind a worker's gradients in a step, and so how much these weigh in the mean.

Each worker tells its number with the count of its step (p3/frontend/steps.py), which then leaves before all gradients.
When the first of these has been computed, the sum over all workers is known as a rule. Each gradient is multiplied by
the worker's share of it before it leaves, so nobody else has to know of weights. Of a worker without samples nothing
leaves, whatever its gradients are: what is divided by no samples is no number.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from p3.frontend import samples as of_workers
from p3.frontend.steps import Count, Steps
from p3.worker.session import Session


class Weights:
    """Of one optimizer's gradients. Threads: those of its rounds, one at a time."""

    def __init__(self, session: Session, steps: Steps, count: Callable[[Optional[float]], Count]) -> None:
        """`count(samples)` counts this worker's step among `steps`, which has so many; None: weigh() was not called."""
        self._session, self._steps, self._count = session, steps, count
        self._samples: Optional[float] = None  # of the gradients from here on; None: all workers' weigh the same
        self._counted: Optional[Count] = None  # by whom they have been told
        self._factor: Optional[float] = None  # once it is known
        self.is_begun = False  # the step has been counted, and its round has not ended
        self.is_used = False
        self.lasts_step = False  # not the round alone: the step has a closure, and may have many

    def begin(self, samples: Any) -> None:
        """This worker's gradients from here on are of so many samples. Returns at once."""
        number = of_workers.checked(samples)
        if self.is_begun:
            raise ValueError("%s: weigh() was called before in this step, and step() has not ended it: call it once in "
                             "each step" % self._session.label)  # fmt: skip
        self._samples, self._factor = number, None
        self._counted, self.is_begun, self.is_used = self._count(number), True, True

    def factor(self) -> float:
        """By which a gradient is to be multiplied before it leaves; 0.0: nothing of it counts. The first call of a step
        waits until all workers have told their numbers."""
        if not self._samples:
            return 1.0 if self._samples is None else 0.0
        if self._factor is None:
            self._steps.wait(self._counted)
            require_told_by_all(self._session, self._counted)
            total, *_ = self._counted.told
            # By which the servers divide. Who has departed they know before this worker hears of it.
            workers = self._counted.workers if self._session.goes_on_without else self._session.num_workers
            self._factor = of_workers.share(self._session, self._samples, total, workers)
        return self._factor

    def end_pushes(self) -> None:
        """All gradients of the round have left."""
        if not self.is_begun:
            self._count(self._samples)
        self.is_begun = False

    def end_round(self) -> None:
        """Gradients from here on are of another round."""
        if not self.lasts_step:
            self._samples = None

    def end_step(self) -> None:
        self.lasts_step = False
        self.end_round()


def require_told_by_all(session: Session, count: Count) -> None:
    """ValueError if some of the workers that took that step have called weigh(), and others have not."""
    of_workers.require_told_by_all(session, count, "this step", "in the same steps, before the step's backward pass")
