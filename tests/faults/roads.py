"""F33: a source that stalls, breaks off or dies at any byte while a model already computes with what has come."""

from __future__ import annotations

import random
import time

import torch

from blendkv import BlendedCache, MissingChunk, Pool, attach
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.scheduler import TransferScheduler
from blendkv.stores import Budget, TieredStore
from blendkv.testing import tiny_model
from tests.faults.rows import Result, row
from tests.helpers import exact_chunk, full, run, tokens
from tests.patience import SLACK_S
from tests.stores.dicts import DictStore

DEADLINE_S = 0.25
SPANS = (5, 30), (30, 41), (44, 66)


@row
def f33(full_count: bool) -> Result:
    result, draw = Result("F33"), random.Random(33)
    model = attach(tiny_model("llama"))
    ids = tokens(70, 4)[None]
    logits, _ = full(model, ids)
    chunks = [exact_chunk(model, ids, *span) for span in SPANS]
    held = DictStore()
    TieredStore(Pool(), held, write="through").put_many(chunks)
    size = sum(map(len, held.entries.values()))
    computed = _seconds(lambda: run(model, ids, BlendedCache([MissingChunk(c.ids) for c in chunks], 0.3, "random")))
    for number in range(400 if full_count else 40):
        kind = ("stall", "cut", "dead")[number % 3]
        selector = ("random", "hkvd", "attention")[number // 3 % 3]
        fault = Fault(draw.randrange(size), kind)
        store = ThrottledStore(held, Bandwidth.constant(1e8), faults=[fault])
        pipeline = Pipeline(TieredStore(Pool(), store), TransferScheduler(4), piece_bytes=1, whole_bytes=0)
        begin = time.monotonic()
        found = result.call(pipeline.fetch, [c.key for c in chunks], (), Budget(DEADLINE_S))
        here = [got.chunk or MissingChunk(c.ids) for got, c in zip(found or [], chunks, strict=True)]
        cache = BlendedCache(here, 0.3 if selector != "hkvd" else 0.0, selector)
        got = result.call(lambda cache=cache: run(model, ids, cache).logits[:, -1])
        took = time.monotonic() - begin
        result.tried += 1
        what = f"{kind} at byte {fault.at}, {selector}"
        result.expect(got is not None and float((got - logits[:, -1]).abs().max()) <= 1e-4, f"{what}: a wrong answer")
        result.expect(bool(torch.isfinite(got).all()) if got is not None else False, f"{what}: not finite")
        late = took - computed
        result.expect(late <= 1.1 * DEADLINE_S + 0.05 + SLACK_S, f"{what}: {late:.2f} s late")
        result.found += cache.report.reused_tokens > 0
        result.figures["missed"] += sum(not use.hit for use in cache.report.chunks)
        result.figures["most_late_ms"] = max(result.figures["most_late_ms"], round(1000 * late))
        del cache, here, found
    return result


def _seconds(call) -> float:
    call()
    times = []
    for _ in range(3):
        begin = time.monotonic()
        call()
        times.append(time.monotonic() - begin)
    return sorted(times)[1]
