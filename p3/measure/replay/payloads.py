"""What a slice takes in a frame, by formula: the bytes that are counted on network cards are held against it."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

from p3 import codecs
from p3.measure.replay import models
from p3.plan import planner
from p3.plan.key_plan import Axes


class Compression(NamedTuple):
    """Of gradients; see docs/compression.md."""

    type: str
    ratio: Optional[float] = None  # of dgc

    @property
    def option(self) -> Dict[str, Any]:
        """Of a store."""
        return {"type": self.type, **({} if self.ratio is None else {"ratio": self.ratio})}


def of_push(tensor: models.Tensor, elements: int, compression: Optional[Compression]) -> int:
    """Bytes of a slice of so many elements that one worker pushes."""
    if not _axes(tensor, compression).codec:
        return elements * models.FLOAT32_BYTES
    return codecs.push_bytes(compression.option, elements)


def of_broadcast(tensor: models.Tensor, elements: int, compression: Optional[Compression], workers: int = 1) -> int:
    """Of the slice that comes back from a server that updates. With dgc: if so many workers have chosen their elements
    independently, then in the mean so many of them; it is smallest with one, or if all choose the same."""
    if not _axes(tensor, compression).codec:
        return elements * models.FLOAT32_BYTES
    untouched = (1 - codecs.sent(compression.option, elements) / elements) ** workers
    return codecs.value_bytes(compression.option, round(elements * (1 - untouched)), elements)


def _axes(tensor: models.Tensor, compression: Optional[Compression]) -> Axes:
    return planner.axes(tensor.shape, "float32", {"compression": compression.option if compression else None})
