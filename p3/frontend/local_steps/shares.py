"""weigh(): each worker's differences count in proportion to the samples that it has trained on for them.

In the step behind which a fragment is due each worker tells its number, as soon as it is known, with a count of who
takes part; each multiplies its differences by its share before they leave, so nobody else has to know of weights. Where
the others' numbers have not come by then, the differences are kept, and leave behind a later step.

With a quorum nobody knows with whom its differences will be added up. So each worker multiplies them by its own number,
and sends that along; the servers divide by the sum of those that came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional, Sequence, Tuple

from p3.frontend import samples as of_workers
from p3.frontend.steps import FIRST, Count, Steps
from p3.worker.session import Session


class Counted(ABC):
    """What this worker has trained on, of all fragments. Threads: the script's."""

    _tells_others = True  # as soon as the number is known, and once

    def __init__(self, session: Session, fragments: int) -> None:
        self._session = session
        self._since: List[Optional[float]] = [None] * fragments  # samples since its last exchange; None: not weighed
        self._of_step: Optional[float] = None  # those of the step under way
        self._may_be_left_out = False  # that step, of which the number then is another one
        self._told: Dict[int, Any] = {}  # of exchanges under way

    def weigh(self, samples: Any, due: Optional[int]) -> None:
        """The step under way, behind which the fragment `due` is exchanged, is of so many samples. Returns at once."""
        number = of_workers.checked(samples)
        if self._of_step is not None and not self._may_be_left_out:
            raise ValueError("%s: weigh() was called before in this step, and step() has not ended it: call it once in "
                             "each step, with the samples of all its batches" % self._session.label)  # fmt: skip
        self._of_step, self._may_be_left_out = number, False
        if self._tells_others and due is not None and due not in self._told:
            self._tell(due)

    def leave_out(self) -> None:
        """If the step under way is not taken after all: weigh() may be called again."""
        self._may_be_left_out = True

    def end_step(self, due: Optional[int]) -> None:
        """It was taken."""
        if due is not None and due not in self._told:
            self._tell(due)
        self._since = [self._with_step(one) for one in self._since]
        if due is not None:
            self._since[due] = None
        self._of_step, self._may_be_left_out = None, False

    def _tell(self, due: int) -> None:
        self._told[due] = self._telling(self._with_step(self._since[due]))

    @abstractmethod
    def _telling(self, own: Optional[float]) -> Any:
        """Of an exchange that begins, with so many samples."""

    def _with_step(self, since: Optional[float]) -> Optional[float]:
        return since if self._of_step is None else (since or 0.0) + self._of_step

    @abstractmethod
    def factor(self, fragment: int, waits: bool) -> Optional[float]:
        """By which this worker's differences are to be multiplied; 0.0: nothing of them counts. None if it is not known
        yet, unless it `waits`."""

    def require_alike(self, fragment: int) -> None:  # noqa: B027
        """ValueError if some workers have called weigh() since the fragment's last exchange, and others have not. Waits
        until all have told; of an exchange that was loaded they have."""

    def end_exchange(self, fragment: int) -> None:
        """Its differences have left, and those of others have come."""
        self._told.pop(fragment, None)

    def forget(self) -> None:
        """What was counted, as what was learned of it is gone."""
        self._since = [None if one is None else 0.0 for one in self._since]

    def finish(self) -> None:  # noqa: B027
        """Until all numbers have been told."""

    # Saved and loaded

    @property
    def since(self) -> List[Optional[float]]:
        return list(self._since)

    def go_on(self, since: Optional[Sequence[Optional[float]]]) -> None:
        """With numbers of since(); None: there are none of these fragments. Nothing is under way."""
        self._since = [None] * len(self._since) if since is None else list(since)
        self._of_step, self._told = None, {}


class Shares(Counted):
    """Of what all workers have trained on."""

    _told: Dict[int, Tuple[Optional[float], Count]]

    def __init__(self, session: Session, store: int, fragments: int) -> None:
        """On every worker at the same point; waits for them. `store`: not that of the weights."""
        super().__init__(session, fragments)
        self._steps = Steps(session, store, tells=2, name="samples")

    def _telling(self, own: Optional[float]) -> Tuple[Optional[float], Count]:
        return own, self._steps.count(0.0, 0.0, of_workers.told(own), FIRST)

    def factor(self, fragment: int, waits: bool) -> Optional[float]:
        own, count = self._told[fragment]
        if own is None:
            return 1.0  # as of all, or require_alike() says so
        if not waits and not count.operation.done:
            return None
        self.require_alike(fragment)
        return of_workers.share(self._session, own, count.told[0], count.workers)

    def require_alike(self, fragment: int) -> None:
        if fragment in self._told:
            _, count = self._told[fragment]
            self._steps.wait(count)
            of_workers.require_told_by_all(self._session, count, "an exchange", "before each of the same steps")

    def finish(self) -> None:
        self._steps.finish()


class OwnNumbers(Counted):
    """With a quorum. Nobody can tell whether all have called weigh(): who has not counts as one sample."""

    _tells_others = False  # so it is that of the step that is taken, whatever was left out

    def _telling(self, own: Optional[float]) -> float:
        return 1.0 if own is None else own

    def factor(self, fragment: int, waits: bool) -> Optional[float]:
        return self._told[fragment]
