"""Parsers of command line options, as argparse's `type`. What they raise names the text."""

from __future__ import annotations

import argparse
from typing import Callable, List, Sequence, Union


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Of `p3 bench NAME`, whose --help is its module's docstring."""
    return argparse.ArgumentParser(
        prog="p3 bench " + name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def number(low: float, high: float, kind: Callable = float) -> Callable[[str], float]:
    """From `low` to `high`, both included."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def slice_size(text: str) -> Union[int, str]:
    """Elements, or `auto`: as P3_SLICE_ELEMENTS."""
    return text if text == "auto" else number(1, 1 << 28, int)(text)


def list_of(one: Callable) -> Callable[[str], List]:
    """Of what `one` parses, separated by commas."""
    return lambda text: [one(part) for part in text.split(",")]


def name_among(known: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """One of known(), which is called when there is a name."""

    def parse(text: str) -> str:
        if text not in known():
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known())}")
        return text

    return parse


def names_among(known: Sequence[str]) -> Callable[[str], List[str]]:
    """A list, each at most once."""
    return names_of(name_among(lambda: known))


def names_of(one: Callable[[str], str]) -> Callable[[str], List[str]]:
    """A list of what `one` parses, each at most once."""

    def parse(text: str) -> List[str]:
        names = list_of(one)(text)
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return names

    return parse
