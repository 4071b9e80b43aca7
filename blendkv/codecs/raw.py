"""The bytes of the tensors, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from blendkv.codecs.base import Arrangement, LayerShape
from blendkv.container.format import aligned
from blendkv.errors import ChunkFileError


class Raw:
    """Lossless and not compressed; decoding is a view wherever the bytes may be written to.

    One segment holds the keys of a layer `[H, T, D]`, one its values, in C order, little endian.

    Raises:
        ValueError: for a level other than 0, or a profile.
    """

    needs_profile: ClassVar[bool] = False
    name = "raw"
    profile_hash = ""

    def __init__(self, level: int = 0, profile: object = None) -> None:
        if level or profile is not None:
            raise ValueError(f"raw has level 0 and no profile; got level {level}, profile {profile!r}")
        self.level = 0

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """Layer by layer, all tokens in one group."""
        return Arrangement(group_tokens=tokens)

    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """The bytes of the one layer's keys, then of its values."""
        return [states.contiguous().view(torch.uint8).numpy().tobytes() for states in (*keys, *values)]

    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[memoryview],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The one layer's keys and values: views of the segments, copies of those that are read-only."""
        (shape,), (keys, values) = shapes, segments
        return (
            [_states(keys, (shape.heads, tokens, shape.key_dim), dtype)],
            [_states(values, (shape.heads, tokens, shape.value_dim), dtype)],
        )


def _states(segment: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    size = prod(shape) * dtype.itemsize
    if len(segment) != aligned(size) or any(segment[size:]):
        raise ChunkFileError(
            f"a segment of {len(segment):,} bytes holds no {shape} of {dtype}; delete the entry", reason="symbols"
        )
    data = bytearray(segment[:size]) if segment.readonly else segment[:size]
    return torch.frombuffer(data, dtype=dtype).view(shape)
