"""What the reports of all processes make of a job: tables of its workers, servers and links (`view` of messages.py). No
I/O.

A link is what joins a host to the others: what its processes send to and receive from those of other machines. Workers
report how much they have exchanged with each server, so servers need not count by peer.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from p3.cluster.watching.history import History, Pace, median

# A worker is slow if its pushes come so late, and by such a share of a step; a server, if slices queue so long for it,
# and so many times as long as for the others.
_LATE_S, _LATE_SHARE = 0.01, 0.05
_QUEUE_S, _QUEUE_TIMES = 0.01, 2.0
_WORTH_NAMING = 0.005  # of the time: what is waited for
_WAITS = "waits/"  # before the name of a group, in the totals of a worker

_Exchanged = Sequence[Sequence[float]]  # of each server, by rank: see `servers` of `worker_reported`


class Reports:
    """Of one process: what it has reported, and the rounds that its heartbeats tell."""

    def __init__(self) -> None:
        self.is_asked = False  # and has not answered yet
        self.at: Optional[float] = None  # when the last one came, by the scheduler's clock
        self.last: dict = {}
        self.pace = Pace()
        self.history = History()
        self.slices = History()  # of a server: those that workers sent to it

    def take(self, report: dict, now: float) -> None:
        self.is_asked, self.at, self.last = False, now, report
        totals = {name: value for name, value in report.items() if type(value) in (int, float)}
        totals.update((_WAITS + group, value) for group, value in report.get("waits", {}).items())
        self.history.add(report["at_s"], totals)
        self.pace.note(now, report["last_round"])  # heartbeats tell as well, but a second later


class Process(NamedTuple):
    """One of the job."""

    rank: int
    host: str
    machine: str
    state: str  # runs, left or lost
    round: int
    reports: Reports


class Links:
    """What hosts exchange, as the last reports of all workers have it."""

    def __init__(self) -> None:
        self._of_hosts: Dict[str, History] = {}  # by machine

    def record(self, now: float, workers: Sequence[Process], servers: Sequence[Process]) -> None:
        """To be called when all have reported. `now`: since the job began."""
        machines = (one.machine for one in (*workers, *servers))
        totals: Dict[str, Dict[str, float]] = {machine: {"sent": 0.0, "received": 0.0} for machine in machines}
        queued = [{"slices": 0.0, "queued_s": 0.0} for _ in servers]
        for worker in workers:
            for server, of_server, (sent, received, slices, queued_s) in zip(servers, queued, _exchanged(worker)):
                of_server["slices"] += slices
                of_server["queued_s"] += queued_s
                if worker.machine != server.machine:
                    for machine, out, back in ((worker.machine, sent, received), (server.machine, received, sent)):
                        totals[machine]["sent"] += out
                        totals[machine]["received"] += back
        for machine, of_host in totals.items():
            self._of_hosts.setdefault(machine, History()).add(now, of_host)
        for server, of_server in zip(servers, queued):
            server.reports.slices.add(now, of_server)

    def rows(self, processes: Sequence[Process], span_s: float) -> List[dict]:
        """By host, in the order of its first process."""
        of_machines: Dict[str, List[Process]] = {}
        for process in processes:
            of_machines.setdefault(process.machine, []).append(process)
        rows = []
        for machine, those in of_machines.items():
            stretch = self._of_hosts.get(machine, History()).over(span_s)
            rows.append({"host": those[0].host, "processes": len(those), "sent_per_s": stretch.per_s("sent"),
                         "received_per_s": stretch.per_s("received")})  # fmt: skip
        return rows


def _exchanged(worker: Process) -> _Exchanged:
    return worker.reports.last.get("servers", ())


def waiting(missing: str) -> dict:
    """A view of a job that has not begun."""
    return {"kind": "view", "seconds": 0.0, "missing": missing, "over_s": 0.0, "workers": [], "servers": [],
            "links": [], "slowest_worker": None, "slowest_server": None}  # fmt: skip


def view(
    now: float, seconds: float, span_s: float, workers: Sequence[Process], servers: Sequence[Process], links: Links
) -> dict:
    """`now`: by the clock of reports; `seconds`: for which the job has run. Rates are of the last `span_s` seconds, or
    of what reports there are."""
    late = _lateness(workers, servers)
    of_workers = [_worker_row(one, now, span_s, late[one.rank]) for one in workers]
    of_servers = [_server_row(one, now, span_s) for one in servers]
    stretches = [one.reports.history.over(span_s).seconds for one in (*workers, *servers) if one.reports.at is not None]
    return {
        "kind": "view",
        "seconds": seconds,
        "missing": "",
        "over_s": median(stretches) if stretches else 0.0,
        "workers": of_workers,
        "servers": of_servers,
        "links": links.rows([*workers, *servers], span_s),
        "slowest_worker": _slowest_worker(of_workers),
        "slowest_server": _slowest_server(of_servers),
    }


def _row(process: Process, now: float, span_s: float) -> dict:
    reports = process.reports
    stretch, last = reports.history.over(span_s), reports.last
    return {
        "rank": process.rank,
        "host": process.host,
        "state": process.state,
        "age_s": None if reports.at is None else max(0.0, now - reports.at),
        "round": max(process.round, last.get("last_round", 0)),
        "steps_per_s": reports.pace.per_s(now, span_s),
        "sent_bytes": last.get("bytes_sent", 0),
        "received_bytes": last.get("bytes_received", 0),
        "sent_per_s": stretch.per_s("bytes_sent"),
        "received_per_s": stretch.per_s("bytes_received"),
        "queued_slices": last.get("queued_slices", 0),
        "memory_bytes": last.get("memory_bytes", 0),
    }


def _worker_row(worker: Process, now: float, span_s: float, late_s: float) -> dict:
    last, stretch = worker.reports.last, worker.reports.history.over(span_s)
    waited_s = last.get("waited_s")
    group, share = _longest({name: stretch.per_s(_WAITS + name) for name in last.get("waits", {})})
    return {
        **_row(worker, now, span_s),
        "waited_s": waited_s,
        "waited_share": None if waited_s is None else min(1.0, stretch.per_s("waited_s")),
        "waits": last.get("waits", {}),
        "group": group,
        "group_share": share,
        "late_s": late_s,
    }


def _longest(shares: Mapping[str, float]) -> Tuple[str, float]:
    """The group that was waited for longest of late, and what share of the time; "": none."""
    group = max(shares, key=lambda name: shares[name], default="")
    return (group, min(1.0, shares[group])) if group and shares[group] >= _WORTH_NAMING else ("", 0.0)


def _server_row(server: Process, now: float, span_s: float) -> dict:
    last, sent = server.reports.last, server.reports.slices.over(span_s)
    slices = sent.grown("slices")
    return {
        **_row(server, now, span_s),
        "received_slices": last.get("received_slices", 0),
        "value_bytes": last.get("value_bytes", 0),
        "queue_s": sent.grown("queued_s") / slices if slices else 0.0,
    }


def _lateness(workers: Sequence[Process], servers: Sequence[Process]) -> Dict[int, float]:
    """Of each worker, by rank: how late its pushes come, where that shows most."""
    of_servers = [server.reports.last.get("late_s", []) for server in servers]
    ranks = [worker.rank for worker in workers]
    return {rank: max([late[rank] for late in of_servers if rank < len(late)], default=0.0) for rank in ranks}


def _slowest_worker(rows: Sequence[dict]) -> Optional[int]:
    """Whom the others wait for in each round, if there is one."""
    if len(rows) < 2:
        return None
    slowest = max(rows, key=lambda row: row["late_s"])
    rates = [row["steps_per_s"] for row in rows if row["steps_per_s"] > 0]
    step_s = 1 / median(rates) if rates else 0.0
    is_slow = slowest["late_s"] > max(_LATE_S, _LATE_SHARE * step_s)
    return slowest["rank"] if is_slow else None


def _slowest_server(rows: Sequence[dict]) -> Optional[int]:
    if len(rows) < 2:
        return None
    slowest = max(rows, key=lambda row: row["queue_s"])
    others = median(row["queue_s"] for row in rows if row is not slowest)
    return slowest["rank"] if slowest["queue_s"] > max(_QUEUE_S, _QUEUE_TIMES * others) else None
