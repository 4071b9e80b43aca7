"""One prompt behind a link, in every way in which its chunks may be loaded: times, and what is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from blendkv import _compat
from blendkv.attaching import attachment_of
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.forcing import Reference, compare
from blendkv.bench.methods import forced_logits
from blendkv.bench.throttle import ThrottledStore
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache, MissingChunk
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec
from blendkv.levelkeys import LevelId, name_of
from blendkv.loading.controller import Controller
from blendkv.loading.costs import Costs
from blendkv.loading.decision import TEXT
from blendkv.loading.guided import Guided
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.sparing import Sparing
from blendkv.loading.survey import Chooser, Place
from blendkv.report import BlendReport
from blendkv.selectors import get_selector
from blendkv.stores import Pool, Store, TieredStore

LATENCY_S = 0.002


@dataclass(frozen=True)
class Run:
    """One timed prompt.

    Attributes:
        ttft_s: from asking for chunks until the first token.
        load_s: until the last piece that was wanted had come.
        compute_s: what the forward took, without waiting for layers.
        ratio: that was recomputed.
        levels: of each chunk, "text" for those that were computed.
        predicted_s: what a controller predicted.
        left_out_bytes: of tokens that the selector knew it would recompute, and that were not waited for.
    """

    ttft_s: float
    load_s: float
    compute_s: float
    ratio: float
    levels: tuple[str, ...]
    predicted_s: float | None = None
    left_out_bytes: int = 0

    @property
    def level(self) -> str:
        """For people: the one of all chunks, or how many are of which."""
        counts = Counter(level for level in self.levels if level != TEXT)
        return next(iter(counts), TEXT) if len(counts) < 2 else "+".join(f"{counts[n]}x{n}" for n in sorted(counts))


class Only:
    """Every chunk at one level.

    Args:
        level: its name.
    """

    def __init__(self, level: str) -> None:
        self._level = level

    def prefers(self, farther: str, nearer: str) -> bool:
        """Never."""
        return False

    def accepts(self, level: LevelId) -> bool:
        """What is of that level."""
        return level.name == self._level

    def choose(self, there: Mapping[str, Sequence[Place]]) -> Mapping[str, Sequence[Place]]:
        """Where that level is."""
        return {key: [place for place in places if place.form.level == self._level] for key, places in there.items()}


@dataclass
class Bench:
    """A prompt whose chunks are in a store behind a link.

    Attributes:
        model: attached.
        reference: the prompt and what full recompute says to it.
        selector: of all blends.
        store: that has the chunks.
        codec: of their own entries.
        levels: of the entries beside those.
        costs: what a controller knows.
    """

    model: PreTrainedModel
    reference: Reference
    selector: str
    store: Store
    codec: Codec
    levels: Sequence[Codec]
    costs: Costs
    _kl: dict[tuple[float, tuple[str, ...]], float] = field(default_factory=dict)

    @cached_property
    def chunks(self) -> tuple[ChunkCache, ...]:
        """Of the prompt."""
        return self.reference.case.chunks

    @cached_property
    def nbytes(self) -> int:
        """Of their own files."""
        return sum(self.store.size(chunk.key) or 0 for chunk in self.chunks)

    def tiers(self, bandwidth: Bandwidth) -> TieredStore:
        """Memory that keeps nothing, over the store behind a link that has just been idle."""
        link = ThrottledStore(self.store, bandwidth, latency_s=LATENCY_S)
        return TieredStore(Pool(1), link, codec=self.codec, levels=self.levels)

    def sequential(self, bandwidth: Bandwidth, ratio: float) -> Run:
        """Everything is loaded, then the prompt is computed."""
        tiers = self.tiers(bandwidth)
        begin = time.perf_counter()
        found = tiers.get_many([chunk.key for chunk in self.chunks])
        load = time.perf_counter() - begin
        compute = self.forward([chunk for chunk in found if chunk is not None], ratio)[0]
        return Run(time.perf_counter() - begin, load, compute, ratio, (name_of(self.codec),) * len(self.chunks))

    def pipelined(
        self,
        bandwidth: Bandwidth,
        ratio: float,
        controller: Controller | None = None,
        level: str | None = None,
        leave_out: bool = True,
    ) -> Run:
        """Layers are computed while others are on their way; at one level, if that is given.

        With `leave_out`, without what is recomputed anyway.
        """
        tiers, progress, report = self.tiers(bandwidth), Progress(), BlendReport()
        options: dict[str, Any] = {"recompute_ratio": ratio, "selector": self.selector, "check_layers": None}
        report.loading = progress
        guided: Chooser | None = None if level is None else Only(level)
        pieces = {chunk.key: (chunk.ids.tolist(), chunk.conditioning) for chunk in self.chunks}
        layers = len(attachment_of(self.model).layers)
        spare = Sparing(self.reference.case.ids[0].cpu(), pieces, options, layers) if leave_out else None
        if controller is not None:
            counts = {chunk.key: len(chunk) for chunk in self.chunks}
            tokens, selector = self.reference.case.ids.shape[1], get_selector(self.selector)
            settings = selector, options, report, spare
            guided = Guided(controller, attachment_of(self.model), tokens, counts, *settings)
        first = BlendedCache((), **options).reads_from
        begin = time.perf_counter()
        fetch = Pipeline(tiers, rest=False).fetch  # memory keeps nothing here
        found = fetch([chunk.key for chunk in self.chunks], first=first, choose=guided, progress=progress, spare=spare)
        ratio = options["recompute_ratio"]
        chunks = [
            got.chunk if got.chunk is not None else MissingChunk(chunk.ids, got.tier or "absent")
            for got, chunk in zip(found, self.chunks, strict=True)
        ]
        seconds, waited = self.forward(chunks, ratio)
        ttft = time.perf_counter() - begin
        levels = tuple(progress.levels[chunk.key] for chunk in self.chunks)
        decision = progress.decision
        predicted = None if decision is None else decision.ttft_s
        return Run(ttft, progress.loaded_s or 0.0, seconds - waited, ratio, levels, predicted, progress.left_out_bytes)

    def text(self, bandwidth: Bandwidth, ratio: float = 1.0) -> Run:
        """Nothing is loaded: full recompute."""
        begin = time.perf_counter()
        compute = self.forward(None, 1.0)[0]
        return Run(time.perf_counter() - begin, 0.0, compute, 1.0, (TEXT,) * len(self.chunks))

    @torch.no_grad()
    def forward(self, chunks: Sequence[Any] | None, ratio: float) -> tuple[float, float]:
        """Seconds until the first token is there, and how many of them were spent waiting for layers."""
        cache = None if chunks is None else BlendedCache(chunks, ratio, self.selector)
        given = {} if cache is None else {_compat.cache_keyword(self.model.forward): cache}
        begin = time.perf_counter()
        logits = self.model(input_ids=self.reference.case.ids, use_cache=True, logits_to_keep=1, **given).logits
        logits[0, -1].argmax().item()
        seconds = time.perf_counter() - begin
        return seconds, 0.0 if cache is None else cache.report.seconds["load"]

    def kl(self, run: Run) -> float:
        """Of full recompute's distributions from those of a run's setting, over the first answer tokens."""
        at = (run.ratio, run.levels)
        if at not in self._kl:
            levels = zip(self.chunks, run.levels, strict=True)
            chunks = [MissingChunk(c.ids, TEXT) if level == TEXT else self._decoded(c, level) for c, level in levels]
            ids, answer = self.reference.case.ids, self.reference.answer
            logits = forced_logits(self.model, ids, answer, BlendedCache(chunks, run.ratio, self.selector))
            self._kl[at] = compare(self.reference.logits, logits, answer, self.reference.end).kl
        return self._kl[at]

    def _decoded(self, chunk: ChunkCache, level: str) -> ChunkCache:
        codec = next(each for each in (self.codec, *self.levels) if name_of(each) == level)
        profile = getattr(codec, "profile", None)
        return decode_chunk(encode_chunk(chunk, codec), profiles=profile) if codec.needs_profile else chunk
