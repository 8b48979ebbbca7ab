"""Strategies to begin a search with: each from a rule, without trying anything."""

from __future__ import annotations

import functools
import math
from typing import List, Sequence, Tuple

from p3.measure.simulate.setting import Setting
from p3.plan.strategy import Cut, Strategy

UNITS_OF_A_SERVER = 8  # of all that the servers hold, in which shares are counted: so many, times the servers
_MOST_UNITS = 512


def units(servers: int) -> int:
    return max(servers, min(UNITS_OF_A_SERVER * servers, _MOST_UNITS))


def equal(setting: Setting) -> List[int]:
    """Each server's share, in units, without a strategy."""
    servers = len(setting.server_hosts)
    return [units(servers) // servers] * servers


def proportional(setting: Setting) -> List[int]:
    """Such that the links of all hosts with a server are busy for as long.

    A host whose servers hold the share w of M bytes sends w M to each worker of other hosts, and receives as much. For
    the n of N workers that push from it, it also sends n (1 - w) M. So its link carries M (n + w (N - 2 n)) each way,
    and w follows from the time that all links take. A host that is busy for longer without a server holds nothing.
    """
    on_host = [0.0] * setting.network.hosts
    pushing = setting.cluster().workers
    workers = [pushing.count(host) for host in range(setting.network.hosts)]
    rates = [min(link) for link in zip(setting.network.up_mbit, setting.network.down_mbit)]
    slopes = [len(pushing) - 2 * here for here in workers]
    hosts = sorted(set(setting.server_hosts))
    if min(slopes[host] for host in hosts) <= 0:
        return equal(setting)  # a server makes no difference to a link of such a host

    def shares(time: float) -> List[float]:
        return [max(0.0, (time * rates[host] - workers[host]) / slopes[host]) for host in hosts]

    low, high = 0.0, max((workers[host] + slopes[host]) / rates[host] for host in hosts)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < 1 else (low, middle)
    for host, share in zip(hosts, shares(high)):
        on_host[host] = share / setting.server_hosts.count(host)
    return _in_units([on_host[host] for host in setting.server_hosts])


def _in_units(shares: Sequence[float]) -> List[int]:
    """Whole ones, whose sum is right: what is left goes to those that lack most."""
    total = units(len(shares))
    exact = [share * total / sum(shares) for share in shares]
    whole = [int(one + 1e-9) for one in exact]
    lacking = sorted(range(len(exact)), key=lambda server: (whole[server] - exact[server], server))
    for server in lacking[: total - sum(whole)]:
        whole[server] += 1
    return whole


def turns(shares: Sequence[int]) -> Tuple[int, ...]:
    """Servers in an order in which each comes as often as its share says, as evenly spread as can be, and not longer
    than it must be."""
    divisor = functools.reduce(math.gcd, shares)
    each = [share // divisor for share in shares]
    total, credit, made = sum(each), [0] * len(each), []
    for _ in range(total):
        credit = [have + gains for have, gains in zip(credit, each)]
        chosen = max(range(len(credit)), key=lambda server: (credit[server], -server))
        credit[chosen] -= total
        made.append(chosen)
    return tuple(made)


def strategy(setting: Setting, shares: Sequence[int], slice_elements: int) -> Strategy:
    """With the fields that differ from what the job does without one."""
    is_equal, is_usual = len(set(shares)) == 1, slice_elements == setting.slice_size.most
    return Strategy(Cut(None if is_equal else turns(shares), None if is_usual else slice_elements))
