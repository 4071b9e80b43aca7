"""Keys and values as a model might have them, and profiles of them, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.codecs import LayerShape, Profile
from blendkv.codecs.cachegen import fit_cachegen
from blendkv.codecs.fitting import fit_transform
from blendkv.codecs.statistics import Statistics, channels

CODECS = ("cachegen", "klt", "klt-xl")
SMALL = (LayerShape(2, 8, 4), LayerShape(1, 6, 10), LayerShape(3, 4, 4))
"""Three layers, none like another."""


def draw(shape: LayerShape, tokens: int, seed: int, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[H, T, D]` fp32 of a layer: means, scales and mixtures that belong to the layer."""
    own = torch.Generator().manual_seed(1000 + layer)
    generator = torch.Generator().manual_seed(100 * seed + layer)
    pair = []
    for size, dim in zip(channels(shape), (shape.key_dim, shape.value_dim), strict=True):
        mixture = torch.eye(size) + torch.randn(size, size, generator=own) * 0.5 / size**0.5
        scale = torch.exp(torch.randn(size, generator=own))
        mean = torch.randn(size, generator=own) * 2
        noise = torch.randn(tokens, size, generator=generator)
        rows = (noise + 0.7 * noise.roll(1, 0)) @ mixture * scale + mean
        pair.append(rows.unflatten(1, (-1, dim)).transpose(0, 1).contiguous())
    return pair[0], pair[1]


def chunk_of(
    shapes: Sequence[LayerShape], tokens: int = 7, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> ChunkCache:
    """A chunk of the layers that `draw` knows."""
    pairs = [draw(shape, tokens, seed, layer) for layer, shape in enumerate(shapes)]
    keys, values = (tuple(states.to(dtype) for states in each) for each in zip(*pairs, strict=True))
    return ChunkCache(torch.arange(tokens) % 500, keys, values, **({"fingerprint": "f" * 32} | fields))


def statistics_of(shapes: Sequence[LayerShape], protected: int = 1, unit_layers: int = 0) -> Statistics:
    """Some thousand tokens of them."""
    statistics = Statistics(tuple(shapes), 1000, 100, protected, unit_layers)
    generator = torch.Generator().manual_seed(0)
    for seed in range(1, 5):
        pairs = [draw(shape, 600, seed, layer) for layer, shape in enumerate(shapes)]
        keys, values = zip(*pairs, strict=True)
        statistics.add_states(keys, values)
        statistics.add_gradients(
            *([torch.randn(x.shape, generator=generator) * 0.01 for x in p] for p in (keys, values))
        )
    return statistics


@cache
def profile_of(codec: str, shapes: tuple[LayerShape, ...] = SMALL, protected: int = 1, unit_layers: int = 2) -> Profile:
    """A profile, the same each time; `unit_layers` is for `klt-xl`."""
    return fit(codec, statistics_of(shapes, protected, unit_layers))


def fit(codec: str, statistics: Statistics) -> Profile:
    """The profile of statistics."""
    if codec == "cachegen":
        return fit_cachegen(statistics, {"model": "none"})
    return fit_transform(statistics, codec == "klt-xl", {"model": "none"})
