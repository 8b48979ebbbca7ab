"""The header of a data-plane frame, as include/p3/wire.h has it: its only definition in Python.

The core reads and writes frames. In Python the scheduler alone sees some, on watch connections: heartbeats, which are
headers without a payload. tests/docs compares this layout, the specification and the bytes of the C++ test.
"""

from __future__ import annotations

import struct

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

_ROUND = list(FIELDS).index("round")


def round_of(header: bytes) -> int:
    """Of a heartbeat: the last round that its sender has completed."""
    return HEADER.unpack(header)[_ROUND]
