"""Parameters on a GPU: how gradients come to the core, which reads and writes CPU memory alone, and new values back.

Each parameter has a *host array*, pinned CPU memory of its size, and a second one for what comes back, if that is
changes of what is there. The gradient's hook records an event and hands the gradient over. A thread of the device's
has a stream of its own wait for that event and copy the gradient, piece by piece; another one waits for the copies,
and tells the core which elements have come (Session.ready). So the first slice leaves before the rest is copied, and
while one piece is waited for those behind it are queued on the device already. The new value lands in the same host
array, slice after slice. When it is whole, a third thread (arrivals.py) has a second stream copy it to the device.
When a module needs it, the stream that computes waits for that copy; the training thread waits for the network alone.

Order: gradients are copied as they were computed, for the most urgent ones are computed last; priorities hold in the
core's queues behind. What comes back has a stream of its own: no gradient that is not computed yet holds it up.

Memory: a gradient is kept until it has been copied. The host array belongs to a copy to the device until its event,
which stands before the next gradient's copy; and the landing tensor to the kernels that were queued before the next
gradient, which that gradient's event stands behind. So neither copy waits for more than it must.

Streams: the value gets into the weight on the stream that is current where it is wanted first. A module that runs on
another one has that wait for it, too; and so has the next round, whose value lands where this one is taken from.
"""

from __future__ import annotations

import collections
import functools
import queue
import sys
import threading
import weakref
from typing import Any, Callable, MutableMapping, Optional, Sequence, Tuple, Type

import torch

from p3.frontend.pieces import pieces
from p3.plan import choices, combinations
from p3.torch.device.arrivals import Arrival, Arrivals
from p3.torch.device.comparisons import Comparisons
from p3.torch.parameters.arrays import DEVICES, as_numpy, flat
from p3.torch.parameters.parameter import Parameter, RowParameter
from p3.worker.key import Key
from p3.worker.session import Session

# Pieces queued on the device that are not known to have been copied. More than about 1000 operations may make a call of
# the driver wait, with Python's lock.
_AHEAD = 256

# Pinned memory comes in slabs, each as large as all before it: to pin takes long, and torch rounds up to powers of two.
# Arrays of more than a quarter of the largest slab are pinned by themselves.
_SMALLEST_SLAB, _LARGEST_SLAB = 1 << 20, 64 << 20
_ALIGNED = 256


def kind_of(name: str, tensor: torch.Tensor, has_rows: bool) -> Type[Parameter]:
    """The class for a parameter, whose gradients are sparse if it `has_rows`. ValueError if there is none."""
    if tensor.device.type not in DEVICES:
        return RowParameter if has_rows else Parameter
    if has_rows:
        combinations.require("parameter %s" % name, choices.ROWS, choices.GPU.said(str(tensor.device)))
    return StagedParameter


