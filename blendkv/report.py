"""What a blend did: where every token of the prompt came from, in every layer, and what it cost."""

from __future__ import annotations

import html
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from blendkv.listening import Listeners

SHOWN = 16
"""Chunks listed when a report is printed."""
STAGES = ("load", "prefill", "decode", "place", "question", "select", "recompute")


@dataclass(frozen=True)
class ChunkUse:
    """What became of one chunk.

    Attributes:
        index: position in the caller's list.
        row: row of the batch.
        key: content address, or "" for a chunk that is missing.
        tokens: its length.
        found: tokens of the prompt that are this chunk's.
        hit: whether stored keys and values were used.
        reason: why not ("absent", "fingerprint", "dtype", "not in the prompt", ...), or how it was found if not
            whole ("partial").
    """

    index: int
    row: int
    key: str
    tokens: int
    found: int
    hit: bool
    reason: str = ""


@dataclass
class LayerRows:
    """The prompt's tokens in one layer, by origin of their keys and values; the four add up to `BlendReport.tokens`.

    Attributes:
        reused: stored.
        recomputed: chunk tokens, computed although stored.
        fresh: question, template and other text, always computed.
        missed: chunk tokens, computed because nothing usable was stored.
        probed: chunk tokens whose keys and values were computed here for comparison (not part of the sum).
        through: tokens that ran through the whole layer, attention and MLP: all that were computed, but in the last
            layer of a `generate` only those whose logits are wanted (nobody reads the output of the others).
    """

    reused: int
    recomputed: int
    fresh: int
    missed: int
    probed: int = 0
    through: int = 0


