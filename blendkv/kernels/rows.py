"""Rows computed fresh: written among those of the whole prompt, or compared with what is stored there."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_S = 16
"""Rows a program handles."""
WARPS = 4


def scatter(keys: Tensor, values: Tensor, rows: Tensor, table: Tensor, layer: int) -> None:
    """Writes fresh keys and values into a layer's buffers, both in one launch.

    Args:
        keys: `[B, H, S, D]`, the last dimension contiguous, of the buffers' dtype.
        values: `[B, H, S, Dv]`, likewise.
        rows: `[B, S]` int64 prompt indices, the last dimension contiguous; where one is repeated, so is what is
            written.
        table: `[L, 4]` int64 (`table.describe`).
        layer: row of the table.
    """
    batch, heads, count, dim = keys.shape
    _scatter[triton.cdiv(count, BLOCK_S), heads, batch](
        keys,
        *keys.stride()[:3],
        values,
        *values.stride()[:3],
        rows,
        rows.stride(0),
        count,
        table,
        layer,
        H=heads,
        D=dim,
        DV=values.shape[3],
        BLOCK_S=BLOCK_S,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_V=triton.next_power_of_2(values.shape[3]),
        num_warps=WARPS,
    )


def deviation(
    fresh: Tensor, rows: Tensor | None, table: Tensor, layer: int, which: Literal["keys", "values"]
) -> Tensor:
    """Squared distance of fresh states from those in a layer's buffer, in fp32.

    Args:
        fresh: `[B, H, S, D]`, the last dimension contiguous, of the buffer's dtype.
        rows: `[B, S]` int64 prompt indices of the fresh states, the last dimension contiguous; None: the first S.
        table: `[L, 4]` int64 (`table.describe`).
        layer: row of the table.
        which: buffer.

    Returns:
        `[B, S]` fp32, summed over heads and dimensions.
    """
    batch, heads, count, dim = fresh.shape
    out = torch.empty(batch, count, dtype=torch.float32, device=fresh.device)
    _deviation[triton.cdiv(count, BLOCK_S), batch](
        fresh,
        *fresh.stride()[:3],
        rows,
        0 if rows is None else rows.stride(0),
        count,
        table,
        layer,
        out,
        COLUMN=0 if which == "keys" else 1,
        H=heads,
        D=dim,
        BLOCK_S=BLOCK_S,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=WARPS,
    )
    return out


@triton.jit(do_not_specialize=["count", "layer"])
def _scatter(
    keys,
    keys_b,
    keys_h,
    keys_s,
    values,
    values_b,
    values_h,
    values_s,
    rows,
    rows_b,
    count,
    table,
    layer,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = index < count
    row = tl.load(rows + b * rows_b + index, mask=inside, other=0)
    table += 4 * layer
    to_keys = tl.multiple_of(tl.load(table).to(tl.pointer_type(keys.dtype.element_ty)), 16)
    to_values = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(values.dtype.element_ty)), 16)
    to = ((b * H + h) * tl.load(table + 2) + row)[:, None]

    index = index.to(tl.int64)[:, None]
    dim, value_dim = tl.arange(0, BLOCK_D)[None], tl.arange(0, BLOCK_V)[None]
    keyed, valued = inside[:, None] & (dim < D), inside[:, None] & (value_dim < DV)
    key = tl.load(keys + b * keys_b + h * keys_h + index * keys_s + dim, mask=keyed)
    value = tl.load(values + b * values_b + h * values_h + index * values_s + value_dim, mask=valued)
    tl.store(to_keys + to * D + dim, key, mask=keyed)
    tl.store(to_values + to * DV + value_dim, value, mask=valued)


@triton.jit(do_not_specialize=["count", "layer"])
def _deviation(
    fresh,
    fresh_b,
    fresh_h,
    fresh_s,
    rows,
    rows_b,
    count,
    table,
    layer,
    out,
    COLUMN: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = index < count
    row = index.to(tl.int64) if rows is None else tl.load(rows + b * rows_b + index, mask=inside, other=0)
    table += 4 * layer
    stored = tl.multiple_of(tl.load(table + COLUMN).to(tl.pointer_type(fresh.dtype.element_ty)), 16)
    capacity = tl.load(table + 2)

    dim = tl.arange(0, BLOCK_D)[None]
    mask = inside[:, None] & (dim < D)
    at = fresh + b * fresh_b + index.to(tl.int64)[:, None] * fresh_s + dim
    squares = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for h in range(H):
        new = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        held = tl.load(stored + ((b * H + h) * capacity + row)[:, None] * D + dim, mask=mask, other=0.0)
        squares += (new - held.to(tl.float32)) * (new - held.to(tl.float32))
        at += fresh_h
    tl.store(out + b * count + index, tl.sum(squares, 1), mask=inside)
