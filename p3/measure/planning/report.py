"""What `p3 plan` says of a strategy: its time beside others', what each choice in it wins, and what groups of workers,
other hosts or links would."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

from p3.measure.planning import builders
from p3.measure.planning.search import Search, Tried
from p3.measure.replay import groups as trees
from p3.measure.simulate import report
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Network, Setting, why_no_groups
from p3.plan.strategy import Strategy

_SHOWN_SERVERS = 16
_LEAST_HOSTS_OF_GROUPS = 8  # with fewer they win nothing


def told(setting: Setting, search: Search, best: Tried, price: Optional[float]) -> Dict[str, Any]:
    """As JSON has it (docs/planning.md); lines() says the same in words. `setting`: what was searched; its own
    strategy, if it has one, stands beside what was found. `price`: of a host for an hour."""
    rows = {"none": search.without().prediction, "proportional": search.proportional().prediction}
    if setting.strategy != Strategy():
        rows["given"] = predict(setting)
    total, hours = sum(best.shares), 1000 * best.seconds / 3600
    return {
        "seconds": best.seconds,
        "bound_s": best.prediction.bound_s,
        "others": {name: {"seconds": one.mean_s, "bound_s": one.bound_s} for name, one in rows.items()},
        "simulations": search.tried,
        "shares": [share / total for share in best.shares],
        "slice": best.slice_elements,
        "ablation": list(_ablation(search, best)),
        "groups": list(_in_groups(setting, best)),
        "what_if": list(_what_if(setting, best)),
        "hours_of_1000_steps": hours,
        "price_of_1000_steps": None if price is None else price * hours * setting.network.hosts,
    }


def lines(setting: Setting, said: Dict[str, Any]) -> Iterator[str]:
    """`said`: by told()."""
    yield report.job(setting)
    yield ""
    yield "%-14s %8s %8s %8s" % ("strategy", "seconds", "bound", "above")
    of = {**said["others"], "found": said}
    for name in [one for one in ("none", "given", "proportional", "found") if one in of]:
        seconds, limit = of[name]["seconds"], of[name]["bound_s"]
        bound = ("%8.3f" % limit, "%+7.1f%%" % (100 * (seconds / limit - 1))) if limit else ("unknown", "")
        yield ("%-14s %8.3f %8s %8s" % (name, seconds, *bound)).rstrip()
    yield f"found after {said['simulations']} simulations"
    yield ""
    shown = [f"{rank} {share:.1%}" for rank, share in enumerate(said["shares"])]
    more = f", and {len(shown) - _SHOWN_SERVERS} others" if len(shown) > _SHOWN_SERVERS else ""
    yield "the servers hold: " + ", ".join(shown[:_SHOWN_SERVERS]) + more
    yield f"slices have at most {said['slice']} elements"
    for one in said["ablation"]:
        yield f"  {one['what']}: {one['seconds']:.3f} s ({one['seconds'] / said['seconds'] - 1:+.1%})"
    for one in said["groups"]:
        yield (f"in groups of workers, with P3_GROUPS={one['groups']}: {one['seconds']:.3f} s "
               f"({one['seconds'] / said['seconds'] - 1:+.1%})")  # fmt: skip
    yield ""
    for one in said["what_if"]:
        yield f"{one['what']}: {one['seconds']:.3f} s, {one['gain']:+.1%} samples a second"
    if said["price_of_1000_steps"] is not None:
        yield f"1000 steps take {said['hours_of_1000_steps']:.2f} hours, and cost {said['price_of_1000_steps']:.2f}"


def _ablation(search: Search, best: Tried) -> Iterator[Dict[str, Any]]:
    usual = search.without()
    if best.shares != usual.shares:
        seconds = search.at(usual.shares, best.slice_elements).seconds
        yield {"what": "with equal shares", "seconds": seconds}
    if best.slice_elements != usual.slice_elements:
        seconds = search.at(best.shares, usual.slice_elements).seconds
        yield {"what": "with slices of %d" % usual.slice_elements, "seconds": seconds}


def _in_groups(setting: Setting, best: Tried) -> Iterator[Dict[str, Any]]:
    """Which a file cannot have: a job begins in them. None where the setting has some, where they are not simulated, or
    where they would not be advised."""
    hosts = setting.network.hosts
    if setting.groups or hosts < _LEAST_HOSTS_OF_GROUPS:
        return
    for sizes in trees.worth_trying(hosts):
        grouped = dataclasses.replace(setting, strategy=best.strategy, groups=sizes)
        if why_no_groups(grouped):
            return
        yield {"groups": trees.told(sizes), "seconds": predict(grouped).mean_s}


class _Other(NamedTuple):
    name: str
    network: Network


def _what_if(setting: Setting, best: Tried) -> Iterator[Dict[str, Any]]:
    """Hosts or links that the job does not have, with servers in proportion."""
    for other in _networks(setting.network):
        if not trees.fit(setting.groups, other.network.hosts):
            continue
        changed = dataclasses.replace(setting, network=other.network, strategy=Strategy())
        usual = changed.slice_size.most
        tried = [builders.strategy(changed, shares, usual)
                 for shares in (builders.equal(changed), builders.proportional(changed))]  # fmt: skip
        seconds = min(predict(dataclasses.replace(changed, strategy=one)).mean_s for one in tried)
        more = len(changed.workers) / seconds / (len(setting.workers) / best.seconds) - 1
        yield {"what": other.name, "seconds": seconds, "gain": more}


def _networks(network: Network) -> Iterator[_Other]:
    up, down = network.up_mbit, network.down_mbit
    fastest = max(range(network.hosts), key=lambda host: min(up[host], down[host]))
    slowest = min(range(network.hosts), key=lambda host: min(up[host], down[host]))
    more = dataclasses.replace(network, up_mbit=(*up, up[fastest]), down_mbit=(*down, down[fastest]))
    yield _Other("one more host, as host %d" % fastest, more)

    def doubled(rates: Tuple[float, ...]) -> Tuple[float, ...]:
        return tuple(rate * (2 if host == slowest else 1) for host, rate in enumerate(rates))

    yield _Other("host %d with twice its rate" % slowest,
                 dataclasses.replace(network, up_mbit=doubled(up), down_mbit=doubled(down)))  # fmt: skip
    all_doubled = [tuple(2 * rate for rate in rates) for rates in (up, down)]
    yield _Other("all hosts with twice their rates",
                 dataclasses.replace(network, up_mbit=all_doubled[0], down_mbit=all_doubled[1]))  # fmt: skip
