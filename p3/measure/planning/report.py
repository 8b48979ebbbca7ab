"""What `p3 plan` says of a strategy: its time beside others', what each choice in it wins, and what other hosts or
links would."""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, NamedTuple, Optional, Tuple

from p3.measure.planning import builders
from p3.measure.planning.search import Search, Tried
from p3.measure.simulate import report
from p3.measure.simulate.predict import Prediction, predict
from p3.measure.simulate.setting import Network, Setting
from p3.plan.strategy import Strategy

_SHOWN_SERVERS = 16


def lines(setting: Setting, search: Search, best: Tried, price: Optional[float]) -> Iterator[str]:
    """`setting`: what was searched; its own strategy, if it has one, stands beside what was found. `price`: of a host
    for an hour."""
    yield report.job(setting)
    yield ""
    yield from _strategies(setting, search, best)
    yield ""
    yield from _shares(setting, best)
    yield from _ablation(search, best)
    yield ""
    yield from _others(setting, best)
    if price is not None:
        hours = 1000 * best.seconds / 3600
        yield f"1000 steps take {hours:.2f} hours, and cost {price * hours * setting.network.hosts:.2f}"


def _strategies(setting: Setting, search: Search, best: Tried) -> Iterator[str]:
    rows: List[Tuple[str, Prediction]] = [("none", search.without().prediction)]
    if setting.strategy != Strategy():
        rows.append(("given", predict(setting)))
    rows += [("proportional", search.proportional().prediction), ("found", best.prediction)]
    yield "%-14s %8s %8s %8s" % ("strategy", "seconds", "bound", "above")
    for name, prediction in rows:
        limit, above = prediction.bound_s, prediction.above_bound
        bound = ("%8.3f" % limit, "%+7.1f%%" % (100 * above)) if limit and above is not None else ("unknown", "")
        yield ("%-14s %8.3f %8s %8s" % (name, prediction.mean_s, *bound)).rstrip()
    yield f"found after {search.tried} simulations"


def _shares(setting: Setting, best: Tried) -> Iterator[str]:
    total = sum(best.shares)
    shown = [f"{rank} {share / total:.1%}" for rank, share in enumerate(best.shares)]
    more = f", and {len(shown) - _SHOWN_SERVERS} others" if len(shown) > _SHOWN_SERVERS else ""
    yield "the servers hold: " + ", ".join(shown[:_SHOWN_SERVERS]) + more
    yield f"slices have at most {best.slice_elements} elements"


def _ablation(search: Search, best: Tried) -> Iterator[str]:
    usual = search.without()
    if best.shares != usual.shares:
        yield _changed("with equal shares", search.at(usual.shares, best.slice_elements).seconds, best)
    if best.slice_elements != usual.slice_elements:
        yield _changed("with slices of %d" % usual.slice_elements, search.at(best.shares, usual.slice_elements).seconds,
                       best)  # fmt: skip


def _changed(what: str, seconds: float, best: Tried) -> str:
    return f"  {what}: {seconds:.3f} s ({seconds / best.seconds - 1:+.1%})"


class _Other(NamedTuple):
    name: str
    network: Network


def _others(setting: Setting, best: Tried) -> Iterator[str]:
    """Hosts or links that the job does not have, with servers in proportion."""
    for other in _networks(setting.network):
        changed = dataclasses.replace(setting, network=other.network, strategy=Strategy())
        usual = changed.elements_of_a_slice
        tried = [builders.strategy(changed, shares, usual)
                 for shares in (builders.equal(changed), builders.proportional(changed))]  # fmt: skip
        seconds = min(predict(dataclasses.replace(changed, strategy=one)).mean_s for one in tried)
        more = len(changed.workers) / seconds / (len(setting.workers) / best.seconds) - 1
        yield f"{other.name}: {seconds:.3f} s, {more:+.1%} samples a second"


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
