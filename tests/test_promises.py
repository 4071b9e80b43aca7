"""The promises of the design, one section each."""

import copy
import hashlib
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from blendkv import (
    BlendedCache,
    ChunkCache,
    ChunkMissError,
    MissingChunk,
    UnsupportedModelError,
    _compat,
    attach,
    prefill,
)
from blendkv.proof import Reference, distance, rms_ratio
from blendkv.selectors import HKVD, Boundary, Random
from blendkv.testing import FAMILIES, REFUSED_FAMILIES, tiny_model
from tests.helpers import CountRows, exact_chunk, full, make_case, run, tokens, worst

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ROPES = {"yarn": YARN, "llama3": LLAMA3, "linear": LINEAR}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}


def with_rope(name, attn="sdpa"):
    return attach(tiny_model("llama", attn_implementation=attn, rope_parameters=ROPES[name]))


# -- 1. ratio 1 is full prefill, ratio 0 computes no chunk row, error falls ------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "selector", [HKVD(), HKVD("kv"), Boundary(), "all"], ids=["hkvd", "hkvd-kv", "boundary", "all"]
)
def test_1_ratio_one_equals_full_prefill(attached, family, selector):
    model = attached(family)
    case = make_case(model)
    logits, reference = full(model, case.ids)
    cache = BlendedCache(case.caches, recompute_ratio=1.0, selector=selector)
    got = run(model, case.ids, cache).logits
    assert (got - logits).abs().max() <= 1e-4  # every row: none is NaN
    assert worst(cache, reference) <= 1e-4


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_1_and_2_with_scaled_rope(rope, ratio):
    model = with_rope(rope)
    case = make_case(model)
    logits, reference = full(model, case.ids)
    exact = [
        exact_chunk(model, case.ids, start, start + len(c)) for start, c in zip(case.starts, case.chunks, strict=True)
    ]
    cache = BlendedCache(exact, ratio, Random(1))
    assert (run(model, case.ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("selector", ["hkvd", "boundary", "random", "none"])
def test_1_ratio_zero_computes_no_chunk_row(attached, family, selector):
    model = attached(family)
    case = make_case(model)
    cache = BlendedCache(case.caches, recompute_ratio=0.0, selector=selector)
    with CountRows(model) as counted:
        run(model, case.ids, cache)
    fresh = case.ids.shape[1] - sum(map(len, case.chunks))
    assert counted.rows == [fresh] * 4
    assert [r.recomputed for r in cache.report.layers] == [0] * 4


@pytest.mark.parametrize("selector", [HKVD(), HKVD("v"), Random(), Boundary()], ids=lambda s: s.name)
def test_1_error_falls_as_the_ratio_grows(attached, selector):
    model = attached("llama")
    errors = []
    for ratio in (0.0, 0.5, 0.9, 1.0):
        total = 0.0
        for seed in range(6):
            case = make_case(model, seed=seed)
            logits, _ = full(model, case.ids)
            got = run(model, case.ids, BlendedCache(case.caches, ratio, selector)).logits[:, -1]
            total += rms_ratio(got, logits[:, -1])
        errors.append(total / 6)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-5


# -- 2. exact keys and values stay exact ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("near_end", [False, True], ids=["offset 0", "near the end"])
@pytest.mark.parametrize("layer", [0, 1])
def test_2_exact_chunks_stay_exact(attached, family, ratio, near_end, layer):
    model = attached(family)
    ids = tokens(70, 4)[None]
    offset = model.config.max_position_embeddings - 70 if near_end else 0
    positions = torch.arange(70)[None] + offset
    logits, reference = full(model, ids, position_ids=positions)
    chunks = [exact_chunk(model, ids, a, b, offset) for a, b in ((5, 30), (30, 41), (44, 66))]
    cache = BlendedCache(chunks, selector=Random(3), check_layers={layer: ratio})
    got = run(model, ids, cache, position_ids=positions).logits[:, -1]
    assert cache.report.layers[-1].recomputed == round(ratio * 58)
    assert (got - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [4, 16, 64])
def test_2_exact_chunks_stay_exact_with_a_sliding_window(attached, attn, window):
    model = attached("mistral", sliding_window=window, attn_implementation=attn)
    ids = tokens(70, 4)[None]
    logits, reference = full(model, ids)
    chunks = [exact_chunk(model, ids, a, b) for a, b in ((5, 30), (30, 41), (44, 66))]
    cache = BlendedCache(chunks, 0.5, Random(3))
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "smollm3", "mixtral"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_2_in_half_precision_within_stated_bounds(family, dtype, bound):
    model = attach(tiny_model(family, dtype=dtype))
    ids = tokens(70, 4)[None]
    logits, reference = full(model, ids)
    chunks = [exact_chunk(model, ids, a, b) for a, b in ((5, 30), (44, 66))]
    cache = BlendedCache(chunks, 0.3, Random(3))
    ours = run(model, ids, cache).logits[:, -1]
    full_prefill = Reference(ids, torch.arange(70)[None], logits[:, -1], _compat.cached_states(reference))
    assert distance(ours, cache, full_prefill) <= bound


def test_2_partial_rotary_in_bf16_is_not_refused():
    attach(tiny_model("phi3", dtype=torch.bfloat16, partial_rotary_factor=0.5))


# -- 3. the mask is exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 16}), ("qwen3_moe", {})]
)
def test_3_later_tokens_change_nothing_earlier(attached, attn, family, overrides):
    model = attached(family, attn_implementation=attn, **overrides)
    case = make_case(model)
    changed = case.ids.clone()
    at = case.starts[0] + 3  # inside the last chunk: everything from here on is other text
    changed[:, at:] = tokens(changed.shape[1] - at, 77)
    # the same rows in both: all rows before `at`, none of them chosen by what comes later
    first = case.caches[1:]  # chunks 1 and 2 stand before `at`
    a, b = (BlendedCache(first, selector=Boundary(), check_layers={0: 0.4}) for _ in range(2))
    out_a, out_b = run(model, case.ids, a), run(model, changed, b)
    assert worst(a, b, slice(0, at)) == 0.0
    rows_a, rows_b = out_a.logits[:, :at], out_b.logits[:, :at]
    assert torch.equal(rows_a.isnan(), rows_b.isnan())
    assert torch.equal(rows_a.nan_to_num(), rows_b.nan_to_num())
    assert 0 < rows_a[0, :, 0].isnan().sum() < at


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_3_a_row_sees_nothing_before_its_window(attached, attn):
    model = attached("mistral", sliding_window=16, num_hidden_layers=1, attn_implementation=attn)
    case = make_case(model)
    length = case.ids.shape[1]
    want = run(model, case.ids, BlendedCache(case.caches, 0.0)).logits[:, -1]
    for back, same in ((16, True), (15, False)):
        changed = case.ids.clone()
        at = length - 1 - back
        chunk, start = next((c, s) for c, s in zip(case.caches, case.starts, strict=True) if s <= at < s + len(c))
        values = tuple(v.clone() for v in chunk.values)
        values[0][:, at - start] += 1.0
        caches = [ChunkCache(c.ids, c.keys, values if c is chunk else c.values, c.fingerprint) for c in case.caches]
        got = run(model, changed, BlendedCache(caches, 0.0)).logits[:, -1]
        assert torch.equal(got, want) is same


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_3_padded_rows_equal_single_rows(attached, attn, side, ratio):
    model = attached("llama", attn_implementation=attn)
    cases = [make_case(model), make_case(model, (6, 11), (1, 0), seed=5)]
    width = max(case.ids.shape[1] for case in cases)
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for b, case in enumerate(cases):
        n = case.ids.shape[1]
        part = slice(width - n, width) if side == "left" else slice(0, n)
        ids[b, part], mask[b, part] = case.ids[0], 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = BlendedCache([case.caches for case in cases], ratio)
    keep = 1 if side == "left" else width - min(case.ids.shape[1] for case in cases) + 1
    got = run(model, ids, cache, attention_mask=mask, position_ids=positions, logits_to_keep=keep).logits
    for b, case in enumerate(cases):
        single, n = BlendedCache(case.caches, ratio), case.ids.shape[1]
        part = slice(width - n, width) if side == "left" else slice(0, n)
        own_keep = 1 if side == "left" else max(1, n - (width - keep))  # rows that stay fresh, padding aside
        want = run(model, case.ids, single, logits_to_keep=own_keep).logits[:, -1]
        assert (got[b, part.stop - 1 - (width - keep)] - want).abs().max() <= 1e-4
        for layer, own in zip(cache.layers, single.layers, strict=True):
            assert (layer.keys[b, :, part] - own.keys[0]).abs().max() <= 1e-4
            assert (layer.values[b, :, part] - own.values[0]).abs().max() <= 1e-4
            assert not layer.keys[b].isnan().any()  # padding is never attended, but 0 * NaN would spread
            assert not layer.values[b].isnan().any()
    assert cache.report.tokens == sum(case.ids.shape[1] for case in cases)


# -- 4. stored chunks never change ------------------------------------------------------------------------------------


def digest(chunks) -> str:
    state = hashlib.sha256()
    for chunk in chunks:
        for tensor in (chunk.ids, *chunk.keys, *chunk.values):
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_4_stored_chunks_never_change(attached, family):
    model = attached(family)
    chunks = prefill(model, [tokens(12, 1), tokens(9, 2)], progress=False)
    before = digest(chunks)
    first: dict[int, torch.Tensor] = {}
    for turn in range(2):
        for offset in range(50):
            ids = torch.cat([tokens(offset, 9), chunks[0].ids, chunks[1].ids, tokens(3, 8)])[None]
            cache = BlendedCache(chunks, 0.3, reserve=1)
            logits = run(model, ids, cache).logits[:, -1]
            if turn:
                assert torch.equal(logits, first[offset])
            first[offset] = logits
            for layer in cache.layers:  # whatever happens to the cache, chunks are not it
                layer.keys.fill_(7.0)
                layer.values.fill_(7.0)
    assert digest(chunks) == before
    fresh = attach(tiny_model(family))
    again = prefill(fresh, [tokens(12, 1), tokens(9, 2)], progress=False)
    assert digest(again) == before
    ids = torch.cat([tokens(49, 9), chunks[0].ids, chunks[1].ids, tokens(3, 8)])[None]
    assert torch.equal(run(fresh, ids, BlendedCache(again, 0.3)).logits[:, -1], first[49])


# -- 5. models are proven, or refused by name -------------------------------------------------------------------------

REASONS = {
    "llama4": "chunked_attention",
    "gemma3n": "num_kv_shared_layers",
    "jamba": "mamba|linear_attention|recurrent",
    "qwen3_next": "linear_attention",
}


def state_of(model) -> tuple:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks, model.config._attn_implementation, sorted(model.__dict__)


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_5_impossible_layers_are_refused_before_any_forward(family):
    model = tiny_model(family)
    before = state_of(model)
    with CountForwards(model) as forwards, pytest.raises(UnsupportedModelError, match=REASONS[family]):
        attach(model)
    assert forwards.count == 0
    assert state_of(model) == before


class CountForwards:
    def __init__(self, model):
        self.count = 0
        self.model = model

    def __enter__(self):
        def count(module, args):
            self.count += 1

        self.handles = [m.register_forward_pre_hook(count) for m in self.model.modules()]
        return self

    def __exit__(self, *exc):
        for handle in self.handles:
            handle.remove()


@pytest.mark.filterwarnings("ignore")
def test_5_positions_from_the_cache_length_are_refused_by_the_proof():
    model = tiny_model("llama4", layer_types=["full_attention"] * 4, attn_temperature_tuning=True)
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match="Llama4"):
        attach(model)
    assert state_of(model) == before


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, LONG], ids=["dynamic", "long"]
)
def test_5_length_dependent_rope_is_refused(rope):
    overrides = {"original_max_position_embeddings": 256} if rope is LONG else {}
    model = tiny_model("llama", rope_parameters=dict(rope) | overrides)
    with pytest.raises(UnsupportedModelError, match=rope["rope_type"]):
        attach(model)


