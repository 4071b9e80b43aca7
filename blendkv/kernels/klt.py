"""Symbols of transform coding to keys and values: all layers, heads and chunks in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T = 64
"""Tokens a program handles."""
BLOCK_K = 64
"""Components that are multiplied at once."""
WARPS = 4
STAGES = 2
SHIFT = 11
"""Integers up to 2 to this power are exact in fp16; a larger symbol is multiplied as two."""
HEAD = ("slab", "width", "first", "depth", "matrix", "stride", "own", "number", "heads", "part")
"""Columns of the table of heads (`inverse`)."""


def inverse(
    symbols: Tensor,
    tokens: int,
    data: Tensor,
    heads: Tensor,
    dim: int,
    align: int,
    tiles: Tensor,
    chunks: Tensor,
    protected: Tensor,
    matrices: Tensor,
    mean: Tensor,
    coded: Tensor,
    step: float,
    status: Tensor,
    dtype: torch.dtype,
) -> None:
    """Writes keys and values of chunks: `mean + step * symbols @ matrix`, or what was protected.

    Symbols and fp16 matrices are multiplied exactly and summed in fp32; the result is rounded once, and differs from
    `codecs.transform.Part.inverse` by no more than the order of summation does.

    Args:
        symbols: int16 slabs of parts, one after the other, each `[tokens, width]`: rows of all chunks.
        tokens: of all chunks.
        data: uint8, where protected tokens are.
        heads: `[H, 10]` int64, contiguous: what is written. Channels and components of all parts are numbered
            together; `slab` is the part's first. Of the part: `width` its components, `part` its number, `heads` in
            it. Of the head: `first` component of the part that it is made of and how many (`depth`), where its
            `matrix` `[depth, dim]` begins and the `stride` of its rows, its `own` first channel in the part and its
            `number` there.
        dim: of all these heads.
        align: what every dim is a multiple of.
        tiles: `[N, 2]` int64 (chunk, first token), multiples of `BLOCK_T` within the chunk.
        chunks: `[C, 4]` int64: address of the output, tokens of the chunk, its first row in `symbols`, tokens that are
            protected. Head `h` of a chunk is `[T, dim]` at element `T * (slab + own)`.
        protected: `[C, parts]` int64 where each part's protected tokens are in `data`, contiguous.
        matrices: fp16.
        mean: fp32, of every channel.
        coded: uint8, of every component: 0 where it has no symbols, and those in `symbols` mean nothing.
        step: what a symbol is worth.
        status: `[C]` int32, set to 1 for a chunk with protected tokens that no encoder writes.
        dtype: of the output.
    """
    if not len(tiles) or not len(heads):
        return
    _inverse[len(tiles), len(heads)](
        symbols,
        tokens,
        data,
        heads,
        tiles,
        chunks,
        protected,
        protected.stride(0),
        matrices,
        mean,
        coded,
        step,
        status,
        TYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        D=dim,
        ALIGN=align,
        SHIFT=SHIFT,
        LARGE=1 << SHIFT,
        CLAMPED=dtype == torch.float16,
        BLOCK_T=BLOCK_T,
        BLOCK_K=min(BLOCK_K, max(16, triton.next_power_of_2(dim))),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=WARPS,
        num_stages=STAGES,
    )


@triton.jit(do_not_specialize=["tokens"])
def _inverse(
    symbols,
    tokens,
    data,
    heads,
    tiles,
    chunks,
    protected,
    parts,
    matrices,
    mean,
    coded,
    step,
    status,
    TYPE: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    LARGE: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, head = tiles + 2 * tl.program_id(0), heads + 10 * tl.program_id(1)
    chunk, begin = tl.load(tile), tl.load(tile + 1)
    slab, width = tl.multiple_of(tl.load(head), ALIGN), tl.multiple_of(tl.load(head + 1), ALIGN)
    first, depth = tl.multiple_of(tl.load(head + 2), ALIGN), tl.multiple_of(tl.load(head + 3).to(tl.int32), ALIGN)
    matrix, stride = tl.multiple_of(tl.load(head + 4), ALIGN), tl.multiple_of(tl.load(head + 5), ALIGN)
    own = tl.multiple_of(tl.load(head + 6), ALIGN)
    chunks += 4 * chunk
    out = tl.multiple_of(tl.load(chunks).to(tl.pointer_type(TYPE)), 16)
    length, row, kept = tl.load(chunks + 1), tl.load(chunks + 2), tl.load(chunks + 3)

    token, dim = begin + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    shown = (token < length)[:, None] & (dim < D)[None]
    symbols += tokens * slab + (row + token)[:, None] * width + first
    matrices += matrix + dim[None]
    coded += slab + first
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, depth, BLOCK_K):
        component = start + tl.arange(0, BLOCK_K)
        there = component < depth
        counted = tl.load(coded + component, mask=there, other=0) != 0
        symbol = tl.load(symbols + component[None], mask=(token < length)[:, None] & there[None], other=0)
        symbol = tl.where(counted[None], symbol, 0).to(tl.int32)
        weight = tl.load(matrices + component[:, None] * stride, mask=there[:, None] & (dim < D)[None], other=0.0)
        high = (symbol + (1 << SHIFT - 1)) >> SHIFT
        total += tl.dot((symbol - (high << SHIFT)).to(tl.float16), weight)
        if tl.max(tl.max(tl.abs(high), 1), 0) > 0:
            total += tl.dot(high.to(tl.float16), weight) * LARGE
    state = tl.load(mean + slab + own + dim, mask=dim < D, other=0.0)[None] + step * total

    if begin < kept:
        part, number, count = tl.load(head + 9), tl.load(head + 7), tl.load(head + 8)
        block = data + tl.load(protected + chunk * parts + part)
        safe = token < kept
        scale = tl.load(block.to(tl.pointer_type(tl.float32)) + token * count + number, mask=safe, other=0.0)
        numbers = block.to(tl.pointer_type(tl.int8)) + 4 * kept * count + token[:, None] * width + own + dim[None]
        value = tl.load(numbers, mask=safe[:, None] & (dim < D)[None], other=0)
        state = tl.where(safe[:, None], value.to(tl.float32) * scale[:, None], state)
        good = (scale >= 0) & (scale < float("inf"))
        if tl.min(good.to(tl.int32), 0) == 0:
            tl.store(status + chunk, 1)
    if CLAMPED:
        state = tl.minimum(tl.maximum(state, -65504.0), 65504.0)
    out += length * (slab + own) + token[:, None] * D + dim[None]
    tl.store(out, state.to(TYPE), mask=shown)
