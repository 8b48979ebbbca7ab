"""What several hosts and a model have come to, in words."""

from __future__ import annotations

from typing import Iterator, Optional, Sequence

from p3.doctor.forecast import EXACT, Forecast
from p3.doctor.rows import Row, aligned, healthy, rate
from p3.doctor.rows import lines as row_lines


def lines(found: dict, rows: Sequence[Row], forecast: Optional[Forecast] = None) -> Iterator[str]:
    hosts = found["hosts"]
    known = [host for host in hosts if host["problem"] is None]
    if known:
        head = ["host", "address", "interface", "MTU", "P3", "Python", "NumPy", "MXNet", "PyTorch", "TCP", "clock"]
        yield from aligned([head, *(_host(host) for host in known)])
        yield ""
    if found["paths"]:
        head = ["from", "to", "round trip", "packets", "TCP", "rate"]
        yield from aligned([head, *(_path(hosts, path) for path in found["paths"])])
        yield ""
    yield from row_lines(rows, "what to do")
    if forecast is not None:
        yield ""
        yield from _forecast(forecast, len(known))
    yield ""
    yield "The hosts are ready." if healthy(rows) else "Something is wrong: see PROBLEM above."


def _host(host: dict):
    fields = ("name", "address", "interface", "mtu", "p3", "python", "numpy", "mxnet", "torch", "congestion")
    return [*(str(host[field]) if host[field] is not None else "-" for field in fields), "%+.3f s" % host["clock_s"]]


def _path(hosts: Sequence[dict], path: dict):
    ends = [hosts[path["from"]]["name"], hosts[path["to"]]["name"]]
    if "error" in path:
        return [*ends, "-", "-", "-", path["error"]]
    told = rate(path["mbit"]) if "mbit" in path else path.get("rate_error", "-")
    return [*ends, "%.2f ms" % (1e3 * path["round_trip_s"]), str(path.get("passes") or "-"), path["congestion"], told]


def _forecast(told: Forecast, hosts: int) -> Iterator[str]:
    yield "%s: %.1f MB, %.4g s of computation, one worker and one server on each of %d hosts" % (
        told.model, told.model_bytes / 1e6, told.compute_s, hosts
    )  # fmt: skip
    share = "%.0f%% of the computation" % (100 * told.communication_s / told.compute_s)
    rows = [
        ["communication alone", told.communication_s, share],
        ["without overlap", told.serial_s, "computation, then communication"],
        ["the bound", told.bound_s, told.bound_reason],
    ]
    if told.predicted_s is not None:
        rows.insert(2, ["P3, as simulated", told.predicted_s, "an iteration by p3 simulate"])
    if told.planned_s is not None:
        shares = ", ".join("%.0f%%" % (100 * share) for share in told.planned_shares)
        rows.insert(3, ["with a plan", told.planned_s, "servers hold %s: --plan-out, then p3 run --strategy" % shares])
    if told.strategy != EXACT:
        rows += [["with %s" % codec, one_s, "the bound, if gradients and what comes back are compressed so"]
                 for codec, one_s in told.compressed_s.items()]  # fmt: skip
    for name, seconds, text in rows:
        yield "  %-20s %9.4f s  %s" % (name, seconds, text)
    yield "  Overlap can hide %.0f%% of the communication at best." % (100 * told.hidden)
    yield "  docs/strategies.md, the row %r" % told.strategy