def test_5_encoder_decoder_is_refused():
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        attach(AutoModelForSeq2SeqLM.from_config(config).eval())


def test_5_learned_positions_are_refused():
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight, std=1.0)
    before = state_of(model)
    with pytest.raises(UnsupportedModelError):
        attach(model)
    assert state_of(model) == before


def test_5_not_a_transformers_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear"):
        attach(torch.nn.Linear(2, 2))


# -- 6. nothing in storage can break or falsify generate --------------------------------------------------------------


def altered(chunk, **changes):
    fields = {"ids": chunk.ids, "keys": chunk.keys, "values": chunk.values, "fingerprint": chunk.fingerprint}
    return ChunkCache(**fields | changes)


def foreign(kind, chunk):
    if kind == "absent":
        return MissingChunk(chunk.ids)
    if kind == "fingerprint":
        return altered(chunk, fingerprint="0" * 64)
    if kind == "dtype":
        return altered(chunk, keys=tuple(k.half() for k in chunk.keys), values=tuple(v.half() for v in chunk.values))
    if kind == "layers":
        return altered(chunk, keys=chunk.keys[:-1], values=chunk.values[:-1])
    if kind == "shape":  # as if two layouts were mixed
        return altered(chunk, keys=tuple(k[:, :, :8] for k in chunk.keys))
    return altered(chunk, keys=tuple(k[:1] for k in chunk.keys), values=tuple(v[:1] for v in chunk.values))


