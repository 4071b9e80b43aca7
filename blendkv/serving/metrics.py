"""Counters of a gateway, for Prometheus. No key, name, token or address is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blendkv.stores.base import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """What one gateway counts."""

    def __init__(self) -> None:
        self.registry = made = CollectorRegistry()
        p = "blendkv_gateway_"
        self.requests = Counter(p + "requests", "Requests answered.", ["route", "method", "status"], registry=made)
        self.seconds = Histogram(
            p + "request_seconds", "From head to end of answer.", ["route"], buckets=_SECONDS, registry=made
        )
        self.sent = Counter(p + "sent_bytes", "Bytes of entries sent.", registry=made)
        self.received = Counter(p + "received_bytes", "Bytes of entries received.", registry=made)
        self.refused = Counter(p + "refused_puts", "Entries not taken, and why.", ["why"], registry=made)
        self.cut = Counter(p + "cut_connections", "Connections cut off, and why.", ["why"], registry=made)
        self.waited = Histogram(p + "slot_wait_seconds", "Waits of pieces for a slot.", buckets=_SECONDS, registry=made)
        self.central = Counter(p + "central", "What came of asking the central gateway.", ["outcome"], registry=made)
        self._made = made

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A figure that is looked up when it is asked for."""
        Gauge("blendkv_gateway_" + name, help, registry=self._made).set_function(value)

    def store(self, name: str, store: Store) -> None:
        """Counters of a store."""
        self._made.register(_Of(name, store))

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._made)


class _Of(Collector):
    def __init__(self, name: str, store: Store) -> None:
        self._name, self._store = name, store

    def collect(self) -> Iterator[Metric]:
        stats = self._store.stats
        for field in ("hits", "misses", "puts", "put_failures", "evictions"):
            family = CounterMetricFamily(f"blendkv_{self._name}_{field}", f"{field} of the store.")
            family.add_metric([], getattr(stats, field))
            yield family
        faults = CounterMetricFamily(f"blendkv_{self._name}_faults", "Faults of the store.", labels=["fault"])
        for word, count in list(stats.faults.items()):
            faults.add_metric([word], count)
        yield faults
        breaker = getattr(self._store, "_breaker", None)
        if breaker is not None:
            yield GaugeMetricFamily(
                f"blendkv_{self._name}_answers", "Whether the store is asked.", value=float(breaker.state == "closed")
            )
