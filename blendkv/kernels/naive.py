"""What the kernels compute, slowly and obviously, on ordinary tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]


def rotate_and_place(
    chunks: Sequence[tuple[Tensor, Tensor]],
    pieces: Sequence[tuple[int, int]],
    to_keys: Tensor,
    to_values: Tensor,
    pairing: Literal["half", "interleaved", "none"],
    angles: Angles | None,
) -> None:
    """Writes the keys of one layer, rotated to the prompt's positions, and its values into the buffers.

    Args:
        chunks: for each piece un-rotated keys `[H, n, D]` and values `[H, n, Dv]`.
        pieces: for each piece (row of the batch, prompt index of its first token).
        to_keys: `[B, H, capacity, D]`.
        to_values: `[B, H, capacity, Dv]`.
        pairing: which dimensions are turned together (`Rotation.pairing`).
        angles: cosines and sines `[B, 1, T, n]` of the whole prompt, or None to copy.
    """
    for (keys, values), (row, start) in zip(chunks, pieces, strict=True):
        here = slice(start, start + keys.shape[1])
        turned = keys.float().clone()
        if angles is not None:
            cos, sin = (angle[row, :, here] for angle in angles)
            n = cos.shape[-1]
            first = torch.arange(n) if pairing == "half" else 2 * torch.arange(n)
            second = first + (n if pairing == "half" else 1)
            a, b = turned[..., first], turned[..., second]
            turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
        to_keys[row, :, here] = turned.to(to_keys.dtype)
        to_values[row, :, here] = values


def scatter(keys: Tensor, values: Tensor, rows: Tensor, to_keys: Tensor, to_values: Tensor) -> None:
    """Writes `[B, H, S, D]` keys and `[B, H, S, Dv]` values into the buffers at `rows [B, S]`."""
    for b, row in enumerate(rows):
        to_keys[b, :, row] = keys[b]
        to_values[b, :, row] = values[b]


def deviation(fresh: Tensor, rows: Tensor | None, stored: Tensor) -> Tensor:
    """`[B, S]` fp32: squared distance of `fresh [B, H, S, D]` from the buffer `[B, H, capacity, D]` at `rows [B, S]`.

    Without rows it is that of the first S tokens.
    """
    if rows is None:
        rows = torch.arange(fresh.shape[2], device=fresh.device).expand(fresh.shape[0], -1)
    held = torch.stack([stored[b, :, row] for b, row in enumerate(rows)])
    return (fresh.float() - held.float()).square().sum((1, 3))


def attention_mass(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """The attention that every key gets, summed over query heads and rows.

    Args:
        query: `[B, Q, S, D]`.
        rows: `[B, S]` prompt indices of the queries; a row sees keys up to itself.
        keys: `[B, H, T, D]`.
        scaling: of the logits.
        window: a row sees only this many keys, itself the last; or None.
        softcap: logits become `softcap * tanh(logit / softcap)`; or None.
        sinks: `[Q]` a logit of each head that only takes its share of attention away; or None.
        padding: `[B, T]` False at padding, or None.

    Returns:
        `[B, T]` fp32, or float64 for float64.
    """
    return _shares(query, rows, keys, scaling, window, softcap, sinks, padding).sum((1, 2))


def scattered_attention(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Attention of queries at `rows` over the keys that each may see.

    Args:
        query: `[B, Q, S, D]`.
        rows: `[B, S]` prompt indices of the queries; a row sees keys up to itself.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, Dv]`.
        scaling: of the logits.
        window: a row sees only this many keys, itself the last; or None.
        softcap: logits become `softcap * tanh(logit / softcap)`; or None.
        sinks: `[Q]` a logit of each head that only takes its share of attention away; or None.
        padding: `[B, T]` False at padding, or None.

    Returns:
        `[B, S, Q, Dv]` fp32, or float64 for float64; 0 for a row that sees nothing.
    """
    shares = _shares(query, rows, keys, scaling, window, softcap, sinks, padding)
    values = values.to(shares.dtype).repeat_interleave(query.shape[1] // values.shape[1], 1)
    return (shares @ values).transpose(1, 2)


def _shares(
    query: Tensor,
    rows: Tensor,
    keys: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    padding: Tensor | None,
) -> Tensor:
    """How much every query attends to every key, `[B, Q, S, T]`: the softmax, 0 where a key is not seen."""
    exact = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // keys.shape[1]
    scores = query.to(exact) @ keys.to(exact).repeat_interleave(groups, 1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key, row = torch.arange(keys.shape[2], device=keys.device), rows[:, None, :, None]
    seen = key <= row
    if window is not None:
        seen &= key > row - window
    if padding is not None:
        seen = seen & padding[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(exact)[:, None, None])
    return (scores - total).exp().masked_fill(~seen, 0)
