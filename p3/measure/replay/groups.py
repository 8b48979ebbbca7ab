"""Groups of hosts with shared leaders: a tree for the slices of each server, as P3 has them (include/p3/groups.h).

Groups of R, neighbours by number, each have a leader for the slices of a server: the member at the server's own place
among its group. It adds up what the group pushes, and passes on the sum, and later the value that comes back. So every
member leads its share. Leaders may be members of greater groups in their turn: `(8, 4)` are groups of 8 hosts, and
groups of 4 of these, whose leaders push to the server.

With a host's number written in digits, the first modulo 8, the next modulo 4, and a last one for what is left, each sum
goes to the host that agrees with the server's in one digit more. So a host's groups are the same for all servers, and
2(R-1 + N/R-1) connections leave each of N hosts in groups of R. With a power of two for R a group's sum is one of those
that the tree of fixed shape makes anyway, so such groups change no bit. Pure functions.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import List, Sequence, Tuple

SERVER = -1  # in place of a leader


def leaders(groups: Sequence[int], hosts: int, home: int) -> List[int]:
    """Of each host: to which other one it pushes the slices of a server on host `home`, or SERVER."""
    return [_leader(groups, host, home) for host in range(hosts)]


def _leader(groups: Sequence[int], host: int, home: int) -> int:
    weight = 1
    for size in groups:
        digit, wanted = host // weight % size, home // weight % size
        if digit != wanted:
            return host + (wanted - digit) * weight
        weight *= size
    return SERVER


def fit(groups: Sequence[int], hosts: int) -> bool:
    """Whether so many hosts are whole groups, of sizes of at least 1."""
    return hosts % math.prod(groups) == 0


def worth_trying(hosts: int) -> List[Tuple[int, ...]]:
    """The two sizes of whole groups with which a host exchanges slices with the fewest others."""
    sizes = [size for size in range(2, hosts // 2 + 1) if fit((size,), hosts)]
    return sorted((size,) for size in sorted(sizes, key=lambda size: (size + hosts // size, size))[:2])


def check(groups: Sequence[int], hosts: int) -> None:
    """ValueError if so many hosts cannot be in such groups."""
    if any(size < 1 for size in groups):
        raise ValueError(f"groups are {told(groups)}; a group has at least one host")
    if not fit(groups, hosts):
        raise ValueError(f"groups of {told(groups)} need a multiple of {math.prod(groups)} hosts; there are {hosts}")


def parse(text: str) -> Tuple[int, ...]:
    """`8`, or `8x4`: groups of 8 hosts, and groups of 4 of these."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a size of groups, nor sizes as 8x4")
    return tuple(map(int, text.split("x")))


def told(groups: Sequence[int]) -> str:
    """As parse() takes it; nothing if there are none."""
    return "x".join(map(str, groups))
