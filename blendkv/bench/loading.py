"""`blendkv bench loading`: chunks from a throttled source, loaded before, while, or instead of computing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from blendkv import _compat
from blendkv.attaching import attachment_of
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.forcing import Reference, compare
from blendkv.bench.laying import Cell, lay_out
from blendkv.bench.methods import forced_logits
from blendkv.bench.results import Row, model_device_name, versions
from blendkv.bench.synthetic import synthetic
from blendkv.bench.throttle import ThrottledStore
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache, MissingChunk
from blendkv.loading.controller import FLOOR, Controller
from blendkv.loading.costs import Costs
from blendkv.loading.guided import Guided
from blendkv.loading.measuring import calibrate_machine, measure_source
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.sparing import Sparing
from blendkv.report import BlendReport
from blendkv.selectors import get_selector
from blendkv.stores import Pool, RemoteStore, Store, TieredStore

FACTORS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Links at which loading takes so many times as long as computing at the floor."""
RATIOS = (0.15, 0.3, 0.5, 1.0)
"""Fixed settings."""
LATENCY_S = 0.002


@dataclass(frozen=True)
class Run:
    """One timed prompt.

    Attributes:
        ttft_s: from asking for chunks until the first token.
        load_s: until the last piece that was wanted had come.
        compute_s: what the forward took, without waiting for layers.
        ratio: that was recomputed.
        text: numbers of chunks that were computed from their text.
        predicted_s: what a controller predicted.
        left_out_bytes: of tokens that the selector knew it would recompute, and that were not waited for.
    """

    ttft_s: float
    load_s: float
    compute_s: float
    ratio: float
    text: frozenset[int] = frozenset()
    predicted_s: float | None = None
    left_out_bytes: int = 0


@dataclass
class Bench:
    """A prompt whose chunks are in a store behind a link.

    Attributes:
        model: attached.
        reference: the prompt and what full recompute says to it.
        selector: of all blends.
        store: that has the chunks.
        costs: what a controller knows.
    """

    model: PreTrainedModel
    reference: Reference
    selector: str
    store: Store
    codec: str
    costs: Costs
    _kl: dict[tuple[float, frozenset[int]], float] = field(default_factory=dict)

    @cached_property
    def chunks(self) -> tuple[ChunkCache, ...]:
        """Of the prompt."""
        return self.reference.case.chunks

    @cached_property
    def nbytes(self) -> int:
        """Of their files."""
        return sum(self.store.size(chunk.key) or 0 for chunk in self.chunks)

    def tiers(self, bandwidth: Bandwidth) -> TieredStore:
        """Memory that keeps nothing, over the store behind a link that has just been idle."""
        return TieredStore(Pool(1), ThrottledStore(self.store, bandwidth, latency_s=LATENCY_S))

    def sequential(self, bandwidth: Bandwidth, ratio: float) -> Run:
        """Everything is loaded, then the prompt is computed."""
        tiers = self.tiers(bandwidth)
        begin = time.perf_counter()
        found = tiers.get_many([chunk.key for chunk in self.chunks])
        load = time.perf_counter() - begin
        compute = self.forward([chunk for chunk in found if chunk is not None], ratio)[0]
        return Run(time.perf_counter() - begin, load, compute, ratio)

    def pipelined(
        self, bandwidth: Bandwidth, ratio: float, controller: Controller | None = None, leave_out: bool = True
    ) -> Run:
        """Layers are computed while others are on their way; with `leave_out`, without what is recomputed anyway."""
        tiers, progress, report = self.tiers(bandwidth), Progress(), BlendReport()
        options: dict[str, Any] = {"recompute_ratio": ratio, "selector": self.selector, "check_layers": None}
        report.loading, choose = progress, None
        if controller is not None:
            guided = Guided(
                controller,
                attachment_of(self.model),
                self.reference.case.ids.shape[1],
                get_selector(self.selector),
                options,
                report,
            )
            choose = guided.choose
        first = BlendedCache((), **options).reads_from
        pieces = {chunk.key: (chunk.ids.tolist(), chunk.conditioning) for chunk in self.chunks}
        layers = len(attachment_of(self.model).layers)
        spare = Sparing(self.reference.case.ids[0].cpu(), pieces, options, layers) if leave_out else None
        begin = time.perf_counter()
        fetch = Pipeline(tiers, rest=False).fetch  # memory keeps nothing here
        found = fetch([chunk.key for chunk in self.chunks], first=first, choose=choose, progress=progress, spare=spare)
        ratio = options["recompute_ratio"]
        chunks = [
            got.chunk if got.chunk is not None else MissingChunk(chunk.ids, got.tier or "absent")
            for got, chunk in zip(found, self.chunks, strict=True)
        ]
        seconds, waited = self.forward(chunks, ratio)
        ttft = time.perf_counter() - begin
        text = frozenset(i for i, chunk in enumerate(chunks) if isinstance(chunk, MissingChunk))
        decision = progress.decision
        predicted = None if decision is None else decision.ttft_s
        left_out = progress.left_out_bytes
        return Run(ttft, progress.loaded_s or 0.0, seconds - waited, ratio, text, predicted, left_out)

    def text(self, bandwidth: Bandwidth, ratio: float = 1.0) -> Run:
        """Nothing is loaded: full recompute."""
        begin = time.perf_counter()
        compute = self.forward(None, 1.0)[0]
        return Run(time.perf_counter() - begin, 0.0, compute, 1.0, frozenset(range(len(self.chunks))))

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
        at = (run.ratio, run.text)
        if at not in self._kl:
            chunks = [
                MissingChunk(chunk.ids, "text") if i in run.text else chunk for i, chunk in enumerate(self.chunks)
            ]
            ids, answer = self.reference.case.ids, self.reference.answer
            logits = forced_logits(self.model, ids, answer, BlendedCache(chunks, run.ratio, self.selector))
            self._kl[at] = compare(self.reference.logits, logits, answer, self.reference.end).kl
        return self._kl[at]


