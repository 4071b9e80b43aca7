"""CacheGen as published (Liu et al. 2024, section 5.2): anchors of eight bits, deltas to them, bins by layer.

Of every ten tokens the first is the anchor, quantised to eight bits by its largest channel; the others are coded as
differences to the anchor as it is decoded, with bins of 0.5, 1 and 1.5 times the layer's standard deviation in the
first, second and last third of the layers. Symbols are entropy coded with statistics of each layer and channel,
profiled once for a model, apart for anchors and deltas. Other than in the paper keys are coded before rotation, which
takes 5% fewer bits, and rANS stands for the arithmetic coder. Anchors come first in a file, so they can be used without
the deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from blendkv.codecs.base import Arrangement, LayerShape
from blendkv.codecs.profile import Profile, profile_for
from blendkv.codecs.protect import LARGEST
from blendkv.codecs.rans import decode, encode, lanes_for
from blendkv.codecs.statistics import ANCHOR_EVERY, Moments, Statistics, flat
from blendkv.codecs.tables import row_of_log2
from blendkv.container.format import ALIGN, aligned
from blendkv.errors import ChunkFileError

GROUP = 250
"""Tokens of a section: a whole number of anchors."""
LEVELS = range(-12, 13)
PER_LEVEL = 4
BINS = (0.5, 1.0, 1.5)
"""Bins of the three thirds of the layers, in standard deviations of a layer's keys or values."""


