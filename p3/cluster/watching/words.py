"""A view of a job in words: one line of it, and numbers as people read them."""

from __future__ import annotations

from typing import List

from p3.cluster.watching.history import median


def line(view: dict) -> str:
    """All of a job in one line, for a log."""
    if view["missing"]:
        return "the job has not begun: %s missing" % view["missing"]
    workers = view["workers"]
    rounds = max((row["round"] for row in workers), default=0)
    parts = ["round %d" % rounds, "%s steps/s" % rate(steps_per_s(view))]
    shares = [row["waited_share"] for row in workers if row["waited_share"] is not None]
    if shares:
        parts.append("workers waited %s of the time%s" % (share(sum(shares) / len(shares)), _for_what(workers)))
    parts.append("links %s" % _links(view["links"]))
    parts += slowest(view)
    return "%s (over the last %.0f s)" % (", ".join(parts), view["over_s"])


def steps_per_s(view: dict) -> float:
    """Of the job: as many workers are faster as are slower."""
    rates = [row["steps_per_s"] for row in view["workers"] if row["state"] == "runs"]
    return median(rates) if rates else 0.0


def _for_what(workers: List[dict]) -> str:
    group, longest = max(((row["group"], row["group_share"]) for row in workers), key=lambda one: one[1])
    return ", longest for %s" % group if longest > 0 else ""


def _links(links: List[dict]) -> str:
    """Of the busiest one each way; most jobs have the same on all."""
    if len(links) < 2:
        return "not used: one host"
    out, back = (max(row[name] for row in links) for name in ("sent_per_s", "received_per_s"))
    return "%s/s out, %s/s in" % (count(out, "B"), count(back, "B"))


def slowest(view: dict) -> List[str]:
    """Who keeps the others up, if anybody does."""
    parts = []
    if view["slowest_worker"] is not None:
        row = next(row for row in view["workers"] if row["rank"] == view["slowest_worker"])
        parts.append("slowest worker %d (%s), %s behind the first" % (row["rank"], row["host"], seconds(row["late_s"])))
    if view["slowest_server"] is not None:
        row = next(row for row in view["servers"] if row["rank"] == view["slowest_server"])
        whom = (row["rank"], row["host"], seconds(row["queue_s"]))
        parts.append("slowest server %d (%s), slices queue %s for it" % whom)
    return parts


def count(number: float, unit: str = "") -> str:
    """In three digits or so: 1.23 MB, 45.6 GB."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    digits = 0 if prefix == "" or number >= 99.95 else 1 if number >= 9.995 else 2
    return "%.*f %s%s" % (digits, number, prefix, unit) if prefix + unit else "%.0f" % number


def rate(number: float) -> str:
    return "%.3g" % number if number < 1000 else "%.0f" % number


def share(number: float) -> str:
    return "%.0f%%" % (100 * number)


def seconds(number: float) -> str:
    return "%.2f s" % number if number >= 1 else "%.0f ms" % (1000 * number)
