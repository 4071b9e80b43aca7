"""How much attention every key gets from a few rows, in plain torch: blocks of rows, each against the keys it may see.

The slow twin is `kernels.naive.attention_mass`, the fast one for GPUs `kernels.mass.attention_mass`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendkv.attention import RowMask


def attention_mass(
    query: Tensor,
    key: Tensor,
    mask: RowMask,
    counted: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention that every key gets, summed over query heads and rows.

    Args:
        query: `[B, Q, S, D]` of the rows in `mask`.
        key: `[B, H, T, D]`.
        mask: which keys each row sees.
        counted: `[B, S]` False for rows that do not count.
        scaling: of the logits.
        softcap: logits become `softcap * tanh(logit / softcap)`; or None.
        sinks: `[Q]` a logit of each head that only takes its share of attention away; or None.

    Returns:
        `[B, T]` fp32.
    """
    batch, heads, count, dim = query.shape
    shared, groups = key.shape[1], heads // key.shape[1]
    folded = query.reshape(batch, shared, groups, count, dim).transpose(2, 3).reshape(batch, shared, -1, dim)
    weight = counted.to(query.device, torch.float32).repeat_interleave(groups, 1)[:, None, None]
    mass = torch.zeros(batch, key.shape[2], dtype=torch.float32, device=query.device)
    for rows, keys, additive in mask.blocks(query, groups, key.shape[2]):
        part = slice(rows.start * groups, rows.stop * groups)
        logits = (folded[:, :, part] @ key[:, :, :keys].mT).float() * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits += additive
        shares = logits.softmax(-1)
        if sinks is not None:
            own = sinks.float().view(1, shared, 1, groups).expand(1, -1, rows.stop - rows.start, -1)
            shares *= (logits.logsumexp(-1, keepdim=True) - own.reshape(1, shared, -1, 1)).sigmoid_()
        mass[:, :keys] += (weight[..., part] @ shares).sum((1, 2))
    return mass
