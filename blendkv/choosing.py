"""Which tokens of a prompt's chunks are recomputed, as a selector ranks them; ahead of time where it needs no layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from blendkv.correctors import Corrector
from blendkv.kernels.table import upload
from blendkv.plan import RowPlan
from blendkv.selectors import Candidates, Selector
from blendkv.selectors.base import best_first, scores_of


def candidates_of(
    plan: RowPlan,
    selector: Selector,
    length: int,
    rows: Tensor,
    k_deviation: Tensor | None = None,
    v_deviation: Tensor | None = None,
    attention: Mapping[int, Tensor] | None = None,
) -> Candidates:
    """What a selector sees.

    Args:
        plan: of the prompt.
        selector: whose stored scores are looked up.
        length: of the prompt in tokens.
        rows: `[N]` prompt indices of chunk tokens.
        k_deviation: `[N]`, if it compares.
        v_deviation: `[N]`, likewise.
        attention: `[N]` by layer, if it asks the question.
    """
    *spans, exact = upload(np.stack([*plan.spans(length), plan.exact]), rows.device)[:, rows]
    return Candidates(
        rows,
        *spans,
        exact=exact.bool(),
        k_deviation=k_deviation,
        v_deviation=v_deviation,
        scores={name: plan.scores(name, length).to(rows.device)[rows] for name in selector.stored},
        attention=attention or {},
    )


def keep_best(selector: Selector, candidates: Tensor, budget: int, view: Callable[[], Candidates]) -> Tensor:
    """`[budget]` of the candidates `[N]`, ascending: those that a selector ranks first, exact ones last.

    Args:
        selector: that ranks.
        candidates: prompt indices, ascending.
        budget: how many are kept; all, if there are no more.
        view: what the selector sees of them; asked only if it has a choice.
    """
    if budget >= len(candidates):
        return candidates
    if not budget:
        return candidates[:0]
    seen = view()
    order = best_first(scores_of(selector, seen))
    if seen.exact is not None:  # last, in the selector's order
        order = order[torch.sort(seen.exact[order].int(), stable=True).indices]
    return candidates[order[:budget]].sort().values


def is_known_ahead(selector: Selector, schedule: Mapping[int, float], corrector: Corrector | None = None) -> bool:
    """Whether it can be said which stored states are not read before any layer runs.

    Positions and stored scores are enough for that. Any selector will do where there is nothing to choose, at ratios
    0 and 1. A corrector that compares reads all.
    """
    known = not selector.needs and (corrector is None or not corrector.compares)
    return known or not any(schedule.values())


def foresee(plan: RowPlan, selector: Selector, schedule: Mapping[int, float], length: int) -> dict[int, Tensor]:
    """By layer in front of which rows are dropped, prompt indices of the chunk tokens that are computed from there on.

    Args:
        plan: of the prompt.
        selector: that ranks tokens.
        schedule: layer -> share kept from there on, ascending.
        length: of the prompt in tokens.

    Raises:
        ValueError: for a selector that must see layers first (`is_known_ahead`).
    """
    if not is_known_ahead(selector, schedule):
        raise ValueError(f"selector {selector.name!r} needs {', '.join(selector.needs)}: nobody knows its tokens ahead")
    kept, found = torch.from_numpy(np.flatnonzero(~plan.fresh)), {}
    for layer, share in schedule.items():
        budget, rows = round(share * plan.chunk_tokens), kept
        kept = keep_best(selector, rows, budget, lambda rows=rows: candidates_of(plan, selector, length, rows))
        found[layer] = kept
    return found


def never_read(plan: RowPlan, selector: Selector, schedule: Mapping[int, float], layers: int) -> dict[int, np.ndarray]:
    """By `id` of each chunk that is placed, `[layers, tokens]` True where what is stored is never read.

    Args:
        plan: of the prompt.
        selector: see `foresee`.
        schedule: likewise.
        layers: of the model.
    """
    length = len(plan.fresh)
    foreseen = foresee(plan, selector, schedule, length)
    read, reads = np.zeros((layers, length), bool), np.zeros(length, bool)
    for layer in range(layers):
        if layer in foreseen:
            reads = ~plan.fresh
            reads[foreseen[layer].numpy()] = False
        read[layer] = reads
    found = {id(chunk): np.ones((layers, len(chunk)), bool) for _, chunk in plan.placed}
    for span, chunk in plan.placed:
        found[id(chunk)][:, span.offset : span.offset + span.length] &= ~read[:, span.start : span.stop]
    return found
