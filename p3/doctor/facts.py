"""What a host can tell of itself, as plain values that become JSON."""

from __future__ import annotations

import os
import platform
import socket
import struct
import subprocess
import sys
from fcntl import ioctl
from typing import Dict, Optional, Tuple

from p3 import __version__
from p3.cluster.messages import PROTOCOL_VERSION
from p3.cluster.node import interface_addresses, machine_id
from p3.doctor import here

_PYTHON_TIMEOUT_S = 10.0
_SIOCGIFMTU = 0x8921  # linux/sockios.h


def facts(address: str) -> Dict[str, object]:
    """`address`: at which the others reach this host."""
    interface, mtu = _interface_of(address)
    mxnet = here.installed_mxnet()
    problem = here.core_problem()
    return {
        "p3": __version__,
        "folder": here.folder(),
        "protocol": PROTOCOL_VERSION,
        "core": "loads" if problem is None else problem[0],
        "python": platform.python_version(),
        "installation": sys.prefix,
        "command": _installation_of("python"),
        "numpy": here.version_of("numpy"),
        "mxnet": None if mxnet is None else here.version_of(mxnet),
        "torch": here.version_of("torch"),
        "hostname": platform.node(),
        "machine": machine_id(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "address": address,
        "interface": interface,
        "mtu": mtu,
        "congestion": here.read("/proc/sys/net/ipv4/tcp_congestion_control").strip(),
        "congestion_available": here.read("/proc/sys/net/ipv4/tcp_available_congestion_control").split(),
        "congestion_allowed": here.read("/proc/sys/net/ipv4/tcp_allowed_congestion_control").split(),
        "ports": here.read("/proc/sys/net/ipv4/ip_local_port_range").split(),
    }


def _installation_of(command: str) -> Optional[str]:
    """The sys.prefix of the Python that a worker's command would be; None if there is none."""
    env = {name: value for name, value in os.environ.items() if name != "DMLC_ROLE"}
    try:
        asked = [command, "-c", "import sys; print(sys.prefix)"]
        told = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=_PYTHON_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def _interface_of(address: str) -> Tuple[Optional[str], Optional[int]]:
    """Its name and MTU; None where the address is on none of this host's, but translated to it."""
    for _, name in socket.if_nameindex():
        if address in interface_addresses(name):
            return name, _mtu(name)
    return None, None


def _mtu(interface: str) -> Optional[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("16si12x", os.fsencode(interface)[:15], 0)
            return struct.unpack("16si12x", ioctl(probe.fileno(), _SIOCGIFMTU, request))[1]
        except OSError:
            return None
