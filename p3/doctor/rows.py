"""What the doctor says: one row for each thing looked at."""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Sequence

OK, NOTE, MISSING, PROBLEM = "ok", "note", "MISSING", "PROBLEM"


class Row(NamedTuple):
    state: str
    subject: str
    finding: str
    remedy: str = ""  # a command, as exact as can be, or what to look at


def rate(mbit: float) -> str:
    return "%.4g Mbit/s" % mbit if mbit < 10000 else "%.4g Gbit/s" % (mbit / 1000)


def healthy(rows: Sequence[Row]) -> bool:
    return all(row.state in (OK, NOTE) for row in rows)


def lines(rows: Sequence[Row], remedies: str = "fix it with") -> Iterator[str]:
    for row in rows:
        yield "%-8s %-22s %s" % row[:3]
        if row.remedy:
            yield "%-8s %-22s   %s: %s" % ("", "", remedies, row.remedy)


def aligned(table: List[List[str]]) -> Iterator[str]:
    """Columns to the left, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*table)]
    for one in table:
        yield "  ".join(text.ljust(width) for text, width in zip(one, widths)).rstrip()