class Staging:
    """The streams and the thread of one device.

    Threads: any. The thread that calls has a current stream of the device, which computes what it speaks of.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """`module`: whose streams and events these are; else torch's for devices of that type."""
        self._device, self._module = device, module or getattr(torch, device.type)
        self._out, self._back = self._new_stream(), self._new_stream()
        self._arrivals: MutableMapping[Session, Arrivals] = weakref.WeakKeyDictionary()
        self._events: collections.deque = collections.deque()  # that nobody needs any more
        self._slab, self._slab_used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
        self._slab_bytes = 0  # of all so far
        self._room = threading.Semaphore(_AHEAD)
        self._to_copy: queue.SimpleQueue = queue.SimpleQueue()
        self._copying: queue.SimpleQueue = queue.SimpleQueue()
        self._start("p3-staging-copies", functools.partial(_work, self._to_copy))
        self._start("p3-staging-waits", functools.partial(_work, self._copying))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """A thread whose current device this is: what waits for an event in one that has chosen none makes CUDA give
        the first GPU a context, of hundreds of megabytes, for each process of the machine."""

        def run() -> None:
            self._module.set_device(self._device)
            work()

        threading.Thread(target=run, name=name, daemon=True).start()

    def host_array(self, tensor: torch.Tensor) -> torch.Tensor:
        """For its elements, in the order of memory. Threads: the script's."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > _LARGEST_SLAB // 4:
            return self._pin(nbytes).view(tensor.dtype)
        if self._slab_used + nbytes > len(self._slab):
            wanted = max(self._slab_bytes, _SMALLEST_SLAB, nbytes)
            self._slab = self._pin(min(1 << (wanted - 1).bit_length(), _LARGEST_SLAB))
            self._slab_bytes, self._slab_used = self._slab_bytes + len(self._slab), 0
        begin, end = self._slab_used, self._slab_used + nbytes
        self._slab_used = -(-end // _ALIGNED) * _ALIGNED
        return self._slab[begin:end].view(tensor.dtype)

    def _pin(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_gpu)

    def send(
        self, session: Session, key: Key, host: torch.Tensor, gradient: Optional[torch.Tensor], before: Sequence[Any]
    ) -> None:
        """Has the key's gated round leave: with the gradient, flat like `host`, or without one. Returns at once.

        `before`: events that must have happened before `host` and the landing tensor are written.
        """
        computed = self._record(self._module.current_stream(self._device))
        job = functools.partial(self._copy_out, session, key, host, gradient, computed, before)
        self._to_copy.put(functools.partial(_or_fail, session, key, job))

    def _copy_out(self, session, key, host, gradient, computed, before) -> None:
        if gradient is None:
            job = functools.partial(self._let_begin, session, key, host.numel(), computed, before)
            return self._copying.put(functools.partial(_or_fail, session, key, job))
        for event in (*before, computed):
            self._out.wait_event(event)
        self.give_back(computed)  # what waits for it does so for what was recorded by now
        for begin, end in pieces(host.numel(), session.slice_size.of(host.numel())):
            self._room.acquire()
            self._copy(self._out, host[begin:end], gradient[begin:end])
            job = functools.partial(self._announce, session, key, end, self._record(self._out), gradient)
            self._copying.put(functools.partial(_or_fail, session, key, job))

    def _announce(self, session, key, end, copied, _gradient) -> None:
        self._room.release()  # of the next piece; if this one fails, the job does
        copied.synchronize()  # without Python's lock
        self.give_back(copied)
        session.ready(key, end)

    def _let_begin(self, session, key, elements, computed, before) -> None:
        """A round without a gradient: when nobody reads the landing tensor and the host array any more."""
        for event in (*before, computed):
            event.synchronize()
        self.give_back(computed)
        session.ready(key, elements)

    def arrivals(self, session: Session) -> Arrivals:
        """Of the session's rounds. Threads: the script's."""
        if session not in self._arrivals:
            self._arrivals[session] = Arrivals()
            self._start("p3-staging-back", self._arrivals[session].work)
        return self._arrivals[session]

    def bring(self, host: torch.Tensor, landing: torch.Tensor, came: Any) -> None:
        """Copies `host` to the device. `came`: the event that says so."""
        self._copy(self._back, landing, host)
        came.record(self._back)

    def wait(self, event: Any) -> None:
        """What the current stream computes from now on comes behind it."""
        self._module.current_stream(self._device).wait_event(event)

    def to_host(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """A copy in CPU memory of what the current stream computes, and its event, to be given back."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._is_gpu)
        host.copy_(tensor, non_blocking=True)
        return host, self._record(self._module.current_stream(self._device))

    def mark(self, event: Any) -> Any:
        """It happens behind what the current stream computes by now. The stream."""
        stream = self._module.current_stream(self._device)
        event.record(stream)
        return stream

    def wait_elsewhere(self, event: Any, marked_on: Any) -> None:
        """As wait(), unless the current stream is the one that the event was marked on."""
        stream = self._module.current_stream(self._device)
        if stream != marked_on:
            stream.wait_event(event)

    def let_finish(self, event: Any) -> None:
        """What bring() copies from now on waits for the event, and for what the current stream computes now."""
        self._back.wait_event(event)
        self._back.wait_stream(self._module.current_stream(self._device))

    def _copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._module.stream(stream):
            destination.copy_(source, non_blocking=True)

    def new_event(self) -> Any:
        """One that does not keep a processor busy while a thread waits for it."""
        return self._module.Event(blocking=True) if self._is_gpu else self._module.Event()

    def give_back(self, event: Any) -> None:
        """Nobody will wait for it any more; what is queued behind it stays so."""
        self._events.append(event)

    def _record(self, stream: Any) -> Any:
        try:
            event = self._events.pop()
        except IndexError:
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


