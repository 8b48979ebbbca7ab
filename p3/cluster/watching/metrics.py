"""A job's numbers for Prometheus, at one port of the scheduler's host (P3_METRICS_PORT), by the package
prometheus_client: for each process with the labels `role`, `rank` and `host`.

Threads: whoever scrapes is answered by a thread of the package's, from the last view.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Sequence, Tuple

from p3.errors import ConfigError
from p3.settings import Settings

METRICS_EVERY_S, METRICS_SPAN_S = 5.0, 15.0  # views: as fresh as any scrape needs

_LABELS = ("role", "rank", "host")


class _Metric(NamedTuple):
    name: str
    is_counter: bool  # else a gauge
    field: str  # of a row
    text: str


_OF_ALL = (
    _Metric("p3_up", False, "state", "1: the process runs; 0: it has left, or is lost."),
    _Metric("p3_rounds", True, "round", "Rounds completed, of the key that has had the most: steps."),
    _Metric("p3_sent_bytes", True, "sent_bytes", "Bytes sent to other processes of the job."),
    _Metric("p3_received_bytes", True, "received_bytes", "Bytes received from other processes of the job."),
    _Metric("p3_queued_slices", False, "queued_slices", "Slices that wait to be sent."),
    _Metric("p3_memory_bytes", False, "memory_bytes", "Resident memory of the process."),
)
_OF_WORKERS = (
    _Metric("p3_waited_seconds", True, "waited_s", "Seconds that the script has waited for new values."),
    _Metric("p3_late_seconds", False, "late_s", "How long after the first push of a round its own last one comes."),
)
_OF_SERVERS = (
    _Metric("p3_received_slices", False, "received_slices", "Slices received and not handled yet."),
    _Metric("p3_value_bytes", False, "value_bytes", "Bytes of values and of optimizers' states."),
    _Metric("p3_queue_seconds", False, "queue_s", "How long slices for this server have lately queued on workers."),
)


class Metrics:
    def __init__(self, settings: Settings) -> None:
        """Listens. ConfigError if it cannot, or if the package is not there."""
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError:
            raise ConfigError(
                "P3_METRICS_PORT=%d: the package prometheus_client is not installed. Run: pip install "
                "'p3-training[metrics]'" % settings.metrics_port
            ) from None
        self._core, self._view = core, None
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        host, port = settings.root_host, settings.metrics_port
        try:
            self._server, _ = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError("P3_METRICS_PORT=%d: cannot listen on %s: %s" % (port, host, error.strerror)) from None
        self.port: int = self._server.server_port

    def take(self, view: dict) -> None:
        self._view = view

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def describe(self) -> List:
        return []  # names are not known to clash: the registry is our own

    def collect(self) -> Iterator:
        """Called for each scrape. Nothing before the job has begun."""
        view = self._view
        if view is None:
            return
        rows = [("worker", row) for row in view["workers"]] + [("server", row) for row in view["servers"]]
        for metric in _OF_ALL:
            yield self._family(metric, rows)
        for metric in _OF_WORKERS:
            yield self._family(metric, [one for one in rows if one[0] == "worker"])
        for metric in _OF_SERVERS:
            yield self._family(metric, [one for one in rows if one[0] == "server"])
        yield self._waits([row for role, row in rows if role == "worker"])

    def _family(self, metric: _Metric, rows: Sequence[Tuple[str, dict]]):
        kind = self._core.CounterMetricFamily if metric.is_counter else self._core.GaugeMetricFamily
        family = kind(metric.name, metric.text, labels=_LABELS)
        for role, row in rows:
            value = row[metric.field]
            if metric.field == "state":
                value = int(value == "runs")
            elif row["age_s"] is None:
                continue  # it has not reported yet: a zero would say that it has done nothing
            if value is not None:
                family.add_metric((role, str(row["rank"]), row["host"]), value)
        return family

    def _waits(self, workers: Sequence[dict]):
        text = "Seconds that the script has waited for the values of this group of layers."
        family = self._core.CounterMetricFamily("p3_waited_group_seconds", text, labels=(*_LABELS, "group"))
        for row in workers:
            for group, waited_s in row["waits"].items():
                family.add_metric(("worker", str(row["rank"]), row["host"], group), waited_s)
        return family
