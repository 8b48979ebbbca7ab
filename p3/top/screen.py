"""A view of a job (`view` of messages.py) as the lines of a table, and the terminal on which it is drawn anew.

Plain ANSI: a table that is drawn from its top again and again needs no more of a terminal than going home and erasing.
"""

from __future__ import annotations

import shutil
import sys
from typing import Iterator, List, Optional, Sequence

from p3.cluster.watching import words

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor; and back
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"

_WORKERS = ("worker", "host", "round", "steps/s", "waited", "longest for", "sent/s", "received/s", "queue", "memory")
_SERVERS = ("server", "host", "round", "sent/s", "received/s", "to send", "to sum", "values", "memory")
_LINKS = ("link of", "processes", "out/s", "in/s")
_TEXT = {"worker", "host", "longest for", "server", "link of"}  # columns to the left, others to the right
_FEW = 3  # rows of a table that are shown, however low the terminal is
_STALE_S = 3.0  # a report that old is told of


def lines(view: dict, height: Optional[int] = None) -> List[str]:
    """`height`: how many there may be."""
    if view["missing"]:
        return ["the job has not begun: %s missing" % view["missing"]]
    tables = [
        (_WORKERS, [_worker(row) for row in view["workers"]]),
        (_SERVERS, [_server(row) for row in view["servers"]]),
        (_LINKS, [_link(row) for row in view["links"]]),
    ]
    head = [_head(view), *("  " + one for one in words.slowest(view))]
    room = None if height is None else height - len(head) - 2 * len(tables) - 1
    found = list(head)
    for number, (columns, rows) in enumerate(tables):
        shown = len(rows)
        if room is not None:
            shown = min(len(rows), max(_FEW, room // (len(tables) - number)))
            room -= shown + (shown < len(rows))
        found += ["", *_table(columns, rows[:shown])]
        if shown < len(rows):
            found.append("and %d more" % (len(rows) - shown))
    return found


def _head(view: dict) -> str:
    rounds = max((row["round"] for row in view["workers"]), default=0)
    return "round %d, %s steps/s; running for %s; rates over the last %.0f s" % (
        rounds, words.rate(words.steps_per_s(view)), _duration(view["seconds"]), view["over_s"]
    )  # fmt: skip


def _worker(row: dict) -> List[str]:
    waited = "-" if row["waited_share"] is None else words.share(row["waited_share"])
    longest = "%s %s" % (row["group"], words.share(row["group_share"])) if row["group"] else "-"
    return [
        _rank(row), row["host"], "%d" % row["round"], words.rate(row["steps_per_s"]), waited, longest,
        words.count(row["sent_per_s"], "B"), words.count(row["received_per_s"], "B"), "%d" % row["queued_slices"],
        words.count(row["memory_bytes"], "B"),
    ]  # fmt: skip


def _server(row: dict) -> List[str]:
    return [
        _rank(row), row["host"], "%d" % row["round"], words.count(row["sent_per_s"], "B"),
        words.count(row["received_per_s"], "B"), "%d" % row["queued_slices"], "%d" % row["received_slices"],
        words.count(row["value_bytes"], "B"), words.count(row["memory_bytes"], "B"),
    ]  # fmt: skip


def _link(row: dict) -> List[str]:
    out, back = words.count(row["sent_per_s"], "B"), words.count(row["received_per_s"], "B")
    return [row["host"], "%d" % row["processes"], out, back]


def _rank(row: dict) -> str:
    """With what is amiss, if anything."""
    if row["state"] != "runs":
        return "%d (%s)" % (row["rank"], row["state"])
    if row["age_s"] is None:
        return "%d (silent)" % row["rank"]
    return "%d (%.0f s ago)" % (row["rank"], row["age_s"]) if row["age_s"] > _STALE_S else "%d" % row["rank"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for one in (columns, *rows):
        aligned = (
            text.ljust(width) if column in _TEXT else text.rjust(width)
            for column, text, width in zip(columns, one, widths)
        )
        yield "  ".join(aligned).rstrip()


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return "%d h %02d min" % (hours, minutes % 60) if hours else "%d min %02d s" % (minutes, int(seconds) % 60)


class Terminal:
    """The one that standard output is, while it shows tables. A context manager, which leaves it as it was."""

    def __enter__(self) -> Terminal:
        self._write(_ENTER)
        return self

    def __exit__(self, *_ignored) -> None:
        self._write(_LEAVE)

    def show(self, view: dict) -> None:
        size = shutil.get_terminal_size()
        drawn = [one[: size.columns] for one in lines(view, size.lines)][: size.lines]
        head, *rest = drawn
        text = [_BOLD + head + _PLAIN, *rest]
        self._write(_HOME + "\n".join(one + _END_OF_LINE for one in text) + _END_OF_SCREEN)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