def _may_be_overwritten(gradient: torch.Tensor) -> bool:
    """Whether CUDA graphs that torch.compile has made, as in its mode "reduce-overhead", run on the device. What they
    compute lies in memory of their own, which the next forward pass takes again, whoever still holds it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        return trees.get_manager(gradient.device.index, create_if_none_exists=False) is not None
    except AssertionError:  # nothing of them is known to the thread that runs this backward pass
        return False


# One for all optimizers of the process: a device copies one thing at a time each way.
staging_of = functools.lru_cache(maxsize=None)(Staging)


class StagedParameter(Parameter):
    """One on a GPU; see the module. The landing tensor is on the device, too."""

    goes_ahead = False  # the next gradient needs the host array, where the answer lands
    comparisons: Comparisons  # whose optimizer makes them

    def __init__(self, session, store, name, tensor, group, update_here, staleness, options) -> None:
        self._staging = staging_of(tensor.device)
        self._host = self._incoming = self._staging.host_array(tensor)
        super().__init__(session, store, name, tensor, group, update_here, staleness, options)
        self._outgoing = as_numpy(self._host)
        if self.lands_changes:  # which is no place for gradients
            self._incoming = self._staging.host_array(tensor)
            self._array = as_numpy(self._incoming)
        self._came = self._staging.new_event()  # the last value has left the host array
        self._taken = self._staging.new_event()  # that value has left the landing tensor, and is in the weight
        self._taken_on: Any = None  # the stream of that
        self._arrivals = self._staging.arrivals(session)

    def _array_of(self, _landing: torch.Tensor) -> Any:
        return as_numpy(self._host)

    def init(self, value: Optional[Any] = None) -> None:
        self._came.synchronize()
        self._staging.let_finish(self._taken)
        self._arrival = Arrival(self._bring)
        super().init(value)

    def _push(self, gradient, _more):
        self._arrival = self._arrivals.expect(self._bring)
        operation = self._session.pushpull(
            self.key, self._outgoing, self._array, self.priority, *self._sent, gated=True, tell=self._arrival.tell
        )
        gradient = self._as_landing(gradient)
        self._send(flat(gradient.clone() if _may_be_overwritten(gradient) else gradient))
        return operation

    def _skip(self, goes_on=True):
        self._arrival = self._arrivals.expect(self._bring)
        operation = self._session.skip(
            self.key, self._array, self.priority, gated=True, goes_on=goes_on, tell=self._arrival.tell
        )
        self._send(None)
        return operation

    def _send(self, gradient: Optional[torch.Tensor]) -> None:
        self._staging.send(self._session, self.key, self._host, gradient, (self._came, self._taken))

    def renew(self) -> None:
        super().renew()
        self._staging.wait_elsewhere(self._taken, self._taken_on)

    def renew_for_step(self) -> None:
        self.renew()  # as nothing goes ahead

    def _take_value(self, operation) -> bool:
        self._wait_for_value()
        super()._take_value(operation)
        self._taken_on = self._staging.mark(self._taken)
        return True

    def _take_round(self, operation) -> bool:
        if operation.updated:
            self._wait_for_value()
        is_updated = super()._take_round(operation)
        self._taken_on = self._staging.mark(self._taken)
        return is_updated

    def _is_same(self, differs, problem) -> bool:
        self.comparisons.note(self._staging, differs, problem)
        return True

    def mean_gradient(self) -> Optional[torch.Tensor]:
        if self.await_result().updated:
            self._wait_for_value()
        return super().mean_gradient()

    def _wait_for_value(self) -> None:
        self._arrival.begin()
        self._staging.wait(self._came)

    def _bring(self) -> None:
        self._staging.bring(self._incoming, flat(self.landing), self._came)

    def _take_update(self, _operation) -> None:
        # Not by changing places: a device copies its own memory in no time, and CUDA graphs know weights by address.
        self._copy_landing()
