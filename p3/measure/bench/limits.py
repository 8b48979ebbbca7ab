"""What no store can beat in a configuration, and what its frames take on the network cards, by formula."""

from __future__ import annotations

from typing import Optional

from p3.measure.bench.configuration import Configuration
from p3.measure.compressions import Compression
from p3.measure.jobs.stores import Store
from p3.measure.planning.names import of_run
from p3.measure.replay import bound, models


def goal(configuration: Configuration, compression: Optional[Compression] = None) -> Optional[bound.Bound]:
    """No store can be faster that compresses in that way. None where that cannot be computed."""
    if not _is_emulated(configuration) or configuration.rate_mbit is None or not _has_formula(compression):
        return None
    model = models.load(configuration.model, configuration.size)
    return bound.bound(
        model,
        configuration.compute_s,
        _cluster(configuration),
        configuration.slice_elements,
        delay_s=configuration.delay_ms / 1e3,
        release=configuration.release,
        compression=compression,
        clips=configuration.clip is not None,
        strategy=of_run(configuration.strategy_text, model),
    )


def why_unknown(configuration: Configuration, compression: Optional[Compression] = None) -> str:
    if not _is_emulated(configuration):
        return "unknown: the computation is real, and its layers' times are not measured"
    return "unknown: no rate is given" if _has_formula(compression) else f"unknown: no codec of P3's is {compression}"


def _is_emulated(configuration: Configuration) -> bool:
    """All of it."""
    return configuration.is_emulated and configuration.batch is None


def _has_formula(compression: Optional[Compression]) -> bool:
    return compression is None or compression.is_of_codecs


def card_bytes(store: Store, configuration: Configuration) -> Optional[float]:
    """That each card sends in an iteration, in the mean over the hosts; None where no formula has it."""
    if not _has_formula(store.compression):
        return None
    model = models.load(configuration.model, configuration.size)
    cluster, elements = _cluster(configuration), configuration.slice_elements
    if store.route is None:
        return bound.card_bytes(model, cluster, elements, compression=store.compression)
    from p3.measure.replay import factored

    def dense_bytes(part: models.Model) -> float:
        return bound.card_bytes(part, cluster, elements)

    hosts, batch = configuration.hosts, configuration.batch
    return factored.sent_by_a_card(model, hosts, elements, batch, store.route, dense_bytes)


def _cluster(configuration: Configuration) -> bound.Cluster:
    cluster = bound.one_of_each(configuration.hosts, configuration.rate_mbit)
    if configuration.rates_mbit:
        cluster = cluster._replace(up_mbit=configuration.rates_mbit, down_mbit=configuration.rates_mbit)
    return cluster
