"""A device whose copies are late: streams that do what they are told some time afterwards, each in a thread of its own.

Computation is on the CPU, in the calling thread: what the current stream waits for, that thread waits for.
"""

import contextlib
import queue
import random
import threading
import time

from p3.torch.device import staging

DEADLINE_S = 30


class Event:
    def __init__(self):
        self._done = None

    def record(self, stream):
        self._done = threading.Event()
        stream.enqueue(self._done.set)

    def query(self):
        return self._done is None or self._done.is_set()

    def synchronize(self):
        self.wait_of_now()()

    def wait_of_now(self):
        """What waits for it as it was recorded by now, whatever is recorded later."""
        done = self._done

        def wait():
            assert done is None or done.wait(DEADLINE_S)

        return wait


class Stream:
    def __init__(self):
        self._jobs, self._random = queue.SimpleQueue(), random.Random(5)
        self.queued = 0  # so far
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, job):
        self._jobs.put(job)
        self.queued += 1

    def wait_event(self, event):
        self.enqueue(event.wait_of_now())

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def _run(self):
        while True:
            job = self._jobs.get()
            time.sleep(self._random.choice((0, 0, 0.0003, 0.002)))
            job()


class Current:
    def enqueue(self, job):
        job()

    def wait_event(self, event):
        event.synchronize()


_current = Current()
device_of = {}  # thread's name -> the device that it has chosen


def set_device(device):
    device_of[threading.current_thread().name] = device


def current_stream(_device):
    return _current


@contextlib.contextmanager
def stream(_stream):
    yield


class Staging(staging.Staging):
    def __init__(self, device):
        import late_streams

        super().__init__(device, late_streams)

    def _copy(self, stream, destination, source):
        stream.enqueue(lambda: destination.copy_(source))
