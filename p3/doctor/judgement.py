"""What is wrong in what Examination.run() has found, and what to do about it. Pure functions."""

from __future__ import annotations

import statistics
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from p3.doctor.paths import LARGEST_PACKET
from p3.doctor.rows import NOTE, OK, PROBLEM, Row, rate
from p3.placement import SHORT_ROUND_TRIP_S

# A clock that is further away confuses logs; P3 itself compares no clocks of different hosts.
_CLOCK_TOLERANCE_S = 1.0
# Of the median of all hosts. Less is a host that holds up the others, for all wait for the slowest.
_SLOW = 0.7

# What must be alike: where the scheduler is, too, and on the hosts. And what only should be.
_EVERYWHERE = (("p3", "P3"), ("protocol", "P3's protocol"))
_MUST = (("mxnet", "MXNet"), ("torch", "PyTorch"))
_SHOULD = (("python", "Python"), ("numpy", "NumPy"))


def judge(found: dict) -> List[Row]:
    hosts, paths = found["hosts"], found["paths"]
    answering = [host for host in hosts if host["problem"] is None]
    rows = [_silent(host) for host in hosts if host["problem"] is not None] + _uninvited(found)
    if len(answering) < 2:
        return [*rows, Row(PROBLEM, "hosts", "fewer than two answered: there is no path between them to check")]
    rows += _machines(answering) + _versions(answering, found["doctor"]) + _cores(answering) + _commands(answering)
    rows += _ports(hosts, paths) + _clocks(answering) + _packets(hosts, answering, paths)
    rows += _congestion(hosts, paths) + _rates(hosts, paths)
    return rows


def rates(found: dict) -> Tuple[Dict[int, float], Dict[int, float]]:
    """Up and down of each host whose rates are known, in Mbit/s: the best that any path from it, or to it, has. What
    stays on one machine is no network's."""
    up: Dict[int, float] = {}
    down: Dict[int, float] = {}
    for path in found["paths"]:
        here, there = (found["hosts"][path[end]] for end in ("from", "to"))
        if "mbit" in path and here["machine"] != there["machine"]:
            up[path["from"]] = max(path["mbit"], up.get(path["from"], 0.0))
            down[path["to"]] = max(path["mbit"], down.get(path["to"], 0.0))
    return up, down


def _silent(host: dict) -> Row:
    return Row(PROBLEM, host["name"], host["problem"], host["remedy"])


def _uninvited(found: dict) -> List[Row]:
    """A job would refuse them, too."""
    told = "%s came as well, and knew the secret, but there are %d places"
    return [
        Row(PROBLEM, "hosts", told % (name, len(found["hosts"])), "say how many machines there are: DMLC_NUM_SERVER")
        for name in found["uninvited"]
    ]


def _machines(hosts: Sequence[dict]) -> List[Row]:
    return [
        Row(NOTE, "one machine", "%s are the same one: nothing between them crosses a network" % _and(names))
        for names in _groups(hosts, lambda host: host["machine"]).values()
        if len(names) > 1
    ]


def _versions(hosts: Sequence[dict], doctor: dict) -> List[Row]:
    rows = []
    for state, of, wanted in (
        (PROBLEM, [*hosts, doctor], _EVERYWHERE), (PROBLEM, hosts, _MUST), (NOTE, hosts, _SHOULD)
    ):  # fmt: skip
        for field, name in wanted:
            groups = _groups(of, lambda one: one.get(field))
            if len(groups) > 1:
                told = "; ".join("%s on %s" % (version or "none", _and(names)) for version, names in groups.items())
                rows.append(Row(state, name, told, "install the same version on all hosts"))
    if not any(row.state == PROBLEM for row in rows):
        rows.append(Row(OK, "versions", "P3 %s, protocol %s, on all hosts" % (hosts[0]["p3"], hosts[0]["protocol"])))
    return rows


def _cores(hosts: Sequence[dict]) -> List[Row]:
    return [Row(PROBLEM, "C++ core", "%s: %s" % (host["name"], host["core"]))
            for host in hosts if host["core"] != "loads"]  # fmt: skip


def _commands(hosts: Sequence[dict]) -> List[Row]:
    """Whether `python train.py` runs with the Python that has P3. Nobody has to call it so; where it is called so on
    some hosts alone, the job fails on the others."""
    others = [host for host in hosts if host.get("command") != host.get("installation")]  # older ones tell neither
    if not others:
        return [Row(OK, "python", "is the one that has P3, on all hosts")]
    which = "; ".join(
        "%s on %s" % ("none" if command is None else "that of %s" % command, _and(names))
        for command, names in _groups(others, lambda host: host["command"]).items()
    )
    remedy = "name it in the command: %s/bin/python train.py" % others[0]["installation"]
    state = NOTE if len(others) == len(hosts) else PROBLEM
    return [Row(state, "python", "is %s, not the one that has P3" % which, remedy)]


def _ports(hosts: Sequence[dict], paths: Sequence[dict]) -> List[Row]:
    rows = []
    for path in paths:
        if "error" in path:
            here, there = hosts[path["from"]], hosts[path["to"]]
            chosen = there.get("server_ports")
            low, high = (min(chosen), max(chosen)) if chosen else (there["ports"] + ["1024", "65535"])[:2]
            takes = "servers take these" if chosen else "servers take free ones, or P3_SERVER_PORTS"
            rows.append(Row(
                PROBLEM, "ports", "%s does not reach %s at %s, TCP port %d: %s"
                % (here["name"], there["name"], there["address"], there["port"], path["error"]),
                "let %s's ports %s to %s be reached from %s (firewalls and routes of both); %s"
                % (there["name"], low, high, here["address"], takes),
            ))  # fmt: skip
    if not rows:
        rows.append(Row(OK, "ports", "every host reaches every other (%d paths)" % len(paths)))
    return rows


