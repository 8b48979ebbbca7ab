"""How a gradient is cut that comes from a device piece by piece (Session.ready)."""

from __future__ import annotations

from typing import Iterator, Tuple


def pieces(elements: int, first: int) -> Iterator[Tuple[int, int]]:
    """(begin, end) of each: the first of `first` elements, every other as large as all before it.

    So the first slice leaves as soon as one has been copied; copying is faster than any network is, and goes on to keep
    ahead of it; and a gradient takes few copies.
    """
    begin, end = 0, min(first, elements)
    while begin < elements:
        yield begin, end
        begin, end = end, min(2 * end, elements)
