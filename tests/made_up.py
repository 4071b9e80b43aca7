"""Profiles of no model: fitted to random keys and values, for what only codes and decodes."""

from __future__ import annotations

import torch

from blendkv.chunk import ChunkCache
from blendkv.codecs import Codec, LayerShape, Profile, get_codec
from blendkv.codecs.fitting import coarser, fit_transform
from blendkv.codecs.statistics import Statistics
from tests.chunks import make_chunk


def fit_profile(chunk: ChunkCache, name: str = "klt", protected: int = 1, unit_layers: int = 0) -> Profile:
    """A profile of chunks such as this one, at about two bits a symbol."""
    shapes = tuple(
        LayerShape(k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(chunk.keys, chunk.values, strict=True)
    )
    statistics = Statistics(shapes, 64, 8, protected, unit_layers)
    keys, values = [k.float().cpu() for k in chunk.keys], [v.float().cpu() for v in chunk.values]
    statistics.add_states(keys, values)
    for seed in range(2):
        torch.manual_seed(seed)
        statistics.add_gradients([torch.randn_like(k) for k in keys], [torch.randn_like(v) for v in values])
    profile = fit_transform(statistics, name == "klt-xl", {})
    scales = torch.cat([t for key, t in profile.tensors.items() if key.startswith("scale.")])
    return coarser(profile, int(scales.float().median()) - 8)


def make_codec(chunk: ChunkCache, name: str = "klt", level: int = 0, **settings) -> Codec:
    """A codec for chunks of that shape, fitted to more tokens than channels are transformed together."""
    heads, dims = chunk.keys[0].shape[0], chunk.keys[0].shape[2] + chunk.values[0].shape[2]
    together = heads * dims * (settings.get("unit_layers", 5) or 5) if name == "klt-xl" else dims
    wide = make_chunk(
        max(200, 2 * together),
        len(chunk.keys),
        chunk.keys[0].shape[0],
        chunk.keys[0].shape[2],
        chunk.values[0].shape[2],
        seed=99,
    )
    return get_codec(name, profile=fit_profile(wide, name, **settings), level=level)