@pytest.mark.parametrize("kind", ["absent", "fingerprint", "dtype", "layers", "shape", "heads"])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_6_unusable_chunks_are_counted_misses(attached, kind, ratio):
    model = attached()
    case = make_case(model)
    chunks = [foreign(kind, case.caches[0]), *case.caches[1:]]
    cache = BlendedCache(chunks, ratio)
    got = run(model, case.ids, cache).logits[:, -1]
    want = run(model, case.ids, BlendedCache(case.caches[1:], ratio)).logits[:, -1]
    assert torch.equal(got, want)
    assert not cache.report.chunks[0].hit
    assert sum(cache.report.misses.values()) == 13
    assert [r.missed for r in cache.report.layers] == [13] * 4
    assert [use.hit for use in cache.report.chunks] == [False, True, True]
    assert kind not in ("absent", "fingerprint", "dtype", "layers") or cache.report.misses == {kind: 13}


@pytest.mark.parametrize("kind", ["absent", "fingerprint", "dtype", "layers"])
def test_6_strict_raises(attached, kind):
    model = attached()
    case = make_case(model)
    chunks = [foreign(kind, case.caches[0]), *case.caches[1:]]
    with pytest.raises(ChunkMissError, match=kind):
        run(model, case.ids, BlendedCache(chunks, strict=True))
    run(model, case.ids, BlendedCache(case.caches, strict=True))  # the paired positive


