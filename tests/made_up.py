"""Profiles of no model: fitted to random keys and values, for what only codes and decodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendkv.chunk import ChunkCache
from blendkv.codecs import Codec, LayerShape, Profile, get_codec
from blendkv.codecs.fitting import coarser, fit_transform
from blendkv.codecs.statistics import Statistics
from tests.chunks import make_chunk


def fit_profile(chunks: Sequence[ChunkCache], name: str = "klt", protected: int = 1, unit_layers: int = 0) -> Profile:
    """A profile of chunks such as these, at about two bits a symbol."""
    shapes = tuple(
        LayerShape(k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(chunks[0].keys, chunks[0].values, strict=True)
    )
    statistics = Statistics(shapes, 64, 8, protected, unit_layers)
    for seed, chunk in enumerate(chunks):
        torch.manual_seed(seed)
        statistics.add_states(chunk.keys, chunk.values)
        statistics.add_gradients([torch.randn_like(k) for k in chunk.keys], [torch.randn_like(v) for v in chunk.values])
    profile = fit_transform(statistics, name == "klt-xl", {})
    scales = torch.cat([t for key, t in profile.tensors.items() if key.startswith("scale.")])
    return coarser(profile, int(scales.float().median()) - 8)


def make_codec(chunk: ChunkCache, name: str = "klt", level: int = 0, **settings) -> Codec:
    """A codec for chunks of that shape."""
    (heads, _, dim), value_dim = chunk.keys[0].shape, chunk.values[0].shape[2]
    others = [make_chunk(100, len(chunk.keys), heads, dim, value_dim, seed=900 + seed) for seed in range(8)]
    return get_codec(name, profile=fit_profile(others, name, **settings), level=level)
