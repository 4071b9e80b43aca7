"""Transform coding: channel means off, a Karhunen-Loeve transform that knows what errors cost, uniform steps, rANS.

A model's own gradients say what an error in a key or value costs: in the metric of their second moments (the Fisher
information) the KL divergence of the next tokens is half the squared error. In that metric one step fits every channel
of every layer, keys and values alike, and the transform that makes channels uncorrelated is the best one. `klt`
transforms each head alone, layer by layer; `klt-xl` all channels of up to three layers together, since a layer's keys
and values are much like those of the layer before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from blendkv.codecs.base import Arrangement, LayerShape
from blendkv.codecs.classes import COUNT
from blendkv.codecs.profile import Profile, profile_for
from blendkv.codecs.protect import protect, protected_bytes, unprotect
from blendkv.codecs.rans import decode, encode, lanes_for
from blendkv.codecs.tables import ABSENT, THIRD, refinement_context, refinement_row_of_log2, row_of_log2
from blendkv.codecs.transform import Part, parts_of
from blendkv.container.format import MAX_LAYERS
from blendkv.errors import ChunkFileError

GROUPS = (256, 128, 64)
"""Tokens of a section may be: as many as keep it within `SECTION`, since a GPU decodes a section from end to end."""
SECTION = 2**16
"""Symbols of a section, unless even the fewest tokens are more."""
PROTECTED = range(GROUPS[-1] + 1)
"""First tokens of a chunk that may be kept in 8 bits: all are in its first group."""
BLOCK = 4096
"""Tokens that are transformed at once; a multiple of every group."""
LEVELS = range(-16, 17)
"""A level is worth a quarter of an octave of steps."""
PER_LEVEL = 4
SILENT = -37
"""Channels below 0.2 steps (log2 in 1/16 octave) are not coded: that costs less than their bits."""


LARGEST_BASE = 0x7FFF // 3
"""Of the symbols of a base, so that those they stand for are within int16."""


class KLT:
    """`klt`: a transform for each head.

    Args:
        level: -16 to 16; steps grow by a quarter of an octave a level. At 0 the KL divergence
            that was measured while profiling is 0.005.
        profile: of the model, or its file or hash.
        streams: 2 codes a base with steps three times as large, then a refinement, in as many bytes.

    Raises:
        ValueError: for another level, no profile, or that of another codec.
    """

    needs_profile: ClassVar[bool] = True
    independent_groups: ClassVar[bool] = True
    max_streams: ClassVar[int] = 2
    name = "klt"

    def __init__(self, level: int = 0, profile: Profile | str | Path | None = None, streams: int = 1) -> None:
        if level not in LEVELS:
            raise ValueError(f"{self.name} has levels {LEVELS[0]} to {LEVELS[-1]}; got {level}")
        if streams not in (1, 2):
            raise ValueError(f"{self.name} has 1 or 2 streams; got {streams}")
        self.level, self.streams, self.profile = int(level), int(streams), profile_for(self.name, profile)
        self.profile_hash = self.profile.hash
        self._units = parts_of(self.profile)
        widest = max(len(part.mean) for parts in self._units for part in parts)
        self.group = next((tokens for tokens in GROUPS if tokens * widest <= SECTION), GROUPS[-1])
        self.unit_layers = self.profile.setting("unit_layers", range(1, MAX_LAYERS + 1))
        self.protected = self.profile.setting("protected", PROTECTED)

    @property
    def step(self) -> float:
        """What a symbol is worth, in the steps of the profile."""
        return 2.0 ** (self.level * PER_LEVEL / 16)

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """Groups of 64 to 256 tokens, in units and parts as profiled."""
        self.profile.require_shapes(tuple(shapes))
        return Arrangement(self.group, self.unit_layers, len(self._units[0]), self.streams)

    def rows(self, part: Part) -> np.ndarray:
        """`[C]` the table row of each channel at this level, `ABSENT` where it is not coded."""
        scale = self._scale(part)
        return np.where(scale < SILENT, ABSENT, np.maximum(row_of_log2(scale), 0)).astype(np.int16)

    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """Sections of a unit: for each part and group the protected tokens (in the first), then symbols."""
        streams: list[list[bytes]] = [[] for _ in range(self.streams)]
        for part, kept, symbols in self._sections(first, keys, values):
            rows = self.rows(part)
            coded = rows != ABSENT
            sections = self._encode(symbols, rows[coded], self._scale(part)[coded])
            streams[0].append(protect(kept, part.heads) + sections[0])
            for stream, section in zip(streams[1:], sections[1:], strict=True):
                stream.append(section)
        return [section for stream in streams for section in stream]

    def symbols(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[np.ndarray]:
        """`[t, C']` int16 for each part and group: what `encode_unit` codes, for those who measure coders."""
        return [symbols for _, _, symbols in self._sections(first, keys, values)]

    def _sections(
        self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Iterator[tuple[Part, Tensor, np.ndarray]]:
        """For each part and group of a unit the part, its protected tokens `[t, C]`, and symbols of the others."""
        for part in self._unit(first, len(keys)):
            states, symbols_of = part.gather(keys, values), part.forward(self.step, self.rows(part) != ABSENT)
            for block in range(0, len(states), BLOCK):
                shift = self.protected if block == 0 else 0
                symbols = symbols_of(states[block + shift : block + BLOCK])
                for start in range(block, min(block + BLOCK, len(states)), self.group):
                    first = shift if start == 0 else 0
                    within = slice(start + first - block - shift, start + self.group - block - shift)
                    yield part, states[start : start + first], symbols[within]

    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[Any],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the unit's layers; NaN of groups whose segments are None."""
        parts = self._unit(first, len(shapes))
        keys = [torch.empty(s.heads, tokens, s.key_dim, dtype=dtype) for s in shapes]
        values = [torch.empty(s.heads, tokens, s.value_dim, dtype=dtype) for s in shapes]
        groups = -(-tokens // self.group)
        for number, part in enumerate(parts):
            rows = self.rows(part)
            coded = rows != ABSENT
            scale = self._scale(part)[coded]
            place, waiting = 0, []
            for group in range(groups):
                base, *fine = (segments[(stream * len(parts) + number) * groups + group] for stream in range(streams))
                end = min((group + 1) * self.group, tokens)
                if group == 0 and (place := min(self.protected, end)) and base is not None:
                    part.scatter(unprotect(base, place, part.heads), keys, values, 0)
                    base = base[protected_bytes(place, part.heads) :]
                start = max(group * self.group, place)
                if base is None:  # products of as many tokens as ever give the same last bits
                    waiting.append(np.zeros((end - start, int(coded.sum())), np.int16))
                else:
                    waiting.append(self._decode([base, *fine], rows[coded], scale, end - start))
                if end == tokens or end % BLOCK == 0:  # products of many tokens are quicker than many products
                    symbols = np.concatenate(waiting) if len(waiting) > 1 else waiting[0]
                    part.inverse(symbols, self.step, coded, keys, values, end - len(symbols))
                    waiting.clear()
        for group in range(groups):  # of each, all parts are there or none
            if segments[group] is None:
                for states in (*keys, *values):
                    states[:, group * self.group : (group + 1) * self.group] = torch.nan
        return keys, values

    def _scale(self, part: Part) -> np.ndarray:
        return part.scale - self.level * PER_LEVEL

    def _unit(self, first: int, layers: int) -> list[Part]:
        unit, within = divmod(first, self.unit_layers)
        if within or layers != min(self.unit_layers, len(self.profile.shapes) - first):
            raise ChunkFileError(
                f"{self.name} with this profile keeps {self.unit_layers} layers together, from layer 0 on: store layer "
                "0 too (layer0=True)",
                reason="geometry",
            )
        return self._units[unit]

    def _encode(self, symbols: np.ndarray, rows: np.ndarray, scale: np.ndarray) -> list[bytes]:
        """Sections of symbols `[t, C']`: one a stream."""
        lanes = lanes_for(*symbols.shape)
        if self.streams == 1:
            return [encode(symbols, rows, lanes)]
        base = np.rint(symbols / 3).astype(np.int16)
        return [
            encode(base, base_rows(scale), lanes),
            encode(symbols - 3 * base, refinement_rows(scale), lanes, refinement_context(base)),
        ]

    def _decode(self, sections: Sequence[memoryview], rows: np.ndarray, scale: np.ndarray, tokens: int) -> np.ndarray:
        """Symbols `[t, C']` of the sections of one or both streams."""
        lanes = lanes_for(tokens, len(rows))
        if self.streams == 1:
            return decode(sections[0], rows, tokens, lanes)
        base = decode(sections[0], base_rows(scale), tokens, lanes)
        if base.size and not -LARGEST_BASE <= base.min() <= base.max() <= LARGEST_BASE:
            raise ChunkFileError("symbols of a base that no encoder writes", reason="symbols")
        if len(sections) == 1:
            return 3 * base
        return 3 * base + decode(sections[1], refinement_rows(scale), tokens, lanes, refinement_context(base))


class KLTXL(KLT):
    """`klt-xl`: one transform for all channels of up to three layers."""

    name = "klt-xl"


def base_rows(scale: np.ndarray) -> np.ndarray:
    """Table rows of a base; every channel has one."""
    return np.maximum(row_of_log2(scale - THIRD), 0)


def refinement_rows(scale: np.ndarray) -> np.ndarray:
    """Table rows of a refinement, whose steps are those of `scale`; every channel has one."""
    return np.maximum(refinement_row_of_log2(scale), COUNT)
