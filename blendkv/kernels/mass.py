"""How much attention every key of the prompt gets from a few rows (a question), without a matrix of all scores.

Two passes over the keys: the first gives every row's normaliser (log-sum-exp), in parallel over parts of the keys; the
second sums the probabilities of a tile of keys over all rows. The query heads of one KV head are folded into rows:
folded row f is row f // G of head f % G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = {2: 64, 4: 32}
"""Folded rows, and keys, of a tile, by the bytes of a number: larger tiles of fp32 do not fit into registers."""
SPLITS = 64
"""Parts, at most, that the first pass cuts the keys into."""
WARPS, STAGES = 4, 2


def attention_mass(
    query: Tensor,
    rows: Tensor,
    table: Tensor,
    layer: int,
    heads: int,
    tokens: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """The attention that every key of a layer gets, summed over query heads and rows.

    Args:
        query: `[B, Q, S, D]` rotated, the last dimension contiguous, of the buffers' dtype.
        rows: `[B, S]` int64 prompt indices of the queries, ascending, the last dimension contiguous; a row sees keys up
            to itself. Repeated rows count repeatedly.
        table: `[L, 4]` int64 (`table.describe`); keys from `filled` on are not read.
        layer: row of the table.
        heads: KV heads.
        tokens: T, known on the host; at least `filled`, or later keys are ignored.
        scaling: of the logits.
        window: a row sees only this many keys, itself the last; or None.
        softcap: logits become `softcap * tanh(logit / softcap)`; or None.
        sinks: `[Q]` a logit of each head that only takes its share of attention away; or None.
        padding: `[B, T]` bool, False at padding, the last dimension contiguous; or None.

    Returns:
        `[B, T]` fp32.
    """
    batch, all_heads, count, dim = query.shape
    groups = all_heads // heads
    block = BLOCK[query.element_size()]
    split = block * triton.cdiv(triton.cdiv(tokens, block), SPLITS)
    splits = triton.cdiv(tokens, split)
    part = torch.empty(batch, heads, splits, count * groups, dtype=torch.float32, device=query.device)
    mass = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
    real = None if padding is None else padding.view(torch.uint8)
    inputs = (query, *query.stride()[:3], rows, rows.stride(0), count, table, layer, tokens)
    inputs += (real, 0 if real is None else real.stride(0))
    constants = {
        "SCALING": scaling,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "H": heads,
        "G": groups,
        "D": dim,
        "BLOCK_F": block,
        "BLOCK_K": block,
        "BLOCK_D": triton.next_power_of_2(dim),
        "num_warps": WARPS,
        "num_stages": STAGES,
    }
    _normalise[triton.cdiv(count * groups, block), splits, batch * heads](*inputs, sinks, split, part, **constants)
    total = torch.logsumexp(part, 2)
    _sum[triton.cdiv(tokens, block), batch * heads](*inputs, total, mass, **constants)
    return mass.sum(1)


@triton.jit(do_not_specialize=["count", "layer", "tokens", "split"])
def _normalise(
    query,
    query_b,
    query_h,
    query_s,
    rows,
    rows_b,
    count,
    table,
    layer,
    tokens,
    padding,
    padding_b,
    sinks,
    split,
    part,
    SCALING: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    bh = tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    row = _row(rows + b * rows_b, f, count, G)
    q = _query(query + b * query_b, query_h, query_s, h, f, count, G, D, BLOCK_D)
    keys, filled = _keys(table + 4 * layer, b * H + h, tokens, query.dtype.element_ty, D)

    start = tl.program_id(1) * split
    stop = tl.minimum(tl.minimum(start + split, filled), tl.max(row, 0) + 1)
    if WINDOW is not None:
        start = tl.maximum(start, tl.min(tl.where(row < 0, tokens, row), 0) - WINDOW + 1)
    top = tl.full([BLOCK_F], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_F], tl.float32)
    if sinks is not None:  # one more logit, in the first part
        here = tl.program_id(1) == 0
        top = tl.where(here, tl.load(sinks + h * G + f % G).to(tl.float32), top)
        total += tl.where(here, 1.0, 0.0)
    for first in range(start, stop, BLOCK_K):
        key = first + tl.arange(0, BLOCK_K)
        k = _tile(keys, key, stop, D, BLOCK_D)
        logits = _logits(q, k, row, key, stop, padding, b * padding_b, SCALING, WINDOW, SOFTCAP)
        new = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = new
    lse = tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-37)), float("-inf"))
    at = (b * H + h) * tl.num_programs(1) + tl.program_id(1)
    tl.store(part + at * count * G + f, lse, mask=f < count * G)


@triton.jit(do_not_specialize=["count", "layer", "tokens"])
def _sum(
    query,
    query_b,
    query_h,
    query_s,
    rows,
    rows_b,
    count,
    table,
    layer,
    tokens,
    padding,
    padding_b,
    total,
    mass,
    SCALING: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    keys, filled = _keys(table + 4 * layer, b * H + h, tokens, query.dtype.element_ty, D)
    first = tl.program_id(0) * BLOCK_K
    key = first + tl.arange(0, BLOCK_K)
    k = _tile(keys, key, filled, D, BLOCK_D)

    rows += b * rows_b
    wanted = (first < filled) & (first <= tl.load(rows + count - 1))
    if WINDOW is not None:
        wanted = wanted & (first + BLOCK_K > tl.load(rows) - WINDOW + 1)
    got = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, tl.where(wanted, count * G, 0), BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        row = _row(rows, f, count, G)
        q = _query(query + b * query_b, query_h, query_s, h, f, count, G, D, BLOCK_D)
        logits = _logits(q, k, row, key, filled, padding, b * padding_b, SCALING, WINDOW, SOFTCAP)
        lse = tl.load(total + (b * H + h) * count * G + f, mask=f < count * G, other=0.0)
        got += tl.sum(tl.exp(logits - tl.maximum(lse, -1e30)[:, None]), 0)  # a row that sees nothing has -inf
    tl.store(mass + (b * H + h) * tokens + key, got, mask=key < tokens)


@triton.jit
def _row(rows, f, count, G: tl.constexpr):
    """Prompt indices `[F]` of folded rows; -1, which sees nothing, beyond the last."""
    return tl.load(rows + f // G, mask=f < count * G, other=-1).to(tl.int32)


@triton.jit
def _query(query, query_h, query_s, h, f, count, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries `[F, D]` of folded rows."""
    dim = tl.arange(0, BLOCK_D)[None]
    at = (h * G + f % G).to(tl.int64) * query_h + (f // G).to(tl.int64) * query_s
    return tl.load(query + at[:, None] + dim, mask=(f < count * G)[:, None] & (dim < D), other=0.0)


@triton.jit
def _keys(entry, bh, tokens, TYPE: tl.constexpr, D: tl.constexpr):
    """Where a head's keys are, and how many of them."""
    keys = tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), 16)
    return keys + bh * tl.load(entry + 2) * D, tl.minimum(tl.load(entry + 3).to(tl.int32), tokens)


@triton.jit
def _tile(keys, key, stop, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys `[K, D]`, 0 from `stop` on: what is there may be NaN."""
    dim = tl.arange(0, BLOCK_D)[None]
    return tl.load(keys + key[:, None] * D + dim, mask=(key < stop)[:, None] & (dim < D), other=0.0)


@triton.jit
def _logits(
    q, k, row, key, stop, padding, padding_at, SCALING: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Logits `[F, K]` of keys below `stop`; -inf where a row does not see a key."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALING
    if SOFTCAP is not None:
        small = tl.exp(-2.0 * tl.abs(logits) / SOFTCAP)
        tanh = (1.0 - small) / (1.0 + small)
        logits = SOFTCAP * tl.where(logits < 0, -tanh, tanh)
    seen = (key[None] <= row[:, None]) & (key < stop)[None]
    if WINDOW is not None:
        seen = seen & (key[None] > row[:, None] - WINDOW)
    if padding is not None:
        seen = seen & (tl.load(padding + padding_at + key, mask=key < stop, other=0) != 0)[None]
    return tl.where(seen, logits, float("-inf"))
