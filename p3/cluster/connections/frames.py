"""The header of a data-plane frame, as include/p3/wire.h has it: its only definition in Python.

The core reads and writes frames. In Python the scheduler alone sees some, on watch connections: heartbeats, which are
headers without a payload, and last what a core says when it ends. tests/docs compares this layout, the specification
and the bytes of the C++ test.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Each field and its code of the module struct; little-endian, in this order, without padding.
FIELDS = {
    "magic": "I",
    "version": "B",
    "kind": "B",
    "dtype": "B",
    "encoding": "B",
    "key": "I",
    "slice": "I",
    "round": "Q",
    "priority": "i",
    "payload_bytes": "I",
    "crc32c": "I",
    "part": "B",
    "of_machine": "B",
    "contributors": "H",
    "lr": "d",
    "wd": "d",
    "rescale": "d",
    "updates": "d",
    "schedule": "d",
}
HEADER = struct.Struct("<" + "".join(FIELDS.values()))

HEARTBEAT = 4  # FrameKind::kPing
_KIND, _ROUND, _RATE, _CONNECTIONS = (list(FIELDS).index(name) for name in ("kind", "round", "lr", "wd"))
_MOST_BYTES_PER_SECOND, _MOST_CONNECTIONS = 1e12, 1e6  # above, a number makes no sense


class LinkShare(NamedTuple):
    """The link that leaves a machine, and how many connections fill it; zeros: not known."""

    bytes_per_second: float
    connections: float


def is_heartbeat(header: bytes) -> bool:
    """Else the core that has sent it ends, by failure or not, and its text may follow."""
    return HEADER.unpack(header)[_KIND] == HEARTBEAT


def round_of(header: bytes) -> int:
    """Of a heartbeat: the last round that its sender has completed."""
    return HEADER.unpack(header)[_ROUND]


def link_share_of(header: bytes) -> LinkShare:
    """Of a heartbeat: what its sender says of its machine's link, and of how many connections it fills there."""
    fields = HEADER.unpack(header)
    told = ((fields[_RATE], _MOST_BYTES_PER_SECOND), (fields[_CONNECTIONS], _MOST_CONNECTIONS))
    return LinkShare(*(value if 0 < value <= most else 0.0 for value, most in told))


def with_link_share(header: bytes, link: LinkShare) -> bytes:
    """A heartbeat that tells this."""
    fields = list(HEADER.unpack(header))
    fields[_RATE], fields[_CONNECTIONS] = link
    return HEADER.pack(*fields)
