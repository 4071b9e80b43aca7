"""Counters of a library for Prometheus or OpenTelemetry: how much was reused, what came from where, what it took.

No text, key, name or address is in them, and each label has a bounded number of values. Nothing is done while a prompt
is computed but to put its report aside; sums are made when somebody asks for them (docs/guides/telemetry.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from blendkv._extras import missing
from blendkv.counting import METRICS, Counts

if TYPE_CHECKING:
    from blendkv.library import ChunkLibrary

_COLLECTORS: WeakKeyDictionary[Any, _Collector] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Telemetry:
    """Counters that somebody reads.

    Attributes:
        counts: the sums.
    """

    def __init__(self, library: ChunkLibrary, name: str) -> None:
        if not name:
            raise ValueError("name='' names no library: give a word for it, such as the model's")
        self.name, self.counts = name, Counts(library.pool)
        self._remove = library.on_report(self.counts.add)
        self._closed = False

    def close(self) -> None:
        """Stops counting, and shows nothing from now on."""
        self._remove()
        self._closed = True

    def samples(self, metric: str) -> Iterable[tuple[dict[str, str], float]]:
        """Labels and value of each line of a metric."""
        if self._closed:
            return
        names = METRICS[metric].labels
        for values, amount in self.counts.of(metric).items():
            yield {"library": self.name, **dict(zip(names, values, strict=True))}, amount


def prometheus(library: ChunkLibrary, *, name: str = "default", registry: Any = None) -> Telemetry:
    """Registers a library's counters with a Prometheus registry.

    Args:
        library: to be counted, from now on.
        name: value of the label `library`; two libraries of one registry need two.
        registry: a `prometheus_client.CollectorRegistry`; None: the default one.

    Returns:
        What to close when the library is no longer used.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        ValueError: for a name that the registry has already.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise missing("telemetry.prometheus", "telemetry", error) from error
    registry = REGISTRY if registry is None else registry
    with _LOCK:
        collector = _COLLECTORS.get(registry)
        if collector is None:
            collector = _Collector()
            registry.register(collector)
            _COLLECTORS[registry] = collector
        collector.forget_closed()
        if any(name == told.name for told in collector.told):
            raise ValueError(f"the registry has a library {name!r} already: give this one another name=, or close that")
        made = Telemetry(library, name)
        collector.told.append(made)
    return made


def opentelemetry(library: ChunkLibrary, meter: Any = None, *, name: str = "default") -> Telemetry:
    """Makes a library's counters instruments of an OpenTelemetry meter.

    Args:
        library: to be counted, from now on.
        meter: an `opentelemetry.metrics.Meter`; None: that of the global provider, named `blendkv`.
        name: value of the attribute `library`; two libraries need two.

    Returns:
        What to close when the library is no longer used.

    Raises:
        ModuleNotFoundError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ImportError as error:
        raise missing("telemetry.opentelemetry", "telemetry", error) from error
    from blendkv._version import __version__

    meter = get_meter("blendkv", __version__) if meter is None else meter
    made = Telemetry(library, name)

    def observed(metric: str) -> Any:
        return lambda options: [Observation(amount, labels) for labels, amount in made.samples(metric)]

    for metric, about in METRICS.items():
        create = meter.create_observable_gauge if about.gauge else meter.create_observable_counter
        create(f"blendkv.{metric}", callbacks=[observed(metric)], unit=about.unit, description=about.help)
    return made


class _Collector:
    """All libraries of one registry."""

    def __init__(self) -> None:
        self.told: list[Telemetry] = []

    def forget_closed(self) -> None:
        self.told = [told for told in self.told if not told._closed]

    def describe(self) -> Iterator[Any]:
        """Names alone, for a registry that looks for names given twice."""
        return self._families()

    def collect(self) -> Iterator[Any]:
        """What Prometheus asks for."""
        for metric, family in zip(METRICS, self._families(), strict=True):
            for told in list(self.told):
                for labels, amount in told.samples(metric):
                    family.add_metric(list(labels.values()), amount)
            yield family

    def _families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, about in METRICS.items():
            family = GaugeMetricFamily if about.gauge else CounterMetricFamily
            yield family(f"blendkv_{metric}", about.help, labels=["library", *about.labels])
