"""Attention of scattered rows (Triton): queries anywhere in the prompt, each against exactly the keys it may see.

The query heads of one KV head are folded into rows, so that a key is read once for all of them; rows come sorted, so
that a block of them needs keys only up to its own last row (and, with a sliding window, from its first). Keys that
every row of a block sees need no mask. Where the grid would leave multiprocessors idle, keys are split and the parts
joined by a second kernel (Flash-Decoding).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """How a launch is cut: rows (query heads folded in) and keys per block, warps, pipeline stages, key splits."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def _keys(
    acc, top, total, q, keys, values, row, pad_base, start, stop, filled, window, scale, softcap,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, PAD: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `[start, stop)` in blocks, with an online softmax in base 2."""
    for first in tl.range(start, stop, BLOCK_N):
        k = keys.load([first, 0])  # beyond what is filled: zeros
        v = values.load([first, 0])
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * scale) + 1.0))  # tanh, in units of base 2
        if MASKED:
            key = first + tl.arange(0, BLOCK_N)
            seen = key[None, :] <= row[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > row[:, None] - window)
            if PAD:
                seen = seen & (tl.load(pad_base + key, mask=key < filled, other=0) != 0)[None, :]
            score = tl.where(seen, score, -float("inf"))
        unit = 1.0 if SOFTCAP else scale
        new_top = tl.maximum(top, tl.max(score, 1) * unit)
        anchor = tl.where(new_top == -float("inf"), 0.0, new_top) if MASKED else new_top
        weight = tl.exp2(score * unit - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["pad_batch", "layer", "S", "window"])
def _attend(
    Q, TABLE, ROWS, PADDING, SINKS, OUT, PARTS, TOPS,
    q_batch, q_head, q_row, pad_batch, layer, S, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, PAD: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    element = Q.dtype.element_ty
    blocks = tl.cdiv(S * G, BLOCK_M)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    head = pid % H
    batch = tl.program_id(2)
    block = blocks - 1 - pid // H  # the longest first
    filled = tl.load(TABLE + 4 * layer + 3).to(tl.int32)
    capacity = tl.load(TABLE + 4 * layer + 2)
    place = (batch * H + head).to(tl.int64) * capacity
    keys = tl.make_tensor_descriptor(
        tl.load(TABLE + 4 * layer).to(tl.pointer_type(element)) + place * D, [filled, D], [D, 1], [BLOCK_N, BLOCK_D]
    )
    values = tl.make_tensor_descriptor(
        tl.load(TABLE + 4 * layer + 1).to(tl.pointer_type(element)) + place * DV, [filled, DV], [DV, 1],
        [BLOCK_N, BLOCK_DV],
    )  # fmt: skip
    flat = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = flat < S * G
    flat = tl.minimum(flat, S * G - 1)
    s = flat // G
    g = flat % G
    row = tl.load(ROWS + batch * S + s).to(tl.int32)
    first_row = tl.min(row, 0)
    last_row = tl.max(row, 0)
    if WINDOW:
        start = tl.maximum(0, first_row - window + 1) // BLOCK_N * BLOCK_N
        open_from = tl.cdiv(tl.maximum(0, last_row - window + 1), BLOCK_N) * BLOCK_N
    else:
        start = 0
        open_from = 0
    stop = tl.minimum(last_row + 1, filled)
    open_to = tl.maximum(open_from, (first_row + 1) // BLOCK_N * BLOCK_N)
    if PAD:
        open_to = open_from  # everything is masked
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(filled, SPLITS), BLOCK_N) * BLOCK_N
        start = tl.maximum(start, split * share)
        stop = tl.minimum(stop, (split + 1) * share)
        if start >= stop:
            return
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = Q + batch * q_batch + ((head * G + g) * q_head)[:, None] + (s.to(tl.int64) * q_row)[:, None] + d[None, :]
    q = tl.load(q_at, mask=(d < D)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    pad_base = PADDING + batch * pad_batch
    if WINDOW or PAD:
        acc, top, total = _keys(
            acc, top, total, q, keys, values, row, pad_base, start, tl.minimum(stop, open_from), filled,
            window, scale, softcap, BLOCK_N, True, WINDOW, PAD, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, top, total = _keys(
        acc, top, total, q, keys, values, row, pad_base, tl.maximum(start, open_from), tl.minimum(stop, open_to),
        filled, window, scale, softcap, BLOCK_N, False, WINDOW, PAD, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc, top, total = _keys(
        acc, top, total, q, keys, values, row, pad_base, tl.maximum(start, open_to), stop, filled,
        window, scale, softcap, BLOCK_N, True, WINDOW, PAD, SOFTCAP, PRECISION,
    )  # fmt: skip
    line = (batch * S + s).to(tl.int64) * (H * G) + head * G + g  # of [B, S, Q]
    if SPLITS > 1:
        lines = tl.num_programs(2).to(tl.int64) * S * (H * G)
        tl.store(
            PARTS + (split * lines + line)[:, None] * DV + dv[None, :], acc, mask=real[:, None] & (dv < DV)[None, :]
        )
        tl.store(TOPS + (split * lines + line) * 2, top, mask=real)
        tl.store(TOPS + (split * lines + line) * 2 + 1, total, mask=real)
    else:
        if SINK:
            sink = tl.load(SINKS + head * G + g).to(tl.float32) * LOG2E
            total += tl.exp2(sink - tl.where(top == -float("inf"), sink, top))
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(OUT + line[:, None] * DV + dv[None, :], out.to(element), mask=real[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["layer", "S", "lines", "window"])
def _join(
    PARTS, TOPS, TABLE, ROWS, SINKS, OUT, layer, S, lines, window,
    Q: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One line of `[B, S, Q]`: the parts that its row's keys fell into, joined."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + line // Q).to(tl.int32)
    filled = tl.load(TABLE + 4 * layer + 3).to(tl.int32)
    share = tl.cdiv(tl.cdiv(filled, SPLITS), BLOCK_N) * BLOCK_N
    split = tl.arange(0, BLOCK_S)
    there = (split < SPLITS) & (split * share <= row)
    if WINDOW:
        there = there & ((split + 1) * share > row - window + 1)
    at = split.to(tl.int64) * lines + line
    top = tl.load(TOPS + at * 2, mask=there, other=-float("inf"))
    total = tl.load(TOPS + at * 2 + 1, mask=there, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp2(top - highest)
    whole = tl.sum(total * weight, 0)
    if SINK:
        whole += tl.exp2(tl.load(SINKS + line % Q).to(tl.float32) * LOG2E - highest)
    dv = tl.arange(0, BLOCK_DV)
    parts = tl.load(PARTS + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(OUT + line * DV + dv, out.to(OUT.dtype.element_ty), mask=dv < DV)


def scattered_attention(
    query: Tensor,
    rows: Tensor,
    table: Tensor,
    layer: int,
    heads: int,
    value_dim: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Attention of the queries at `rows` over the keys of a layer's buffers.

    Args:
        query: `[B, Q, S, D]`, any strides with the last dim contiguous.
        rows: `[B, S]` int64 prompt indices of the queries, ascending; row r sees keys `<= r`.
        table: `[L, 4]` int64 addresses (see `kernels.table`).
        layer: row of the table.
        heads: KV heads H.
        value_dim: Dv.
        scaling: of the logits.
        window: row r sees keys `> r - window`; None for all.
        softcap: `softcap * tanh(logit / softcap)`, as Gemma-2; None for none.
        sinks: `[Q]` logits that only add to the denominator, as gpt-oss; None for none.
        padding: `[B, T]` bool, False where nobody may look; None for none. T at least the tokens filled.
        tiling: how to cut the launch; by default what was measured best for the shape.

    Returns:
        `[B, S, Q, Dv]`; 0 for a row that sees nothing.
    """
    b, q, s, d = query.shape
    groups = q // heads
    rows = rows.contiguous()
    tiling = tiling or choose_tiling(s * groups, b * heads, max(d, value_dim), query.dtype, query.device)
    out = query.new_empty(b, s, q, value_dim)
    if tiling.splits > 1:
        parts = torch.empty(tiling.splits, b * s * q, value_dim, dtype=torch.float32, device=query.device)
        tops = torch.empty(tiling.splits, b * s * q, 2, dtype=torch.float32, device=query.device)
    else:
        parts = tops = out
    triton.set_allocator(_scratch)
    grid = (triton.cdiv(s * groups, tiling.block_m) * heads, tiling.splits, b)
    log2e = LOG2E.value
    _attend[grid](
        query, table, rows, rows if padding is None else padding.view(torch.uint8), query if sinks is None else sinks,
        out, parts, tops,
        query.stride(0), query.stride(1), query.stride(2), 0 if padding is None else padding.stride(0),
        layer, s, window or 0, scaling * log2e * (2 / softcap if softcap else 1.0), (softcap or 0.0) * log2e,
        H=heads, G=groups, D=d, DV=value_dim,
        BLOCK_D=max(16, triton.next_power_of_2(d)), BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, SPLITS=tiling.splits,
        WINDOW=window is not None, PAD=padding is not None, SOFTCAP=softcap is not None, SINK=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if tiling.splits > 1:
        _join[(b * s * q,)](
            parts, tops, table, rows, query if sinks is None else sinks, out, layer, s, b * s * q, window or 0,
            Q=q, DV=value_dim, BLOCK_DV=max(16, triton.next_power_of_2(value_dim)), BLOCK_N=tiling.block_n,
            SPLITS=tiling.splits, BLOCK_S=triton.next_power_of_2(tiling.splits), WINDOW=window is not None,
            SINK=sinks is not None, num_warps=1 if tiling.splits <= 8 else 4,
        )  # fmt: skip
    return out


def choose_tiling(lines: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """What was measured best on an H100 (docs/lab-log.md), smaller where shared memory is.

    Args:
        lines: rows with query heads folded in, per KV head.
        heads: KV heads times batch.
        dim: the larger head dim.
        dtype: of keys.
        device: where to run.
    """
    processors, memory = _card(device)
    wide = dim * dtype.itemsize  # bytes of a key: 256 for 128 dims of bf16
    if lines <= 16:
        block_n = max(16, min(128, 2**14 // triton.next_power_of_2(wide)))
        tiling = Tiling(16, block_n, 4, 2)
    elif wide > 512:
        tiling = Tiling(32, 32, 4, 2) if memory >= 160 * 1024 else Tiling(16, 16, 4, 2)
    elif wide > 256:
        tiling = Tiling(64, 32, 4, 2)
    elif memory >= 227 * 1024 and triton.cdiv(lines, 128) * heads >= 1.5 * processors:
        tiling = Tiling(128, 128, 8, 3)
    else:
        tiling = Tiling(64, 64, 4, 3 if memory >= 160 * 1024 else 2)
    programs = triton.cdiv(lines, tiling.block_m) * heads
    splits = 1
    while splits < 16 and programs * splits * 2 <= 2 * processors:
        splits *= 2
    return tiling._replace(splits=splits)


@functools.cache
def _card(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have; the interpreter is one."""
    if device.type != "cuda":
        return 1, 2**16
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for tensor descriptors, as `triton.set_allocator` wants it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
