"""What a slice takes in a frame, by formula: the bytes that are counted on network cards are held against it."""

from __future__ import annotations

from typing import NamedTuple, Optional

from p3.measure.replay import models
from p3.worker import dgc

# Besides dgc; each carries gradients of +1 and -1 exactly, 2bit with a threshold of 1.
ENCODINGS = ("fp16", "2bit", "1bit")
_MEANS_BYTES = 8  # of 1bit: the two values of a slice


class Compression(NamedTuple):
    """Of gradients; see docs/compression.md."""

    type: str  # dgc, or one of ENCODINGS
    ratio: float = 0.0  # of dgc


def of_push(tensor: models.Tensor, elements: int, compression: Optional[Compression]) -> int:
    """Bytes of a slice of so many elements that one worker pushes."""
    if compression is None or _leaves_out(compression, tensor):
        return elements * models.FLOAT32_BYTES
    if compression.type == "dgc":
        return dgc.payload_bytes(dgc.count_of(elements, compression.ratio), elements)
    if compression.type == "fp16":
        return 2 * elements
    return -(-elements // 4) if compression.type == "2bit" else _MEANS_BYTES + -(-elements // 8)


def of_broadcast(tensor: models.Tensor, elements: int, compression: Optional[Compression], workers: int = 1) -> int:
    """Of the slice that comes back from a server that updates. With dgc: if so many workers have chosen their elements
    independently, then in the mean so many of them; it is smallest with one, or if all choose the same."""
    if compression is None or compression.type != "dgc" or _leaves_out(compression, tensor):
        return elements * models.FLOAT32_BYTES
    untouched = (1 - dgc.count_of(elements, compression.ratio) / elements) ** workers
    return dgc.payload_bytes(round(elements * (1 - untouched)), elements)


def _leaves_out(compression: Compression, tensor: models.Tensor) -> bool:
    return compression.type == "dgc" and len(tensor.shape) < 2
