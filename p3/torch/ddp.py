"""DistributedDataParallel around a model that P3 trains already is an error, of which the script learns at once: it
would write rank 0's weights over those that P3 watches, and add up the gradients a second time. Within a site it comes
before LocalSteps (p3/torch/sites/)."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from p3.torch.parameters import trained


def refuse() -> None:
    """From now on, of models that an optimizer of P3 trains. Call it once."""
    wrap = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def checked(self: Any, module: Any, *arguments: Any, **keywords: Any) -> None:
        name = next((trained.names[one] for one in module.parameters() if one in trained.names), None)
        if name is not None:
            raise ValueError(
                "DistributedDataParallel(model): P3 trains its parameter %s already. Take DistributedDataParallel away "
                "and use the model itself; optimizer.no_sync() and optimizer.join() are those of P3. Within a site "
                "(p3.torch.site) it comes before LocalSteps" % name
            )
        wrap(self, module, *arguments, **keywords)

    DistributedDataParallel.__init__ = checked
