"""The bytes of the tensors, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from blendkv.codecs.base import Arrangement, LayerShape
from blendkv.container.format import ALIGN, aligned
from blendkv.errors import ChunkFileError

GROUP = 32
"""Tokens of a group at level 1, or a power of two times as many. What a selector knows ahead that it will recompute is
often the first 40 to 80 tokens of a chunk."""
MOST_GROUPS = 16
"""Of a chunk, so that there are few checksums, and nearly every head is read with one request."""


class Raw:
    """Lossless and not compressed.

    At level 0 a segment holds the keys of a layer `[H, T, D]`, the next one its values, in C order, little endian;
    decoding is a view wherever the bytes may be written to. At level 1 tokens are cut into groups, and a segment holds
    keys `[H, t, D]` and values of a layer for one of them, so that groups which nobody needs are left out.

    Args:
        level: 0 or 1.
        profile: none.

    Raises:
        ValueError: for another level, or a profile.
    """

    needs_profile: ClassVar[bool] = False
    independent_groups: ClassVar[bool] = True
    name = "raw"
    profile_hash = ""

    def __init__(self, level: int = 1, profile: object = None) -> None:
        if level not in (0, 1) or profile is not None:
            raise ValueError(f"raw has level 0 or 1, and no profile; got level {level}, profile {profile!r}")
        self.level = int(level)

    def arrangement(self, shapes: Sequence[LayerShape], tokens: int) -> Arrangement:
        """Layer by layer; keys and values apart and all tokens in one group, or together in groups."""
        return Arrangement(self._group(tokens), parts=1 if self.level else 2)

    def encode_unit(self, first: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[bytes]:
        """The bytes of the one layer's keys, then of its values; at level 1 of each group's."""
        (k,), (v,) = keys, values
        if not self.level:
            return [_bytes(k), _bytes(v)]
        group = self._group(k.shape[1])
        cuts = [slice(start, start + group) for start in range(0, k.shape[1], group)]
        return [_padded(_bytes(k[:, cut])) + _bytes(v[:, cut]) for cut in cuts]

    def decode_unit(
        self,
        first: int,
        shapes: Sequence[LayerShape],
        tokens: int,
        dtype: torch.dtype,
        segments: Sequence[memoryview | None],
        streams: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The one layer's keys and values: views of what lies in one piece and may be written to, copies of others."""
        (shape,), group = shapes, self._group(tokens)
        dims = (shape.key_dim, shape.value_dim)
        if not self.level:
            keys, values = (_view(s, shape.heads, tokens, dim, dtype) for s, dim in zip(segments, dims, strict=True))
            return [keys], [values]
        if group >= tokens and segments[0] is not None:
            keys, values = (
                _view(part, shape.heads, tokens, dim, dtype)
                for part, dim in zip(_halves(segments[0], shape, tokens, dtype), dims, strict=True)
            )
            return [keys], [values]
        both = [torch.empty(shape.heads, tokens, dim, dtype=dtype) for dim in dims]
        pieces: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        for segment, start in zip(segments, range(0, tokens, group), strict=True):
            count = min(group, tokens - start)
            halves = (None, None) if segment is None else _halves(segment, shape, count, dtype)
            for each, half, dim in zip(pieces, halves, dims, strict=True):
                size = (shape.heads, count, dim * dtype.itemsize)
                each.append(np.zeros(size, np.uint8) if half is None else np.ndarray(size, np.uint8, half))
        for out, each in zip(both, pieces, strict=True):
            np.concatenate(each, axis=1, out=out.view(torch.uint8).numpy())
        for segment, start in zip(segments, range(0, tokens, group), strict=True):
            if segment is None:
                for out in both:
                    out[:, start : start + group] = torch.nan
        return [both[0]], [both[1]]

    def is_plain(self, sizes: np.ndarray, shapes: Sequence[LayerShape], tokens: int, dtype: torch.dtype) -> bool:
        """Whether `in_order` can be had of layers: they are alike, and there is no padding among their segments.

        Args:
            sizes: `[layers, parts, groups]` bytes of each segment.
            shapes: of the layers.
            tokens: of the chunk.
            dtype: of keys and values.
        """
        shape, group = shapes[0], self._group(tokens)
        token = shape.heads * shape.key_dim * dtype.itemsize
        counts = np.minimum(tokens - np.arange(0, tokens, group), group)
        alike = len(set(shapes)) == 1 and shape.key_dim == shape.value_dim
        return alike and not (counts * token % ALIGN).any() and bool((sizes == counts * token * (1 + self.level)).all())

    def in_order(self, data: Any, out: Any) -> None:
        """What `decode_unit` makes of layers, for several that follow each other at once.

        Args:
            data: `[N]`, their segments, verified and plain (`is_plain`), as they follow each other.
            out: `[layers, 2, H, T, D]` keys and values, to be filled. Both are tensors of one device and dtype, or
                numpy arrays of bytes (`D` too), which leave PyTorch's threads to a model that computes meanwhile.
        """
        layers, _, heads, tokens, dim = out.shape
        group, states = self._group(tokens), data.reshape(layers, -1)
        whole = tokens // group * group
        cut = 2 * heads * whole * dim
        groups = states[:, :cut].reshape(layers, -1, 2, heads, group, dim).swapaxes(1, 2).swapaxes(2, 3)
        out[:, :, :, :whole].reshape(groups.shape)[...] = groups
        if whole < tokens:
            out[:, :, :, whole:] = states[:, cut:].reshape(layers, 2, heads, tokens - whole, dim)

    def _group(self, tokens: int) -> int:
        group = GROUP if self.level else tokens
        while group * MOST_GROUPS < tokens:
            group *= 2
        return group


def _bytes(states: Tensor) -> bytes:
    return states.contiguous().view(torch.uint8).numpy().tobytes()


def _padded(data: bytes) -> bytes:
    return data + bytes(aligned(len(data)) - len(data))


def _halves(segment: memoryview, shape: LayerShape, tokens: int, dtype: torch.dtype) -> tuple[memoryview, memoryview]:
    """Keys and values of a segment of level 1, each with its padding, which was looked at."""
    sizes = [shape.heads * tokens * dim * dtype.itemsize for dim in (shape.key_dim, shape.value_dim)]
    at = aligned(sizes[0])
    end = at + sizes[1]
    if len(segment) != aligned(end) or any(segment[sizes[0] : at]) or any(segment[end:]):
        raise _refused(segment, (shape.heads, tokens, (shape.key_dim, shape.value_dim)), dtype)
    return segment[:at], segment[at:]


def _view(segment: memoryview | None, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """`[H, T, D]` of the bytes in one piece; NaN of none."""
    shape = (heads, tokens, dim)
    if segment is None:
        return torch.full(shape, torch.nan, dtype=dtype)
    size = prod(shape) * dtype.itemsize
    if len(segment) != aligned(size) or any(segment[size:]):
        raise _refused(segment, shape, dtype)
    data = bytearray(segment[:size]) if segment.readonly else segment[:size]
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _refused(segment: memoryview, shape: object, dtype: torch.dtype) -> ChunkFileError:
    return ChunkFileError(
        f"a segment of {len(segment):,} bytes holds no {shape} of {dtype}; delete the entry", reason="symbols"
    )
