"""Parameters on a GPU: how gradients come to the core, which reads and writes CPU memory alone, and new values back.

Each parameter has a *host array*, pinned CPU memory of its size. The gradient's hook records an event and hands the
gradient over. A thread of the device's has a stream of its own wait for that event and copy the gradient, piece by
piece, and tells the core which elements have come (Session.ready): the first slice leaves before the rest is copied.
The new value lands in the same host array, slice after slice. When a module needs it, a second stream copies it to the
device, and the stream that computes waits for that copy; the training thread waits for the network alone.

Order: gradients are copied as they were computed, for the most urgent ones are computed last; priorities hold in the
core's queues behind. What comes back has a stream of its own: no gradient that is not computed yet holds it up.

Memory: a gradient is kept until it has been copied. The host array belongs to a copy to the device until its event, for
which the thread waits before it lets the next round begin; and the landing tensor to the kernels that were queued
before the next gradient, which that gradient's event stands behind. So neither copy waits for more than it must.
"""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any, Optional, Type

import torch

from p3.torch.arrays import as_numpy, flat
from p3.torch.parameter import Parameter, RowParameter
from p3.worker.key import Key
from p3.worker.pieces import pieces
from p3.worker.session import Session

# Types of devices. Tests of the staging add "cpu", whose streams and events in torch do nothing.
STAGED = {"cuda"}


def kind_of(name: str, tensor: torch.Tensor, has_rows: bool) -> Type[Parameter]:
    """The class for a parameter, whose gradients are sparse if it `has_rows`. ValueError if there is none."""
    if tensor.device.type not in STAGED:
        return RowParameter if has_rows else Parameter
    if has_rows:
        raise ValueError(
            "parameter %s has sparse gradients, and is on %s, where the number of their rows is not known without "
            "waiting for the device; pass sparse=False to its module, or keep the module on the CPU"
            % (name, tensor.device)
        )
    return StagedParameter


class Staging:
    """The streams and the thread of one device.

    Threads: any. The thread that calls has a current stream of the device, which computes what it speaks of.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """`module`: whose streams and events these are; else torch's for devices of that type."""
        self._device, self._module = device, module or getattr(torch, device.type)
        self._out, self._back = self._new_stream(), self._new_stream()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="p3-staging", daemon=True).start()

    def host_array(self, tensor: torch.Tensor) -> torch.Tensor:
        """For its elements, in the order of memory."""
        return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=self._is_gpu)

    def send(self, session: Session, key: Key, host: torch.Tensor, gradient: Optional[torch.Tensor], came: Any) -> None:
        """Has the key's gated round leave: with the gradient, flat like `host`, or without one. Returns at once.

        `came`: the event of the copy from `host` that was begun last.
        """
        computed = self._record(self._module.current_stream(self._device))
        job = functools.partial(self._copy_out, session, key, host, gradient, computed, came)
        self._jobs.put(functools.partial(_or_fail, session, key, job))

    def _copy_out(self, session, key, host, gradient, computed, came) -> None:
        came.synchronize()
        if gradient is None:
            computed.synchronize()  # then nobody reads the landing tensor any more
            return session.ready(key, host.numel())
        self._out.wait_event(computed)
        cuts = pieces(host.numel(), session.slice_elements)
        copied = [(end, self._copy(self._out, host[begin:end], gradient[begin:end])) for begin, end in cuts]
        for end, event in copied:
            event.synchronize()  # without Python's lock
            session.ready(key, end)

    def bring(self, host: torch.Tensor, landing: torch.Tensor) -> Any:
        """Copies `host` to the device, before what the current stream computes from now on. The event of that."""
        came = self._copy(self._back, landing, host)
        self._module.current_stream(self._device).wait_event(came)
        return came

    def let_finish(self) -> None:
        """What bring() copies from now on waits for what the current stream computes now."""
        self._back.wait_stream(self._module.current_stream(self._device))

    def _copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """Returns its event."""
        with self._module.stream(stream):
            destination.copy_(source, non_blocking=True)
        return self._record(stream)

    def new_event(self) -> Any:
        """One that does not keep a processor busy while a thread waits for it."""
        return self._module.Event(blocking=True) if self._is_gpu else self._module.Event()

    def _record(self, stream: Any) -> Any:
        event = self.new_event()
        event.record(stream)
        return event

    def _new_stream(self) -> Any:
        return self._module.Stream(self._device) if self._is_gpu else self._module.Stream()

    @property
    def _is_gpu(self) -> bool:
        return self._device.type != "cpu"


def _work(jobs: queue.SimpleQueue) -> None:
    while True:
        job = jobs.get()
        job()
        del job  # and the gradient that it has kept


def _or_fail(session: Session, key: Key, job: Any) -> None:
    """The device has failed: all workers must know, or they would wait for this one."""
    try:
        job()
    except Exception as error:
        session.fail("the gradient of %s could not be copied from its device: %s" % (key.name, error))


# One for all optimizers of the process: a device copies one thing at a time each way.
_of = functools.lru_cache(maxsize=None)(Staging)


class StagedParameter(Parameter):
    """One on a GPU; see the module. The landing tensor is on the device, too."""

    def __init__(self, session, store, name, tensor, group, update_here, staleness) -> None:
        self._staging = _of(tensor.device)
        self._host = self._staging.host_array(tensor)
        super().__init__(session, store, name, tensor, group, update_here, staleness)
        self._came = self._staging.new_event()  # the last value has left the host array

    def _landing_array(self) -> Any:
        return as_numpy(self._host)

    def init(self, value: Optional[Any] = None) -> None:
        self._came.synchronize()
        self._staging.let_finish()
        super().init(value)

    def _push(self, gradient, _more):
        array = self._array
        operation = self._session.pushpull(self.key, array, array, self.priority, *self._sent, gated=True)
        self._send(flat(self._as_landing(gradient)))
        return operation

    def _skip(self, goes_on=True):
        operation = self._session.skip(self.key, self._array, self.priority, gated=True, goes_on=goes_on)
        self._send(None)
        return operation

    def _send(self, gradient: Optional[torch.Tensor]) -> None:
        self._staging.send(self._session, self.key, self._host, gradient, self._came)

    def _take_value(self, operation) -> bool:
        self._bring()
        return super()._take_value(operation)

    def _take_round(self, operation) -> bool:
        if operation.updated:
            self._bring()
        return super()._take_round(operation)

    def _bring(self) -> None:
        self._came = self._staging.bring(self._host, flat(self.landing))

    def _take_update(self, _operation) -> None:
        # Not by changing places: a device copies its own memory in no time, and CUDA graphs know weights by address.
        self.tensor.copy_(self.landing)
