"""CacheGen as published (Liu et al. 2024, section 5.2): anchors of eight bits, deltas to them, bins by layer.

Of every ten tokens the first is the anchor, quantised to eight bits by its largest channel; the others are coded as
differences to the anchor as it is decoded, with bins in proportion to 0.5, 1 and 1.5 times the layer's standard
deviation in the first, second and last third of the layers. Symbols are entropy coded with statistics of each layer and
channel, profiled once for a model, apart for anchors and deltas. Other than in the paper keys are coded before
rotation, which takes 5% fewer bits, and rANS stands for the arithmetic coder. Anchors come first in a file, so they can
be used without the deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from blendkv.codecs.base import Arrangement, LayerShape
from blendkv.codecs.profile import FAR_OUTSIDE, Profile, profile_for
from blendkv.codecs.protect import LARGEST, LARGEST_SCALE, scales_of
from blendkv.codecs.rans import decode, encode, lanes_for
from blendkv.codecs.statistics import ANCHOR_EVERY, Moments, Statistics, channels, flat, scale_of
from blendkv.codecs.tables import row_of_log2
from blendkv.container.format import ALIGN, aligned
from blendkv.errors import ChunkFileError

GROUP = 250
"""Tokens of a section: a whole number of anchors."""
LEVELS = range(-12, 13)
PER_LEVEL = 4
BINS = (0.5, 1.0, 1.5)
"""Bins of the three thirds of the layers, in standard deviations of a layer's keys or values."""
KEYS_FINER = 0.5
"""Octaves by which bins of keys are finer, and those of values coarser: the code published with the paper gives keys up
to twice as many bins as values."""
TINY = np.finfo(np.float32).tiny


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
    independent_groups: ClassVar[bool] = True
    name = "cachegen"

    def __init__(self, level: int = 0, profile: Profile | str | Path | None = None) -> None:
        if level not in LEVELS:
            raise ValueError(f"cachegen has levels {LEVELS[0]} to {LEVELS[-1]}; got {level}")
        self.level, self.profile = int(level), profile_for(self.name, profile)
        self.profile_hash = self.profile.hash
        self._layers = sides_of(self.profile)

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """Layer by layer, anchors in one stream and deltas in the next."""
        self.profile.require_shapes(tuple(shapes))
        return Arrangement(GROUP, streams=2)

    @np.errstate(over="ignore")
    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """Sections of one layer: anchors of its keys and values, then deltas."""
        anchors, deltas = [], []
        for side, scales, symbols, steps in self._sections(first, keys, values):
            section = encode((symbols - side.means).astype(np.int16), side.rows, lanes_for(*symbols.shape))
            anchors.append(scales.astype("<f4").tobytes() + bytes(-scales.nbytes % ALIGN) + section)
            deltas.append(encode(steps.astype(np.int16), self._deltas(side)[1], lanes_for(*steps.shape)))
        return anchors + deltas

    @np.errstate(over="ignore")
    def symbols(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[np.ndarray]:
        """`[t, C]` of each section, anchors and deltas: what `encode_unit` codes, for those who measure coders."""
        return [each for _, _, *both in self._sections(first, keys, values) for each in both]

    def _sections(
        self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Iterator[tuple[Side, np.ndarray, np.ndarray, np.ndarray]]:
        """For keys and values, and each group: scales of anchors, anchors, and deltas, integers in fp32."""
        for side, states in zip(self._layers[first], (keys[0], values[0]), strict=True):
            rows = flat(states.float()).numpy()
            step, _ = self._deltas(side)
            for start in range(0, len(rows), GROUP):
                group = rows[start : start + GROUP]
                first_of_ten, rest = group[::ANCHOR_EVERY], _others(len(group))
                scales = np.minimum(np.abs(first_of_ten).max(1) / np.float32(LARGEST), LARGEST_SCALE)
                symbols = np.rint(first_of_ten / np.maximum(scales, TINY)[:, None])
                steps = np.rint((group[rest] - (symbols * scales[:, None])[rest // ANCHOR_EVERY]) / step)
                if steps.size and not np.abs(steps).max() <= 0x7FFF:
                    raise ValueError(FAR_OUTSIDE)
                yield side, scales, symbols, steps

    @np.errstate(over="ignore")
    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[Any],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the layer; without deltas every token is its anchor. NaN where segments are None."""
        (shape,), groups = shapes, -(-tokens // GROUP)
        decoded = []
        for part, side in enumerate(self._layers[first]):
            states = np.empty((tokens, len(side.means)), np.float32)
            step, delta_rows = self._deltas(side)
            for group in range(groups):
                out = states[group * GROUP : (group + 1) * GROUP]
                if segments[part * groups + group] is None:
                    out[:] = np.nan
                    continue
                anchors = _anchors(segments[part * groups + group], side, -(-len(out) // ANCHOR_EVERY))
                out[:] = anchors[np.arange(len(out)) // ANCHOR_EVERY]
                if streams > 1:
                    rest = _others(len(out))
                    section, lanes = segments[(2 + part) * groups + group], lanes_for(len(rest), out.shape[1])
                    out[rest] += decode(section, delta_rows, len(rest), lanes) * step
            decoded.append(_states(torch.from_numpy(states), shape.heads, dtype))
        return [decoded[0]], [decoded[1]]

    def _deltas(self, side: Side) -> tuple[np.float32, np.ndarray]:
        """The bin of deltas at this level, and their table rows."""
        shift = self.level * PER_LEVEL
        return np.float32(side.bin * 2.0 ** (shift / 16)), np.maximum(row_of_log2(side.deltas - shift), 0)


@dataclass(frozen=True, eq=False)
class Side:
    """Keys or values of one layer, as profiled.

    Attributes:
        means: `[C]` int16, of the anchors' symbols.
        rows: `[C]` table rows of anchors.
        deltas: `[C]` int64, log2 of the deltas' standard deviation in bins, in 1/16 octave.
        bin: of deltas at level 0.
    """

    means: np.ndarray
    rows: np.ndarray
    deltas: np.ndarray
    bin: float


@lru_cache(maxsize=8)
def sides_of(profile: Profile) -> list[tuple[Side, Side]]:
    """Keys and values of each layer of a profile.

    Raises:
        ValueError: if tensors are missing, or do not fit the model's layers.
    """
    bins = profile.tensor("bins", (len(profile.shapes), 2), torch.float32)
    if not bool((bins > 0).all()):
        raise ValueError(f"profile {profile.hash}: bins are not all positive")
    layers = []
    for layer, shape in enumerate(profile.shapes):
        keys, values = (_side(profile, f"{layer}.{p}", size, bins[layer, p]) for p, size in enumerate(channels(shape)))
        layers.append((keys, values))
    return layers


def _side(profile: Profile, name: str, size: int, width: Tensor) -> Side:
    means, anchors, deltas = (
        profile.tensor(f"{kind}.{name}", (size,), torch.int16).numpy() for kind in ("mean", "anchor", "delta")
    )
    if np.abs(means.astype(np.int64)).max() > LARGEST:
        raise ValueError(f"profile {profile.hash}: mean.{name} is beyond {LARGEST}")
    return Side(means, np.maximum(row_of_log2(anchors), 0), deltas.astype(np.int64), float(width))


def fit_cachegen(statistics: Statistics, about: Mapping[str, Any]) -> Profile:
    """Fits `cachegen`: bins by layer, and what anchors and deltas look like in each channel."""
    tensors: dict[str, Tensor] = {}
    bins = torch.empty(len(statistics.shapes), 2)
    for layer in range(len(statistics.shapes)):
        third = layer * len(BINS) // len(statistics.shapes)
        for part in range(2):
            spread = statistics.spread(layer)[part]
            bins[layer, part] = BINS[third] * 2.0 ** (KEYS_FINER * (2 * part - 1)) * float(spread.mean().sqrt())
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
    return scale_of(moments.spread.clamp_min(0).sqrt() / max(step, 1e-30))


def _others(tokens: int) -> np.ndarray:
    """Tokens of a group that are no anchors."""
    every = np.arange(tokens)
    return every[every % ANCHOR_EVERY > 0]


def _anchors(section: memoryview, side: Side, count: int) -> np.ndarray:
    """Anchors `[count, C]` fp32."""
    end = aligned(4 * count)
    if len(section) < end or any(section[4 * count : end]):
        raise ChunkFileError("the scales of anchors are cut off", reason="symbols")
    scales = scales_of(section, count)
    symbols = decode(section[end:], side.rows, count, lanes_for(count, len(side.rows))) + side.means.astype(np.int32)
    if np.abs(symbols).max() > LARGEST:
        raise ChunkFileError("an anchor that no encoder writes", reason="symbols")
    return symbols.astype(np.float32) * scales[:, None]


def _states(rows: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[T, H * D]` fp32 as `[H, T, D]`."""
    most = torch.finfo(dtype).max
    return rows.unflatten(1, (heads, -1)).transpose(0, 1).clamp(-most, most).to(dtype).contiguous()
