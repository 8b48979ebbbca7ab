"""A trainer's local steps (docs/local-steps.md): whose weights a model has when, and what a checkpoint has of them.

Between steps a model has this worker's own weights. What is evaluated and saved are the global ones; beside a
checkpoint each worker writes its own part, from which it goes on with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, MutableMapping, Optional, Sequence

import torch

import p3.torch
from p3.frontend import samples as of_workers
from p3.plan import choices, combinations
from p3.torch.requirements import parameters_of
from p3.torch.start import job
from p3.trainers import former, gradients

Part = List[Dict[str, Any]]  # of each optimizer


class Local:
    """Of one trainer's optimizers. Without options they share each step's gradients, and the rest does nothing."""

    def __init__(self, options: Optional[Mapping[str, Any]]) -> None:
        """`options`: the arguments of p3.torch.LocalSteps, and "weigh", which says what count() does. ValueError if it
        is no dict, or for another "weigh"."""
        if options is not None and not isinstance(options, Mapping):
            raise ValueError("local_steps is %.100r; it must be a dict of the arguments of p3.torch.LocalSteps, as "
                             "{'every': 30}" % (options,))  # fmt: skip
        self._options = None if options is None else {name: value for name, value in options.items() if name != "weigh"}
        self._weigh = _checked_weigh((options or {}).get("weigh"))
        self._optimizers: List[Any] = []
        # Samples of batches, by an optimizer's step under way; not told yet.
        self._counted: MutableMapping[Any, float] = weakref.WeakKeyDictionary()
        self._ended_at: MutableMapping[Any, int] = weakref.WeakKeyDictionary()  # the steps that they had taken by then

    @property
    def is_on(self) -> bool:
        return self._options is not None

    @property
    def optimizers(self) -> List[Any]:
        """Those that take local steps."""
        return [one for one in self._optimizers if hasattr(one, "_p3_local")]  # else it was released

    @property
    def weighs(self) -> bool:
        """Whether count() does anything."""
        return bool(self._weigh)

    def distribute(self, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]) -> None:
        """Has P3 train its parameters, on every worker at the same point, and releases what no training has taken up.
        ValueError if the models lack one of them, or for what cannot be trained so."""
        former.release_all()
        if self._options is None:
            return gradients.distribute(optimizer, models)
        session = job.current()
        if session.goes_on_without:
            combinations.require(session.label, choices.LEAVING, choices.TRAINERS)
        combinations.require(session.label, choices.TRAINERS, *choices.of_quorum(self._options.get("quorum")))
        if any("compression" in group for group in optimizer.param_groups):
            raise ValueError('group["compression"]: it is for gradients, and with local_steps none travel: say '
                             'local_steps={"codec": ...}')  # fmt: skip
        p3.torch.LocalSteps(optimizer, gradients.of_models(optimizer, models), **self._options)
        taken = set(parameters_of(optimizer))  # from a former one, which is over
        self._optimizers = [*(one for one in self.optimizers if taken.isdisjoint(parameters_of(one))), optimizer]

    def set_aside(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """On every worker: their training is over, unless take_up() follows before another begins."""
        gone = list(optimizers)
        former.set_aside(gone)
        self._optimizers = [one for one in self._optimizers if one not in gone]

    def take_up(self, optimizer: torch.optim.Optimizer) -> None:
        """One that distribute() was given trains, or trains again."""
        former.take_up(optimizer)
        if self.is_on and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    # How much each worker's differences weigh

    def count(self, batches: Sequence[Any], usual: Callable[[], Any]) -> None:
        """The step under way trains on these, too. Of how many samples they are, `usual`, the trainer's own rule, says,
        or the script's function of a batch. ValueError if that is no number from 0 on."""
        if self._weigh is True:
            self.add(usual())
        elif self._weigh:
            self.add(sum(of_workers.checked(self._weigh(batch)) for batch in batches))

    def add(self, samples: Any) -> None:
        """The step under way trains on so many samples more. ValueError if it is no number from 0 on."""
        number = of_workers.checked(samples)
        for one in self.optimizers:
            self._counted[one] = self._counted.get(one, 0.0) + number

    def tell(self, *optimizers: Any) -> None:
        """Before the step of these, or of all, for which nothing more will be counted; the earlier the better."""
        for one in optimizers or self.optimizers:
            if one in self._counted:
                one.weigh(self._counted.pop(one))

    # Whose weights the models have

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the models have the global weights, also in another shown(). Behind end() they are as they are,
        until the next step."""
        with contextlib.ExitStack() as stack:
            for one in self.optimizers:
                if one._p3_local.steps_taken != self._ended_at.get(one) and not one._p3_local.shows_global:
                    stack.enter_context(one.global_weights())
            yield

    def end(self) -> None:
        """At the end of a training, on every worker: the global weights are the models' for good. Behind another end()
        they stay as they are."""
        for one in self.optimizers:
            if one._p3_local.steps_taken != self._ended_at.get(one):
                one.take_global()
                self._ended_at[one] = one._p3_local.steps_taken

    # Checkpoints

    def part(self, of: str) -> Optional[Part]:
        """What a checkpoint has of this worker alone, beside the models' global weights and the optimizers' states. On
        every worker, in `of`, a call of the script. None: nothing."""
        return [one._p3_local.own_part(of) for one in self.optimizers] or None

    def take(self, read: Callable[[], Optional[Part]], of: str) -> None:
        """`read` gives this worker's part, or None; on every worker, behind the load of models and optimizers."""
        read = functools.lru_cache(None)(read)

        def of_one(place: int) -> Optional[Dict[str, Any]]:
            found = read()
            return None if found is None else found[place]

        for place, one in enumerate(self.optimizers):
            self._ended_at.pop(one, None)  # the weights are its own again
            one._p3_local.take_own_part(functools.partial(of_one, place), of)

    def save_in(self, folder: Any, of: str) -> None:
        part = self.part(of)
        if part is not None:
            os.makedirs(folder, exist_ok=True)
            torch.save(part, _path(folder))

    def load_from(self, folder: Any, of: str) -> None:
        def read() -> Optional[Part]:
            path = _path(folder)
            return torch.load(path, "cpu", weights_only=True) if os.path.exists(path) else None

        self.take(read, of)


def _checked_weigh(given: Any) -> Any:
    if not isinstance(given, (bool, type(None))) and not callable(given):
        raise ValueError("local_steps has weigh=%.100r; it must be True, and the trainer's own count of a batch "
                         "weighs, or a function of a batch that returns a number" % (given,))  # fmt: skip
    return given


def _path(folder: Any) -> str:
    return os.path.join(os.fspath(folder), "p3_local_%d.pt" % p3.torch.rank())
