"""Steps of an optimizer that the script has declared to update each parameter by itself (independent=True).

Whether it looks at others cannot be seen. What can be: that it counts its steps in a group or in itself, which would
then count updates of parameters.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import torch

from p3.torch.rounds.clipping import Clipping
from p3.torch.rounds.overlapping import Overlapping


class Declared(Overlapping):
    _joins_updates = False  # or workers whose updates are not of one parameter alone would drift apart

    def _update(self, closure: Optional[Callable] = None) -> Any:
        """Of the groups that the optimizer has now: one parameter's."""
        optimizer = self._optimizer
        shared = (*optimizer.param_groups, vars(optimizer), _of_no_parameter(optimizer.state))
        before = [_values(one) for one in shared]
        result = super()._update(closure)
        for was, now in zip(before, (*shared[:-1], _of_no_parameter(optimizer.state))):
            changed = [name for name, value in _values(now).items() if name not in was or was[name] != value]
            if changed:
                raise ValueError(
                    "%s: step() of %s has changed %r, which is not of one parameter alone: leave out independent=True"
                    % (self._session.label, self._kind.__name__, changed[0])
                )
        return result


class DeclaredClipping(Clipping, Declared):
    pass


def _of_no_parameter(state: Dict[Any, Any]) -> Dict[str, Any]:
    return {str(name): value for name, value in state.items() if not isinstance(name, torch.Tensor)}


def _values(of: Dict[str, Any]) -> Dict[str, Any]:
    """What can be compared: numbers and the like as they are, and of a tensor how often it was written."""
    plain = {name: value for name, value in of.items() if isinstance(value, (int, float, str, type(None)))}
    return {**plain, **{name: value._version for name, value in of.items() if isinstance(value, torch.Tensor)}}
