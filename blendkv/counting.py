"""Sums over blends and stores, by labels with a bounded number of values and nothing private in them."""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blendkv.report import BlendReport
from blendkv.stores import TieredStore

MOST_VALUES = 64
"""Of a metric's labels; what comes beyond is "other"."""
_WORD = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,47}")
_OTHER = "other"
Labels = tuple[str, ...]


@dataclass(frozen=True)
class Metric:
    """What is counted.

    Attributes:
        help: for people.
        unit: as UCUM writes it.
        labels: names.
        gauge: whether it may fall.
    """

    help: str
    unit: str
    labels: Labels = ()
    gauge: bool = False


METRICS = {
    "prompts": Metric("Prompts that were blended.", "{prompt}"),
    "tokens": Metric(
        "Tokens of prompts, by origin of their keys and values in the last layer.", "{token}", ("origin",)
    ),
    "chunks": Metric("Chunks of prompts: whether stored keys and values were used.", "{chunk}", ("result",)),
    "missed_tokens": Metric("Tokens of chunks that could not be used, by reason.", "{token}", ("reason",)),
    "prefilled_tokens": Metric("Tokens of chunks that were computed and stored for a prompt.", "{token}"),
    "loaded_tokens": Metric("Tokens of chunks, by where they came from.", "{token}", ("tier",)),
    "loaded_bytes": Metric("Bytes that came while a prompt was computed, by store.", "By", ("tier",)),
    "placed_bytes": Metric("Stored keys and values placed into prompts.", "By"),
    "seconds": Metric("Time until the end of a prompt's first forward, by stage.", "s", ("stage",)),
    "not_stored": Metric("Chunks of prompts that no store kept.", "{chunk}"),
    "store_hits": Metric("Entries that were found, by tier.", "{entry}", ("tier",)),
    "store_misses": Metric("Entries that were not found, by tier.", "{entry}", ("tier",)),
    "store_puts": Metric("Entries that were stored, by tier.", "{entry}", ("tier",)),
    "store_put_failures": Metric("Entries that were not stored, by tier.", "{entry}", ("tier",)),
    "store_evictions": Metric("Entries that made room for others, by tier.", "{entry}", ("tier",)),
    "store_faults": Metric("Why entries were missed or not stored, by tier.", "{entry}", ("tier", "fault")),
    "memory_bytes": Metric("Chunks in memory.", "By", (), gauge=True),
}


@dataclass
class Counts:
    """The sums of one library. Safe to share among threads; keeps neither the library nor its chunks alive.

    Args:
        chunks: the library's pool, or tiered store.
    """

    chunks: Any
    _sums: dict[str, dict[Labels, float]] = field(default_factory=dict, init=False, repr=False)
    _waiting: deque[BlendReport] = field(default_factory=deque, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        chunks, self.chunks = self.chunks, None
        self._memory = (chunks.pool if isinstance(chunks, TieredStore) else chunks).stats
        stores = chunks.stores if isinstance(chunks, TieredStore) else ()
        self._tiers = _names([store.url for store in stores])
        self._stores = {self._tiers[store.url]: store.stats for store in stores}

    def add(self, report: BlendReport) -> None:
        """A prompt was blended. On a GPU its times are read later, so that nobody waits for the device here."""
        with self._lock:
            self._waiting.append(report)
            while self._waiting and self._waiting[0].clock.settled:
                self._fold(self._waiting.popleft())

    def of(self, metric: str) -> Mapping[Labels, float]:
        """Values of a metric by its labels, everything counted so far."""
        with self._lock:
            while self._waiting:
                self._fold(self._waiting.popleft())
            if metric == "memory_bytes":
                return {(): self._memory.bytes}
            if metric.startswith("store_"):
                return self._of_stores(metric)
            return dict(self._sums.get(metric, {(): 0} if not METRICS[metric].labels else {}))

    def _fold(self, report: BlendReport) -> None:
        last = report.layers[-1]
        self._plus("prompts", 1)
        for origin in ("reused", "recomputed", "fresh", "missed"):
            self._plus("tokens", getattr(last, origin), origin)
        for use in report.chunks:
            self._plus("chunks", 1, "hit" if use.hit else "miss")
        for reason, tokens in report.misses.items():
            self._plus("missed_tokens", tokens, reason)
        for url, tokens in report.loaded.items():
            self._plus("loaded_tokens", tokens, self._tier(url))
        for url, nbytes in () if report.loading is None else list(report.loading.nbytes.items()):
            self._plus("loaded_bytes", nbytes, self._tier(url))
        for stage, seconds in report.seconds.items():
            self._plus("seconds", seconds, stage)
        self._plus("prefilled_tokens", report.prefilled_tokens)
        self._plus("placed_bytes", report.chunk_bytes)
        self._plus("not_stored", report.put_failures)

    def _plus(self, metric: str, amount: float, *labels: str) -> None:
        sums = self._sums.setdefault(metric, {})
        named = tuple(map(_word, labels))
        if named not in sums and len(sums) >= MOST_VALUES:
            named = (_OTHER,) * len(labels)
        sums[named] = sums.get(named, 0) + amount

    def _tier(self, url: str) -> str:
        return "memory" if url == "memory" else self._tiers.get(url, _OTHER)

    def _of_stores(self, metric: str) -> Mapping[Labels, float]:
        what = metric.removeprefix("store_")
        if what == "faults":
            found: Counter[Labels] = Counter()
            for tier, stats in self._stores.items():
                for fault, count in list(stats.faults.items()):
                    found[tier, _word(fault)] += count
            return found
        memory = self._memory.rejected if what == "put_failures" else getattr(self._memory, what)
        return {("memory",): memory} | {(tier,): getattr(stats, what) for tier, stats in self._stores.items()}


def _names(urls: list[str]) -> dict[str, str]:
    """A word for each store: the scheme of its URL, with a number where there are several."""
    schemes = [_word(url.partition("://")[0].lower()) for url in urls]
    seen: Counter[str] = Counter()
    names = {}
    for url, scheme in zip(urls, schemes, strict=True):
        seen[scheme] += 1
        names[url] = scheme if seen[scheme] == 1 else f"{scheme}-{seen[scheme]}"
    return names


def _word(text: str) -> str:
    """A label's value: a few plain words, or "other"."""
    return text if _WORD.fullmatch(text) else _OTHER
