"""Every selector keeps what a blend promises: on eager and SDPA, grouped heads, sliding windows, batches."""

import math

import pytest
import torch

from blendkv import BlendedCache
from blendkv.proof import rms_ratio
from blendkv.selectors import get_selector
from tests.helpers import CountRows, exact_chunk, full, make_case, run, tokens, worst

NAMES = [
    "hkvd-kv",
    "boundary",
    "every-4",
    "attention",
    "attention-1:3-last2@window5",
    "attention*hkvd-v^0.5",
    "20%boundary+attention",
    "(every-4+hkvd)@per-chunk",
]
MODELS = [
    ("llama", {}),
    ("qwen3", {"attn_implementation": "eager"}),
    ("gemma3_text", {"sliding_window": 16}),
    ("mistral", {"sliding_window": 16, "attn_implementation": "eager"}),
]
each_selector = pytest.mark.parametrize("name", NAMES)
each_model = pytest.mark.parametrize(("family", "settings"), MODELS, ids=[family for family, _ in MODELS])


@each_selector
@each_model
def test_ratio_one_is_full_prefill(attached, family, settings, name):
    model = attached(family, **settings)
    case = make_case(model)
    logits, reference = full(model, case.ids)
    cache = BlendedCache(case.caches, 1.0, name)
    assert (run(model, case.ids, cache).logits - logits).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4


@each_selector
@each_model
def test_ratio_zero_computes_no_chunk_row(attached, family, settings, name):
    model = attached(family, **settings)
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.0, name)
    with CountRows(model) as counted:
        run(model, case.ids, cache)
    assert counted.rows == [case.ids.shape[1] - sum(map(len, case.chunks))] * 4
    assert cache.report.charged_budget in (0.0, pytest.approx(math.nan, nan_ok=True))


@each_selector
@each_model
@pytest.mark.parametrize("ratio", [0.15, 0.5])
def test_exact_chunks_stay_exact(attached, family, settings, name, ratio):
    model = attached(family, **settings)
    ids = tokens(70, 4)[None]
    logits, reference = full(model, ids)
    cache = BlendedCache([exact_chunk(model, ids, a, b) for a, b in ((5, 30), (30, 41), (44, 66))], ratio, name)
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4
    assert cache.report.layers[-1].recomputed == round(ratio * 58)


@each_selector
def test_the_report_is_a_partition(attached, name):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, selector=name, check_layers={1: 0.6, 2: 0.3, 3: 0.1})
    run(model, case.ids, cache)
    length, selector = case.ids.shape[1], get_selector(name)
    assert [la.reused + la.recomputed + la.fresh + la.missed for la in cache.report.layers] == [length] * 4
    assert [la.recomputed for la in cache.report.layers] == [39, 23, 12, 4]
    probed = [0, 39, 23, 12] if "deviation" in selector.needs else [0] * 4
    assert [la.probed for la in cache.report.layers] == probed
    assert (cache.report.seconds["question"] > 0) is ("question" in selector.needs)


@each_selector
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_two_prompts_at_once(attached, attn, name):
    model = attached("qwen2", attn_implementation=attn)
    cases = [make_case(model), make_case(model, (20, 3), (1, 0), seed=4, question=23)]
    cache = BlendedCache([case.caches for case in cases], 0.3, name)
    got = run(model, torch.cat([case.ids for case in cases]), cache)
    for b, case in enumerate(cases):
        single = BlendedCache(case.caches, 0.3, name)
        want = run(model, case.ids, single).logits[0, -1]
        assert (got.logits[b, -1] - want).abs().max() <= 1e-4
        for layer, own in zip(cache.layers, single.layers, strict=True):
            assert (layer.keys[b] - own.keys[0]).abs().max() <= 1e-4


@each_selector
def test_error_falls_as_the_ratio_grows(attached, name):
    model, errors = attached(), []
    for ratio in (0.0, 0.5, 1.0):
        total = 0.0
        for seed in range(3):
            case = make_case(model, seed=seed)
            logits, _ = full(model, case.ids)
            got = run(model, case.ids, BlendedCache(case.caches, ratio, name)).logits[:, -1]
            total += rms_ratio(got, logits[:, -1])
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4 < errors[0]
