"""Chunks that no model computed, for what only stores and reads them."""

from __future__ import annotations

import torch

from blendkv.chunk import ChunkCache
from blendkv.container import Header


def make_chunk(
    tokens: int = 7,
    layers: int = 3,
    heads: int = 2,
    key_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields,
) -> ChunkCache:
    """Random keys and values, slowly changing from token to token."""
    generator = torch.Generator().manual_seed(seed)
    dims = (key_dim, value_dim or key_dim)

    def states(dim: int) -> torch.Tensor:
        steps = torch.randn(heads, tokens, dim, generator=generator) * 0.3
        return (steps.cumsum(1) + torch.randn(heads, 1, dim, generator=generator)).to(dtype)

    pairs = [tuple(states(dim) for dim in dims) for _ in range(layers)]
    keys, values = zip(*pairs, strict=True)
    ids = torch.randint(0, 500, (tokens,), generator=generator)
    return ChunkCache(ids, keys, values, **({"fingerprint": "f" * 32} | fields))


def assert_same(a: ChunkCache, b: ChunkCache) -> None:
    """Every field, bit by bit."""
    for name in ("fingerprint", "conditioning", "tokenizer", "namespace", "text", "key"):
        assert getattr(a, name) == getattr(b, name), name
    assert torch.equal(a.ids, b.ids)
    assert a.ids.dtype == b.ids.dtype
    assert len(a.keys) == len(b.keys)
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x.cpu().contiguous().view(torch.uint8), y.cpu().contiguous().view(torch.uint8))


def payload_start(data: bytes) -> int:
    """Where the payload of a chunk file begins."""
    return 32 + int.from_bytes(data[12:16], "little")


def index_at(data: bytes, header: Header) -> int:
    """Where the index of a chunk file begins."""
    entry = 12 if header.key_id is None else 20
    fixed = 100 + 6 * len(header.layers) + 17 * len(header.token_streams) + len(header.key_id or b"")
    names = sum(len(name.encode()) for name in (header.fingerprint, header.tokenizer, header.namespace))
    at = fixed + names + len(header.conditioning) + len(header.ids) + len((header.text or "").encode())
    assert at + entry * header.segments <= payload_start(data)
    return at
