"""What varies beside rates, models and hosts: how packets go, and the settings of a job."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple

from p3.measure.lab.shaping import Shaping


class Path(NamedTuple):
    shaping: Shaping = Shaping()
    workers_per_host: int = 1
    environment: Mapping[str, str] = {}  # of P3's processes


# By name, as tables show it.

# Of `p3 bench paths`: everything about a network but its rate, and how a job uses it. A user can choose none of the
# former, so a result that holds for one of them alone is worth little.
PATHS: Dict[str, Path] = {
    "plain": Path(),
    "CUBIC": Path(Shaping(congestion="cubic")),
    "BBR": Path(Shaping(congestion="bbr")),
    "htb": Path(Shaping(shaper="htb")),
    "no bursts": Path(Shaping(shaper="smooth")),
    "queue of 100 ms": Path(Shaping(queue_ms=100.0)),
    "queue of 5 ms": Path(Shaping(queue_ms=5.0)),
    "slow beyond the host": Path(Shaping(beyond=True)),
    "TLS": Path(environment={"P3_TLS": "1"}),
    "2 workers on each host": Path(workers_per_host=2),
}

# Of `p3 bench fault_tolerance`: which processes a job goes on without when they are lost.
_WITHOUT_WORKERS = {"P3_ON_WORKER_LOSS": "continue"}
TOLERANCES: Dict[str, Path] = {
    "none": Path(),
    "workers": Path(environment=_WITHOUT_WORKERS),
    "workers and servers": Path(environment={**_WITHOUT_WORKERS, "P3_ON_SERVER_LOSS": "continue"}),
}

ALL = {**PATHS, **TOLERANCES}
