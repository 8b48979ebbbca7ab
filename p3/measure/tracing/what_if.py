"""A recorded run held against changes: what would an iteration take with other links, hosts, codecs, slices, servers?

The run as it was is a Setting of `p3 simulate`, and a what-if that with other fields. Ratios are to the run as
simulated, so that what the simulator leaves out stands on both sides.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from p3 import codecs
from p3.errors import ConfigError
from p3.measure import compressions
from p3.measure.arguments import number, slice_size
from p3.measure.compressions import Compression
from p3.measure.replay.recorded import iteration_s, recorded_model
from p3.measure.results import summaries
from p3.measure.simulate import report
from p3.measure.simulate.options import MOST_HOSTS, link_rate, of_hosts
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Network, Setting
from p3.plan.key_plan import SliceSize
from p3.plan.strategy import Cut, Strategy
from p3.trace.lives import Trace

Rates = Tuple[float, ...]  # of hosts, in Mbit/s; the last one for all others


class WhatIf(NamedTuple):
    text: str  # as it was given
    changes: Mapping[str, Any]  # by name, of _CHANGES


def lines(trace: Trace, rate: Optional[Rates], what_ifs: Sequence[WhatIf]) -> Iterator[str]:
    """A table: the run as recorded, as simulated, and each what-if. `rate`: of the run's links, which no trace tells.
    ConfigError for what cannot be."""
    recorded = recorded_setting(trace, rate)
    simulated_s = predict(recorded).mean_s
    rows = [["", "iteration, s", "ratio"]]
    for name, seconds in [
        ("as recorded", iteration_s(trace)), ("as simulated", simulated_s),
        *((one.text, predict(changed(recorded, rate, one)).mean_s) for one in what_ifs),
    ]:  # fmt: skip
        rows.append([name, f"{seconds:.3f}", f"{seconds / simulated_s:.2f}"])
    yield _told(recorded)
    yield ""
    yield from report.aligned(rows)


def _told(setting: Setting) -> str:
    hosts, rates = setting.network.hosts, " and ".join(f"{rate:g}" for rate in sorted(set(setting.network.up_mbit)))
    return (
        f"{setting.model.name}: {setting.model.bytes / 1e6:.1f} MB{report.compressed(setting)}, "
        f"{summaries.slices(setting.slice_elements)}, {setting.compute_s:.3f} s of computation; "
        f"{len(setting.workers)} workers and "
        f"{len(setting.server_hosts)} servers on " + (f"{hosts} hosts, {rates} Mbit/s" if hosts > 1 else "one host")
    )


def recorded_setting(trace: Trace, rate: Optional[Rates]) -> Setting:
    """As the run was. ConfigError if the simulator knows no such job, or lacks the rate of its links."""
    model, compute_s = recorded_model(trace)
    workers, servers = ([(one.boot, one.host) for one in trace.processes if one.role == role]
                        for role in ("worker", "server"))  # fmt: skip
    hosts = list(dict.fromkeys(workers))
    if not servers or set(servers) - set(hosts):
        raise ConfigError("the trace has no servers, or some on hosts without workers: the simulator has none there")
    if len(workers) % len(hosts):
        raise ConfigError(f"{len(workers)} workers were on {len(hosts)} hosts; the simulator has as many on each")
    if rate is None and len(hosts) > 1:
        raise ConfigError(f"the run was on {len(hosts)} hosts, and no trace tells the rate of their links: say it, as "
                          "--rate 100mbit, or 100mbit:50mbit by the ranks of their workers (`p3 doctor` measures it)")
    is_each = [hosts.index(host) for host in servers] == list(range(len(hosts)))
    slice_elements, strategy = _cut(trace, len(servers))
    compression, strategy = _compressed(trace, strategy)
    return Setting(
        model, compute_s, _network(rate or (1.0,), len(hosts)), workers_per_host=len(workers) // len(hosts),
        servers=None if is_each else len(servers), slice_elements=slice_elements, strategy=strategy,
        local_aggregation=bool((trace.lives["server"] < 0).any()), sparse=_touched(trace),
        compression=compression, groups=trace.processes[0].groups if 1 < len(workers) == len(hosts) else (),
    )  # fmt: skip


def _network(rate: Rates, hosts: int) -> Network:
    rates = of_hosts(rate, hosts)
    return Network(rates, rates)


def _cut(trace: Trace, servers: int) -> Tuple[Union[int, str], Strategy]:
    """As P3_SLICE_ELEMENTS, and what is otherwise with single keys."""

    def is_cut(key, setting) -> bool:
        return key.row_elements or key.slice_elements == SliceSize(setting, servers).of(math.prod(key.shape))

    counts: Counter = Counter()
    for key in trace.keys.values():
        counts["auto" if is_cut(key, "auto") else key.slice_elements] += math.prod(key.shape)
    usual = counts.most_common(1)[0][0]
    own = {}
    for key in trace.keys.values():
        is_usual = is_cut(key, usual)
        own[key.name] = Cut(key.servers or None, None if is_usual else key.slice_elements)
    keys = {name: cut for name, cut in own.items() if cut != Cut()}
    return usual, Strategy(keys=keys, path="of the run") if keys else Strategy()


def _touched(trace: Trace) -> Dict[str, float]:
    """Of keys of rows, the share that a worker pushed in a round, in the mean."""
    shares = {}
    for wire_key, key in trace.keys.items():
        of_key = trace.lives[trace.lives["key"] == wire_key]
        if key.row_elements and len(of_key):
            pushes = len(set(zip(of_key["round"].tolist(), of_key["worker"].tolist())))
            share = float(of_key["bytes"].sum()) / pushes / (4 * math.prod(key.shape))
            shares[key.name] = min(1.0, max(share, 1e-9))
    return shares


def _compressed(trace: Trace, strategy: Strategy) -> Tuple[Optional[Compression], Strategy]:
    """That of all keys; or none, and the strategy says it of each."""
    counts: Counter = Counter()
    of_keys = {key.name: (key, codecs.Ways(key.codec or None, key.value_codec or None)) for key in trace.keys.values()}
    for key, ways in of_keys.values():
        counts[Compression.of_ways(ways)] += math.prod(key.shape)
    usual = counts.most_common(1)[0][0]
    own = {
        name: strategy.keys.get(name, Cut())._replace(codec=ways)
        for name, (key, ways) in of_keys.items()
        if not compressions.is_of(key.shape, usual, ways) and not key.row_elements
    }
    if not own:
        return usual, strategy
    of_others = Cut(codec=usual.ways if usual else None)
    return None, strategy._replace(default=of_others, keys={**strategy.keys, **own}, path="of the run")


# What-ifs


def _with_hosts(setting: Setting, hosts: int) -> Setting:
    rates = setting.network.up_mbit[:hosts]
    return dataclasses.replace(setting, network=_network(rates, hosts))


def _with_rate(setting: Setting, rate: Rates) -> Setting:
    return dataclasses.replace(setting, network=_network(rate, setting.network.hosts))


def _with_slice(setting: Setting, elements: Any) -> Setting:
    """Of all keys."""
    keys = {name: cut._replace(slice=None) for name, cut in setting.strategy.keys.items()}
    return dataclasses.replace(setting, slice_elements=elements, strategy=setting.strategy._replace(keys=keys))


def _with_codec(setting: Setting, compression: Optional[Compression]) -> Setting:
    """Of all keys."""
    keys = {name: cut._replace(codec=None) for name, cut in setting.strategy.keys.items()}
    strategy = setting.strategy._replace(default=setting.strategy.default._replace(codec=None), keys=keys)
    return dataclasses.replace(setting, compression=compression, strategy=strategy)


class _Change(NamedTuple):
    parse: Callable[[str], Any]
    make: Callable[[Setting, Any], Setting]


# In the order in which they are made, however they are written.
_CHANGES = {
    "hosts": _Change(number(1, MOST_HOSTS, int), _with_hosts),
    "rate": _Change(link_rate, _with_rate),
    "servers": _Change(number(1, MOST_HOSTS, int), lambda setting, count: dataclasses.replace(setting, servers=count)),
    "slice": _Change(slice_size, _with_slice),
    "codec": _Change(compressions.parse, _with_codec),
}


def parse(text: str) -> WhatIf:
    """Changes, comma-separated. ArgumentTypeError names what is none."""
    changes: Dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in _CHANGES or not equals:
            known = ", ".join(f"{one}=" for one in _CHANGES)
            raise argparse.ArgumentTypeError(f"--what-if {text}: {part!r} is no change; there are {known}")
        if name in changes:
            raise argparse.ArgumentTypeError(f"--what-if {text}: there are two of {name}=")
        try:
            changes[name] = _CHANGES[name].parse(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"--what-if {text}: {name}: {error}") from None
    return WhatIf(text, changes)


def changed(setting: Setting, rate: Optional[Rates], what_if: WhatIf) -> Setting:
    """`setting`: the run as it was, with links of that `rate`. ConfigError if it says of no link how fast it is."""
    for name, change in _CHANGES.items():
        if name in what_if.changes:
            setting = change.make(setting, what_if.changes[name])
    if rate is None and setting.network.hosts > 1 and "rate" not in what_if.changes:
        raise ConfigError(
            f"--what-if {what_if.text}: the run was on one host, so nobody knows of a link: add rate=, as "
            f"{what_if.text},rate=100mbit"
        )
    return setting
