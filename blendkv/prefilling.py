"""Text to chunks: run the model over each chunk alone and keep its keys, un-rotated, and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.attachment import Attachment
from blendkv.chunk import ChunkCache, tokenizer_fingerprint
from blendkv.chunkfile import ChunkFile, Rebuild
from blendkv.errors import ChunkFileError
from blendkv.hooks import require_eval
from blendkv.layout import encode
from blendkv.prompt import as_array
from blendkv.rope import on_device

BATCH_TOKENS = 4096
"""Most tokens (padding included) of one forward."""


def prefill(
    model: nn.Module,
    chunks: Sequence[str | Sequence[int] | Tensor],
    tokenizer: Any = None,
    *,
    conditioning: Sequence[int] = (),
    namespace: str = "",
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = True,
) -> list[ChunkCache]:
    """Computes the keys and values of chunks, each alone (CacheBlend, section 3).

    Chunks of similar length share a forward; no graph is kept, whatever the caller's grad mode. Attaches the model.

    Args:
        model: a transformers decoder.
        chunks: texts (needs `tokenizer`) or token ids.
        tokenizer: cuts texts into ids, without special tokens.
        conditioning: ids put in front of every chunk (a BOS, a system prefix); part of the chunk's key, their own keys
            and values are not kept.
        namespace: part of the key.
        batch_tokens: most tokens of one forward, padding included; a longer chunk has a forward of its own.
        progress: whether to show a bar.

    Returns:
        One chunk for each given, in order.

    Raises:
        ValueError: for an empty chunk, or text without a tokenizer.
        UnsupportedModelError: if the model cannot be blended.
    """
    state = attachment_of(attach(model))
    require_eval(state.decoder)
    texts = [chunk if isinstance(chunk, str) else None for chunk in chunks]
    ids = [torch.from_numpy(as_array(_to_ids(chunk, tokenizer))) for chunk in chunks]
    for i, row in enumerate(ids):
        if not len(row):
            raise ValueError(f"chunk {i} is empty: a chunk needs at least one token")
    fingerprint = state.facts.fingerprint
    digest = tokenizer_fingerprint(tokenizer) if tokenizer is not None else ""
    made: dict[int, ChunkCache] = {}
    bar = tqdm(total=sum(map(len, ids)), unit="tok", desc="prefill", disable=not progress or not ids, leave=False)
    with bar:
        for batch in batches([len(row) for row in ids], batch_tokens, len(conditioning)):
            for i, keys, values in _run(state, [ids[i] for i in batch], batch, conditioning):
                made[i] = ChunkCache(
                    ids=ids[i],
                    keys=keys,
                    values=values,
                    fingerprint=fingerprint,
                    conditioning=tuple(int(t) for t in conditioning),
                    tokenizer=digest,
                    namespace=namespace,
                    text=texts[i],
                )
                bar.update(len(ids[i]))
    return [made[i] for i in range(len(ids))]


@torch.no_grad()
def _run(
    state: Attachment, rows: list[Tensor], index: list[int], conditioning: Sequence[int]
) -> Iterator[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """One forward over right-padded rows (causal: padding changes nothing before it)."""
    facts = state.facts
    front, longest = len(conditioning), max(map(len, rows))
    device = next(state.model.parameters()).device
    ids = torch.zeros(len(rows), front + longest, dtype=torch.long)
    ids[:, :front] = torch.tensor(list(conditioning), dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, front : front + len(row)] = row
    positions = torch.arange(front + longest, device=device)[None]
    cache = DynamicCache()
    keyword = {_compat.cache_keyword(state.decoder.forward): cache}
    with torch.autocast(device.type, enabled=False):  # stored states are the model's own dtype, wherever they are made
        state.decoder(input_ids=ids.to(device), position_ids=positions.expand(ids.shape), use_cache=True, **keyword)
    keys: list[list[Tensor]] = [[] for _ in rows]
    values: list[list[Tensor]] = [[] for _ in rows]
    layers = _compat.cached_states(cache)
    cache.layers.clear()
    for rotation in facts.rotations:
        rotated, plain_values = layers.pop(0)  # a layer's full-length states go as soon as they are cut
        plain = rotation.unrotate(rotated, on_device(rotation.angles(facts.rotary, positions), rotated.device))
        for b, row in enumerate(rows):
            part = slice(front, front + len(row))
            keys[b].append(plain[b, :, part].clone())
            values[b].append(plain_values[b, :, part].clone())
    for b, i in enumerate(index):
        yield i, tuple(keys[b]), tuple(values[b])


class _Stop(Exception):
    """Carries the first keys and values out of a forward."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.states = keys, values


class _FirstStates(DynamicCache):
    """A cache that ends a forward as soon as its first layer has keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        raise _Stop(key_states, value_states)


@torch.no_grad()
def first_layer(model: nn.Module, ids: Tensor, conditioning: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Keys and values of layer 0 alone, which depend on nothing but the tokens; no other layer is run.

    Args:
        model: a transformers decoder; it is attached.
        ids: `[T]` token ids of a chunk.
        conditioning: ids in front of it; only their number matters here.

    Returns:
        `[H, T, D]` keys, un-rotated, and `[H, T, Dv]` values: those of `prefill`, up to the rounding of another batch.

    Raises:
        UnsupportedModelError: if the model cannot be blended.
    """
    state = attachment_of(attach(model))
    require_eval(state.decoder)
    facts, device = state.facts, next(state.model.parameters()).device
    positions = torch.arange(len(conditioning), len(conditioning) + len(ids), device=device)[None]
    keyword = {_compat.cache_keyword(state.decoder.forward): _FirstStates()}
    try:
        with torch.autocast(device.type, enabled=False):
            state.decoder(input_ids=ids[None].to(device), position_ids=positions, use_cache=True, **keyword)
    except _Stop as stop:
        keys, values = stop.states
        rotation = facts.rotations[0]
        plain = rotation.unrotate(keys, on_device(rotation.angles(facts.rotary, positions), keys.device))
        return plain[0].contiguous(), values[0].contiguous()
    raise AssertionError("an attached model updates its cache")


def first_layer_of(model: nn.Module) -> Rebuild:
    """What a `ChunkFile` without layer 0 needs: computes it, for files whose other layers the same model computed.

    Args:
        model: a transformers decoder; it is attached when it is used.
    """

    def rebuild(file: ChunkFile) -> tuple[Tensor, Tensor]:
        state = attachment_of(attach(model))
        if state.facts.fingerprint != file.header.fingerprint or int(file.ids.max()) >= state.config.vocab_size:
            raise ChunkFileError(
                "layer 0 is not in the chunk file, and the model given is not the one that computed the others: pass "
                f"the model of fingerprint {file.header.fingerprint}",
                reason="layer0",
            )
        return first_layer(model, file.ids, file.conditioning)

    return rebuild


def batches(lengths: Sequence[int], batch_tokens: int, front: int = 0) -> Iterator[list[int]]:
    """Indices grouped by similar length so that rows x longest stays within `batch_tokens`."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * (front + lengths[batch[0]]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _to_ids(chunk: str | Sequence[int] | Tensor, tokenizer: Any) -> Any:
    if not isinstance(chunk, str):
        return chunk
    if tokenizer is None:
        raise ValueError("chunks given as text need a tokenizer: prefill(model, texts, tokenizer)")
    return encode(tokenizer, chunk)
