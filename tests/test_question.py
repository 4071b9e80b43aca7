"""The question pass: what it hears, what it leaves behind, and blends that are steered by it."""

import pytest
import torch
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from blendkv import BlendedCache, MissingChunk, UnsupportedModelError, attach, prefill
from blendkv.attention import LazyMask, RowMask
from blendkv.cache import BlendedLayer
from blendkv.kernels import naive
from blendkv.mass import attention_mass
from blendkv.selectors import HKVD, Attention, Boundary, Product, get_selector
from blendkv.testing import tiny_model
from tests.helpers import CountRows, exact_chunk, full, make_case, run, tokens, worst
from tests.oracle import Placement, blend

WINDOWED = {"sliding_window": 16}


class Spy(Attention):
    """Keeps what it was given."""

    def score(self, candidates):
        self.seen = [*getattr(self, "seen", []), candidates]
        return super().score(candidates)


def placements(case):
    return [Placement(c, s) for c, s in zip(case.caches, case.starts, strict=True)]


def heard(model, case, **settings):
    """What a selector is given: layer -> `[N]`."""
    spy = Spy(**settings)
    run(model, case.ids, BlendedCache(case.caches, 0.3, spy))
    return spy.seen[0].attention


# -- the sum itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks", "padding"])
@pytest.mark.parametrize(("rows", "heads", "shared"), [(1, 2, 2), (5, 6, 2), (90, 4, 1)])
def test_mass_equals_its_slow_twin(window, extra, rows, heads, shared):
    draw = torch.Generator().manual_seed(rows)
    length = 130
    query, key = torch.randn(2, heads, rows, 16, generator=draw), torch.randn(2, shared, length, 16, generator=draw)
    at = torch.stack([torch.randperm(length - 1, generator=draw)[:rows].sort().values + 1 for _ in range(2)])
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[1, :4] = False
    options = {"softcap": {"softcap": 2.0}, "sinks": {"sinks": torch.randn(heads, generator=draw)}}.get(extra, {})
    at = at.clamp_min(4) if extra == "padding" else at  # rows of text
    function = causal_mask_function
    if window is not None:
        function = and_masks(sliding_window_overlay(window), causal_mask_function)
    hidden = padding if extra == "padding" else None
    counted = torch.ones(2, rows, dtype=torch.bool)
    got = attention_mass(query, key, RowMask(LazyMask(lambda: None, function, hidden), at), counted, 0.3, **options)
    want = naive.attention_mass(query, at, key, 0.3, window=window, padding=hidden, **options)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert got.sum() <= 2 * heads * rows + 1e-2
    counted[0, 0] = False
    less = attention_mass(query, key, RowMask(LazyMask(lambda: None, function, hidden), at), counted, 0.3, **options)
    first = naive.attention_mass(
        query[:1, :, :1],
        at[:1, :1],
        key[:1],
        0.3,
        window=window,
        padding=None if hidden is None else hidden[:1],
        **options,
    )
    torch.testing.assert_close(less[0], want[0] - first[0], atol=1e-4, rtol=1e-4)


# -- what the pass hears ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("qwen3", {}), ("mistral", WINDOWED), ("smollm3", {}), ("qwen2", {})]
)
def test_it_hears_what_full_reuse_attends_to(attached, family, settings, attn):
    model = attached(family, attn_implementation=attn, **settings)
    case = make_case(model)
    want = blend(model, case.ids[0], placements(case), {0: 0.0}).attention
    rows = torch.cat([torch.arange(s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)]).sort().values
    got = heard(model, case)
    assert sorted(got) == [0, 1, 2, 3]
    for layer, attention in got.items():
        torch.testing.assert_close(attention.double(), want[layer][rows], atol=1e-5, rtol=1e-4)
        assert attention.dtype == torch.float32


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("ratio", [0.15, 0.5])
def test_blends_equal_the_oracle(attached, attn, ratio):
    model = attached("qwen3", attn_implementation=attn)
    case = make_case(model, seed=3)
    reused = blend(model, case.ids[0], placements(case), {0: 0.0})
    rows = torch.cat([torch.arange(s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)]).sort().values
    score = sum(layer[rows] for layer in reused.attention)
    want = blend(model, case.ids[0], placements(case), {0: ratio}, score)
    cache = BlendedCache(case.caches, ratio, "attention")
    got = run(model, case.ids, cache, logits_to_keep=1)
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=1e-4, rtol=1e-4)
    for layer, keys, values in zip(cache.layers, want.keys, want.values, strict=True):
        torch.testing.assert_close(layer.keys[0].double(), keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values[0].double(), values, atol=1e-4, rtol=1e-4)


