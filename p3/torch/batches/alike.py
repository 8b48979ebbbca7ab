"""Whether all workers train on the same data, as where nobody has shared it out: told once, by rank 0.

Of each of the first steps a digest of some of the inputs travels with the next step's count (p3/frontend/steps.py). If
all workers' are the same in all of these steps, that is a warning, and never an error: some trainings mean it so.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from typing import Any, Iterator, List, Tuple

import torch

from p3.torch.device import staging
from p3.torch.parameters.arrays import DEVICES, as_bytes
from p3.worker.session import Session

log = logging.getLogger("p3.torch")

STEPS = 3
_ELEMENTS = 4096  # of each tensor, at equal distances: the edges of pictures are alike


class Alike:
    """Threads: the script's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left = STEPS if session.num_workers > 1 else 0  # to be looked at
        self._same = 0
        self._samples: List[Tuple[Any, Any, torch.Tensor]] = []  # staging and event, if it comes from a device

    def note(self, inputs: Any, keywords: Any) -> None:
        """What the first module that runs in a step is called with."""
        if not self._left or self._samples:
            return
        for tensor in _tensors((inputs, keywords)):
            sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _ELEMENTS)].contiguous()
            if sample.device.type in DEVICES:
                of_device = staging.staging_of(sample.device)
                host, came = of_device.to_host(sample)
                self._samples.append((of_device, came, host))
            else:
                self._samples.append((None, None, sample.clone()))

    def digest(self) -> float:
        """Of what was noted since the last call; 0.0: of nothing, or it has not come from its device yet."""
        samples, self._samples = self._samples, []
        if any(came is not None and not came.query() for _, came, _ in samples):
            return 0.0
        found = 0
        for of_device, came, sample in samples:
            if came is not None:
                of_device.give_back(came)
            found = zlib.crc32(as_bytes(sample).numpy(), found)
        return float(found)

    def compare(self, own: float, workers: int, total: float) -> None:
        """`own`: what digest() gave; `total`: the sum of all `workers` that took the step."""
        if not own or not self._left:
            return
        self._left -= 1
        self._same += (workers, total) == (len(self._session.members), own * workers)
        if self._left == 0 and self._same == STEPS and self._session.is_first and self._session not in _told:
            _told.add(self._session)
            log.warning(
                "all %d workers had the same inputs in each of their first %d steps, as if nobody shared the data out: "
                "give each worker its own, as torch.utils.data.DistributedSampler(dataset, p3.torch.size(), "
                "p3.torch.rank()) does", len(self._session.members), STEPS,
            )  # fmt: skip


_told: weakref.WeakSet = weakref.WeakSet()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain ones, of which the bytes are to be had."""
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested
        is_real = not (value.is_quantized or value.dtype.is_complex)
        if is_plain and is_real and value.device.type in ("cpu", *DEVICES):
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
