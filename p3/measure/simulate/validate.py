"""`p3 simulate --validate`: what `p3 bench --out` has measured, beside what the simulator makes of the same settings.

Each configuration of a P3 store or of DDP in the files is simulated, with as many iterations and as much warm-up as its
runs had, and the median of its iterations stands beside the median of the runs' medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Dict, Iterator, List, NamedTuple, Optional

from p3.errors import ConfigError
from p3.measure.bench import experiments
from p3.measure.jobs import stores
from p3.measure.planning.names import of_run
from p3.measure.replay import models
from p3.measure.results import records, summaries
from p3.measure.simulate import options as given
from p3.measure.simulate import report
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Network, Setting, can_compress


_TOLD = ("model", "rate", "compute", "delay", "hosts", "slice", "release", "clip")


class Comparison(NamedTuple):
    summary: summaries.Summary
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted_s / self.summary.median_s - 1

    @property
    def is_held_out(self) -> bool:
        return experiments.named(self.summary.experiment).is_held_out(self.summary)


def compare(found: records.Results, options: argparse.Namespace) -> List[Comparison]:
    """In the order of the runs. What failed, computed for real, or no simulation knows is left out."""
    asked = {one.experiment: one.options for one in found.settings}
    texts = {run.configuration: run.strategy_text for run in found.runs}

    def predicted_s(one: summaries.Summary) -> float:
        setting = setting_of(one, asked[one.experiment], options)
        return predict(_planned(setting, texts[one.configuration])).median_s

    return [
        Comparison(one, predicted_s(one))
        for one in summaries.summarise(found.runs)
        if one.median_s and one.computation == "emulated" and one.rate_mbit and one.path is None
        and _is_known(stores.named(one.store))
    ]  # fmt: skip


def _planned(setting: Setting, text: Optional[str]) -> Setting:
    return dataclasses.replace(setting, strategy=of_run(text, setting.model))


def _is_known(store: stores.Store) -> bool:
    if store.simulated is None:
        return False
    return can_compress(store.simulated.get("scheme", "p3"), store.simulated.get("compression"))


def setting_of(one: records.Configuration, asked: Dict, options: argparse.Namespace) -> Setting:
    """`asked`: the options of its bench; `options`: those of the simulation, of which --congestion and --set count."""
    rates = tuple(one.rates_mbit or (one.rate_mbit,) * one.hosts)
    base = Network(rates, rates)  # with the delay that even an undelayed lab has
    base = dataclasses.replace(base, delay_ms=base.delay_ms + one.delay_ms, **_smooth(one))
    return Setting(
        model=models.load(one.model, one.size),
        compute_s=one.compute_s,
        network=given.network(options, base, options.congestion[0]),
        **{**given.of_p3(options), **stores.named(one.store).simulated},
        workers_per_host=max(1, one.workers // one.hosts),
        servers=one.servers,
        slice_elements=one.slice_elements or models.load(one.model, one.size).bytes,
        release=one.release or "layer",
        clip=_clip(one),
        jitter=asked.get("jitter") or 0.0,
        iterations=asked.get("iterations") or 5,
        warmup=asked.get("warmup") or 2,
    )


def _smooth(one: records.Configuration) -> Dict:
    """Of links without buckets, see lab/hosts.py."""
    has_bursts = not (one.delay_ms or one.packet_loss or one.shaper == "smooth")
    return {} if has_bursts else {"burst_kib": 0.0, "loss": one.packet_loss or 0.0}


def _clip(one: records.Configuration) -> str:
    compression = stores.named(one.store).compression
    with_norm = "norm" if compression is None or compression.has_norm else "wait"
    return with_norm if one.clip else "none"


def lines(options: argparse.Namespace) -> Iterator[str]:
    """The table, and below it the mean and the greatest error, of all and of those that were held out."""
    found = records.read(options.validate)
    comparisons = compare(found, options)
    if not comparisons:
        raise ConfigError("no run in %s can be simulated" % ", ".join(options.validate))
    rows = [["", "store", "measured, s", "predicted, s", "error", "bound, s", "held out"]]
    for one in comparisons:
        told = summaries.setting(one.summary, _TOLD)
        rows.append([
            told, one.summary.store, f"{one.summary.median_s:.3f}", f"{one.predicted_s:.3f}", f"{one.error:+.1%}",
            f"{one.summary.bound_s:.3f}" if one.summary.bound_s else "",
            "yes" if one.is_held_out else "",
        ])  # fmt: skip
    yield from report.aligned(rows)
    yield ""
    yield _summed_up("all", comparisons)
    parts = [[one for one in comparisons if one.is_held_out == out] for out in (False, True)]
    if all(parts):
        yield _summed_up("looked at", parts[0])
        yield _summed_up("held out", parts[1])


def _summed_up(name: str, comparisons: List[Comparison]) -> str:
    errors = [abs(one.error) for one in comparisons]
    return "%s: %d configurations, mean error %.1f%%, greatest %.1f%%, mean with sign %+.1f%%" % (
        name, len(errors), 100 * statistics.fmean(errors), 100 * max(errors),
        100 * statistics.fmean(one.error for one in comparisons),
    )  # fmt: skip