@dataclass
class BlendReport:
    """Filled in by the first forward of a `BlendedCache`.

    Attributes:
        tokens: prompt tokens, over all rows of the batch.
        layers: one entry a layer.
        chunks: one entry a chunk and row.
        selector: name.
        corrector: name, or "".
        schedule: layer -> ratio kept from there on.
        charged_budget: linear FLOPs spent on chunk tokens / those of full prefill on the same tokens; NaN if the
            model's layers could not be counted.
        chunk_bytes: stored keys and values placed into this prompt.
        cache_bytes: buffers allocated for the prompt's keys and values.
        put_failures: chunks that the store did not keep.
        prefilled_tokens: chunk tokens computed for this prompt because the store did not have them.
        loading: how chunks came while layers were computed, and what a controller chose and predicted
            (`loading.progress.Progress`); None where they were there before.
        loaded: chunk tokens by where they came from: "memory", or the URL of a store.
        store_faults: by URL, why entries were missed or not kept while this prompt waited, and how many.
        kernels: what computed it: Triton kernels, or torch and SDPA, and then why.
        notes: remarks for the reader (fallbacks taken).
        listeners: told when the first forward is done (`ChunkLibrary.on_report`).
    """

    tokens: int = 0
    layers: list[LayerRows] = field(default_factory=list)
    chunks: list[ChunkUse] = field(default_factory=list)
    selector: str = ""
    corrector: str = ""
    schedule: dict[int, float] = field(default_factory=dict)
    charged_budget: float = float("nan")
    chunk_bytes: int = 0
    cache_bytes: int = 0
    put_failures: int = 0
    prefilled_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    store_faults: dict[str, dict[str, int]] = field(default_factory=dict)
    kernels: str = ""
    loading: Any = None
    notes: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=lambda: Clock(), repr=False)
    listeners: Listeners = field(default_factory=Listeners, repr=False, compare=False)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage: load, prefill (of missing chunks), decode, place, question, select, recompute (rest)."""
        return self.clock.seconds()

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that belong to chunks, usable or not."""
        return sum(use.found for use in self.chunks)

    @property
    def reused_tokens(self) -> int:
        """Chunk tokens whose stored keys and values were used in the last layer."""
        return self.layers[-1].reused if self.layers else 0

    @property
    def recomputed_share(self) -> float:
        """Share of the usable chunk tokens recomputed in the last layer."""
        last = self.layers[-1] if self.layers else LayerRows(0, 0, 0, 0)
        return last.recomputed / max(1, last.reused + last.recomputed)

    @property
    def misses(self) -> dict[str, int]:
        """Prompt tokens that had to be computed although a chunk was named for them, by reason."""
        reasons: dict[str, int] = {}
        for use in self.chunks:
            if not use.hit and use.found:
                reasons[use.reason] = reasons.get(use.reason, 0) + use.found
        return reasons

    def note_faults(self, before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> None:
        """Adds the faults that stores counted in between."""
        for url, faults in after.items():
            for fault, count in faults.items():
                if (more := count - before.get(url, {}).get(fault, 0)) > 0:
                    mine = self.store_faults.setdefault(url, {})
                    mine[fault] = mine.get(fault, 0) + more

    def take_over(self, other: BlendReport) -> None:
        """Goes on with what happened before the cache of this report was made."""
        self.clock, self.notes = other.clock, self.notes + other.notes
        self.put_failures, self.prefilled_tokens = other.put_failures, other.prefilled_tokens
        self.loaded, self.store_faults, self.loading = other.loaded, other.store_faults, other.loading
        self.listeners = other.listeners

    def unload(self, tier: str, tokens: int) -> None:
        """A chunk of so many tokens did not come from a tier after all."""
        if tier in self.loaded:
            self.loaded[tier] -= tokens
            if self.loaded[tier] <= 0:
                del self.loaded[tier]

    def remark(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            "tokens": self.tokens,
            "chunk_tokens": self.chunk_tokens,
            "selector": self.selector,
            "corrector": self.corrector,
            "schedule": {str(k): v for k, v in self.schedule.items()},
            "charged_budget": self.charged_budget,
            "chunk_bytes": self.chunk_bytes,
            "cache_bytes": self.cache_bytes,
            "put_failures": self.put_failures,
            "prefilled_tokens": self.prefilled_tokens,
            "loaded": self.loaded,
            "store_faults": self.store_faults,
            "seconds": self.seconds,
            "loading": None if self.loading is None else self.loading.to_dict(sum(self.seconds.values())),
            "misses": self.misses,
            "layers": [asdict(layer) for layer in self.layers],
            "chunks": [asdict(use) for use in self.chunks],
            "kernels": self.kernels,
            "notes": self.notes,
        }

    def _summary(self) -> list[tuple[str, str]]:
        last = self.layers[-1] if self.layers else LayerRows(0, 0, 0, 0)
        hits = sum(use.hit for use in self.chunks)
        rows = [
            ("tokens", f"{self.tokens:,} ({self.chunk_tokens:,} in chunks)"),
            ("chunks", f"{hits} hit, {len(self.chunks) - hits} not"),
            (
                "last layer",
                f"{last.reused:,} reused, {last.recomputed:,} recomputed, {last.fresh:,} fresh, {last.missed:,} missed",
            ),
            ("selector", f"{self.selector} {self.schedule}" + (f", then {self.corrector}" if self.corrector else "")),
            ("charged budget", f"{self.charged_budget:.3f} of full prefill's linear FLOPs on chunk tokens"),
            ("bytes", f"{self.chunk_bytes:,} placed, {self.cache_bytes:,} allocated"),
            ("computed by", self.kernels),
            ("seconds", ", ".join(f"{stage} {s:.3f}" for stage, s in self.seconds.items())),
        ]
        if self.misses:
            rows.append(("misses", ", ".join(f"{n} tokens {reason}" for reason, n in self.misses.items())))
        if self.loaded:
            rows.append(("loaded", ", ".join(f"{n:,} tokens from {tier}" for tier, n in self.loaded.items())))
        if self.loading is not None and self.loading.nbytes:
            rows.append(("on the way", str(self.loading)))
        for url, faults in self.store_faults.items():
            rows.append(("store faults", f"{url}: " + ", ".join(f"{n} {fault}" for fault, n in faults.items())))
        if self.prefilled_tokens:
            rows.append(("prefilled", f"{self.prefilled_tokens:,} tokens that the store did not have"))
        if self.put_failures:
            rows.append(("not stored", f"{self.put_failures} chunks"))
        return rows + [("note", note) for note in self.notes]

    def _layer_runs(self) -> list[tuple[str, LayerRows]]:
        """Layers with equal counts folded into one line."""
        runs: list[tuple[int, int, LayerRows]] = []
        for i, layer in enumerate(self.layers):
            if runs and runs[-1][2] == layer:
                runs[-1] = (runs[-1][0], i, layer)
            else:
                runs.append((i, i, layer))
        return [(f"{a}" if a == b else f"{a}-{b}", layer) for a, b, layer in runs]

    def _chunk_rows(self) -> list[tuple[str, ...]]:
        """Chunk, tokens, found in the prompt, hit or why not; the first `SHOWN` of them."""
        rows: list[tuple[str, ...]] = [
            (
                f"{use.row}:{use.index} {use.key[:8]}".strip(),
                f"{use.tokens:,}",
                f"{use.found:,}",
                ("hit" if use.hit else "miss") + (f" ({use.reason})" if use.reason else ""),
            )
            for use in self.chunks[:SHOWN]
        ]
        more = len(self.chunks) - SHOWN
        return [*rows, (f"... {more} more", "", "", "")] if more > 0 else rows

    def __str__(self) -> str:
        """Three tables: the sums, the chunks, and the origin of rows by layer."""
        if not self.layers:
            return "BlendReport: nothing was blended yet (it is filled by the first forward)"
        lines = [f"{name:<15} {value}" for name, value in self._summary()]
        lines += ["", f"{'chunk':<15}{'tokens':>8}{'found':>8}"]
        lines += [f"{name:<15}{tokens:>8}{found:>8}  {what}" for name, tokens, found, what in self._chunk_rows()]
        lines += [
            "",
            f"{'layers':<10}{'reused':>9}{'recomputed':>12}{'fresh':>8}{'missed':>8}{'probed':>8}{'through':>9}",
        ]
        for name, r in self._layer_runs():
            lines.append(
                f"{name:<10}{r.reused:>9,}{r.recomputed:>12,}{r.fresh:>8,}{r.missed:>8,}{r.probed:>8,}{r.through:>9,}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same three tables for a notebook."""
        cells = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in self._summary())
        head = "".join(
            f"<th>{h}</th>" for h in ("layers", "reused", "recomputed", "fresh", "missed", "probed", "through")
        )
        body = "".join(
            f"<tr><td>{name}</td>"
            + "".join(f"<td>{n:,}</td>" for n in (r.reused, r.recomputed, r.fresh, r.missed, r.probed, r.through))
            + "</tr>"
            for name, r in self._layer_runs()
        )
        chunks = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._chunk_rows()
        )
        titles = "".join(f"<th>{h}</th>" for h in ("chunk", "tokens", "found", ""))
        return f"<table>{cells}</table><table><tr>{titles}</tr>{chunks}</table><table><tr>{head}</tr>{body}</table>"