def test_the_product_is_known_at_the_check_layer(attached):
    model = attached()
    case = make_case(model)
    seen = {}

    class Both(Product):
        def score(self, candidates):
            seen["view"], seen["score"] = candidates, super().score(candidates)
            return seen["score"]

    cache = BlendedCache(case.caches, 0.3, Both([Attention(), HKVD("v")], [1, 0.5]))
    run(model, case.ids, cache)
    assert cache.schedule == {1: 0.3}
    view = seen["view"]
    assert view.k_deviation is None
    want = sum(view.attention.values()) * view.v_deviation.sqrt()
    torch.testing.assert_close(seen["score"] / seen["score"].sum(), want / want.sum())
    alone = heard(model, case)
    for layer, attention in view.attention.items():
        assert torch.equal(attention, alone[layer])


def test_layers_and_rows_that_count(attached):
    model = attached()
    case = make_case(model)
    everything = heard(model, case)
    some = heard(model, case, layers=(2, 0))
    assert sorted(some) == [0, 2]
    assert torch.equal(some[2], everything[2])
    by_row = [heard(model, case, last=n)[3] for n in range(1, 6)]
    assert (by_row[1] > by_row[0]).all()
    torch.testing.assert_close(by_row[4], everything[3])
    torch.testing.assert_close(heard(model, case, last=99)[3], everything[3])
    with pytest.raises(ValueError, match="layers 0 to 3"):
        heard(model, case, layers=(4,))


def test_it_ends_after_the_last_layer_wanted(attached):
    model = attached()
    case = make_case(model)
    fresh = case.ids.shape[1] - sum(map(len, case.chunks))
    for layers, ran in (((0,), 0), ((1,), 1), (None, 3)):
        with CountRows(model) as counted:
            run(model, case.ids, BlendedCache(case.caches, 0.3, Attention(layers)))
        assert counted.rows == [fresh + 12 + (fresh if layer < ran else 0) for layer in range(4)]


def test_what_the_question_is(attached):
    """The text after the last chunk that is used; not the text between chunks, and not a chunk that is missing."""
    model = attached()
    a, b = prefill(model, [tokens(20, 1), tokens(20, 2)], progress=False)
    gap, question = tokens(3, 3), tokens(4, 4)
    ids = torch.cat([gap, a.ids, gap, b.ids, question])[None]

    def rows(chunks, ids=ids):
        spy = Spy()
        run(model, ids, BlendedCache(chunks, 0.3, spy))
        return float(spy.seen[0].attention[0].sum() / 4)  # heads: the part of each row's attention that chunks get

    both, without = rows([a, b]), rows([a, MissingChunk(b.ids)])
    assert 0 < both < 4
    assert 0 < without < 7  # the gap and the question, not the 20 tokens of b
    assert 0 < rows([a, b], torch.cat([a.ids, b.ids])[None]) < 1  # no question: the last row, whose logits are wanted


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_batches_hear_what_single_prompts_hear(attached, attn):
    model = attached("qwen2", attn_implementation=attn)
    cases = [make_case(model), make_case(model, (20, 3), (1, 0), seed=4, question=23)]  # ragged fresh rows
    spy = Spy()
    cache = BlendedCache([case.caches for case in cases], 0.3, spy)
    run(model, torch.cat([case.ids for case in cases]), cache)
    for case, view in zip(cases, spy.seen, strict=True):
        for layer, want in heard(model, case).items():
            torch.testing.assert_close(view.attention[layer], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_asks_nothing(attached, side):
    model = attached()
    cases = [make_case(model), make_case(model, (6, 11), (1, 0), seed=5)]
    width = max(case.ids.shape[1] for case in cases)
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for b, case in enumerate(cases):
        n = case.ids.shape[1]
        part = slice(width - n, width) if side == "left" else slice(0, n)
        ids[b, part], mask[b, part] = case.ids[0], 1
    spy = Spy()
    cache = BlendedCache([case.caches for case in cases], 0.3, spy)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    run(model, ids, cache, attention_mask=mask, position_ids=positions, logits_to_keep=1)
    for case, view in zip(cases, spy.seen, strict=True):
        for layer, want in heard(model, case).items():
            torch.testing.assert_close(view.attention[layer], want, atol=1e-5, rtol=1e-4)


# -- what it leaves behind --------------------------------------------------------------------------------------------


def test_no_second_copy_of_the_cache(attached, monkeypatch):
    model, made = attached(), []
    case = make_case(model)
    allocate = BlendedLayer.allocate_for
    monkeypatch.setattr(BlendedLayer, "allocate_for", lambda *args: made.append(1) or allocate(*args))
    run(model, case.ids, BlendedCache(case.caches, 0.3, "attention*hkvd"))
    assert len(made) == 4


def test_the_same_rows_give_the_same_blend_with_and_without_a_pass(attached):
    model = attached("gemma3_text", sliding_window=16)
    case = make_case(model)

    class Same(Attention):
        def score(self, candidates):
            return Boundary().score(candidates)

    asked, plain = BlendedCache(case.caches, 0.3, Same()), BlendedCache(case.caches, 0.3, Boundary())
    a, b = run(model, case.ids, asked).logits, run(model, case.ids, plain).logits
    assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert worst(asked, plain) == 0.0
    assert asked.report.layers == plain.report.layers
    assert asked.report.charged_budget == plain.report.charged_budget
    assert asked.report.seconds["question"] > 0 == plain.report.seconds["question"]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_no_pass_where_nothing_is_chosen(attached, ratio):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, ratio, "attention")
    run(model, case.ids, cache)
    assert cache.report.seconds["question"] == 0


