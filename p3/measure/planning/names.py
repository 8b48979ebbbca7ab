"""Strategies of replayed models: the replay's keys in MXNet's stores are numbers, in forward order, and the simulator's
and the bound's are the layers' names."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from p3.measure.replay.models import Model
from p3.plan.strategy import Cut, Strategy, parse


def by_number(strategy: Strategy, model: Model) -> Strategy:
    names = {one.name: str(number) for number, one in enumerate(model.tensors)}
    return strategy._replace(keys=_renamed(strategy, names))


def of_run(text: Optional[str], model: Model) -> Strategy:
    """That of a run's record, by the model's names; without one what there is without a strategy."""
    return by_name(parse(text), model) if text else Strategy()


def by_name(strategy: Strategy, model: Model) -> Strategy:
    names = {str(number): one.name for number, one in enumerate(model.tensors)}
    return strategy._replace(keys=_renamed(strategy, names))


def _renamed(strategy: Strategy, names: Mapping[str, str]) -> Dict[str, Cut]:
    return {names[name]: cut for name, cut in strategy.keys.items()}
