"""What several test files share: prompts made of chunks, and forwards to compare."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv.attaching import attachment_of
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.learning import own_states
from blendkv.prefilling import prefill

VOCABULARY = 512


def unprintable(tokenizer, also: str = "") -> list[int]:
    """Ids that a tiny model should not say, so that its answer is text: all but those of one printable ASCII character.

    Args:
        tokenizer: of `byte_tokenizer`.
        also: characters that it should not say either.
    """
    texts = [tokenizer.decode([i]) for i in range(VOCABULARY)]
    return [i for i, text in enumerate(texts) if len(text) != 1 or not " " <= text <= "~" or text in also]


def tokens(length: int, seed: int = 0) -> Tensor:
    """`[length]` random ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A prompt of three chunks out of order with text between them.

    Attributes:
        ids: `[1, T]`.
        chunks: ids of each chunk.
        starts: prompt index of each chunk.
        caches: the chunks, each computed alone.
    """

    ids: Tensor
    chunks: list[Tensor]
    starts: list[int]
    caches: list[ChunkCache]


def make_case(model, lengths=(13, 9, 17), order=(1, 2, 0), seed: int = 0, question: int = 5) -> Case:
    """Chunks of `lengths`, laid out in `order`, two fresh tokens in front of each, a question behind."""
    chunks = [tokens(n, seed * 100 + i + 1) for i, n in enumerate(lengths)]
    starts, parts, at = [0] * len(chunks), [], 0
    for i in order:
        parts += [tokens(2, seed * 100 + 50 + i), chunks[i]]
        starts[i] = at + 2
        at += 2 + len(chunks[i])
    parts.append(tokens(question, seed * 100 + 99))
    return Case(torch.cat(parts)[None], chunks, starts, prefill(model, chunks, progress=False))


@torch.no_grad()
def run(model, ids: Tensor, cache, **kwargs):
    """One forward with a cache under the installed transformers' keyword."""
    return model(input_ids=ids, use_cache=True, **{_compat.cache_keyword(model.forward): cache}, **kwargs)


def full(model, ids: Tensor, **kwargs):
    """Full prefill: (logits `[B, T, V]`, cache)."""
    cache = DynamicCache()
    return run(model, ids, cache, **kwargs).logits, cache


def exact_chunk(model, ids: Tensor, start: int, stop: int, offset: int = 0) -> ChunkCache:
    """Tokens `[start, stop)` of `ids [1, T]`, cut out of a full prefill at positions from `offset`."""
    facts = attachment_of(model).facts
    positions = torch.arange(ids.shape[1])[None] + offset
    _, cache = full(model, ids, position_ids=positions)
    keys = []
    for rotation, layer in zip(facts.rotations, cache.layers, strict=True):
        keys.append(rotation.unrotate(layer.keys, rotation.angles(facts.rotary, positions))[0, :, start:stop])
    values = tuple(layer.values[0, :, start:stop] for layer in cache.layers)
    return ChunkCache(ids[0, start:stop], tuple(keys), values, facts.fingerprint)


def worst(cache: BlendedCache, reference, rows=slice(None)) -> float:
    """Largest difference of keys and values of all layers between two caches, over prompt indices `rows`."""
    pairs = [(a.keys, b.keys) for a, b in zip(cache.layers, reference.layers, strict=True)]
    pairs += [(a.values, b.values) for a, b in zip(cache.layers, reference.layers, strict=True)]
    return max(float((a[:, :, rows] - b[:, :, rows]).abs().max()) for a, b in pairs)


def generate(model, ids: Tensor, cache=None, **kwargs):
    """Greedy `generate` with the cache under the installed transformers' keyword."""
    if cache is not None:
        kwargs[_compat.CACHE_ARG] = cache
    kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)} | kwargs
    try:
        return model.generate(ids, pad_token_id=0, **kwargs)
    except StrictDataclassError as error:  # transformers 5.4 with a newer hub: OLMo-2's default config is refused
        pytest.skip(f"this transformers cannot generate with this model at all: {error}")


class CountRows:
    """Counts the rows that go through each decoder layer's MLP or MoE block."""

    def __init__(self, model) -> None:
        self.rows = []
        self.handles = []
        for i, layer in enumerate(attachment_of(model).layers):
            self.rows.append(0)
            block = next(getattr(layer, n) for n in ("mlp", "block_sparse_moe", "feed_forward") if hasattr(layer, n))
            self.handles.append(block.register_forward_pre_hook(self._count(i)))

    def _count(self, layer: int):
        def hook(module, args):
            self.rows[layer] += args[0].shape[:-1].numel()

        return hook

    def __enter__(self) -> CountRows:
        return self

    def __exit__(self, *exc) -> None:
        for handle in self.handles:
            handle.remove()


def own_keys(state, ids, here, there):
    """Each layer's own keys of the same hidden states at two sets of positions: `[1, H, T, D]` twice."""
    for (keys_here, _), (keys_there, _) in own_states(state, ids, here, there):
        yield keys_here, keys_there