def test_generate_decodes_after_it(attached):
    from tests.helpers import generate

    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.3, "attention*hkvd-v^0.5", reserve=2)
    out = generate(model, case.ids, cache)
    assert out.shape[1] == case.ids.shape[1] + 12
    assert cache.get_seq_length() == out.shape[1] - 1


def test_an_error_in_the_pass_spoils_the_cache_and_nothing_else(attached):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.3, Attention(layers=(9,)))
    with pytest.raises(ValueError, match="layers 0 to 3"):
        run(model, case.ids, cache)
    with pytest.raises(Exception, match="fork"):
        run(model, case.ids, cache)
    logits, _ = full(model, case.ids)
    got = run(model, case.ids, BlendedCache(case.caches, 1.0, "attention")).logits
    assert (got - logits).abs().max() <= 1e-4


def test_hooks_on_the_decoder_run_once_and_outputs_are_complete(attached):
    model, calls = attached(), []
    case = make_case(model)
    handle = model.model.register_forward_hook(lambda *args: calls.append(1))
    try:
        out = run(model, case.ids, BlendedCache(case.caches, 0.3, "attention"), output_hidden_states=True)
    finally:
        handle.remove()
    assert calls == [1]
    assert len(out.hidden_states) == 5


def test_attention_code_of_its_own_is_refused(monkeypatch):
    model = attach(tiny_model("llama"))
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    ids = tokens(60, 1)[None]
    (chunk,) = prefill(model, [ids[0, 5:50]], progress=False)
    run(model, ids, BlendedCache([chunk], 0.3, "hkvd"))
    with pytest.raises(UnsupportedModelError, match="hkvd"):
        run(model, ids, BlendedCache([chunk], 0.3, "attention"))


# -- exact tokens are left for last -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["boundary", "random", "attention", "every"])
@pytest.mark.parametrize("conditioned", [False, True])
def test_tokens_that_are_exact_come_last(attached, name, conditioned):
    model = attached()
    head, a, b = tokens(8, 1), tokens(20, 2), tokens(20, 3)
    front = head.tolist() if conditioned else []
    chunks = prefill(model, [a, b], conditioning=front, progress=False)
    ids = torch.cat([head, a, b, tokens(4, 4)] if conditioned else [a, b, tokens(4, 4)])[None]
    cache = BlendedCache(chunks, 0.5, get_selector(name))
    logits, _ = full(model, ids)
    got = run(model, ids, cache).logits[:, -1]
    assert cache.report.layers[-1].recomputed == 20
    assert (got - logits[:, -1]).abs().max() <= 1e-4  # all of b was recomputed, and none of a

    moved = BlendedCache(chunks, 0.5, get_selector(name))
    ids = torch.cat([tokens(3, 9), ids[0]])[None]
    assert (run(model, ids, moved).logits[:, -1] - full(model, ids)[0][:, -1]).abs().max() > 1e-3


def test_exact_chunks_stay_exact_through_a_pass(attached):
    model = attached()
    ids = tokens(70, 4)[None]
    logits, reference = full(model, ids)
    chunks = [exact_chunk(model, ids, a, b) for a, b in ((5, 30), (30, 41), (44, 66))]
    cache = BlendedCache(chunks, 0.3, "attention*hkvd")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4
