"""Hosts on one machine: network namespaces joined by a switch, with a rate and a delay on every link.

    with lab(2, rate_mbit=800, delay_ms=1) as hosts:
        subprocess.Popen(hosts[0].command("iperf3", "-c", hosts[1].address))

Every host has one interface, `eth0`, and its own loopback. The switch is a bridge in a namespace of its own, so the
machine's real network is neither touched nor reached. What crosses a link obeys its rate in both directions; what a
host sends to itself does not, as with real machines.

Leaving the `with` block, in whatever way (Ctrl-C included), kills the processes that still run on the hosts and removes
the namespaces. What a process that was itself killed left behind is removed by the next `lab`.

Needs Linux, root, `ip` and `tc`; `why_unavailable()` says what is missing. One lab at a time in a process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional

PREFIX = "p3lab"
COMMAND_TIMEOUT_S = 20.0

# Token bucket: a TCP segment of 64 KiB, counted with a header for each packet it will become, must pass whole, or the
# kernel cuts up every one in software. At 800 Mbit/s and 64 KiB bare TCP had 0.43 Gbit/s of goodput, with 96 KiB 0.75,
# for a third of the CPU time.
BURST_BYTES = 96 << 10
# Queue in front of a slow link. Bounded by time, not bytes, so that a lab at any rate behaves like the same switch.
QUEUE_MS = 20.0

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


class LabError(RuntimeError):
    """A namespace or a link could not be set up. The text holds the command and what it printed."""


class MissingQdisc(LabError):
    """The kernel was built without what a rate (tbf) or a delay (netem) needs."""


@dataclass(frozen=True)
class Host:
    """One network namespace. `address` is IPv4 and can be reached from the other hosts of the same lab only."""

    namespace: str
    address: str

    def command(self, *argv: str) -> List[str]:
        """The argv that runs `argv` on this host. It replaces itself by `argv`, so the process id stays the same."""
        return ["ip", "netns", "exec", self.namespace, *argv]


def why_unavailable() -> Optional[str]:
    """What this machine lacks for a lab, as a sentence, or None if it can have one."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command '{tool}', which is missing (Debian: apt-get install iproute2)"
    needed = 1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN
    if _effective_capabilities() & needed != needed:
        return "network namespaces need root (CAP_NET_ADMIN and CAP_SYS_ADMIN): run with sudo"
    return None


@contextlib.contextmanager
def lab(count: int, rate_mbit: Optional[float] = None, delay_ms: float = 0.0) -> Iterator[List[Host]]:
    """Yields `count` hosts. `rate_mbit` limits every host's link, each way; `delay_ms` is added to each packet once,
    so a round trip between two hosts takes twice that. Without either the links are as fast as the kernel.

    Raises ValueError for numbers that make no sense, MissingQdisc if the kernel cannot limit or delay, and LabError for
    whatever else the machine cannot do.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"a lab has 1 to 200 hosts, not {count}")
    if (rate_mbit is not None and rate_mbit <= 0) or delay_ms < 0:
        raise ValueError(f"rate_mbit must be above 0 and delay_ms at least 0, not {rate_mbit} and {delay_ms}")
    reason = why_unavailable()
    if reason is not None:
        raise LabError(reason)

    atexit.register(_remove_own)  # for a second Ctrl-C that comes just before the `finally` can hold signals back
    try:
        with _signals_held():
            _remove_leftovers()
            hosts = _set_up(count, rate_mbit, delay_ms)
        yield hosts
    finally:
        _remove_own()


def _own_prefix() -> str:
    return f"{PREFIX}-{os.getpid()}-"


def _set_up(count: int, rate_mbit: Optional[float], delay_ms: float) -> List[Host]:
    switch = f"{_own_prefix()}switch"
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "name", "bridge", "type", "bridge", "stp_state", "0")
    _ip("-n", switch, "link", "set", "dev", "bridge", "up")
    hosts = [_plug_in(switch, f"{_own_prefix()}host{i}", i) for i in range(count)]
    for i, host in enumerate(hosts):
        _shape(switch, host, f"port{i}", rate_mbit, delay_ms)
    return hosts


def _plug_in(switch: str, namespace: str, index: int) -> Host:
    host = Host(namespace, f"10.33.0.{index + 1}")
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "set", "dev", "lo", "up")
    _ip("-n", switch, "link", "add", "name", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", switch, "link", "set", "dev", f"port{index}", "master", "bridge", "up")
    _ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "dev", "eth0", "up")
    return host


def _shape(switch: str, host: Host, port: str, rate_mbit: Optional[float], delay_ms: float) -> None:
    """Up: the rate at the host's own interface. Down: the delay, then the rate, at the switch's port.

    The delay is not put at the host, because netem takes packets off the sending socket's account, and TCP would then
    fill a queue in its own host that no real machine has.
    """
    down_at = ["root"]
    if delay_ms:
        _tc(switch, port, *down_at, "handle", "1:", "netem", "delay", f"{delay_ms}ms", "limit", "1000000")
        down_at = ["parent", "1:1"]
    if rate_mbit is not None:
        queue_bytes = BURST_BYTES + int(rate_mbit * 1e6 / 8 * QUEUE_MS / 1e3)
        bucket = ["tbf", "rate", f"{int(rate_mbit * 1e6)}bit", "burst", str(BURST_BYTES), "limit", str(queue_bytes)]
        _tc(host.namespace, "eth0", "root", *bucket)
        _tc(switch, port, *down_at, *bucket)


def _remove_own() -> None:
    with _signals_held():
        _remove(name for name in _namespaces() if name.startswith(_own_prefix()))


def _remove_leftovers() -> None:
    """Removes the namespaces of labs whose process was killed."""
    _remove(name for name in _namespaces() if not Path("/proc", name.split("-")[1]).exists())


def _remove(namespaces: Iterator[str]) -> None:
    for name in list(namespaces):
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _namespaces() -> List[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Setting up and cleaning up are short and must not be cut in two: Ctrl-C and SIGTERM act at the end of the block.

    By handlers and not by a signal mask, because another thread, of a library perhaps, would take a masked signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread alone, so no signal interrupts this one
        return
    held: List[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def _tc(namespace: str, device: str, *argv: str) -> None:
    try:
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, *argv)
    except LabError as error:
        if "qdisc kind is unknown" not in str(error):
            raise
        kind = "netem" if "netem" in argv else "tbf"
        raise MissingQdisc(
            f"this kernel has no {kind} (CONFIG_NET_SCH_{kind.upper()}), which a "
            f"{'delay' if kind == 'netem' else 'rate'} needs: load the module sch_{kind}, or do without"
        ) from error


def _ip(*argv: str) -> str:
    return _call("ip", *argv)


def _call(*argv: str) -> str:
    # In a session of its own, so that Ctrl-C on the terminal does not reach a half-done command.
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=COMMAND_TIMEOUT_S,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise LabError(f"'{' '.join(argv)}' failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
