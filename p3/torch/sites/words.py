"""What the leader of a site tells the other members, and has them do with it: over a group of Gloo's of their own.

All members make the same calls at the same point, as with every collective. The leader's part of a call may wait for
other sites, and may fail. So behind it the leader has a word for the others: what has become of it. While it waits it
says that, too. So a member need not wait for longer than P3_WAIT_TIMEOUT_S from one word to the next, and learns at
once if the leader's process has ended; and a leader, which waits for other sites, if a member's has, and fails the job.
A leader whose script fails elsewhere has last words, which nobody need listen to: a member that fails of that in turn,
within torch, says what they were.

Nothing that comes is unpickled: words are JSON, the rest are bytes.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import threading
from datetime import timedelta
from typing import Any, Callable, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist

from p3._core import P3Error
from p3.errors import AuthenticationError, ConfigError, RendezvousError
from p3.worker import open_sessions

_BYTES = 1024  # of a frame; a longer word follows it
_MOST_BYTES = 1 << 26
_LENGTH = struct.Struct(">I")
_PULSE_S = 1.0  # so often the leader says that it waits
_LAST = 1  # the tag of last words
_LAST_S = 2.0  # for each member, who has been ready for them all the time

# Of what the others raise where the leader has.
_ERRORS = {kind.__name__: kind for kind in (
    AuthenticationError, ConfigError, P3Error, RendezvousError, RuntimeError, TimeoutError, TypeError, ValueError,
)}  # fmt: skip


class Words:
    """Threads: the script's, one at a time."""

    def __init__(self, ranks: Sequence[int], group: Any, timeout_s: float) -> None:
        """`group`: Gloo's, of these global ranks, the leader's first. On every member at the same point. `timeout_s`:
        the group's."""
        self.rank, self.size = list(ranks).index(dist.get_rank()), len(ranks)
        self.is_leader = self.rank == 0
        self.label = "member %d of %d of a site" % (self.rank, self.size)
        self._ranks, self._group, self._timeout_s = list(ranks), group, timeout_s
        self._last_frame = _empty_frame()
        self._last: Optional[dist.Work] = None  # where the leader's last words will come
        if not self.is_leader:
            self._last = dist.irecv(self._last_frame, self._ranks[0], group=group, tag=_LAST)
        self._report_uncaught_exceptions()

    # Calls that the leader makes for all

    def lead(self, call: str, function: Callable[[], Any]) -> Any:
        """What `function()` returns on the leader, as JSON has it; on all members, each of which makes this `call`. If
        it raises there, it raises on all, an error of the same type where P3 has it."""
        return self._lead(call, function) if self.is_leader else self._hear(call)

    def _lead(self, call: str, function: Callable[[], Any]) -> Any:
        try:
            with self._saying_that_it_waits(call):
                told = function()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # or the members' end would hide why
                self._say({"call": call, "failed": type(error).__name__, "text": str(error)}, call)
            raise
        self._say({"call": call, "told": told}, call)
        return told

    @contextlib.contextmanager
    def _saying_that_it_waits(self, call: str) -> Iterator[None]:
        over = threading.Event()

        def say() -> None:
            try:
                while not over.wait(min(_PULSE_S, self._timeout_s / 4)):
                    self._say({"call": call, "waits": True}, call)
            except RuntimeError as error:
                session = open_sessions.opened()
                if session is not None:
                    session.fail(str(error))

        thread = threading.Thread(target=say, daemon=True, name="p3-site")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _hear(self, call: str) -> Any:
        while True:
            word = self._next(call)
            if word["call"] != call:
                raise RuntimeError("%s is in %s, and its leader in %s: all members of a site make the same calls at "
                                   "the same point" % (self.label, call, word["call"]))  # fmt: skip
            if "failed" in word:
                raise self._error(call, word)
            if "waits" not in word:
                return word["told"]

    def _error(self, call: str, word: Any) -> Exception:
        kind = _ERRORS.get(word["failed"])
        name = "" if kind else "%s: " % word["failed"]
        text = "%s: %s has failed on its leader: %s%s" % (self.label, call, name, word["text"])
        return (kind or RuntimeError)(text)

    # Frames

    def _say(self, word: Any, call: str) -> None:
        text = json.dumps(word).encode()
        self.broadcast(_framed(text), call)
        if len(text) > _BYTES - _LENGTH.size:
            self.broadcast(_bytes(text), call)

    def _next(self, call: str) -> Any:
        frame = _empty_frame()
        self.broadcast(frame, call)
        length, text = _read(frame)
        if length > len(text):
            whole = torch.empty(length, dtype=torch.uint8, device="cpu")
            self.broadcast(whole, call)
            text = whole.numpy().tobytes()
        return json.loads(text)

    # What they have, to all

    def broadcast(self, tensor: torch.Tensor, call: str, group: Any = None) -> None:
        """The leader's, in place; of one dimension. `group`: another one of the same members."""
        self._all(call, dist.broadcast, tensor, self._ranks[0], group=group or self._group)

    def gather(self, number: float, call: str) -> List[float]:
        """What each member gives, by rank, on all."""
        own = torch.tensor([number], dtype=torch.float64, device="cpu")
        numbers = [torch.empty_like(own) for _ in range(self.size)]
        self._all(call, dist.all_gather, numbers, own, group=self._group)
        return [one.item() for one in numbers]

    def _all(self, call: str, collective: Callable, *arguments: Any, **keywords: Any) -> None:
        try:
            collective(*arguments, **keywords)
        except RuntimeError as error:
            said = self.last_words()
            why = "its leader has said: %s" % said if said else str(error).strip().splitlines()[0]
            text = "%s: %s: a process of the site has ended, or has not made the call in %g s (P3_WAIT_TIMEOUT_S): %s"
            raise RuntimeError(text % (self.label, call, self._timeout_s, why)) from None

    # Last words

    def say_last(self, text: str) -> None:
        frame = _framed(text.encode()[: _BYTES - _LENGTH.size])
        for rank in self._ranks[1:]:
            with contextlib.suppress(RuntimeError):
                dist.isend(frame, rank, group=self._group, tag=_LAST).wait(timedelta(seconds=_LAST_S))

    def last_words(self) -> str:
        """On a member; "": there are none."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.wait(timedelta(seconds=_LAST_S))
                self._last = None
        length, text = _read(self._last_frame)
        return text[:length].decode(errors="replace")

    def _report_uncaught_exceptions(self) -> None:
        previous = sys.excepthook

        def report(kind: Any, error: Any, trace: Any) -> None:
            if self.is_leader:
                self.say_last(open_sessions.describe(kind, error))
            previous(kind, error, trace)
            said = self.last_words()
            if said and said not in str(error):
                print("p3: %s: its leader has said: %s" % (self.label, said), file=sys.stderr, flush=True)

        sys.excepthook = report


def _empty_frame() -> torch.Tensor:
    return torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")


def _framed(text: bytes) -> torch.Tensor:
    """Its length, and as much of it as there is room for."""
    frame, content = _empty_frame(), _bytes(_LENGTH.pack(len(text)) + text)[:_BYTES]
    frame[: len(content)] = content
    return frame


def _read(frame: torch.Tensor) -> Any:
    """The text's length, and as much of it as the frame has."""
    content = frame.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(content)
    if length > _MOST_BYTES:
        raise RuntimeError("a word of %d bytes has come to a member of a site: its processes have different versions "
                           "of P3" % length)  # fmt: skip
    return length, content[_LENGTH.size : _LENGTH.size + length]


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
