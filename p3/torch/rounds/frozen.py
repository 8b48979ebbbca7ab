"""Weights that no optimizer has, as the base of an adapter: rank 0's on every worker, when training begins.

They may be most of the model, and nobody needs them again. So they travel as one stream of bytes
(p3/worker/streams.py), tensor after tensor. Neither servers nor workers ever hold more of them than two pieces, and
snapshots have none.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np
import torch

from p3.plan.strategy import Strategy
from p3.torch.parameters import trained
from p3.torch.rounds.forward import named_parameters
from p3.worker import streams
from p3.worker.session import Session
from p3.worker.stores import OF_A_MOMENT

Place = Tuple[torch.Tensor, int, int]  # of a tensor's bytes: from, to


class Frozen:
    def __init__(self, session: Session, models: Sequence[torch.nn.Module], store: int,
                 strategy: Optional[Strategy] = None) -> None:  # fmt: skip
        """`store`: one that stays, where workers that have other weights hear of it."""
        self._session, self._models, self._strategy = session, models, strategy
        session.declare("frozen", (0, _bytes(self._tensors())), "uint8", store)

    def _tensors(self) -> List[torch.Tensor]:
        """As it is now: another optimizer may have taken some, or given them back."""
        named = named_parameters(self._models)
        return [tensor for _, tensor in named if tensor not in trained.names and tensor.numel() > 0]

    def broadcast(self) -> None:
        """The first worker's, on every worker at the same point. Waits for them."""
        session, tensors = self._session, self._tensors()
        total, giver = _bytes(tensors), session.first
        if total == 0 or len(session.members) == 1:  # who is not alone knows that, as do the others
            return
        store = session.new_store(self._strategy, OF_A_MOMENT)
        if not streams.give(session, store, total, giver, _Stream(tensors)):
            what = "worker %d was lost while it gave all workers the weights that no optimizer trains"
            session.fail(what % giver)
            session.check()
        session.release(store)

    def hand_over(self) -> None:
        """The first worker's, to those who join the job here; by every worker at the same point. The others, who have
        them, only wait."""
        tensors = self._tensors()
        if tensors:
            self._session.entrance.hand_over(self._session.first, _bytes(tensors), _Stream(tensors))


class _Stream:
    """Tensors as a stream of bytes, in the order of their axes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._rest = iter(tensors)
        self._tensor, self._at = next(self._rest, None), 0
        self._copied: Tuple = (None, None)  # a tensor whose bytes do not lie in that order, and a copy where they do

    def next(self, count: int) -> List[Place]:
        """Where the next `count` bytes are; fewer at the end."""
        places: List[Place] = []
        while count > 0 and self._tensor is not None:
            end = min(self._at + count, self._tensor.nbytes)
            places.append((self._tensor, self._at, end))
            count, self._at = count - (end - self._at), end
            if end == self._tensor.nbytes:
                self._tensor, self._at = next(self._rest, None), 0
        return places

    def read(self, places: List[Place], array: np.ndarray) -> None:
        to, done = torch.from_numpy(array), 0
        for tensor, begin, end in places:
            to[done : done + end - begin].copy_(self._bytes(tensor)[begin:end])
            done += end - begin

    def write(self, places: List[Place], array: np.ndarray) -> None:
        come, done = torch.from_numpy(array), 0
        with torch.no_grad():
            for tensor, begin, end in places:
                self._bytes(tensor)[begin:end].copy_(come[done : done + end - begin])
                done += end - begin
                if end == tensor.nbytes and not tensor.is_contiguous():
                    tensor.copy_(self._copied[1])

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place, if they lie in order; else of a copy, of one tensor at a time."""
        if tensor.is_contiguous():
            return tensor.detach().view(-1).view(torch.uint8)
        if self._copied[0] is not tensor:
            self._copied = tensor, tensor.detach().contiguous()
        return self._copied[1].view(-1).view(torch.uint8)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
