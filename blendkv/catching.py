"""Chunks that turn out not to come while layers run: their tokens are taken through the layers that are behind."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from blendkv.blend import Blend
from blendkv.errors import ChunkMissError
from blendkv.kernels.table import upload
from blendkv.rows import left_pad, take_rows


class CaughtUp(Exception):
    """Ends a pass that catches up; carries `[B, S, D]` hidden states in front of the layer where it ends."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def gives_up(blend: Blend, layer_idx: int) -> bool:
    """Waits for what is stored for a layer, if it is wanted there; chunks of which it will not come are missed.

    Args:
        blend: under way.
        layer_idx: the layer about to run.

    Returns:
        Whether there was one.

    Raises:
        ChunkMissError: then, if the cache is strict.
    """
    if blend.until is not None or (blend.rows is None and not blend.wants_selection(layer_idx)):
        return False
    given_up = False
    while reasons := _lacking(blend, layer_idx):  # without a chunk others are chosen, and what they lack shows
        _give_up(blend, layer_idx, reasons)
        given_up = True
    return given_up


def _lacking(blend: Blend, layer_idx: int) -> dict[int, str]:
    """By `id` of chunks of which what the layer reads will not come: why."""
    with blend.report.clock.stage("load"):
        chunks = {id(chunk): chunk for plan in blend.plans for _, chunk in plan.placed}
        reads = _reads(blend, layer_idx) if any(chunk.has_gaps for chunk in chunks.values()) else {}
        lacking = {at: chunk.lacks(layer_idx, reads.get(at)) for at, chunk in chunks.items()}
    return {at: why for at, why in lacking.items() if why is not None}


def _reads(blend: Blend, layer_idx: int) -> dict[int, np.ndarray]:
    """By `id` of chunks, `[tokens]` True where what is stored for the layer is read; nothing: all of it may be."""
    chosen = blend.chosen_at(layer_idx)
    if chosen is None:
        return {}
    reads: dict[int, np.ndarray] = {}
    for plan, rows in zip(blend.plans, chosen, strict=True):
        reused = ~plan.fresh
        reused[rows.cpu().numpy()] = False
        for span, chunk in plan.placed:
            mine = reads.setdefault(id(chunk), np.zeros(len(chunk), bool))
            mine[span.offset : span.offset + span.length] |= reused[span.start : span.stop]
    return reads


def _give_up(blend: Blend, layer_idx: int, reasons: dict[int, str]) -> None:
    """Chunks are missed from here on: their tokens are computed."""
    chunks = {id(chunk): chunk for plan in blend.plans for _, chunk in plan.placed}
    why = ", ".join(sorted(set(reasons.values())))
    if blend.cache.strict:
        raise ChunkMissError(f"{len(reasons)} chunks did not come whole from their store: {why}")
    for at in reasons:
        tier = getattr(chunks[at], "tier", "")
        blend.report.unload(tier, len(chunks[at]))
        if reasons[at].startswith("error"):  # other faults were counted, or are none of the store
            blend.report.note_faults({}, {tier: {"error": 1}})
    blend.plans[:] = [plan.without(reasons) for plan in blend.plans]
    blend.chosen = blend.still_of_chunks(blend.chosen)
    blend.forget()
    blend.count()
    blend.buffers.replan()
    blend.report.remark(
        f"layer {layer_idx} of {len(reasons)} chunks did not come from their store ({why}): their tokens were computed "
        "instead"
    )


def catch_up(blend: Blend, layer_idx: int, hidden: Tensor) -> Tensor:
    """Takes the tokens of chunks that were given up through the layers that are behind already.

    What other rows have read of those chunks until here was stored; from here on it is computed.

    Args:
        blend: under way.
        layer_idx: the layer about to run.
        hidden: `[B, S, D]` hidden states of the current rows.

    Returns:
        `[B, S', D]` hidden states of the current rows, those tokens among them from now on.
    """
    rows = blend.rows
    assert rows is not None
    blend.graphs = None  # recorded for other numbers of rows
    for layer in blend.cache.blended:
        layer.resize(0)
    behind = _behind(blend, rows)
    blend.until, late = layer_idx, hidden[:, :0]
    blend.set_rows(behind)
    try:
        blend.again()
    except CaughtUp as caught:
        late = caught.hidden
    finally:
        blend.until = None
    rows = torch.cat([rows, behind], 1)
    order = rows.argsort(dim=1, stable=True)
    blend.set_rows(rows.gather(1, order))
    return take_rows(torch.cat([hidden, late.to(hidden.device)], 1), order)


def _behind(blend: Blend, rows: Tensor) -> Tensor:
    """`[B, S]` prompt indices that are to be computed, and were not among the `rows [B, S']` so far."""
    found = []
    for plan, now in zip(blend.plans, rows.cpu().numpy(), strict=True):
        lacking = np.setdiff1d(np.flatnonzero(plan.fresh), now)
        # a row that lacks nothing runs one of its rows again: its first, as the last ones are those whose logits count
        found.append(upload(lacking if len(lacking) else now[:1], rows.device))
    return torch.stack([left_pad(row, max(map(len, found))) for row in found])
