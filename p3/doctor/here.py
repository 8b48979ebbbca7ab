"""What a job would find on this machine, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import shutil
import socket
import sys
from typing import Callable, List, Optional, Tuple

from p3.cluster.node import endpoint, interface_address, interface_addresses, listen, loopback, machine_id, resolve
from p3.errors import ConfigError, NotBuilt, RendezvousError
from p3.doctor.rows import MISSING, NOTE, OK, Row
from p3.mxnet import hooks
from p3.settings import Settings, in_job


def examine(settings: Settings) -> List[Row]:
    checks: List[Callable[[Settings], List[Row]]] = [
        _python,
        _core,
        _numpy,
        _mxnet,
        _torch,
        _cpu,
        _kernel,
        _network,
        _ports,
        _ssh,
        _environment,
    ]
    return [row for check in checks for row in check(settings)]


def _python(_settings: Settings) -> List[Row]:
    from p3 import __version__

    return [
        Row(OK, "p3", "%s in %s" % (__version__, folder())),
        Row(OK, "python", "%s, %s" % (platform.python_version(), sys.executable)),
    ]


def _core(_settings: Settings) -> List[Row]:
    problem = core_problem()
    if problem is not None:
        return [Row(MISSING, "C++ core", *problem)]
    from p3._core import TLS_BUILT_IN

    if TLS_BUILT_IN:
        where = "the kernel" if "tls" in read("/proc/sys/net/ipv4/tcp_available_ulp").split() else "OpenSSL"
        return [Row(OK, "C++ core", "loads"), Row(OK, "P3_TLS=1", "possible; %s would encrypt" % where)]
    remedy = "apt-get install libssl-dev   # or: dnf install openssl-devel; and build P3 again"
    return [Row(OK, "C++ core", "loads"), Row(NOTE, "P3_TLS=1", "impossible: built without OpenSSL", remedy)]


def core_problem() -> Optional[Tuple[str, str]]:
    """Why it does not load, and the command that mends that; None if it does."""
    try:
        importlib.import_module("p3._core")
    except NotBuilt as error:  # with the command
        return str(error), ""
    except ImportError as error:
        return str(error), _pip("--force-reinstall --no-deps WHEEL   # P3's, or the folder of its source")
    return None


def _numpy(_settings: Settings) -> List[Row]:
    version = version_of("numpy")
    if version is None:
        return [Row(MISSING, "numpy", "not installed", _pip("numpy"))]
    problem = hooks.numpy_problem(version) if installed_mxnet() else None
    return [Row(OK, "numpy", version) if problem is None else Row(MISSING, "numpy", *problem)]


def _mxnet(_settings: Settings) -> List[Row]:
    name = installed_mxnet()
    if name is not None:
        version = version_of(name)
        state = OK if version.startswith("1.9.") else NOTE
        return [Row(state, "mxnet", "%s %s%s" % (name, version, "" if state == OK else "; P3 is made for 1.9.1"))]
    finding = "not installed; only workers that train with MXNet need it"
    if sys.version_info >= (3, 12):
        return [Row(NOTE, "mxnet", finding + ", with Python 3.8 to 3.11")]
    return [Row(NOTE, "mxnet", finding, _pip("'p3-training[mxnet]'"))]


def _torch(_settings: Settings) -> List[Row]:
    version = version_of("torch")
    if version is None:
        finding = "not installed; only workers that train with PyTorch need it"
        return [Row(NOTE, "torch", finding, _pip("'p3-training[torch]'"))]
    if tuple(int(number) for number in version.split(".")[:2]) < (2, 1):
        return [Row(NOTE, "torch", "%s; p3.torch is made for 2.1 and later" % version, _pip("--upgrade torch"))]
    return [Row(OK, "torch", version)]


def installed_mxnet() -> Optional[str]:
    """Looked up, not imported: as a server, `import mxnet` would never return."""
    return next((name for name in ("mxnet", "mxnet-cu117", "mxnet-cu112") if version_of(name) is not None), None)


def _cpu(_settings: Settings) -> List[Row]:
    features = set(read("/proc/cpuinfo").partition("\nflags")[2].partition("\n")[0].split())
    vectors = [name for name in ("sse2", "avx", "avx2", "avx512f", "f16c") if name in features]
    return [Row(OK, "cpu", "%d cores, %s %s" % (len(os.sched_getaffinity(0)), platform.machine(), " ".join(vectors)))]


def _kernel(_settings: Settings) -> List[Row]:
    rows = [Row(OK, "kernel", "%s %s" % (platform.system(), platform.release()))]
    default = read("/proc/sys/net/ipv4/tcp_congestion_control").strip()
    if default != "bbr":
        rows.append(Row(OK, "TCP", default))
    elif os.geteuid() == 0 or "cubic" in read("/proc/sys/net/ipv4/tcp_allowed_congestion_control").split():
        rows.append(Row(OK, "TCP", "bbr; P3 chooses cubic for its own connections where round trips are short"))
    else:
        finding = "bbr; where round trips are short P3 chooses reno, as cubic is not allowed"
        remedy = "sudo sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
        rows.append(Row(NOTE, "TCP", finding, remedy))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind("\0p3-doctor-" + os.urandom(8).hex())
        rows.append(Row(OK, "abstract AF_UNIX", "works; machine %s" % machine_id()[:8]))
    except OSError as error:
        rows.append(Row(NOTE, "abstract AF_UNIX", "%s; set P3_LOCAL=tcp" % error.strerror))
    return rows


def _network(_settings: Settings) -> List[Row]:
    rows = []
    for _, name in socket.if_nameindex():
        addresses = interface_addresses(name)
        rows.append(Row(OK if addresses else NOTE, "interface " + name, ", ".join(addresses) or "no address"))
    return rows


def _ports(settings: Settings) -> List[Row]:
    try:
        listen(loopback()).close()
        rows = [Row(OK, "free TCP ports", "yes")]
    except OSError as error:
        rows = [Row(MISSING, "free TCP ports", error.strerror, "end the programs that hold them: ss -tlnp")]
    if settings.server_ports is not None:
        free = [port for port in settings.server_ports if _is_free(port)]
        told = "%d of %d are free: so many servers can run here" % (len(free), len(settings.server_ports))
        state, remedy = (OK, "") if free else (MISSING, "ss -tlnp   # who holds them")
        rows.append(Row(state, "P3_SERVER_PORTS", told, remedy))
    if settings.root_port is not None and settings.role in (None, "scheduler"):
        try:
            listen("0.0.0.0", settings.root_port).close()
            rows.append(Row(OK, "port %d" % settings.root_port, "free for a scheduler here"))
        except OSError as error:
            remedy = "ss -tlnp 'sport = :%d'   # and end that program, or choose another port" % settings.root_port
            rows.append(Row(NOTE, "port %d" % settings.root_port, error.strerror, remedy))
    return rows


def _is_free(port: int) -> bool:
    try:
        listen("0.0.0.0", port).close()
        return True
    except OSError:
        return False


def _ssh(settings: Settings) -> List[Row]:
    program = shlex.split(settings.ssh)[0]
    path = shutil.which(program)
    if path is None:
        remedy = "apt-get install openssh-client   # or: dnf install openssh-clients"
        return [Row(NOTE, "ssh", "%s not found; only `p3 run --hostfile` needs it" % program, remedy)]
    return [Row(OK, "ssh", path)]


def _environment(settings: Settings) -> List[Row]:
    if not in_job(os.environ):
        return [Row(OK, "DMLC_*", "not set: a script runs alone (embedded) unless `p3 run` starts it")]
    try:
        settings.require("role", "root_host", "root_port", "num_workers", "num_servers")
        settings.job_secret()
        resolve(settings.root_host, settings.root_port, "DMLC_PS_ROOT_URI")
        if settings.interface is not None:
            interface_address(settings.interface)
    except (ConfigError, RendezvousError) as error:
        return [Row(MISSING, "DMLC_*", str(error), "p3 run -n WORKERS -s SERVERS COMMAND   # sets them all")]
    where = "%s of the job at %s" % (settings.role, endpoint(settings.root_host, settings.root_port))
    return [Row(OK, "DMLC_*", "%s, %d workers, %d servers" % (where, settings.num_workers, settings.num_servers))]


def folder() -> str:
    """That holds the p3 package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def version_of(distribution: str) -> Optional[str]:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _pip(what: str) -> str:
    return "%s -m pip install %s" % (sys.executable, what)


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
