"""Chunks to where they stand in the prompt: keys rotated, values copied, all pieces and many layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from blendkv.kernels.table import ALIGN

BLOCK_T = 32
"""Tokens a program handles."""
HEADS = 4
"""KV heads a program handles, one after the other, with the same angles."""
WARPS = 4


def cut(spans: Sequence[tuple[int, int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Cuts pieces of chunks into what one program handles.

    Args:
        spans: for each piece (row of the batch, its first prompt index, its length, tokens of its whole chunk).

    Returns:
        pieces `[P, 4]` int64, the same as an array; tiles `[N, 2]` int64, (piece, first token within it).
    """
    pieces = np.array(spans, np.int64).reshape(-1, 4)
    counts = -(-pieces[:, 2] // BLOCK_T)
    piece = np.repeat(np.arange(len(pieces)), counts)
    first = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    return pieces, np.stack([piece, first * BLOCK_T], 1)


def locate(placed: Sequence[tuple[np.ndarray, int]], layers: range) -> np.ndarray:
    """Addresses of every piece's first token.

    Args:
        placed: for each piece `ChunkCache.addresses`, and how far into the chunk it begins.
        layers: wanted.

    Returns:
        `[len(layers), P, 2]` int64: keys, values.
    """
    chosen = slice(layers.start, layers.stop, layers.step)
    found = np.stack([bases[chosen] for bases, _ in placed], 1)
    offsets = np.array([offset for _, offset in placed], np.int64)
    return found[..., 0] + offsets[:, None] * found[..., 1]


def rotate_and_place(
    sources: Tensor,
    pieces: Tensor,
    tiles: Tensor,
    table: Tensor,
    layers: range,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    pairing: Literal["half", "interleaved", "none"],
    angles: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes keys, rotated to the prompt's positions, and values of chunks into the buffers of a cache.

    Nothing else in the buffers is touched. Arithmetic is fp32, rounded once. All layers have the same sizes, pairing
    and angles.

    Args:
        sources: `[len(layers), P, 2]` int64 (`locate`), the last two dimensions contiguous.
        pieces: `[P, 4]` int64 (`cut`).
        tiles: `[N, 2]` int64 (`cut`).
        table: `[L, 4]` int64 (`table.describe`).
        layers: which rows of the table are written.
        sizes: (KV heads, key dim, value dim).
        dtype: of chunks and buffers.
        pairing: which dimensions are turned together (`Rotation.pairing`).
        angles: cosines and sines `[B, 1, T, n]` fp32 of the whole prompt, contiguous (`Rotation.angles`), or None to
            copy.
    """
    if not len(tiles) or not len(layers):
        return
    heads, key_dim, value_dim = sizes
    cos, sin = (None, None) if angles is None else angles
    tokens, n = (0, 0) if cos is None else cos.shape[2:]
    rest = key_dim - 2 * n
    _place[len(tiles), triton.cdiv(heads, HEADS), len(layers)](
        sources,
        sources.stride(0),
        pieces,
        tiles,
        table,
        layers.start,
        layers.step,
        cos,
        sin,
        tokens,
        TYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        H=heads,
        D=key_dim,
        DV=value_dim,
        N=n,
        INTERLEAVED=pairing == "interleaved",
        ALIGN_K=gcd(ALIGN, key_dim * dtype.itemsize),
        ALIGN_V=gcd(ALIGN, value_dim * dtype.itemsize),
        HEADS=HEADS,
        BLOCK_T=BLOCK_T,
        BLOCK_N=triton.next_power_of_2(max(n, 1)),
        BLOCK_R=triton.next_power_of_2(max(rest, 1)),
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["first", "step", "tokens"])
def _place(
    sources,
    source_stride,
    pieces,
    tiles,
    table,
    first,
    step,
    cos,
    sin,
    tokens,
    TYPE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tile, head, layer = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    piece, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    pieces += 4 * piece
    row, start = tl.load(pieces), tl.load(pieces + 1)
    length, chunk_tokens = tl.load(pieces + 2), tl.load(pieces + 3)
    sources += layer * source_stride + 2 * piece
    from_keys = tl.multiple_of(tl.load(sources).to(tl.pointer_type(TYPE)), ALIGN_K)
    from_values = tl.multiple_of(tl.load(sources + 1).to(tl.pointer_type(TYPE)), ALIGN_V)
    table += 4 * (first + layer * step)
    to_keys = tl.multiple_of(tl.load(table).to(tl.pointer_type(TYPE)), 16)
    to_values = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(TYPE)), 16)
    capacity = tl.load(table + 2)

    token = begin + tl.arange(0, BLOCK_T)
    inside = (token < length)[:, None]
    pair = tl.arange(0, BLOCK_N)[None]
    turning = inside & (pair < N)
    rest = 2 * N + tl.arange(0, BLOCK_R)[None]
    resting = inside & (rest < D)
    dim = tl.arange(0, BLOCK_V)[None]
    valued = inside & (dim < DV)
    if N > 0:
        angle = (row * tokens + start + token)[:, None] * N + pair
        c = tl.load(cos + angle, mask=turning, other=0.0)
        s = tl.load(sin + angle, mask=turning, other=0.0)

    for h in range(head, tl.minimum(head + HEADS, H)):
        at = (h * chunk_tokens + token)[:, None]
        to = ((row * H + h) * capacity + start + token)[:, None]
        value = tl.load(from_values + at * DV + dim, mask=valued)
        if 2 * N < D:
            still = tl.load(from_keys + at * D + rest, mask=resting)
            tl.store(to_keys + to * D + rest, still, mask=resting)
        if N > 0 and INTERLEAVED:
            both = tl.arange(0, 2 * BLOCK_N)[None]
            shown = inside & (both < 2 * N)
            x = tl.load(from_keys + at * D + both, mask=shown, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, [BLOCK_T, BLOCK_N, 2]))
            y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_T, 2 * BLOCK_N])
            tl.store(to_keys + to * D + both, y.to(TYPE), mask=shown)
        elif N > 0:
            a = tl.load(from_keys + at * D + pair, mask=turning, other=0.0).to(tl.float32)
            b = tl.load(from_keys + at * D + N + pair, mask=turning, other=0.0).to(tl.float32)
            tl.store(to_keys + to * D + pair, (a * c - b * s).to(TYPE), mask=turning)
            tl.store(to_keys + to * D + N + pair, (b * c + a * s).to(TYPE), mask=turning)
        tl.store(to_values + to * DV + dim, value, mask=valued)
