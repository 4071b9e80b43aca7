"""What a blend did, once its forward is over: the partition of rows by layer, and the cost."""

from __future__ import annotations

import numpy as np
import torch

from blendkv import flops
from blendkv.blend import Blend
from blendkv.report import LayerRows


def write_report(blend: Blend) -> None:
    """Writes the partition of rows and the cost into the report."""
    blend.prepare()
    missed = sum(plan.missed for plan in blend.plans)
    fresh = blend.report.tokens - blend.chunk_total - missed
    last_only = blend.rows is not None and blend.rows is not blend.filled[-1][0]
    for i, (_, chosen) in enumerate(blend.filled):
        computed = blend.chunk_total if chosen is None else sum(map(len, blend.still_of_chunks(chosen)))
        blend.report.layers.append(
            LayerRows(
                reused=blend.chunk_total - computed,
                recomputed=computed,
                fresh=fresh,
                missed=missed,
                probed=blend.probed.get(i, 0),
                through=computed + fresh + missed,
            )
        )
    last = blend.report.layers[-1]
    if last_only:
        last.through = blend.outputs * len(blend.plans)
    if blend.facts.shape is not None:
        spent = [
            flops.LayerRows(full=layer.recomputed)
            if rows is None
            else flops.LayerRows(probed=layer.probed, selected=layer.recomputed)
            for (rows, _), layer in zip(blend.filled, blend.report.layers, strict=True)
        ]
        if last_only:
            spent[-1] = flops.LayerRows(probed=max(last.probed, last.recomputed))
        blend.report.charged_budget = flops.charged_budget(blend.facts.shape, spent, blend.chunk_total)
    blend.report.cache_bytes = sum(t.nbytes for la in blend.cache.blended for t in (la._keys, la._values))
    all_of_them = [torch.from_numpy(np.flatnonzero(~plan.fresh)) for plan in blend.plans]
    chosen = blend.filled[-1][1]
    blend.cache.recomputed = all_of_them if chosen is None else blend.still_of_chunks(chosen)
