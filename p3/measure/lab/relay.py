"""The process that carries the frames of a lab whose links delay, lose, or keep their rate without bursts.

    prepare(lab, hosts=2)
    set_link(lab, 0, Link(rate_mbit=100, queue_ms=20, delay_ms=50, loss=0.001))
    # on the switch: python -m p3.measure.lab.relay LAB 2

A file `links` of the lab says how each host's link is, and counts what has passed (src/relay/table.h). This module as a
program makes the hosts' cards; it says on standard error what failed, or goes on in the background. It stays in the
switch's network namespace: so it is one of the lab's processes, and ends with the lab.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

TABLE = "links"
DEVICE = "/dev/net/tun"


class Link(NamedTuple):
    """Of a host: its rate and queue in each direction, and what becomes of what leaves it."""

    rate_mbit: Optional[float] = None
    queue_ms: float = 20.0
    delay_ms: float = 0.0
    loss: float = 0.0  # share of the packets
    seed: int = 0  # of which ones


def why_unavailable() -> Optional[str]:
    """What this machine lacks for it besides root, as a sentence, or None."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return (
            f"links that delay, lose or have no bursts need TAP devices, and {DEVICE} cannot be opened "
            f"({error.strerror}): load the module tun, or give the container that device"
        )
    return None


def prepare(lab: Path, hosts: int) -> None:
    """Before it is started. Links have no limit, no delay and no losses until they are set."""
    from p3.measure._relay import Table

    Table(lab / TABLE, hosts)


def is_in(lab: Path) -> bool:
    """Whether a lab's links are made so."""
    return (lab / TABLE).exists()


def set_link(lab: Path, node: int, link: Link) -> None:
    """At any time; but what is lost is settled by the seed that is set when the relay starts."""
    table = _table(lab)
    bytes_per_s = (link.rate_mbit or 0.0) * 1e6 / 8
    table.set(node, "up", bytes_per_s, link.queue_ms / 1e3, link.delay_ms / 1e3, link.loss, link.seed + node)
    table.set(node, "down", bytes_per_s, link.queue_ms / 1e3, 0.0, 0.0, 0)


def cut(lab: Path, node: int, is_cut: bool = True) -> None:
    _table(lab).cut(node, is_cut)


def counted(lab: Path, hosts: int) -> List[Dict]:
    """Of each host: `up` and `down` with their `packets`, `bytes`, `dropped` for want of room and `lost` by chance, and
    `late_s`, the most that a packet came late because the relay had no processor."""
    table = _table(lab)
    return [table.counted(node) for node in range(hosts)]


def _table(lab: Path):
    from p3.measure._relay import Table

    return Table(lab / TABLE)


def main(argv: Sequence[str]) -> int:
    """Returns when the cards are there; the frames are carried by a child that nobody waits for."""
    from p3.measure._relay import Carrier

    lab = Path(argv[0])
    spaces = [lab / str(node) / "net" for node in range(int(argv[1]))]
    try:
        carrier = Carrier(lab / TABLE, [*spaces, lab / "switch" / "net"])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if os.fork() != 0:
        os._exit(0)  # the cards are the child's
    os.setsid()
    _leave_behind(lab / "relay.log")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    carrier.run()
    return 0


def _leave_behind(log: Path) -> None:
    """All descriptors that were inherited: pipes to who started this, and the lab's lock."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    written = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    for own, others in ((nowhere, (0, 1)), (written, (2,))):
        for other in others:
            os.dup2(own, other)
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                os.close(int(name))
        except OSError:  # the list's own
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