class Clock:
    """Seconds by stage. A stage inside another counts for itself alone. On CUDA, device time, read when asked for."""

    def __init__(self) -> None:
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, str | None, Any, Any]] = []
        self._inside: list[str] = []

    @contextmanager
    def stage(self, name: str, device: torch.device | None = None) -> Generator[None]:
        """Adds the time of a block to a stage, and takes it from the stage around it."""
        around = self._inside[-1] if self._inside else None
        self._inside.append(name)
        on_cuda = device is not None and device.type == "cuda"
        try:
            if on_cuda:
                with torch.cuda.device(device):
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    try:
                        yield
                    finally:
                        stop.record()
                        self._events.append((name, around, start, stop))
            else:
                begin = time.perf_counter()
                try:
                    yield
                finally:
                    self._add(name, around, time.perf_counter() - begin, self._host)
        finally:
            self._inside.pop()

    @property
    def settled(self) -> bool:
        """Whether `seconds` need not wait for a device."""
        return all(stop.query() for *_, stop in self._events)

    def seconds(self) -> dict[str, float]:
        """Seconds of every stage so far."""
        total = dict.fromkeys(STAGES, 0.0) | self._host
        for name, around, start, stop in self._events:
            stop.synchronize()
            self._add(name, around, start.elapsed_time(stop) / 1e3, total)
        return {name: max(0.0, seconds) for name, seconds in total.items()}

    @staticmethod
    def _add(name: str, around: str | None, seconds: float, total: dict[str, float]) -> None:
        total[name] = total.get(name, 0.0) + seconds
        if around is not None:
            total[around] = total.get(around, 0.0) - seconds
