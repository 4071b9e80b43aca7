"""What must hold on a prompt before any time of it is reported."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv.attaching import attachment_of
from blendkv.bench.methods import Blend, Case, Full, forward
from blendkv.cache import BlendedCache
from blendkv.errors import BlendError
from blendkv.learning import bound_of, rms_ratio
from blendkv.proof import BLEND_BOUND, Reference, cut_chunk, distance
from blendkv.selectors import HKVD, Random, Selector

NARROWED = 0.15
"""Share of chunk tokens computed while exact keys and values are blended."""


def require_exact(case: Case, selectors: Iterable[Selector] = (HKVD(),)) -> float:
    """Ratio 1 says what full recompute says, whichever selector is asked (one with a ratio of its own is not).

    Returns:
        The worst error: RMS of the logits' difference / RMS of full recompute's.

    Raises:
        BlendError: with the figure.
    """
    full = Full().prepare(case)(1, output_logits=True)
    bound = bound_of(BLEND_BOUND, case.chunks[0].dtype)
    errors = [0.0]
    for selector in selectors:
        if selector.ratio is not None:
            continue
        blend = Blend(1.0, selector).prepare(case)(1, output_logits=True)
        errors.append(rms_ratio(blend.logits, full.logits))
        ties = case.chunks[0].dtype != torch.float32  # random weights nearly tie: rounding may swap two tokens
        same = ties or torch.equal(blend.tokens, full.tokens)
        if not (errors[-1] <= bound and same):
            raise BlendError(
                f"a blend at ratio 1 is not full prefill here ({case.tokens} tokens, {selector.name}: first token "
                f"{blend.tokens.tolist()} instead of {full.tokens.tolist()}, logits off by {errors[-1]:.3g}, at most "
                f"{bound:.3g} allowed): no time is reported; run `blendkv verify` on this model"
            )
    return max(errors)


def require_same(case: Case, other: Case, blends: Iterable[Blend]) -> float:
    """Chunks that lie elsewhere, or come while layers are computed, make each blend say what those of a case do.

    Returns:
        The worst error, as of `require_exact`.

    Raises:
        BlendError: with the figure.
    """
    bound, errors = bound_of(BLEND_BOUND, case.chunks[0].dtype), [0.0]
    for blend in blends:
        mine, theirs = (blend.prepare(each)(1, output_logits=True).logits for each in (case, other))
        errors.append(rms_ratio(theirs, mine))
        if not errors[-1] <= bound:
            raise BlendError(
                f"blends of chunks that lie elsewhere say something else ({case.tokens} tokens, {blend.selector.name}: "
                f"logits off by {errors[-1]:.3g}, at most {bound:.3g} allowed): no time is reported"
            )
    return max(errors)


@torch.no_grad()
def require_exact_states(case: Case, seed: int = 0) -> float:
    """Exact keys and values stay exact through a blend that computes `NARROWED` of the rows, chosen at random.

    The chunks are cut out of a full prefill of this very prompt, so that nothing but a mistake in the narrowed path
    (rows, positions, masks, placing) can make a difference.

    Returns:
        `proof.distance` of logits and of every layer's keys and values.

    Raises:
        BlendError: with the figure.
    """
    state, ids, own = attachment_of(case.model), case.ids, DynamicCache()
    logits = forward(case.model, ids, own)[:, -1]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    reference = Reference(ids, positions, logits, _compat.cached_states(own))
    borders = accumulate(map(len, case.chunks), initial=0)
    cache = BlendedCache([cut_chunk(state, reference, a, b) for a, b in pairwise(borders)], NARROWED, Random(seed))
    blended = forward(case.model, ids, cache)[:, -1]
    error, bound = distance(blended, cache, reference), bound_of(BLEND_BOUND, case.chunks[0].dtype)
    if not (error <= bound and cache.report.reused_tokens):
        raise BlendError(
            f"exact keys and values do not stay exact through a blend here ({case.tokens} tokens, {NARROWED:.0%} "
            f"computed: off by {error:.3g}, at most {bound:.3g} allowed; {cache.report.reused_tokens} tokens reused): "
            "no time is reported; run `blendkv verify` on this model"
        )
    return error
