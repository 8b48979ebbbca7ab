"""What a script may ask of local steps, checked before anything begins. ValueError names the option."""

from __future__ import annotations

import math
import numbers
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from p3.codecs import Ways
from p3.errors import ConfigError
from p3.frontend.compression import Compression
from p3.frontend.local_steps.fragments import Schedule
from p3.plan import choices, combinations
from p3.plan import strategy as strategies
from p3.plan.choices import Choice
from p3.plan.key_plan import MOST_GRACE_S
from p3.plan.strategy import Given, Strategy
from p3.settings import Settings


class Outer(NamedTuple):
    """The servers' optimizer: SGD on the workers' mean difference. The standard values are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    @classmethod
    def checked(cls, given: Optional[Mapping[str, Any]]) -> Outer:
        """What is not given is standard. ValueError, which names the field, for what there is not."""
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ValueError("outer is %.100r; it must be a dict, as {'lr': 0.7, 'momentum': 0.9}" % (given,))
        for field in given:
            if field not in cls._fields:
                raise ValueError("outer has the field %.100r, which there is not: it may have %s"
                                 % (field, ", ".join(cls._fields)))  # fmt: skip
        outer = cls(**given)
        for field in ("lr", "momentum"):
            value = getattr(outer, field)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (field == "lr" and value == 0):
                raise ValueError("the outer %s is %.100r; it must be a number %s" % (
                    field, value, "above 0" if field == "lr" else "of at least 0"))  # fmt: skip
        if not isinstance(outer.nesterov, bool):
            raise ValueError("the outer nesterov is %.100r; it must be True or False" % (outer.nesterov,))
        if outer.nesterov and outer.momentum == 0 and "nesterov" in given:
            raise ValueError("the outer nesterov is True and its momentum 0: give it a momentum, or leave nesterov out")
        return outer._replace(lr=float(outer.lr), momentum=float(outer.momentum))

    def description(self, sends_weights: bool) -> Dict[str, Any]:
        """For the servers (p3/plan/optimizers.py)."""
        nesterov = self.nesterov and self.momentum > 0
        made = {"momentum": float(self.momentum), "nesterov": nesterov, "multi_precision": False}
        return {"name": "outer_sgd", **made} if sends_weights else {
            "name": "torch_sgd", "dampening": 0.0, "maximize": False, **made}  # fmt: skip


class Options(NamedTuple):
    """The same on every worker."""

    schedule: Schedule
    alpha: float
    outer: Outer
    codec: Ways
    strided: bool
    strategy: Optional[Strategy]  # of all stores
    quorum: int = 0  # how many workers must have pushed for a round to close without the others; 0: all, always
    grace: float = 0.0  # seconds that the others are waited for then

    @classmethod
    def checked(
        cls, every: Any, fragments: Any, delay: Any, alpha: Any, codec: Any, outer: Any, strided: Any, strategy: Given,
        quorum: Any = None, grace: Any = None,
    ) -> Options:  # fmt: skip
        schedule = Schedule.checked(every, fragments, delay)
        share = _checked_alpha(alpha, schedule.delay)
        plan, of_quorum = strategies.given(strategy), _checked_quorum(quorum, grace)
        return cls(schedule, share, Outer.checked(outer), _ways(codec), bool(strided), plan, *of_quorum)

    @property
    def numbers(self) -> Dict[str, float]:
        """Those by which workers must train alike, or they would wait for what others send at other times. Their stores
        agree on the strategy."""
        others = {"outer lr": self.outer.lr, "quorum": self.quorum, "grace": self.grace}
        return {**self.schedule._asdict(), "strided": int(self.strided), "alpha": self.alpha, **others}

    def require_workers(self, count: int) -> None:
        """ValueError if a job of so many can have no such quorum."""
        if self.quorum > count:
            raise ValueError("quorum is %d, and the job has %d worker%s: take at most as many"
                             % (self.quorum, count, "s" * (count != 1)))  # fmt: skip

    def require_together(self, settings: Settings, others: Mapping[str, Any], known: Mapping[str, Choice],
                         *found: Choice) -> None:  # fmt: skip
        """ValueError unless local steps go with the codec, with what was `found`, and with what else the script asks
        for: `others`, by the names of the arguments; TypeError for one that is not `known`. ConfigError for the job's
        settings."""
        quorum = choices.of_quorum(self.quorum)
        of_job = [choices.SNAPSHOTS] * (settings.snapshot_dir is not None) + [choices.CHECK] * (settings.check > 0)
        refusal = combinations.refusal(choices.LOCAL_STEPS, *quorum, *of_job * (self.quorum > 0),
                                       *choices.of_server_losses(settings.on_server_loss),
                                       *choices.of_strategy(settings.strategy))  # fmt: skip
        if refusal:
            raise ConfigError(refusal)
        for name, value in others.items():
            if name == "compression":
                raise ValueError("LocalSteps: compression=%.100r: give it as codec" % (value,))
            if name not in known:
                raise TypeError("LocalSteps() got an unexpected keyword argument %r" % name)
        asked = [known[name].said("%s=%.100r" % (name, value)) for name, value in others.items() if value]
        codecs = choices.of_compression(self.codec.up), choices.of_value_compression(self.codec.down)
        combinations.require("LocalSteps", choices.LOCAL_STEPS, *quorum, *asked, *codecs, *found)


def _checked_alpha(alpha: Any, delay: int) -> float:
    """How much of the local weight stays in a merge. None: 0.5 with a delay, during which it has moved on; else 0."""
    if alpha is None:
        return 0.5 if delay else 0.0
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 <= alpha <= 1:
        raise ValueError("alpha is %.100r; it must be a number from 0, where the global weight takes the local one's "
                         "place, to 1, where the local one stays" % (alpha,))  # fmt: skip
    return float(alpha)


def _checked_quorum(quorum: Any, grace: Any) -> Tuple[int, float]:
    """(0, 0.0) without a quorum."""
    if quorum is None:
        if grace is not None:
            raise ValueError("grace is %.100r, and there is no quorum whose end it could put off: give quorum as well"
                             % (grace,))  # fmt: skip
        return 0, 0.0
    if isinstance(quorum, bool) or not isinstance(quorum, numbers.Integral) or quorum < 1:
        raise ValueError("quorum is %.100r; it must be a whole number of workers, at least 1" % (quorum,))
    is_number = isinstance(grace, numbers.Real) and not isinstance(grace, bool)
    if not is_number or not 0 <= grace <= MOST_GRACE_S:
        raise ValueError("grace is %.100r; with a quorum it must be the seconds that a round waits for the other "
                         "workers, from 0 to %.0e" % (grace, MOST_GRACE_S))  # fmt: skip
    return int(quorum), float(grace)


def _ways(codec: Any) -> Ways:
    if callable(codec):
        raise ValueError("codec is a function; LocalSteps takes one codec for all weights: a name, as 'int4', or a "
                         "dict, as {'up': 'int4', 'down': 'int8'}")  # fmt: skip
    try:
        return Compression(codec).of_store
    except ValueError as error:
        raise ValueError("codec: %s" % error) from None
