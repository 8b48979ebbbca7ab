"""Hosts on one machine: namespaces joined by a switch, with a rate, a delay and losses on every link.

    with lab(2, rate_mbit=800, delay_ms=1) as hosts:
        subprocess.Popen(hosts[0].command("iperf3", "-c", hosts[1].address))

For P3 and for MXNet every host is another machine: its own network, host name, IPC and /dev/shm. It has one interface,
`eth0`, and its own loopback. The switch is a bridge in a namespace of its own, so the machine's real network is neither
touched nor reached, and labs side by side do not meet. What crosses a link obeys its rate in both directions; what a
host sends to itself does not, as with real machines. Files, processes and users are the machine's.

`lab` is for one program: leaving the `with` block, in whatever way (Ctrl-C included), ends the processes that still run
on the hosts and removes everything. What a program that was itself killed left behind is removed by the next `lab`.
`up`, `attach` and `down` are for a lab with a name, which stands until it is taken down (`p3 lab`). `change` gives the
links of either other rates, while whatever runs goes on.

Needs Linux, root and a few commands; `why_unavailable()` says what is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from p3.measure.lab import network, relay
from p3.measure.lab.network import COMMAND_TIMEOUT_S, LabError, MissingQdisc
from p3.measure.lab.shaping import Shaping
from p3.measure.lab.signals import signals_held

__all__ = [
    "Host", "LabError", "LabStatus", "MissingQdisc", "attach", "change", "down", "lab", "status", "up",
    "why_unavailable",
]  # fmt: skip

# One folder for each lab. It is locked by who sets the lab up or takes it down and, if the lab is temporary, by its
# owner for life; the kernel frees the lock of a process that was killed.
RUN = Path("/run/p3lab")
TEMPORARY = "tmp-"
NAME = re.compile(r"(?!tmp-)[A-Za-z0-9]([A-Za-z0-9-]{0,48}[A-Za-z0-9])?")  # so that NAME-NODE is a host name

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21

Rates = Union[None, float, Sequence[Optional[float]]]


class _Links(NamedTuple):
    """What all links of a lab have in common."""

    delay_ms: float = 0.0
    shaping: Shaping = Shaping()
    loss: float = 0.0
    seed: int = 0

    @property
    def are_relayed(self) -> bool:
        return self.delay_ms > 0 or self.loss > 0 or self.shaping.shaper == "smooth"

    def of_rate(self, rate_mbit: Optional[float]) -> relay.Link:
        return relay.Link(rate_mbit, self.shaping.queue_ms, self.delay_ms, self.loss, self.seed)


_locks: Dict[str, int] = {}  # by lab: the descriptor by which this process holds the lock


@dataclass(frozen=True)
class Host:
    """One machine of a lab. `address` is IPv4 and can be reached from the other hosts of the same lab only."""

    name: str  # LAB-NODE, and its host name
    address: str
    rate_mbit: Optional[float]  # of its link, each way; None: as fast as the kernel

    @property
    def lab(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def node(self) -> int:
        return int(self.name.rpartition("-")[2])

    def command(self, *argv: str) -> List[str]:
        """The argv that runs `argv` on this host. It replaces itself by `argv`, so the process id stays the same."""
        return network.enter(_contents(self.lab) / str(self.node), argv)


@dataclass(frozen=True)
class LabStatus:
    name: str
    state: str  # up, being changed, half made; of a temporary one: in use, left over
    delay_ms: float
    loss: float  # share of the packets
    hosts: List[Host]
    processes: List[List[int]]  # of each host
    carried: List[Dict]  # of each host whose link is smooth, see relay.counted()


def why_unavailable() -> Optional[str]:
    """What this machine lacks for a lab, as a sentence, or None if it can have one."""
    packages = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
    missing = [tool for tool in packages if shutil.which(tool) is None]
    lacks = []
    needed = 1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN
    if _effective_capabilities() & needed != needed:
        lacks.append("root (CAP_NET_ADMIN and CAP_SYS_ADMIN): run with sudo")
    if missing:
        install = " ".join(sorted({packages[tool] for tool in missing}))
        names = ", ".join(map(repr, missing))
        lacks.append(f"the commands {names}, which are missing (Debian: apt-get install {install})")
    return "a lab needs " + "; and ".join(lacks) if lacks else None


@contextlib.contextmanager
def lab(
    count: int, rate_mbit: Rates = None, delay_ms: float = 0.0, shaping: Shaping = Shaping(), loss: float = 0.0,
    seed: int = 0,
) -> Iterator[List[Host]]:
    """Yields `count` hosts. `rate_mbit` limits every host's link, each way, to one rate or each to its own; None is as
    fast as the kernel. `delay_ms` is added to each packet once, so a round trip between two hosts takes twice that.
    `loss` is the share of the packets from each host that are lost, of all but ARP's; which ones depends on `seed`, and
    on how many of that host's came before. `shaping` says how rates are kept.

    Raises ValueError for numbers that make no sense, MissingQdisc if the kernel cannot limit a rate, and LabError for
    whatever else the machine cannot do.
    """
    rates, links = _checked(count, rate_mbit, _Links(delay_ms, shaping, loss, seed))
    name = None
    try:
        with signals_held():
            _remove_leftovers()
            name = _claim_temporary()
            hosts = _set_up(name, rates, links)
        yield hosts
    finally:
        with signals_held():
            if name in _locks and name.startswith(_own_prefix()):  # a forked child has the lock, but not the lab
                _remove(name)


def up(
    name: str, count: int, rate_mbit: Rates = None, delay_ms: float = 0.0, shaping: Shaping = Shaping(),
    loss: float = 0.0, seed: int = 0,
) -> List[Host]:
    """Sets up a lab that outlives this process; arguments and errors as `lab`. All of it, or nothing."""
    rates, links = _checked(count, rate_mbit, _Links(delay_ms, shaping, loss, seed))
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a lab: up to 50 letters, digits and hyphens, as in a host name, not {TEMPORARY}..."
        )
    try:
        with signals_held():
            if not _lock(name, create=True):
                raise LabError(f"lab {name!r} is being set up or taken down by another process")
            if _read(name) is not None:
                _unlock(name)
                raise LabError(f"lab {name!r} is up already: take it down first, or choose another name")
            _clear(name)  # what an `up` that was killed has left
            hosts = _set_up(name, rates, links)
        _unlock(name)
        return hosts
    except BaseException:
        with signals_held():
            if name in _locks:
                _remove(name)
        raise


def attach(name: str) -> List[Host]:
    """The hosts of a lab that is up."""
    _require()
    described = _read(name)
    if described is None:
        raise LabError(f"there is no lab {name!r}{_others()}")
    return described[0]


def change(hosts: Sequence[Host], rate_mbit: Rates) -> List[Host]:
    """All hosts of a lab, with links of other rates from now on, one for all or each its own. What waits in a queue
    stays there, but for what a shorter one does not hold. Errors as `lab`."""
    name, rates = hosts[0].lab, _each(len(hosts), rate_mbit)
    described = _read(name)
    if described is None or len(described[0]) != len(hosts):
        raise LabError(f"these are not all hosts of a lab that is up: {', '.join(host.name for host in hosts)}")
    if None in rates or None in [host.rate_mbit for host in hosts]:
        raise ValueError("only links that have a rate can be given another one")
    links, changed = described[1], [replace(host, rate_mbit=rate) for host, rate in zip(hosts, rates)]
    for host in changed:
        _limit(_contents(name), host, links)
    _write(name, changed, links)
    return changed


def carried(hosts: Sequence[Host]) -> List[Dict]:
    """What the links of a lab's hosts have carried, if they are smooth: see relay.counted(). Else nothing."""
    folder = _contents(hosts[0].lab)
    return relay.counted(folder, len(hosts)) if relay.is_in(folder) else []


