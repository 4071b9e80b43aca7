"""`blendkv bench loading`: chunks from a throttled source, loaded before, while, or instead of computing."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

from transformers import PreTrainedModel

from blendkv.attaching import attachment_of
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.forcing import Reference
from blendkv.bench.laying import Cell, lay_out
from blendkv.bench.loading_runs import LATENCY_S, Bench, Run
from blendkv.bench.results import Row, model_device_name, versions
from blendkv.bench.synthetic import synthetic
from blendkv.bench.throttle import ThrottledStore
from blendkv.codecs import Codec, get_codec
from blendkv.levelkeys import id_of, name_of
from blendkv.loading.controller import FLOOR, Controller
from blendkv.loading.costs import Costs
from blendkv.loading.decision import TEXT
from blendkv.loading.losses import measure_losses
from blendkv.loading.measuring import calibrate_machine, measure_source
from blendkv.selectors import get_selector
from blendkv.stores import Pool, RemoteStore, Store, TieredStore

FACTORS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Links at which loading takes so many times as long as computing at the floor."""
RATIOS = (0.15, 0.3, 0.5, 1.0)
"""Fixed settings."""


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
    levels: Sequence[Codec] = (),
    max_kl: float = math.inf,
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
        levels: that they are kept at besides.
        max_kl: the most that a level may lose, of those that the controller uses.
        repeats: timed runs of each; medians count.
        name: of the model, for the rows.
        on_row: called with each row.

    Yields:
        A row a link and method: "sequential" and "pipeline" at the floor, "fixed" once for each ratio, and for each
        level at the floor, "text", "controller", and, where the selector knows its tokens ahead, "whole", the pipeline
        that loads them all the same. `bound_s` of "pipeline" is 1.15 x max(load, compute) of "sequential" and its first
        layer.
    """
    example = synthetic(1, chunks)[0]
    case = lay_out(model, tokenizer, example, Cell(chunk_tokens=chunk_tokens))
    reference = replace(Reference.of(model, tokenizer, example), case=case)
    store = RemoteStore(f"memory://blendkv-bench-{id(reference)}")
    codec = get_codec(codec)
    TieredStore(Pool(1), store, codec=codec, levels=levels, write="through").put_many(reference.case.chunks)
    costs = calibrate_machine(model, codecs=[codec, *levels], selector=selector)
    costs.losses = measure_losses(model, tokenizer, [codec, *levels])
    bench = Bench(model, reference, selector, store, codec, levels, costs)
    compute = min(bench.forward(list(bench.chunks), floor)[0] for _ in range(3))
    common = {
        "bench": "loading",
        "model": name or model.config.model_type,
        "device": model_device_name(model),
        "dtype": str(attachment_of(model).facts.dtype).removeprefix("torch."),
        "tokens": reference.case.ids.shape[1],
        "chunk_tokens": chunk_tokens,
        "selector": selector,
        "codec": name_of(codec),
        **versions(),
    }
    for factor in factors:
        bandwidth = Bandwidth.constant(bench.nbytes / (compute * factor))
        for row in _rows_of(bench, bandwidth, ratios, Controller(costs, floor=floor, max_kl=max_kl), repeats):
            found = common | {"factor": factor, "link_mb_s": bandwidth.mean / 1e6, "bytes": bench.nbytes} | row
            on_row(found)
            yield found


def _rows_of(
    bench: Bench, bandwidth: Bandwidth, ratios: Sequence[float], controller: Controller, repeats: int
) -> Iterator[dict[str, Any]]:
    link = ThrottledStore(bench.store, bandwidth, latency_s=LATENCY_S)
    bench.costs.sources[link.url] = measure_source(cast("Store", _Probe(link)))
    floor, own = controller.floor, name_of(bench.codec)
    beside = [name_of(codec) for codec in bench.levels]
    good = {name_of(codec) for codec in (bench.codec, *bench.levels) if _may(controller, bench.costs, codec)}
    methods: dict[tuple[str, float, str], Callable[[], Run]] = {
        ("sequential", floor, own): lambda: bench.sequential(bandwidth, floor),
        ("pipeline", floor, own): lambda: bench.pipelined(bandwidth, floor),
        ("controller", floor, ""): lambda: bench.pipelined(bandwidth, floor, controller),
        **{("fixed", r, own): lambda r=r: bench.pipelined(bandwidth, r) for r in ratios},
        **{("fixed", floor, level): lambda n=level: bench.pipelined(bandwidth, floor, level=n) for level in beside},
        ("text", 1.0, TEXT): lambda: bench.text(bandwidth),
    }
    if not get_selector(bench.selector).needs:  # else all is loaded in any case
        methods["whole", floor, own] = lambda: bench.pipelined(bandwidth, floor, leave_out=False)
    runs: dict[tuple[str, float, str], list[Run]] = {at: [] for at in methods}
    for turn in range(repeats + 1):
        for at, run in methods.items():
            gc.collect()
            done = run()
            if turn:  # the first turn warms up
                runs[at].append(done)
    before = runs["sequential", floor, own]
    layers = len(attachment_of(bench.model).layers)
    load, compute = (median(getattr(run, what) for run in before) for what in ("load_s", "compute_s"))
    bound = 1.15 * max(load, compute) + max(load, compute) / layers
    settings = {at: median(run.ttft_s for run in those) for at, those in runs.items()}
    best = min(
        seconds
        for (method, ratio, level), seconds in settings.items()
        if method == "text" or (method == "fixed" and ratio >= floor and level in good)
    )
    for (method, *_), those in runs.items():
        last = sorted(those, key=lambda run: run.ttft_s)[len(those) // 2]
        yield {
            "method": method,
            "ttft_s": median(run.ttft_s for run in those),
            "load_s": median(run.load_s for run in those),
            "compute_s": median(run.compute_s for run in those),
            "ratio": last.ratio,
            "level": last.level,
            "text": last.levels.count(TEXT),
            "kl": bench.kl(last),
            "predicted_s": last.predicted_s,
            "left_out_bytes": last.left_out_bytes,
            "bound_s": bound if method == "pipeline" else None,
            "best_fixed_s": best if method == "controller" else None,
        }


def _may(controller: Controller, costs: Costs, codec: Codec) -> bool:
    """Whether a level is good enough for a controller."""
    return controller.max_kl == math.inf or costs.losses.get(str(id_of(codec)), 0.0) <= controller.max_kl


class _Probe:
    """A throttled store as `measure_source` wants one: it reads an entry that is there."""

    read_only = True

    def __init__(self, store: ThrottledStore) -> None:
        self.url, self.stats, self._store = store.url, store.stats, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
