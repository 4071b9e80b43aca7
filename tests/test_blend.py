"""The fast path equals the oracle: every selector, ratio and schedule."""

import pytest
import torch

from blendkv import BlendedCache, prefill
from blendkv.selectors import HKVD, Boundary, Random
from tests.helpers import make_case, run, tokens
from tests.oracle import Placement, blend

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 1.0)


def compare(model, case, cache, schedule, score="k", tolerance=1e-4, **corrected):
    """Runs both; logits, K/V of all layers and the number of rows must agree."""
    placements = [Placement(c, s) for c, s in zip(case.caches, case.starts, strict=True)]
    want = blend(model, case.ids[0], placements, schedule, score, **corrected)
    got = run(model, case.ids, cache, logits_to_keep=1)
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=tolerance, rtol=tolerance)
    for layer, keys, values in zip(cache.layers, want.keys, want.values, strict=True):
        torch.testing.assert_close(layer.keys[0].double(), keys, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(layer.values[0].double(), values, atol=tolerance, rtol=tolerance)
    fresh = case.ids.shape[1] - sum(map(len, case.chunks))
    assert [r.recomputed + fresh for r in cache.report.layers] == [len(rows) for rows in want.rows]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_hkvd_at_every_ratio(attached, attn, ratio):
    model = attached("llama", attn_implementation=attn)
    case = make_case(model)
    cache = BlendedCache(case.caches, recompute_ratio=ratio)
    compare(model, case, cache, {1: ratio} if ratio else {0: 0.0})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "smollm3"])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_families(attached, family, ratio):
    model = attached(family)
    case = make_case(model)
    compare(model, case, BlendedCache(case.caches, recompute_ratio=ratio), {1: ratio} if ratio else {0: 0.0})


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_sliding_window(attached, attn, ratio):
    model = attached("mistral", sliding_window=16, attn_implementation=attn)
    case = make_case(model)
    compare(model, case, BlendedCache(case.caches, recompute_ratio=ratio), {1: ratio} if ratio else {0: 0.0})


@pytest.mark.parametrize("source", ["k", "v", "kv"])
@pytest.mark.parametrize("schedule", [{1: 0.3}, {1: 0.5, 2: 0.2}, {1: 0.6, 3: 0.1}, {2: 0.4}])
def test_sources_and_gradual_filtering(attached, source, schedule):
    model = attached("qwen3")
    case = make_case(model, seed=2)
    compare(model, case, BlendedCache(case.caches, selector=HKVD(source), check_layers=schedule), schedule, source)


@pytest.mark.parametrize("ratio", RATIOS)
def test_boundary(attached, ratio):
    model = attached()
    case = make_case(model)
    compare(model, case, BlendedCache(case.caches, ratio, Boundary()), {0: ratio}, "boundary")


@pytest.mark.parametrize("schedule", [{0: 0.5}, {0: 0.8, 1: 0.5, 3: 0.2}, {2: 0.3}])
def test_random(attached, schedule):
    model = attached()
    case = make_case(model)
    total = sum(map(len, case.chunks))
    scores = torch.rand(total, generator=torch.Generator().manual_seed(7))
    if len(schedule) == 1:
        compare(model, case, BlendedCache(case.caches, selector=Random(7), check_layers=schedule), schedule, scores)
        return

    class Fixed(Random):
        def score(self, candidates):
            at = torch.cat([torch.arange(s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)])
            rank = {int(r): i for i, r in enumerate(at.sort().values)}
            return torch.tensor([scores[rank[int(r)]] for r in candidates.rows])

    compare(model, case, BlendedCache(case.caches, selector=Fixed(), check_layers=schedule), schedule, scores)


@pytest.mark.parametrize(("name", "schedule"), [("all", {}), ("none", {0: 0.0})])
def test_all_and_none(attached, name, schedule):
    model = attached()
    case = make_case(model)
    compare(model, case, BlendedCache(case.caches, selector=name), schedule)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_batch_of_two_prompts_with_different_chunks(attached, attn, ratio):
    model = attached("qwen2", attn_implementation=attn)
    # The third prompt has fewer chunk tokens than the others: the rows computed are ragged.
    cases = [make_case(model), make_case(model, (9, 17, 13), (0, 1, 2), seed=3)]
    other = make_case(model, (20, 3), (1, 0), seed=4, question=23)
    cases.append(other)
    ids = torch.cat([case.ids for case in cases])
    cache = BlendedCache([case.caches for case in cases], recompute_ratio=ratio)
    got = run(model, ids, cache)
    for b, case in enumerate(cases):
        placements = [Placement(c, s) for c, s in zip(case.caches, case.starts, strict=True)]
        want = blend(model, case.ids[0], placements, {1: ratio} if ratio else {0: 0.0})
        torch.testing.assert_close(got.logits[b, -1].double(), want.logits, atol=1e-4, rtol=1e-4)
        for layer, keys, values in zip(cache.layers, want.keys, want.values, strict=True):
            torch.testing.assert_close(layer.keys[b].double(), keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values[b].double(), values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_repeated_chunk_partial_run_and_prompt_of_chunks_only(attached, ratio):
    model = attached()
    a, b = tokens(12, 1), tokens(40, 2)
    chunk_a, chunk_b = prefill(model, [a, b], progress=False)
    ids = torch.cat([a, b[3:37], a])  # no fresh text; a twice; b without its ends
    cache = BlendedCache([chunk_b, chunk_a], recompute_ratio=ratio)
    got = run(model, ids[None], cache)
    placements = [Placement(chunk_a, 0), Placement(chunk_b, 12, 3, 34), Placement(chunk_a, 46)]
    want = blend(model, ids, placements, {1: ratio} if ratio else {0: 0.0})
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=1e-4, rtol=1e-4)
    assert [(use.found, use.hit, use.reason) for use in cache.report.chunks] == [(34, True, "partial"), (23, True, "")]


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_chunk_longer_than_the_prompt(attached, length):
    model = attached()
    (chunk,) = prefill(model, [tokens(30, 5)], progress=False)
    ids = chunk.ids[None, :length]
    cache = BlendedCache([chunk], recompute_ratio=0.0)
    if length < 15:
        with pytest.raises(Exception, match=r"none of the chunks|no chunk was found"):
            run(model, ids, cache)
        return
    got = run(model, ids, cache)
    want = blend(model, ids[0], [Placement(chunk, 0, 0, length)], {0: 0.0})
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=1e-4, rtol=1e-4)


def test_many_rows_cross_block_borders(attached):
    model = attached("qwen2")
    case = make_case(model, (150, 90, 60), seed=8, question=9)
    compare(model, case, BlendedCache(case.caches, recompute_ratio=0.5), {1: 0.5}, tolerance=1e-3)


def test_attentions_that_transformers_does_not_give_are_no_error(attached):
    """SDPA computes none: full prefill gives an empty tuple, whatever was asked for."""
    model = attached("llama")
    case = make_case(model)
    want = run(model, case.ids, BlendedCache(case.caches, 0.3)).logits
    output = run(model, case.ids, BlendedCache(case.caches, 0.3), output_attentions=True)
    assert not output.attentions
    assert (output.logits[:, -1] - want[:, -1]).abs().max() <= 1e-4
