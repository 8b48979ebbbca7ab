"""What the options of several commands are made of."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10000:
        raise argparse.ArgumentTypeError("%r is not a whole number from 1 to 10000" % text)
    return int(text)


def timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError("%r is not a number of seconds above 0" % text)
    return value