def down(name: str) -> None:
    """Ends what runs on the hosts and removes the lab, whatever state it is in. LabError if there is none."""
    _require()
    with signals_held():
        if name not in _names():
            raise LabError(f"there is no lab {name!r}{_others()}")
        if not _lock(name, timeout_s=0 if name.startswith(TEMPORARY) else COMMAND_TIMEOUT_S):
            raise LabError(f"lab {name!r} is in use by the program that made it, or being set up: end that first")
        try:
            _remove(name)
        finally:
            _unlock(name)


def status() -> List[LabStatus]:
    """All labs of this machine."""
    _require()
    return [_status(name) for name in _names()]


def _checked(count: int, rate_mbit: Rates, links: _Links) -> Tuple[List[Optional[float]], _Links]:
    if not 1 <= count <= 200:
        raise ValueError(f"a lab has 1 to 200 hosts, not {count}")
    if not 0 <= links.delay_ms < 1e6:
        raise ValueError(f"a delay must be from 0 to 1000000 ms, not {links.delay_ms}")
    if not 0 <= links.loss < 1:
        raise ValueError(f"the share of packets that are lost must be from 0 to below 1, not {links.loss}")
    links.shaping.check()
    if links.are_relayed and links.shaping.shaper not in (None, "smooth"):
        raise ValueError(f"links that delay or lose are smooth ones: leave out the shaper {links.shaping.shaper}")
    rates = _each(count, rate_mbit)
    _require()
    reason = relay.why_unavailable() if links.are_relayed else None
    if reason is not None:
        raise LabError(reason)
    return rates, links


def _each(count: int, rate_mbit: Rates) -> List[Optional[float]]:
    rates = list(rate_mbit) if isinstance(rate_mbit, (list, tuple)) else [rate_mbit] * count
    if len(rates) != count:
        raise ValueError(f"{count} hosts need {count} rates or one for all, not {len(rates)}")
    for rate in rates:
        if rate is not None and not 0.1 <= rate <= 1e6:
            raise ValueError(f"a rate must be from 0.1 to 1000000 Mbit/s, not {rate}")
    return rates


def _require() -> None:
    reason = why_unavailable()
    if reason is not None:
        raise LabError(reason)