def test_6_strict_names_a_chunk_that_is_not_in_the_prompt(attached):
    model = attached()
    case = make_case(model)
    (other,) = prefill(model, [tokens(11, 123)], progress=False)
    with pytest.raises(ChunkMissError, match="not in the prompt"):
        run(model, case.ids, BlendedCache([*case.caches, other], strict=True))


def test_6_chunks_of_other_weights_miss(attached):
    model = attached()
    other = tiny_model("llama", seed=1)
    case = make_case(model)
    cache = BlendedCache(prefill(other, case.chunks, progress=False))
    got = run(model, case.ids, cache).logits
    assert torch.equal(got, full(model, case.ids)[0])
    assert cache.report.misses == {"fingerprint": 39}


def test_6_a_usable_twin_of_a_missing_chunk_is_used(attached):
    model = attached()
    case = make_case(model)
    cache = BlendedCache([MissingChunk(case.caches[0].ids), *case.caches], 0.0)
    run(model, case.ids, cache)
    assert cache.report.layers[0].reused == 39


# -- 7. the report is a partition -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", [{}, {0: 0.0}, {1: 0.3}, {1: 0.5, 2: 0.2}, {1: 0.6, 3: 0.1}])
def test_7_rows_add_up_and_were_really_computed(attached, family, schedule):
    model = attached(family)
    case = make_case(model)
    chunks = [foreign("fingerprint", case.caches[0]), *case.caches[1:]]
    cache = BlendedCache(chunks, check_layers=schedule)
    with CountRows(model) as counted:
        run(model, case.ids, cache)
    report = cache.report
    assert report.tokens == case.ids.shape[1]
    assert len(report.layers) == 4
    for layer in report.layers:
        assert layer.reused + layer.recomputed + layer.fresh + layer.missed == report.tokens
        assert min(layer.reused, layer.recomputed, layer.fresh, layer.missed) >= 0
    assert counted.rows == [r.recomputed + r.fresh + r.missed for r in report.layers]
    assert [r.missed for r in report.layers] == [13] * 4
    assert report.chunk_tokens == 39
    assert 0.0 <= report.charged_budget <= 1.0 or math.isnan(report.charged_budget)


