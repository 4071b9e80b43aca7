"""`blendkv calibrate`: what loading and computing cost here, in seconds of measuring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from blendkv import _compat, flops
from blendkv.attaching import attach, attachment_of
from blendkv.cache import BlendedCache, make_schedule
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, get_codec
from blendkv.errors import StoreError
from blendkv.levelkeys import name_of
from blendkv.loading.costs import ComputeCosts, Costs, SourceCosts, fit_compute, machine, work_of
from blendkv.prefilling import prefill
from blendkv.selectors import get_selector
from blendkv.stores import Store

LENGTHS = (256, 1024)
RATIOS = (0.0, 0.15, 0.5, 1.0)
QUESTION = 32
CHUNK = 256
PROBE_BYTES = 4 << 20
SMALL = 1 << 12
TRIES = 3


def calibrate_machine(
    model: Any,
    stores: Sequence[Store] = (),
    codecs: Sequence[str | Codec] = ("raw",),
    lengths: Sequence[int] = LENGTHS,
    ratios: Sequence[float] = RATIOS,
    selector: str = "hkvd",
    say: Callable[[str], object] = lambda text: None,
) -> Costs:
    """Measures a model on this machine, stores as they are seen from it, and codecs.

    Args:
        model: attached by this.
        stores: each is given an entry of 4 MiB, which is read and deleted; of one that cannot be written, an entry that
            it has is read.
        codecs: to decode with, of one or several levels; of a codec the slowest level counts.
        lengths: prompts of so many tokens are blended.
        ratios: at each of these.
        selector: of those blends.
        say: called with a line about each step.

    Returns:
        The costs.

    Raises:
        StoreError: for a store that neither takes nor has an entry.
        ValueError: for a model whose layers cannot be counted.
    """
    attachment = attachment_of(attach(model))
    if attachment.facts.shape is None:
        raise ValueError(f"the layers of {type(model).__name__} could not be counted: no costs can be predicted")
    weight = next(model.parameters())
    prompts = [_prompt(model, length) for length in lengths]
    say(f"blending prompts of {', '.join(map(str, lengths))} tokens at ratios {', '.join(f'{r:g}' for r in ratios)}")
    compute = measure_compute(model, attachment.facts.shape, prompts, ratios, selector)
    costs = Costs(compute, machine=machine(weight.device), fingerprint=attachment.facts.fingerprint)
    for codec in map(get_codec, codecs):
        say(f"decoding {name_of(codec)}")
        rate = decoding_rate(prompts[0][1][0], codec)
        costs.decoding[codec.name] = min(rate, costs.decoding.get(codec.name, rate))
    for store in stores:
        say(f"reading from {store.url}")
        costs.sources[store.url] = measure_source(store)
    return costs


def measure_compute(
    model: Any,
    shape: flops.ModelShape,
    prompts: Sequence[tuple[Tensor, Sequence[ChunkCache]]],
    ratios: Sequence[float],
    selector: str,
) -> ComputeCosts:
    """Fits what blends cost to some of them; each is run once to warm up, and timed twice."""
    points, chosen = [], get_selector(selector)
    device = next(model.parameters()).device
    for ids, chunks in prompts:
        tokens = sum(map(len, chunks))
        for ratio in ratios:
            schedule = make_schedule(chosen, ratio, None)
            linear, attention = work_of(shape, tokens, ids.shape[1] - tokens, schedule, "deviation" in chosen.needs)
            seconds = min(_seconds(model, ids, chunks, ratio, selector, device) for _ in range(TRIES))
            points.append((linear, attention, seconds))
    return fit_compute(points)


def measure_source(store: Store) -> SourceCosts:
    """Latency and rate of a store, by ranged reads of one entry.

    Raises:
        StoreError: if there is none.
    """
    key = os.urandom(32).hex()
    ours = not getattr(store, "read_only", False) and store.put(key, os.urandom(PROBE_BYTES))
    if not ours:
        key = next(iter(store.keys()), "")
    size = store.size(key) if key else None
    if size is None:
        raise StoreError(f"{store.url} takes no entry and has none: nothing can be measured")
    try:
        latency = median(_read_seconds(store, key, 0, min(SMALL, size)) for _ in range(TRIES))
        whole = min(_read_seconds(store, key, 0, size) for _ in range(2))
    finally:
        if ours:
            store.delete(key)
    return SourceCosts(latency, size / max(whole - latency, whole / 100, 1e-9))


def decoding_rate(chunk: ChunkCache, codec: Codec) -> float:
    """Bytes of keys and values that are decoded in a second, layer by layer."""
    data = encode_chunk(chunk.to("cpu"), codec)
    best = float("inf")
    for _ in range(TRIES):
        begin = time.perf_counter()
        with ChunkFile(data, codec=codec) as file:
            for unit in range(file.header.units):
                file.units(range(unit, unit + 1))
        best = min(best, time.perf_counter() - begin)
    return chunk.nbytes / best


def _prompt(model: Any, tokens: int) -> tuple[Tensor, list[ChunkCache]]:
    """A prompt of random ids, in chunks, and a question."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (tokens + QUESTION,), generator=torch.Generator().manual_seed(tokens))
    pieces = [ids[start : min(start + CHUNK, tokens)].tolist() for start in range(0, tokens, CHUNK)]
    return ids[None].to(next(model.parameters()).device), prefill(model, pieces, progress=False)


@torch.no_grad()
def _seconds(
    model: Any, ids: Tensor, chunks: Sequence[ChunkCache], ratio: float, selector: str, device: torch.device
) -> float:
    cache = BlendedCache(chunks, ratio, selector)
    begin = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{_compat.cache_keyword(model.forward): cache})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _read_seconds(store: Store, key: str, start: int, stop: int) -> float:
    begin = time.perf_counter()
    if store.get(key, start, stop) is None:
        raise StoreError(f"{store.url} does not give back what it was given: nothing can be measured")
    return time.perf_counter() - begin
