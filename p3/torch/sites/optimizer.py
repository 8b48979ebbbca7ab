"""LocalSteps in the processes of a site: the leader exchanges for all, and what becomes of its weights, all have.

The members' weights are the same bits before a step of the optimizer, and the same gradients make them the same behind
it. Whatever P3 writes to the leader's weights then, in whatever call, the others get, at the same point: so they need
know nothing of fragments, rounds and codecs.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set

import torch

from p3.frontend import samples as of_workers
from p3.frontend.local_steps.options import Options
from p3.settings import Settings
from p3.torch.parameters import trained
from p3.torch.rounds.forward import named_buffers, named_parameters
from p3.torch.shared_weights import Parameter, Shared
from p3.torch.sites.site import Site


class OfSite(Shared):
    """What stands between one optimizer and the job: on the leader, with all that this is elsewhere; on another member,
    with its own part of that alone.

    Of a script's calls every member makes the same, at the same point; but for stats(), synchronize() and state_dict(),
    which are of one process.
    """

    def __init__(self, site: Site, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module],
                 shared: List[Parameter], options: Options, settings: Settings) -> None:  # fmt: skip
        self._site = site
        self._written: Set[str] = set()  # weights of the leader, in a call
        self._stats: Dict[str, float] = {}  # of the leader
        self._has_resumed = False
        self._note(optimizer, models, shared)
        self._all = [one for _, one in named_parameters(models) + named_buffers(models)]
        self._require_free()
        self._require_same_model()
        begin = functools.partial(super().__init__, optimizer, models, shared, options, settings)
        self._lead("LocalSteps", begin, self._all)
        if not site.is_leader:
            self.steps_taken = int(self._stats["step"])
            for one in shared:
                trained.names[one.tensor] = one.name
        if site.lead("LocalSteps", lambda: self._has_resumed):
            state = site.tree("LocalSteps", lambda: self._kind.state_dict(self._optimizer))
            if not site.is_leader:
                self._optimizer.load_state_dict(state)

    def _require_free(self) -> None:
        former = [one.name for one in self._shared.values() if one.tensor in trained.names]
        if former:
            raise ValueError("%s: another optimizer trains %s: in a site call its release() before, on all members"
                             % (self._site.label, former[0]))  # fmt: skip

    def _require_same_model(self) -> None:
        """ValueError on all members if one has another model."""
        described = [(name, str(one.tensor.dtype), tuple(one.tensor.shape)) for name, one in self._shared.items()]
        described += [("", str(one.dtype), tuple(one.shape)) for one in self._all]
        digests = self._site.gather(zlib.crc32(repr(described).encode()), "LocalSteps")
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise ValueError("%s: LocalSteps: member %d has a model of other parameters or buffers than the leader, or "
                             "an optimizer of others: give all the same" % (self._site.label, odd[0]))  # fmt: skip

    # What the leader does for all

    def _lead(self, call: str, function: Callable[[], Any], tensors: Optional[Sequence[torch.Tensor]] = None) -> None:
        """`function()` on the leader; behind it all have the weights that it has written there, or these `tensors`."""

        def lead() -> Any:
            self._written.clear()
            function()
            written = [number for number, name in enumerate(self._shared) if name in self._written]
            return [written if tensors is None else [], super(OfSite, self).stats()]

        written, self._stats = self._site.lead(call, lead)
        parameters = list(self._shared.values())
        self._site.share([parameters[number].tensor for number in written] if tensors is None else tensors, call)

    def merge(self, name: str, value: Any, alpha: float) -> None:
        self._written.add(name)
        super().merge(name, value, alpha)

    def _take_own(self, resumed: Dict[str, Any]) -> None:
        super()._take_own(resumed)
        self._has_resumed = True

    # The calls of all members

    @torch.compiler.disable
    def after_step(self) -> None:
        def lead() -> None:
            self._session.check()  # also in a step in which nothing is due
            super(OfSite, self).after_step()

        number = self.steps_taken + 1
        self._lead("step() number %d" % number, lead)
        self.steps_taken = number

    def weigh(self, samples: Any) -> None:
        """Of the members' samples the sum."""
        own = self._site.gather(of_workers.checked(samples), "weigh()")
        self._lead("weigh()", functools.partial(super().weigh, sum(own)))

    def leave_out(self) -> None:
        if self._site.is_leader:
            super().leave_out()

    def synchronize(self) -> None:
        if self._site.is_leader:
            super().synchronize()

    def take_global(self) -> None:
        self.require_own_weights("take_global()")
        self._lead("take_global()", super().take_global)

    def broadcast(self) -> None:
        self.require_own_weights("broadcast()")
        self._lead("broadcast()", super().broadcast, self._all)

    def _show_global(self) -> None:
        self._lead("global_weights()", super()._show_global)

    def stats(self) -> Dict[str, float]:
        """Of the leader; on another member as of the last call."""
        return super().stats() if self._site.is_leader else dict(self._stats)

    # Saved and loaded

    def with_outer(self, content: Dict[str, Any]) -> Dict[str, Any]:
        """The leader's, which is all that need be saved; another member has no outer state."""
        return super().with_outer(content) if self._site.is_leader else content

    def load(self, load: Callable[[], None], content: Optional[Mapping[str, Any]]) -> None:
        self.require_own_weights("load_state_dict()")
        self._lead("load_state_dict()", functools.partial(super().load, load, content))
        if not self._site.is_leader:
            load()
            self.steps_taken = int(self._stats["step"])

    def _leave(self) -> None:
        self._lead("release()", super()._leave)
        if not self._site.is_leader:
            for one in self._shared.values():
                del trained.names[one.tensor]