def loading_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    chunks: int = 24,
    chunk_tokens: int = 256,
    factors: Sequence[float] = FACTORS,
    ratios: Sequence[float] = RATIOS,
    floor: float = FLOOR,
    selector: str = "hkvd",
    codec: Any = "raw",
    repeats: int = 3,
    name: str = "",
    on_row: Callable[[Row], object] = lambda row: None,
) -> Iterator[Row]:
    """Times methods on one prompt at links of several speeds, in turns, so that a busy machine is busy for all.

    Args:
        model: attached by this.
        tokenizer: its own.
        chunks: texts of the prompt (`synthetic`).
        chunk_tokens: they are joined, and cut anew every so many tokens.
        factors: what loading takes, in times of what computing at the floor takes.
        ratios: fixed settings, beside computing everything from text.
        floor: the controller's smallest ratio, and that of "sequential" and "pipeline".
        selector: which tokens are recomputed.
        codec: that chunks are kept with.
        repeats: timed runs of each; medians count.
        name: of the model, for the rows.
        on_row: called with each row.

    Yields:
        A row a link and method: "sequential" and "pipeline" at the floor, "fixed" once for each setting,
        "controller", and, where the selector knows its tokens ahead, "whole", the pipeline that loads them all the
        same. `bound_s` of "pipeline" is 1.15 x max(load, compute) of "sequential" and its first layer.
    """
    example = synthetic(1, chunks)[0]
    case = lay_out(model, tokenizer, example, Cell(chunk_tokens=chunk_tokens))
    reference = replace(Reference.of(model, tokenizer, example), case=case)
    store = RemoteStore(f"memory://blendkv-bench-{id(reference)}")
    TieredStore(Pool(1), store, codec=codec, write="through").put_many(reference.case.chunks)
    costs = calibrate_machine(model, codecs=[codec], selector=selector)
    kept = codec if isinstance(codec, str) else codec.name
    bench = Bench(model, reference, selector, store, kept, costs)
    compute = min(bench.forward(list(bench.chunks), floor)[0] for _ in range(3))
    common = {
        "bench": "loading",
        "model": name or model.config.model_type,
        "device": model_device_name(model),
        "dtype": str(attachment_of(model).facts.dtype).removeprefix("torch."),
        "tokens": reference.case.ids.shape[1],
        "chunk_tokens": chunk_tokens,
        "selector": selector,
        "level": kept,
        **versions(),
    }
    for factor in factors:
        bandwidth = Bandwidth.constant(bench.nbytes / (compute * factor))
        for row in _rows_of(bench, bandwidth, ratios, floor, repeats):
            found = common | {"factor": factor, "link_mb_s": bandwidth.mean / 1e6, "bytes": bench.nbytes} | row
            on_row(found)
            yield found


def _rows_of(
    bench: Bench, bandwidth: Bandwidth, ratios: Sequence[float], floor: float, repeats: int
) -> Iterator[dict[str, Any]]:
    link = ThrottledStore(bench.store, bandwidth, latency_s=LATENCY_S)
    bench.costs.sources[link.url] = measure_source(cast("Store", _Probe(link)))
    controller = Controller(bench.costs, floor=floor)
    methods: dict[tuple[str, float], Callable[[], Run]] = {
        ("sequential", floor): lambda: bench.sequential(bandwidth, floor),
        ("pipeline", floor): lambda: bench.pipelined(bandwidth, floor),
        ("controller", floor): lambda: bench.pipelined(bandwidth, floor, controller),
        **{("fixed", r): lambda r=r: bench.pipelined(bandwidth, r) for r in ratios},
        ("text", 1.0): lambda: bench.text(bandwidth),
    }
    if not get_selector(bench.selector).needs:  # else all is loaded in any case
        methods["whole", floor] = lambda: bench.pipelined(bandwidth, floor, leave_out=False)
    runs: dict[tuple[str, float], list[Run]] = {at: [] for at in methods}
    for turn in range(repeats + 1):
        for at, run in methods.items():
            gc.collect()
            done = run()
            if turn:  # the first turn warms up
                runs[at].append(done)
    before = runs["sequential", floor]
    layers = len(attachment_of(bench.model).layers)
    load, compute = (median(getattr(run, what) for run in before) for what in ("load_s", "compute_s"))
    bound = 1.15 * max(load, compute) + max(load, compute) / layers
    settings = {at: median(run.ttft_s for run in those) for at, those in runs.items()}
    best = min(seconds for (method, _), seconds in settings.items() if method in ("fixed", "text"))
    for (method, _), those in runs.items():
        last = sorted(those, key=lambda run: run.ttft_s)[len(those) // 2]
        yield {
            "method": method,
            "ttft_s": median(run.ttft_s for run in those),
            "load_s": median(run.load_s for run in those),
            "compute_s": median(run.compute_s for run in those),
            "ratio": last.ratio,
            "text": len(last.text),
            "kl": bench.kl(last),
            "predicted_s": last.predicted_s,
            "left_out_bytes": last.left_out_bytes,
            "bound_s": bound if method == "pipeline" else None,
            "best_fixed_s": best if method == "controller" else None,
        }


class _Probe:
    """A throttled store as `measure_source` wants one: it reads an entry that is there."""

    read_only = True

    def __init__(self, store: ThrottledStore) -> None:
        self.url, self.stats, self._store = store.url, store.stats, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
