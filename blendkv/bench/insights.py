"""The two observations that CacheBlend rests on, measured on a model and prompts of one's own.

1. Attention deviation falls with the share recomputed, quickly at first: how far the attention of the answer's first
   tokens over the prompt is from that after full recompute (relative L2 distance, mean over heads and tokens).
2. Tokens whose keys and values deviate most in one layer do so in the next: Spearman's rank correlation of the tokens'
   deviations (squared distance of reused from full keys and values) between a layer and the one after it. And few
   tokens hold most of it: the share that the 15% with the largest deviation hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from blendkv import _compat
from blendkv.bench.forcing import STEPS
from blendkv.bench.intervals import Resamples
from blendkv.bench.laying import lay_out
from blendkv.bench.methods import Case, greedy_answer, states_of
from blendkv.bench.records import Example
from blendkv.bench.results import model_device_name, versions
from blendkv.bench.scores import rank_correlation
from blendkv.cache import BlendedCache
from blendkv.selectors import Selector

TOP = 0.15
ATTENTION, RANKS, HELD = "attention deviation", "rank correlation", "deviation held by the top 15%"


def insight_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    examples: Sequence[Example],
    ratios: Sequence[float],
    selector: Selector,
    *,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Rows of three figures: attention deviation by ratio (and layer), rank correlation and share held by layer.

    Args:
        model: loaded with `attn_implementation="eager"`, which alone tells attention weights.
        tokenizer: its tokenizer.
        examples: questions with their chunks.
        ratios: shares of chunk tokens recomputed.
        selector: which.
        about: added to every row.
        progress: whether to show a bar on stderr.

    Raises:
        ValueError: if there are no prompts, or the model's attention tells no weights.
    """
    if not examples:
        raise ValueError("there are no prompts to measure")
    found: dict[tuple[str, int | None, float | None], list[float]] = {}
    for example in tqdm(examples, desc="bench insights", unit="prompt", disable=not progress, leave=False):
        for key, value in prompt_insights(lay_out(model, tokenizer, example), ratios, selector):
            found.setdefault(key, []).append(value)
    draws = Resamples.of(len(examples))
    shared = {"bench": "insights", "device": model_device_name(model), **(about or {}), "prompts": len(examples)}
    shared |= {"dtype": str(model.dtype).removeprefix("torch."), "selector": selector.name, "versions": versions()}
    rows = []
    for (figure, layer, ratio), values in found.items():
        mean, low, high = draws.mean(values)
        known = mean == mean
        told = {"value": mean if known else None, "ci": [low, high] if known else None}
        rows.append(shared | {"figure": figure, "layer": layer, "ratio": ratio, **told})
    return rows


@torch.no_grad()
def prompt_insights(case: Case, ratios: Sequence[float], selector: Selector):
    """(figure, layer, ratio) and value, for one prompt."""
    full, reuse = DynamicCache(), BlendedCache(case.chunks, 0.0)
    answer, _ = greedy_answer(case.model, case.ids, STEPS, full)
    full.crop(case.ids.shape[1] - full.get_seq_length())
    _prompt(case, reuse)
    deviations = kv_deviations(states_of(full), states_of(reuse), len(case.chunks[0]), case.tokens)
    for layer, (here, after) in enumerate(pairwise(deviations[1:]), 1):
        yield (RANKS, layer, None), rank_correlation(here.tolist(), after.tolist())
    for layer, deviation in enumerate(deviations):
        if layer:  # layer 0 deviates by rounding alone
            yield (HELD, layer, None), held(deviation, TOP)
    wanted = _attentions(case, full, answer)
    for ratio in ratios:
        cache = BlendedCache(case.chunks, ratio, selector)
        _prompt(case, cache)
        far = [relative_distance(a, b) for a, b in zip(_attentions(case, cache, answer), wanted, strict=True)]
        yield (ATTENTION, None, ratio), sum(far) / len(far)
        for layer, value in enumerate(far):
            yield (ATTENTION, layer, ratio), value


def kv_deviations(
    full: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]], start: int, stop: int
) -> list[Tensor]:
    """By layer `[stop - start]` squared distances of keys and values `[1, H, T, D]`, each part over its mean square."""
    found = []
    for own, theirs in zip(full, other, strict=True):
        parts = []
        for a, b in zip(own, theirs, strict=True):
            a, b = a[0, :, start:stop].double(), b[0, :, start:stop].double()
            parts.append((a - b).square().sum((0, 2)) / a.square().sum((0, 2)).mean())
        found.append(parts[0] + parts[1])
    return found


def held(deviation: Tensor, share: float) -> float:
    """The part of the sum that the largest `share` of the values hold."""
    count = max(1, round(share * len(deviation)))
    return float(deviation.sort(descending=True).values[:count].sum() / deviation.sum())


def relative_distance(weights: Tensor, wanted: Tensor) -> float:
    """L2 distance of attention rows `[1, H, N, T]` over the length of the wanted ones, mean over heads and rows."""
    distance = (weights.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    return float(distance.mean())


def _prompt(case: Case, cache: Cache) -> None:
    keyword = {_compat.cache_keyword(case.model.forward): cache}
    case.model(input_ids=case.ids, use_cache=True, logits_to_keep=1, **keyword)


def _attentions(case: Case, cache: Cache, answer: Tensor) -> list[Tensor]:
    """By layer `[1, H, N, T]` attention of the answer's tokens over the prompt; the cache grows."""
    keyword = {_compat.cache_keyword(case.model.forward): cache}
    ids = answer[None, :-1].to(case.ids.device)
    output = case.model(input_ids=ids, use_cache=True, logits_to_keep=1, output_attentions=True, **keyword)
    weights = output.attentions
    if not weights or any(w is None for w in weights):
        raise ValueError('this attention tells no weights: load the model with attn_implementation="eager"')
    return [w[..., : case.ids.shape[1]].clone() for w in weights]