def _contents(name: str) -> Path:
    """Where the lab's tmpfs is. A folder below the one that is locked, which must not be covered by a mount."""
    return RUN / name / "lab"


def _set_up(name: str, rates: List[Optional[float]], links: _Links) -> List[Host]:
    """In the folder of a lab that is locked and empty."""
    folder = _contents(name)
    folder.mkdir()
    network.mount(folder)
    hosts = [Host(f"{name}-{node}", f"10.33.0.{node + 1}", rate) for node, rate in enumerate(rates)]
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
    network.create_switch(folder)
    for host in hosts:
        network.create_host(folder, host.node, host.name)
    if links.are_relayed:
        network.join_by_relay(folder, [links.of_rate(rate) for rate in rates])
    else:
        network.join_by_bridge(folder, len(hosts), links.shaping)
    for host in hosts:
        network.plug_in(folder, host.node, host.address, links.shaping.congestion)
        if host.rate_mbit is not None:
            _limit(folder, host, links)
    _write(name, hosts, links)
    return hosts


def _limit(folder: Path, host: Host, links: _Links) -> None:
    if links.are_relayed:
        relay.set_link(folder, host.node, links.of_rate(host.rate_mbit))
    else:
        network.limit(folder, host.node, host.rate_mbit, links.shaping)


def _write(name: str, hosts: Sequence[Host], links: _Links) -> None:
    path = _contents(name) / "lab.json"
    partial = path.with_suffix(".partial")
    described = [{"name": host.name, "address": host.address, "rate_mbit": host.rate_mbit} for host in hosts]
    links_described = {**links._asdict(), "shaping": links.shaping._asdict()}
    partial.write_text(json.dumps({**links_described, "hosts": described}))
    partial.replace(path)


def _read(name: str) -> Optional[Tuple[List[Host], _Links]]:
    """None if the lab is not there, or not complete. It may be removed at any moment."""
    if name not in _names():  # nor is it a path
        return None
    try:
        described = json.loads((_contents(name) / "lab.json").read_text())
    except FileNotFoundError:
        return None
    hosts = [Host(**host) for host in described.pop("hosts")]
    return hosts, _Links(**{**described, "shaping": Shaping(**described["shaping"])})


def _names() -> List[str]:
    try:
        return sorted(os.listdir(RUN))
    except FileNotFoundError:
        return []


def _others() -> str:
    return f"; there are {', '.join(_names())}" if _names() else ", nor any other"


def _status(name: str) -> LabStatus:
    free, described = _lock(name, timeout_s=0), _read(name)
    if free:
        _unlock(name)
    if name.startswith(TEMPORARY):
        state = "left over" if free else "in use"
    else:
        state = "up" if described else "half made" if free else "being changed"
    hosts, links = described or ([], _Links())
    running = network.processes(_contents(name))
    pids = [sorted(pid for pid, node in running.items() if node == str(host.node)) for host in hosts]
    counts = []
    with contextlib.suppress(RuntimeError):  # it has just been removed
        counts = carried(hosts) if hosts else []
    return LabStatus(name, state, links.delay_ms, links.loss, hosts, pids, counts)


def _claim_temporary() -> str:
    for number in itertools.count():
        name = f"{_own_prefix()}{number}"
        if name not in _locks and _lock(name, create=True, timeout_s=0):
            _clear(name)
            return name
    raise AssertionError("not reached")


def _remove_leftovers() -> None:
    """Removes the labs of programs that were killed."""
    for name in _names():
        if name.startswith(TEMPORARY) and name not in _locks and _lock(name, timeout_s=0):
            _remove(name)


@atexit.register  # for a second Ctrl-C that comes just before the `finally` of lab() can hold signals back
def _remove_own() -> None:
    with signals_held():
        for name in [name for name in _locks if name.startswith(_own_prefix())]:
            _remove(name)


def _own_prefix() -> str:
    return f"{TEMPORARY}{os.getpid()}-"


def _remove(name: str) -> None:
    """Of a lab that this process has locked."""
    _clear(name)
    (RUN / name).rmdir()
    _unlock(name)
    with contextlib.suppress(OSError):  # another lab is there
        RUN.rmdir()


def _clear(name: str) -> None:
    folder = _contents(name)
    network.end_processes(folder)
    network.unmount(folder)
    if folder.exists():
        folder.rmdir()


def _lock(name: str, create: bool = False, timeout_s: float = COMMAND_TIMEOUT_S) -> bool:
    """Whether this process now holds the lock of the lab, which makes its folder if asked to."""
    folder = RUN / name
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if create:
                folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if create:
                continue  # another process has just removed the folder above
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, folder):
                _locks[name] = descriptor
                network.held_locks.add(descriptor)
                return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return False
            time.sleep(0.02)
        os.close(descriptor)


def _unlock(name: str) -> None:
    descriptor = _locks.pop(name, None)
    if descriptor is not None:
        with network.inheriting:
            network.held_locks.discard(descriptor)
            os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Not if the folder was removed, and perhaps made anew, between its opening and its locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        return False


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