def _clocks(hosts: Sequence[dict]) -> List[Row]:
    low, high = (pick(hosts, key=lambda host: host["clock_s"]) for pick in (min, max))
    apart = high["clock_s"] - low["clock_s"]
    if apart <= _CLOCK_TOLERANCE_S:
        within_s = apart + max(host["clock_within_s"] for host in hosts)
        return [Row(OK, "clocks", "within %.1f ms" % (1e3 * within_s))]
    told = "%s is %.1f s ahead of %s; only logs suffer from it" % (high["name"], apart, low["name"])
    return [Row(NOTE, "clocks", told, "timedatectl set-ntp true")]


def _packets(hosts: Sequence[dict], answering: Sequence[dict], paths: Sequence[dict]) -> List[Row]:
    groups = _groups([host for host in answering if host["mtu"] is not None], lambda host: host["mtu"])
    rows = []
    if len(groups) > 1:
        told = "; ".join("%d on %s" % (mtu, _and(names)) for mtu, names in groups.items())
        usual = max(groups, key=lambda mtu: len(groups[mtu]))
        odd = next(host for host in answering if host["mtu"] not in (None, usual))
        rows.append(Row(
            PROBLEM, "MTU", "%s; larger packets to a host with less are lost, unless TCP hears of it" % told,
            "on %s: ip link set dev %s mtu %d" % (odd["name"], odd["interface"], usual),
        ))  # fmt: skip
    for path in paths:
        here, there = hosts[path["from"]], hosts[path["to"]]
        passes = path.get("passes")
        # What the other end's own MTU keeps out is said above.
        expected = min((host["mtu"] for host in (here, there) if host["mtu"] is not None), default=0)
        if passes is not None and passes < min(expected, LARGEST_PACKET):
            rows.append(Row(
                PROBLEM, "MTU", "from %s to %s packets of %d bytes pass, of %d do not"
                % (here["name"], there["name"], passes, passes + 1),
                "on both: ip link set dev %s mtu %d, or mend what is between them" % (here["interface"], passes),
            ))  # fmt: skip
    untold = [path for path in paths if "error" not in path and path.get("passes") is None]
    if untold:
        plural = "" if len(untold) == 1 else "s"
        told = "%d path%s not probed: UDP blocked, or IPv6. P3 itself needs only TCP" % (len(untold), plural)
        rows.append(Row(NOTE, "packets", told))
    elif not rows:
        rows.append(Row(OK, "MTU", "%d bytes, and packets of that size pass" % next(iter(groups), 0)))
    return rows


def _congestion(hosts: Sequence[dict], paths: Sequence[dict]) -> List[Row]:
    rows = []
    chosen = sorted({path["congestion"] for path in paths if "congestion" in path})
    reno = sorted({hosts[path["from"]]["name"] for path in paths
                   if path.get("congestion") == "reno" and hosts[path["from"]]["congestion"] == "bbr"})  # fmt: skip
    if reno:
        rows.append(Row(
            NOTE, "TCP", "%s: bbr is the default, and for short round trips P3 must take reno" % _and(reno),
            "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
        ))  # fmt: skip
    far = sorted({hosts[path["from"]]["name"] for path in paths
                  if path.get("congestion", "bbr") != "bbr" and path["round_trip_s"] > SHORT_ROUND_TRIP_S})  # fmt: skip
    if far:
        rows.append(Row(
            NOTE, "TCP", "%s: round trips are long, and P3 may not take bbr, which losses hardly slow" % _and(far),
            "modprobe tcp_bbr; sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
        ))  # fmt: skip
    if len(chosen) > 1:
        rows.append(Row(NOTE, "TCP", "P3 would use %s on different paths" % _and(chosen)))
    if not rows and chosen:
        rows.append(Row(OK, "TCP", "P3 would use %s between all hosts" % chosen[0]))
    return rows


def _rates(hosts: Sequence[dict], paths: Sequence[dict]) -> List[Row]:
    rows = [
        Row(PROBLEM, "rate", "%s to %s: %s" % (hosts[one["from"]]["name"], hosts[one["to"]]["name"], one["rate_error"]))
        for one in paths
        if "rate_error" in one
    ]
    up, down = rates({"hosts": hosts, "paths": paths})
    usual = statistics.median([*up.values(), *down.values()]) if up else 0.0
    for of_host, verb in ((up, "sends"), (down, "receives")):
        for host, mbit in of_host.items():
            if mbit < _SLOW * usual:
                name, interface = hosts[host]["name"], hosts[host]["interface"] or "INTERFACE"
                rows.append(Row(
                    PROBLEM, "rate", "%s %s at %s, the median of all is %s; all wait for the slowest"
                    % (name, verb, rate(mbit), rate(usual)),
                    "look at its link (ethtool %s), and at what else uses it" % interface,
                ))  # fmt: skip
    if up and not rows:
        least, most = min([*up.values(), *down.values()]), max([*up.values(), *down.values()])
        rows.append(Row(OK, "rate", "%s to %s, sent and received" % (rate(least), rate(most))))
    return rows


def _groups(hosts: Sequence[dict], of: Callable[[dict], Optional[object]]) -> Dict[object, List[str]]:
    """Names by value, the value of most hosts first."""
    found: Dict[object, List[str]] = {}
    for host in hosts:
        found.setdefault(of(host), []).append(host["name"])
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "%s and %s" % (", ".join(names[:-1]), names[-1])
