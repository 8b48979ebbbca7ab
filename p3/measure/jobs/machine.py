"""What a result depends on besides its options: the machine, the versions, the commit. JSON-ready."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Dict

# Settings in the environment that the jobs of an experiment inherit; secrets are none of a result's business.
_PREFIXES = ("P3_", "MXNET_", "OMP_", "MKL_", "PS_")


def machine() -> Dict[str, object]:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cores": os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def omp_threads(sharing: int) -> int:
    """Of each of so many workers of this machine, for all stores alike, as `p3 run` sets it; OMP_NUM_THREADS in the
    environment is kept. More than a core for each worker only takes it from those that send."""
    return int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // sharing)))


def in_a_line() -> str:
    """What a benchmark of the processor alone depends on."""
    here, installed = machine(), versions()
    software = f"Python {installed['python']}, NumPy {installed['numpy']}"
    return f"{here['cpu']}, {platform.system()} {here['kernel']}; {software}"


def versions() -> Dict[str, str]:
    from p3 import __version__

    installed = {name: _version(name) for name in ("mxnet", "torch", "numpy")}
    return {"p3": __version__, "python": platform.python_version(), **installed}


def inherited_settings() -> Dict[str, str]:
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) and "SECRET" not in name
    }


def commit() -> str:
    """Of the source tree that P3 runs from, if it does."""

    def git(*argv: str) -> str:
        return subprocess.check_output(
            ["git", *argv], cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, universal_newlines=True
        ).strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # "mxnet-cu112" and its like go by other names
        return "unknown"
