"""The numbers of each param group that the servers' rules read, from step to step.

The servers are told of a group's optimizer once. Where a step finds other numbers in the group, its pushes go by those
(p3/plan/optimizers.py); the states that the servers keep stay those of what was announced.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List

import torch

from p3.plan.optimizers import differing, values_from_now_on
from p3.torch import rules
from p3.torch.parameters.parameter import Parameter


class LiveGroups:
    """Those of one optimizer. Looks at each group twice in a step: before the first gradient leaves, and at the end."""

    def __init__(self, kind: type, announced: List[Dict[str, Any]], groups: Iterable[Dict[str, Any]]) -> None:
        """`announced`: of the groups as they are now."""
        self._kind, self._announced = kind, announced
        self._read = [rules.fields_read(group) for group in groups]
        self._has_looked = False

    def end_step(self) -> None:
        self._has_looked = False

    def look_once(self, groups: List[Dict[str, Any]], parameter_of: Callable[[torch.Tensor], Parameter]) -> None:
        """Of a step whose first gradient is about to leave."""
        if not self._has_looked:
            self.look(groups, parameter_of)

    def look(self, groups: List[Dict[str, Any]], parameter_of: Callable[[torch.Tensor], Parameter]) -> None:
        """Gives parameters what their rounds go by from here on. ValueError, which names the field, if the servers
        cannot follow."""
        self._has_looked = True
        for index, group in enumerate(groups):
            now = rules.fields_read(group)
            if now == self._read[index]:
                continue
            announced, parameters = self._announced[index], [parameter_of(tensor) for tensor in group["params"]]
            fields = self._fields(announced, group, parameters)
            for parameter in parameters:
                parameter.fields, parameter.counts = fields, rules.counts(announced, group)
            self._read[index] = now

    def _fields(self, announced: Dict[str, Any], group: Dict[str, Any], parameters: List[Parameter]) -> rules.Fields:
        try:
            now = rules.describe(self._kind, group)
        except rules.NotOnServer as error:
            text = "the servers cannot go on with this param group: %s. Pass synchronous=True" % error
            raise ValueError(text) from None
        changed = differing(announced, now)
        if not changed:
            return None
        if any(one.takes_steps for one in parameters):
            raise ValueError(
                "with dgc the workers apply the momentum, and %s cannot change from step to step. OneCycleLR and "
                "CyclicLR leave it as it is with cycle_momentum=False" % ", ".join(changed)
            )
        of_rows = [one.name for one in parameters if one.key.sparse]
        if of_rows and not rules.updates_rows_alone(now, group):
            raise ValueError(
                "%s of the param group of %s has changed, and an update is now of more rows than its sparse gradient "
                "has: pass synchronous=True" % (", ".join(changed), of_rows[0])
            )
        return values_from_now_on(announced, now, "a param group", ", or pass synchronous=True")
