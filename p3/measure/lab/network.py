"""What a lab is made of, as Linux sees it: namespaces kept by bind mounts, and a bridge with token buckets or a relay.

A lab is one folder. On it a tmpfs is mounted, so that one unmount takes everything away:

    lab.json            the lab is complete, and this is what was asked for (hosts.py)
    hosts               names of the hosts, which is /etc/hosts on each of them
    switch/net          network namespace with the bridge `bridge` and, for host N, the port `portN`; where uplinks are
                        slow beyond the host, a bridge `routerN` has that port, and a link to `bridge` of its own. With
                        a relay it holds that process alone
    links, relay.log    of a relay: how the links are and what has passed (relay.py), and its last words
    N/net uts ipc shm   namespaces of host N, with the interface `eth0`; and what is /dev/shm there

Namespaces that are mounted need no process to hold them. A network namespace that nobody holds any more is destroyed
by the kernel with its links.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Set, Tuple

from p3.measure.lab import relay
from p3.measure.lab.shaping import BURST_BYTES, Shaping

COMMAND_TIMEOUT_S = 20.0
TERMINATE_TIMEOUT_S = 2.0  # between SIGTERM and SIGKILL
KINDS = ("net", "uts", "ipc")
SWITCH = "switch"

# Without IPv6 no address has to prove that it is unique before it can be used, and idle links stay silent.
PREPARE_HOST = """
echo "$0" > /proc/sys/kernel/hostname
for setting in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e "$setting" ] || echo 1 > "$setting"; done
ip link set dev lo up
"""

# Each process of a host gets a mount namespace of its own with the same three mounts, as `ip netns exec` does it: a
# mount namespace that is kept would lose the working directory on entering.
ENTER_HOST = (
    'mount --bind "$0/shm" /dev/shm && mount --bind "$0/../hosts" /etc/hosts && mount -t sysfs sysfs /sys && exec "$@"'
)

# Descriptors of the locks on labs that this process is at work on. Commands inherit them, so that a lab stays locked
# until the last command has ended, even when the process that started it has been killed.
held_locks: Set[int] = set()
# Held while a child gets them, and while one is closed: its number may be another file's a moment later.
inheriting = threading.Lock()


class LabError(RuntimeError):
    """A lab could not be set up, found or removed. The text says why; of a command that failed, what it printed."""


class MissingQdisc(LabError):
    """The kernel was built without what a rate needs: tbf, or htb."""


def enter(folder: Path, argv: Sequence[str]) -> List[str]:
    """The argv that runs `argv` in the namespaces of one host, in the same working directory and process.

    Mounts are slaves of the machine's, so that another lab's removal is seen here too and nothing holds it back.
    """
    spaces = [f"--{kind}={folder}/{kind}" for kind in KINDS]
    return [
        "nsenter", *spaces, "unshare", "--mount", "--propagation", "slave", "sh", "-c", ENTER_HOST, str(folder), *argv
    ]


def mount(folder: Path) -> None:
    """The tmpfs that holds a lab. Shared, so that its unmounting reaches the mount namespaces of other processes."""
    call("mount", "-t", "tmpfs", "-o", "mode=755", "p3lab", str(folder))
    call("mount", "--make-shared", str(folder))


def unmount(folder: Path) -> None:
    """Takes everything away, also what somebody still looks at. Nothing mounted is fine."""
    while os.path.ismount(folder):
        call("umount", "--lazy", str(folder))


def create_switch(lab: Path) -> None:
    (lab / SWITCH).mkdir()
    (lab / SWITCH / "net").touch()
    call("unshare", f"--net={lab / SWITCH}/net", "true")


def create_host(lab: Path, node: int, name: str) -> None:
    """Without a network card."""
    host = lab / str(node)
    (host / "shm").mkdir(parents=True)
    call("mount", "-t", "tmpfs", "-o", "mode=1777", "p3lab", str(host / "shm"))
    for kind in KINDS:
        (host / kind).touch()
    call("unshare", *(f"--{kind}={host}/{kind}" for kind in KINDS), "sh", "-ec", PREPARE_HOST, name)


def join_by_bridge(lab: Path, hosts: int, shaping: Shaping) -> None:
    """Gives all hosts their cards: links that are as fast as the kernel."""
    switch = lab / SWITCH
    _ip(switch, "link", "add", "name", "bridge", "type", "bridge", "stp_state", "0")
    _ip(switch, "link", "set", "dev", "bridge", "up")
    for node in range(hosts):
        port = f"port{node}"
        _ip(switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", f"{lab}/{node}/net")
        _ip(switch, "link", "set", "dev", port, "master", _router(switch, node) if shaping.beyond else "bridge", "up")


def join_by_relay(lab: Path, links: Sequence[relay.Link]) -> None:
    """Gives all hosts their cards: one link for each. The relay runs on the switch, whose processes end last."""
    relay.prepare(lab, len(links))
    for node, link in enumerate(links):
        relay.set_link(lab, node, link)
    program = [sys.executable, "-m", relay.__name__, str(lab), str(len(links))]
    call("nsenter", f"--net={lab / SWITCH}/net", *program)


def plug_in(lab: Path, node: int, address: str, congestion: str) -> None:
    host = lab / str(node)
    _ip(host, "address", "add", f"{address}/24", "dev", "eth0")
    _ip(host, "link", "set", "dev", "eth0", "up")
    if congestion != "machine":  # the kernel keeps a namespace from choosing a default that is restricted
        subnet = f"{address.rpartition('.')[0]}.0/24"
        # P3 leaves BBR where it should, and would choose it where it may: locked, no program can.
        chosen = [congestion] if congestion == "bbr" else ["lock", congestion]
        _ip(host, "route", "replace", subnet, "dev", "eth0", "src", address, "congctl", *chosen)


def _router(switch: Path, node: int) -> str:
    """Of a host, between it and the bridge; its name."""
    name = f"router{node}"
    _ip(switch, "link", "add", "name", name, "type", "bridge", "stp_state", "0")
    _ip(switch, "link", "add", "name", f"up{node}", "type", "veth", "peer", "name", f"down{node}")
    _ip(switch, "link", "set", "dev", f"up{node}", "master", name, "up")
    _ip(switch, "link", "set", "dev", f"down{node}", "master", "bridge", "up")
    _ip(switch, "link", "set", "dev", name, "up")
    return name


def limit(lab: Path, node: int, rate_mbit: float, shaping: Shaping) -> None:
    """Sets the rate of a host that the bridge joins to the others: up at its interface or beyond, down at the switch's
    port."""
    rate, limit_bytes = f"{round(rate_mbit * 1e6)}bit", str(shaping.limit_bytes(rate_mbit))
    switch = lab / SWITCH
    uplink = (switch, f"up{node}") if shaping.beyond else (lab / str(node), "eth0")
    for folder, device in (uplink, (switch, f"port{node}")):
        _SHAPE[shaping.shaper or "tbf"](folder, device, rate, limit_bytes)


def _tbf(folder: Path, device: str, rate: str, limit_bytes: str) -> None:
    _tc("replace", folder, device, "root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", limit_bytes)


def _htb(folder: Path, device: str, rate: str, limit_bytes: str) -> None:
    _tc("replace", folder, device, "root", "pfifo")  # htb cannot be replaced by itself
    _tc("replace", folder, device, "root", "handle", "10:", "htb", "default", "1")
    burst = ["burst", str(BURST_BYTES), "cburst", str(BURST_BYTES), "quantum", str(BURST_BYTES)]
    call("nsenter", f"--net={folder}/net", "tc", "class", "replace", "dev", device,
         "parent", "10:", "classid", "10:1", "htb", "rate", rate, *burst)  # fmt: skip
    _tc("replace", folder, device, "parent", "10:1", "handle", "11:", "bfifo", "limit", limit_bytes)


_SHAPE = {"tbf": _tbf, "htb": _htb}


def cut(lab: Path, node: int) -> None:
    """Takes a host's cable out: nothing reaches it any more or leaves it, and nobody is told."""
    _set_cut(lab, node, True)