class CacheGen:
    """`cachegen`: anchors and deltas.

    Args:
        level: -12 to 12; bins grow by a quarter of an octave a level. At 0 the KL divergence that was measured while
            profiling is 0.005.
        profile: of the model, or its file or hash.

    Raises:
        ValueError: for another level, no profile, or that of another codec.
    """

    needs_profile: ClassVar[bool] = True
    name = "cachegen"

    def __init__(self, level: int = 0, profile: Profile | str | Path | None = None) -> None:
        if level not in LEVELS:
            raise ValueError(f"cachegen has levels {LEVELS[0]} to {LEVELS[-1]}; got {level}")
        self.level, self.profile = level, profile_for(self.name, profile)
        self.profile_hash = self.profile.hash

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """Layer by layer, anchors in one stream and deltas in the next."""
        self.profile.require_shapes(tuple(shapes))
        return Arrangement(GROUP, streams=2)

    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """Sections of one layer: anchors of its keys and values, then deltas."""
        anchors, deltas = [], []
        for part, scales, symbols, steps in self._sections(first, keys, values):
            means, anchor_rows, delta_rows, _ = self._of(first, part)
            section = encode((symbols - means).astype(np.int16), anchor_rows, lanes_for(*symbols.shape))
            anchors.append(scales.astype("<f4").tobytes() + bytes(-scales.nbytes % ALIGN) + section)
            deltas.append(encode(steps.astype(np.int16), delta_rows, lanes_for(*steps.shape)))
        return anchors + deltas

    def symbols(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[np.ndarray]:
        """`[t, C]` of each section, anchors and deltas: what `encode_unit` codes, for those who measure coders."""
        return [each for _, _, *both in self._sections(first, keys, values) for each in both]

    def _sections(
        self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """For keys (0) and values (1), and each group: scales of anchors, anchors, and deltas, integers in fp32."""
        for part, states in enumerate((keys[0], values[0])):
            *_, step = self._of(first, part)
            rows = flat(states.float()).numpy()
            for start in range(0, len(rows), GROUP):
                group = rows[start : start + GROUP]
                scales = np.abs(group[::ANCHOR_EVERY]).max(1) / np.float32(LARGEST)
                symbols = np.rint(group[::ANCHOR_EVERY] / np.maximum(scales, 1e-38)[:, None])
                rest = _others(len(group))
                decoded = (symbols.astype(np.float32) * scales[:, None])[rest // ANCHOR_EVERY]
                steps = np.rint((group[rest] - decoded) / step)
                if steps.size and not np.abs(steps).max() <= 0x7FFF:
                    raise ValueError(
                        "keys or values are far outside what the profile was made of: is it a profile of this model? "
                        "codec='raw' stores anything"
                    )
                yield part, scales, symbols, steps

    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[memoryview],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the layer; without deltas every token is its anchor."""
        (shape,), groups = shapes, -(-tokens // GROUP)
        decoded = []
        for part, dim in enumerate((shape.key_dim, shape.value_dim)):
            means, anchor_rows, delta_rows, step = self._of(first, part)
            states = np.empty((tokens, shape.heads * dim), np.float32)
            for group in range(groups):
                out = states[group * GROUP : (group + 1) * GROUP]
                section, count = segments[part * groups + group], -(-len(out) // ANCHOR_EVERY)
                scales = _scales(section, count)
                coded = decode(section[aligned(scales.nbytes) :], anchor_rows, count, lanes_for(count, out.shape[1]))
                anchors = (coded.astype(np.float32) + means) * scales[:, None]
                out[:] = anchors[np.arange(len(out)) // ANCHOR_EVERY]
                if streams > 1:
                    rest = _others(len(out))
                    section = segments[(2 + part) * groups + group]
                    steps = decode(section, delta_rows, len(rest), lanes_for(len(rest), out.shape[1]))
                    out[rest] += steps * np.float32(step)
            decoded.append(_states(torch.from_numpy(states), shape.heads, dtype))
        return [decoded[0]], [decoded[1]]

    def _of(self, layer: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Anchor means, rows of anchors and of deltas, and the bin of a layer's keys (0) or values (1)."""
        tensors, name, shift = self.profile.tensors, f"{layer}.{part}", self.level * PER_LEVEL
        anchor_rows = np.maximum(row_of_log2(tensors[f"anchor.{name}"].numpy()), 0)
        delta_rows = np.maximum(row_of_log2(tensors[f"delta.{name}"].numpy().astype(np.int64) - shift), 0)
        step = float(tensors["bins"][layer, part]) * 2.0 ** (shift / 16)
        return tensors[f"mean.{name}"].numpy(), anchor_rows, delta_rows, step


def fit_cachegen(statistics: Statistics, about: Mapping[str, Any]) -> Profile:
    """Fits `cachegen`: bins by layer, and what anchors and deltas look like in each channel."""
    tensors: dict[str, Tensor] = {}
    bins = torch.empty(len(statistics.shapes), 2)
    for layer in range(len(statistics.shapes)):
        third = layer * len(BINS) // len(statistics.shapes)
        for part in range(2):
            spread = statistics.spread(layer)[part]
            bins[layer, part] = BINS[third] * float(spread.mean().sqrt())
            anchors, deltas = statistics.anchors[layer][part], statistics.deltas[layer][part]
            name = f"{layer}.{part}"
            tensors[f"mean.{name}"] = anchors.mean.round().to(torch.int16)
            tensors[f"anchor.{name}"] = _log2(anchors, 1.0)
            tensors[f"delta.{name}"] = _log2(deltas, float(bins[layer, part]))
    return Profile("cachegen", statistics.shapes, tensors | {"bins": bins}, {}, about)


def coarser(profile: Profile, sixteenths: int) -> Profile:
    """The same profile with bins larger by that many sixteenths of an octave."""
    tensors = {
        name: tensor - sixteenths
        if name.startswith("delta.")
        else tensor * 2.0 ** (sixteenths / 16)
        if name == "bins"
        else tensor
        for name, tensor in profile.tensors.items()
    }
    return replace(profile, tensors=tensors)


def _log2(moments: Moments, step: float) -> Tensor:
    """Log2 of standard deviations in steps, in 1/16 octave."""
    deviations = moments.spread.clamp_min(0).sqrt()
    return (
        (16 * torch.log2((deviations / max(step, 1e-30)).clamp_min(2.0**-60))).round().clamp(-999, 999).to(torch.int16)
    )


def _others(tokens: int) -> np.ndarray:
    """Tokens of a group that are no anchors."""
    every = np.arange(tokens)
    return every[every % ANCHOR_EVERY > 0]


def _scales(section: memoryview, count: int) -> np.ndarray:
    if len(section) < 4 * count:
        raise ChunkFileError("the scales of anchors are cut off", reason="symbols")
    scales = np.frombuffer(section, "<f4", count)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise ChunkFileError("the scale of an anchor is not a positive number", reason="symbols")
    return scales


def _states(rows: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[T, H * D]` fp32 as `[H, T, D]`."""
    states = rows.unflatten(1, (heads, -1)).transpose(0, 1)
    return (states.clamp(-65504, 65504) if dtype == torch.float16 else states).to(dtype).contiguous()
