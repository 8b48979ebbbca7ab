"""What a command prints, as a picture for a page: PREFIX-light.svg and PREFIX-dark.svg. Text stays text."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence

from p3.errors import ConfigError

_WIDTH, _HEIGHT, _MARGIN = 7.25, 18, 16  # of a character, of a line, around all; in pixels
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class _Theme(NamedTuple):
    paper: str
    ink: str
    muted: str  # of the command, and of the heads of tables
    line: str


_THEMES = {
    "light": _Theme("#f6f8fa", "#1f2328", "#59636e", "#d1d9e0"),
    "dark": _Theme("#151b23", "#e6edf3", "#9198a1", "#3d444d"),
}


def save(lines: Sequence[str], prefix: str, command: str) -> List[str]:
    """The names of the files. ConfigError, as of the option --svg. A line behind an empty one counts as the head of a
    table."""
    written = []
    for name, theme in _THEMES.items():
        written.append("%s-%s.svg" % (prefix, name))
        try:
            Path(written[-1]).write_text("\n".join(_drawing(lines, command, theme)) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--svg %s cannot be written: %s" % (prefix, error.strerror)) from None
    return written


def _drawing(lines: Sequence[str], command: str, theme: _Theme) -> Iterator[str]:
    shown = ["$ " + command, *lines]
    width = round(2 * _MARGIN + _WIDTH * max(map(len, shown)))
    height = 2 * _MARGIN + _HEIGHT * len(shown)
    yield '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">' % (
        width, height, width, height
    )  # fmt: skip
    yield '<rect x="0.5" y="0.5" width="%d" height="%d" rx="6" fill="%s" stroke="%s"/>' % (
        width - 1, height - 1, theme.paper, theme.line
    )  # fmt: skip
    yield '<g font-family="%s" font-size="12" xml:space="preserve">' % escape(_FONT)
    for number, (text, before) in enumerate(zip(shown, ["", *shown])):
        if not text:
            continue
        colour = theme.muted if not before else theme.ink
        # The length keeps columns under each other, whatever font there is.
        yield '<text x="%d" y="%d" fill="%s" textLength="%d">%s</text>' % (
            _MARGIN, _MARGIN + _HEIGHT * (number + 0.75), colour, round(_WIDTH * len(text)), escape(text)
        )  # fmt: skip
    yield "</g>"
    yield "</svg>"