def mend(lab: Path, node: int) -> None:
    """Puts it in again."""
    _set_cut(lab, node, False)


def _set_cut(lab: Path, node: int, is_cut: bool) -> None:
    if relay.is_in(lab):
        relay.cut(lab, node, is_cut)
    else:
        _ip(lab / SWITCH, "link", "set", "dev", f"port{node}", "down" if is_cut else "up")


def processes(lab: Path) -> Dict[int, str]:
    """What runs on the hosts and the switch: process id -> folder of the host, or SWITCH."""
    owner: Dict[Tuple[int, int], str] = {}
    for folder in _folders(lab):
        for kind in KINDS:
            space = _identity(folder / kind)
            if space is not None:
                owner[space] = folder.name
    found: Dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for space in _spaces(int(entry)) & owner.keys():
                found[int(entry)] = owner[space]
    return found


def end_processes(lab: Path) -> None:
    """SIGTERM for all that runs on the hosts, then SIGKILL; as long as they end, a relay carries their frames. Returns
    when none is left."""
    running = _on_hosts(lab)
    if os.getpid() in running:
        raise LabError("this process runs on a host of the lab itself: do that from outside")
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_TIMEOUT_S
    while _on_hosts(lab) and time.monotonic() < deadline:
        time.sleep(0.01)
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while True:
        left = processes(lab)
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(map(str, left))} survive SIGKILL; the lab stays")
        _signal(left, signal.SIGKILL)  # again and again: one may have had a child just before it died
        time.sleep(0.01)


def _on_hosts(lab: Path) -> List[int]:
    return [pid for pid, place in processes(lab).items() if place != SWITCH]


def call(*argv: str) -> str:
    """The output of a command; LabError if it fails."""
    # In a session of its own, so that Ctrl-C on the terminal does not reach a half-done command.
    with inheriting:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
            start_new_session=True, pass_fds=tuple(held_locks),
        )
    with process:
        try:
            output, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"'{' '.join(argv)}' did not end in {COMMAND_TIMEOUT_S:.0f} s") from None
            raise
    if process.returncode != 0:
        raise LabError(f"'{' '.join(argv)}' failed with status {process.returncode}: {errors.strip()}")
    return output


def _folders(lab: Path) -> List[Path]:
    try:
        return [entry for entry in lab.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []


def _spaces(pid: int) -> Set[Tuple[int, int]]:
    found = (_identity(Path(f"/proc/{pid}/ns/{kind}")) for kind in KINDS)
    return {space for space in found if space is not None}


def _identity(path: Path) -> Optional[Tuple[int, int]]:
    """What two paths to one namespace have in common. None where there is none: the process has ended."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _ip(folder: Path, *argv: str) -> None:
    call("nsenter", f"--net={folder}/net", "ip", *argv)


def _tc(action: str, folder: Path, device: str, *argv: str) -> None:
    try:
        call("nsenter", f"--net={folder}/net", "tc", "qdisc", action, "dev", device, *argv)
    except LabError as error:
        if "qdisc kind is unknown" not in str(error):
            raise
        kind = "htb" if "htb" in argv else "tbf"
        raise MissingQdisc(
            f"this kernel has no {kind} (CONFIG_NET_SCH_{kind.upper()}), which a rate needs: load the module "
            f"sch_{kind}, choose the shaper smooth, or do without"
        ) from error
