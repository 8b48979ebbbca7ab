"""Many processes, one terminal: their lines, each with the name of its process before it.

A carriage return means that the line is drawn anew, as progress bars do. Only its last state is worth a line in a
log; on a terminal, the unfinished line of one process (worker 0's bar) is also shown live, below all others.
Nothing blocks; while nobody reads what is written, room() holds up those that have more. Only the launcher's event loop
calls.
"""

from __future__ import annotations

import codecs
import sys
from typing import Dict, Optional, TextIO

from p3.launch.writer import Writer

_MAX_LINE_CHARACTERS = 1 << 16  # a longer one is broken
_MAX_UNWRITTEN_BYTES = 1 << 16  # beyond that, processes with more to say have to wait
_COLOURS = (36, 32, 33, 35, 34, 31)  # of terminals: cyan, green, yellow, magenta, blue, red
_LIVE = "worker 0"  # whose unfinished line a terminal shows
_ERASE_LINE = "\r\x1b[K"
_JOB_FAILED = "p3: the job failed: "


class Output:
    """Writes whole lines of all sources to `stream`."""

    def __init__(self, stream: Optional[TextIO] = None) -> None:
        """`stream`: standard output, unless given."""
        self._stream = stream
        self._writer = Writer()
        self._terminal = (stream or sys.stdout).isatty()
        self._shown = ""  # the live line that stands on the terminal now
        self._prefixes: Dict[str, str] = {}

    def source(self, name: str) -> Source:
        """A new stream of bytes under that name, for example the standard error of 'worker 1'."""
        return Source(self, name)

    def line(self, name: Optional[str], text: str) -> None:
        """One finished line; of ourselves if `name` is None."""
        prefix = self._prefix(name) if name else ""
        self._write((_ERASE_LINE if self._shown else "") + prefix + text + "\n" + self._shown)

    def show(self, name: str, text: str) -> None:
        """The state of an unfinished line; empty when it has been finished."""
        if not self._terminal or name != _LIVE:
            return
        shown = self._prefix(name) + text if text else ""
        if shown != self._shown:
            self._shown = shown
            self._write(_ERASE_LINE + shown)

    def say(self, text: str) -> None:
        """A line of our own, to standard error, behind what is written before."""
        self._writer.write(sys.stderr, text + "\n")

    @property
    def has_room(self) -> bool:
        return self._writer.is_below(_MAX_UNWRITTEN_BYTES)

    async def room(self) -> None:
        """Returns when there is room for more."""
        await self._writer.below(_MAX_UNWRITTEN_BYTES)

    async def written(self) -> None:
        """Returns when all is written."""
        await self._writer.below(0)

    def close(self) -> None:
        """No more will come."""
        self._writer.close()

    def _prefix(self, name: str) -> str:
        if name not in self._prefixes:
            colour = _COLOURS[len(self._prefixes) % len(_COLOURS)]
            form = "\x1b[%dm[%s]\x1b[0m " % (colour, name) if self._terminal else "[%s] " % name
            self._prefixes[name] = form
        return self._prefixes[name]

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
        else:
            self._writer.write(sys.stdout, text)


class Source:
    """Cuts one process's bytes into lines."""

    def __init__(self, output: Output, name: str) -> None:
        self._output, self._name = output, name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # the unfinished line, with its carriage returns
        self._muted = False
        self.last_line = ""  # the last finished line that is not blank, nor P3's own that the job failed

    def feed(self, data: bytes) -> None:
        self._text += self._decoder.decode(data)
        *finished, self._text = self._text.split("\n")
        for text in finished:
            self._finish(text)
        if len(self._text) > _MAX_LINE_CHARACTERS:
            self._text = self._text.rpartition("\r")[2]
            if len(self._text) > _MAX_LINE_CHARACTERS:
                self._finish(self._text)
                self._text = ""
        if "\r" in self._text:
            self._output.show(self._name, _standing(self._text))

    def mute(self) -> None:
        """Whatever still comes is not shown."""
        self._muted = True

    def end(self) -> None:
        """No more will come: what is unfinished is printed."""
        self._text += self._decoder.decode(b"", True)
        if self._text:
            self._finish(self._text)
            self._text = ""

    def _finish(self, text: str) -> None:
        if self._muted:
            return
        text = _standing(text)
        self._output.show(self._name, "")
        self._output.line(self._name, text)
        if text.strip() and not text.startswith(_JOB_FAILED):
            self.last_line = text.strip()


def _standing(text: str) -> str:
    """What stands on the line after all its carriage returns."""
    return next((part for part in reversed(text.split("\r")) if part.strip()), "")
