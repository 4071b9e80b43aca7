"""A corrector at work on one layer of a blend: stored states that stay are changed, once fresh ones are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blendkv.buffers import Buffers, gather
from blendkv.correctors import Corrector, Kept
from blendkv.kernels.table import upload
from blendkv.plan import RowPlan


def write_corrected(
    corrector: Corrector,
    buffers: Buffers,
    layer_idx: int,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Sequence[Tensor],
) -> None:
    """As `Buffers.write`, and what stays of chunks is corrected. Exact states (`RowPlan.exact`) are left as they are.

    Args:
        corrector: that changes it.
        buffers: of the prompt.
        layer_idx: of the layer.
        rows: `[B, S]` prompt indices of fresh states, ascending.
        keys: `[B, H, S, D]` fresh, rotated by the model.
        values: `[B, H, S, Dv]` fresh.
        chosen: for each batch row the chunk tokens among its rows.
    """
    buffers.place(layer_idx, keys, values)
    layer = buffers.layers[layer_idx]
    errors: tuple[Tensor, Tensor] | None = None
    if corrector.compares:
        stored = gather(layer._keys, rows), gather(layer._values, rows)
        errors = keys.float() - stored[0].float(), values.float() - stored[1].float()
    buffers.write(layer_idx, rows, keys, values)
    for b, (plan, mine) in enumerate(zip(buffers.plans, chosen, strict=True)):
        stays = _stays(plan, mine)
        if not len(stays):
            continue
        at = upload(stays, keys.device)
        told = None
        if errors is not None:
            among = torch.searchsorted(rows[b], mine.to(rows.device))
            told = errors[0][b, :, among], errors[1][b, :, among]
        kept = _kept(buffers, layer_idx, b, at, mine.to(keys.device), told)
        layer._keys[b, :, at], layer._values[b, :, at] = (
            states.to(layer._keys.dtype) for states in corrector.correct(kept)
        )


def _stays(plan: RowPlan, chosen: Tensor) -> np.ndarray:
    """Prompt indices of tokens whose stored states are used and not exact."""
    stays = ~(plan.fresh | plan.exact)
    stays[chosen.cpu().numpy()] = False
    return np.flatnonzero(stays)


def _kept(
    buffers: Buffers, layer_idx: int, b: int, at: Tensor, chosen: Tensor, errors: tuple[Tensor, Tensor] | None
) -> Kept:
    layer, rotation, plan = buffers.layers[layer_idx], buffers.rotations[layer_idx], buffers.plans[b]
    angles = buffers.angles(rotation, at.device)
    number, offset = upload(plan.spans(buffers.length)[:2], at.device)

    def turn(tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if angles is None else (angles[0][b : b + 1, :, tokens], angles[1][b : b + 1, :, tokens])

    return Kept(
        keys=layer._keys[b, :, at].float(),
        values=layer._values[b, :, at].float(),
        chunk=number[at],
        offset=offset[at],
        chunks=len(plan.placed),
        key_errors=None if errors is None else rotation.unrotate(errors[0][None], turn(chosen))[0],
        value_errors=None if errors is None else errors[1],
        error_chunk=None if errors is None else number[chosen],
        error_offset=None if errors is None else offset[chosen],
        place=lambda keys: rotation.rotate(keys[None], turn(at))[0],
    )