def test_7_batches_add_up(attached):
    model = attached()
    cases = [make_case(model), make_case(model, (20, 3), (1, 0), seed=4, question=23)]
    cache = BlendedCache([case.caches for case in cases], 0.3)
    run(model, torch.cat([case.ids for case in cases]), cache)
    assert cache.report.tokens == 100
    for layer in cache.report.layers:
        assert layer.reused + layer.recomputed + layer.fresh + layer.missed == 100
    assert cache.report.layers[-1].recomputed == round(0.3 * 39) + round(0.3 * 23)


# -- 8. nothing is silently narrowed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("schedule", [{0: 0.0}, {0: 0.3}, {1: 0.5, 3: 0.1}])
def test_8_outputs_keep_their_shape(attached, attn, schedule):
    model = attached("llama", attn_implementation=attn)
    case = make_case(model)
    length = case.ids.shape[1]
    cache = BlendedCache(case.caches, check_layers=schedule)
    asked = {"output_hidden_states": True} | ({"output_attentions": True} if attn == "eager" else {})
    out = run(model, case.ids, cache, logits_to_keep=0, **asked)
    assert out.logits.shape == (1, length, 512)
    last = cache.report.layers[-1]
    assert int(out.logits[0, :, 0].isnan().sum()) == last.reused
    assert torch.equal(out.logits[0].isnan().any(-1), out.logits[0].isnan().all(-1))
    assert not out.logits[:, -5:].isnan().any()
    assert len(out.hidden_states) == 5
    for hidden, rows in zip(out.hidden_states[1:], cache.report.layers, strict=True):
        assert hidden.shape == (1, length, 64)
        assert int(hidden[0, :, 0].isnan().sum()) == rows.reused
    assert out.hidden_states[0].shape == (1, length, 64)
    if attn == "eager":
        assert len(out.attentions) == 4
        for weights, rows in zip(out.attentions, cache.report.layers, strict=True):
            assert weights.shape == (1, 4, length, length)
            assert int(weights[0, 0, :, 0].isnan().sum()) == rows.reused
            computed = weights[0, :, ~weights[0, 0, :, 0].isnan()]
            torch.testing.assert_close(computed.sum(-1), torch.ones_like(computed[..., 0]))


def test_8_tuples_and_the_bare_decoder(attached):
    model = attached()
    case = make_case(model)
    (hidden, *_) = run(model.model, case.ids, BlendedCache(case.caches, 0.0), return_dict=False)
    assert hidden.shape == (1, case.ids.shape[1], 64)
    assert int(hidden[0, :, 0].isnan().sum()) == 39
    out = run(model, case.ids, BlendedCache(case.caches, 0.0), return_dict=False)
    assert out[0].shape == (1, case.ids.shape[1], 512)


def test_8_logits_to_keep(attached):
    model = attached()
    case = make_case(model)
    for keep in (1, 7, 20):
        cache = BlendedCache(case.caches, 0.0)
        out = run(model, case.ids, cache, logits_to_keep=keep).logits
        assert out.shape[1] == keep
        assert not out.isnan().any()
    index = torch.tensor([30, 49])
    out = run(model, case.ids, BlendedCache(case.caches, 0.0), logits_to_keep=index).logits
    assert out.shape[1] == 2
    assert not out.isnan().any()


def test_8_router_logits_are_refused(attached):
    model = attached("mixtral")
    case = make_case(model)
    with pytest.raises(ValueError, match="leave out output_router_logits"):  # no shape would be honest
        run(model, case.ids, BlendedCache(case.caches, 0.0), output_router_logits=True)


def test_8_a_deep_copy_keeps_the_promises(attached):
    twin = copy.deepcopy(attached("qwen3"))
    case = make_case(twin)
    logits, _ = full(twin, case.ids)
    got = run(twin, case.ids, BlendedCache(case.caches, 1.0)).logits
    assert (got - logits).abs().max() <= 1e-4
