"""Inside an unmodified `generate`: everything users do with it, and everything that must be refused."""

import copy
import threading

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache

from blendkv import BlendedCache, CacheStateError, NotAttachedError, _compat, attach, detach, prefill
from blendkv.attaching import attachment_of
from blendkv.learning import rms_ratio
from blendkv.selectors import Random
from blendkv.testing import FAMILIES, byte_tokenizer, tiny_model
from tests.helpers import exact_chunk, full, generate, make_case, run, tokens

LOOKUP = {"prompt_lookup_num_tokens": 3, "eos_token_id": 511}  # transformers < 5.24 wants an end for prompt lookup
SCORES = {"output_scores": True, "return_dict_in_generate": True}


def one(case, **options) -> BlendedCache:
    return BlendedCache(case.caches, recompute_ratio=1.0, **options)


def same_scores(a, b, tolerance=2e-4) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.scores) == len(b.scores)
    for x, y in zip(a.scores, b.scores, strict=True):
        finite = y.isfinite()
        assert torch.equal(x.isfinite(), finite)
        assert (x[finite] - y[finite]).abs().max() <= tolerance


# -- ratio 1 equals plain generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        LOOKUP,
        {"num_beams": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"repetition_penalty": 1.3},
    ],
    ids=["greedy", "sampling", "prompt lookup", "beams", "beams returned", "several sequences", "penalty"],
)
def test_ratio_one_equals_plain(attached, plain, family, options):
    model = attached(family)
    case = make_case(model)
    ids = case.ids
    if "prompt_lookup_num_tokens" in options:
        ids = torch.cat([ids, case.chunks[0][None, :5]], dim=1)  # something to look up
    torch.manual_seed(5)
    want = generate(plain(family), ids, **SCORES, **options)
    torch.manual_seed(5)
    cache = one(case)
    got = generate(model, ids, cache, **SCORES, **options)
    same_scores(got, want)
    assert cache.report.chunk_tokens >= 39


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, LOOKUP, {"num_beams": 2}], ids=["greedy", "lookup", "beams"])
def test_exact_chunks_equal_plain_at_any_ratio(attached, plain, ratio, options):
    model = attached("qwen3")
    case = make_case(model)
    chunks = [exact_chunk(model, case.ids, s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)]
    want = generate(plain("qwen3"), case.ids, **SCORES, **options)
    got = generate(model, case.ids, BlendedCache(chunks, ratio, Random()), **SCORES, **options)
    same_scores(got, want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_padded_batch_equals_plain(attached, plain, attn):
    model, other = (f("llama", attn_implementation=attn) for f in (attached, plain))
    cases = [make_case(model), make_case(model, (6, 11), (1, 0), seed=5)]
    width = max(case.ids.shape[1] for case in cases)
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for b, case in enumerate(cases):
        ids[b, -case.ids.shape[1] :], mask[b, -case.ids.shape[1] :] = case.ids[0], 1
    want = generate(other, ids, attention_mask=mask, **SCORES)
    cache = BlendedCache([case.caches for case in cases], 1.0)
    same_scores(generate(model, ids, cache, attention_mask=mask, **SCORES), want)


def test_streamers(attached):
    model, tokenizer = attached(), byte_tokenizer()
    case = make_case(model)
    heard = []

    class Listener(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            heard.append(text)

    want = generate(model, case.ids)[0, case.ids.shape[1] :]
    text = tokenizer.decode(want % 256)

    class Bytes:  # ids of the model beyond the tokenizer's 260 are folded
        def decode(self, ids, **kwargs):
            return tokenizer.decode([i % 256 for i in ids], **kwargs)

    generate(model, case.ids, one(case), streamer=Listener(Bytes(), skip_prompt=True))
    assert "".join(heard) == text
    streamer = TextIteratorStreamer(Bytes(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generate, args=(model, case.ids, one(case)), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()


def test_logits_processors_and_stopping_criteria_see_the_whole_prompt(attached, plain):
    """What they are given, in every step, is what plain generate gives them."""
    model, case, told = attached(), make_case(attached()), []

    class Note(LogitsProcessor):
        def __call__(self, input_ids, scores):
            told.append(input_ids.tolist())
            scores[:, input_ids[0, -1]] = -torch.inf  # never the same token twice
            return scores

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= case.ids.shape[1] + 7)

    def both():
        return {"logits_processor": LogitsProcessorList([Note()]), "stopping_criteria": StoppingCriteriaList([Stop()])}

    want = generate(plain(), case.ids, **SCORES, **both())
    wanted, told = told, []
    same_scores(generate(model, case.ids, one(case), **SCORES, **both()), want)
    assert told == wanted
    assert len(told) == 7


def test_threads_that_stream_from_one_model(attached):
    """Each hears its own answer, whatever the others are at."""
    model = attached()
    cases = [make_case(model, seed=s) for s in range(4)]
    wants = [generate(model, case.ids, BlendedCache(case.caches, 0.3))[0, case.ids.shape[1] :] for case in cases]

    class Numbers:
        def decode(self, ids, **kwargs):
            return "".join(f"{int(i)} " for i in ids)

    heard: dict[int, str] = {}

    def ask(i: int) -> None:
        streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
        cache = BlendedCache(cases[i].caches, 0.3)
        thread = threading.Thread(target=generate, args=(model, cases[i].ids, cache), kwargs={"streamer": streamer})
        thread.start()
        heard[i] = "".join(streamer)
        thread.join()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: [int(n) for n in text.split()] for i, text in heard.items()} == dict(
        enumerate(want.tolist() for want in wants)
    )


def test_gradient_checkpointing():
    """It works in training mode only, which is refused; in eval mode it changes nothing."""
    model = attach(tiny_model("llama"))
    case = make_case(model)
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    new_name = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable)()
    assert torch.equal(generate(model, case.ids, BlendedCache(case.caches, 0.3)), want)
    model.train()
    for call in (run, generate):
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            call(model, case.ids, BlendedCache(case.caches, 0.3))
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        prefill(model, case.chunks, progress=False)


def test_output_hidden_states_and_attentions(attached, plain):
    model, other = (f("llama", attn_implementation="eager") for f in (attached, plain))
    case = make_case(model)
    asked = {"output_hidden_states": True, "output_attentions": True} | SCORES
    want = generate(other, case.ids, **asked)
    got = generate(model, case.ids, one(case), **asked)
    same_scores(got, want)
    for a, b in zip(got.attentions, want.attentions, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-4)


def test_the_cache_under_either_keyword(attached):
    model = attached()
    case = make_case(model)
    want = generate(model, case.ids)
    assert torch.equal(generate(model, case.ids, one(case)), want)
    kwargs = {"past_key_values": one(case), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if _compat.CACHE_ARG == "past_key_values":
        got = model.generate(case.ids, **kwargs)
    else:
        with pytest.warns(FutureWarning, match="past_key_values"):  # transformers' own
            got = model.generate(case.ids, **kwargs)
    assert torch.equal(got, want)


def test_growth_by_blocks(attached, plain):
    model = attached()
    case = make_case(model)
    cache = one(case, reserve=16)
    got = generate(model, case.ids, cache, max_new_tokens=600)
    assert torch.equal(got, generate(plain(), case.ids, max_new_tokens=600))
    assert cache.get_seq_length() == case.ids.shape[1] + 599
    room = cache.layers[0]._keys.shape[2]
    assert 0 <= room - cache.get_seq_length() <= 16


# -- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_same_ids_plus_more_goes_on(attached, plain, ratio):
    model = attached()
    case = make_case(model)
    chunks = [exact_chunk(model, case.ids, s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)]
    cache = BlendedCache(chunks, ratio)
    first = generate(model, case.ids, cache)
    for turn in range(2):
        ids = torch.cat([first, tokens(4, 60 + turn)[None]], dim=1)
        got = generate(model, ids, cache, **SCORES)
        same_scores(got, generate(plain(), ids, **SCORES))
        first = got.sequences


def test_only_the_new_ids_with_a_full_mask(attached, plain):
    model = attached()
    case = make_case(model)
    cache = one(case)
    logits = run(model, case.ids, cache).logits
    more = tokens(6, 61)[None]
    got = run(model, more, cache).logits
    want, _ = full(plain(), torch.cat([case.ids, more], dim=1))
    assert (got - want[:, -6:]).abs().max() <= 2e-4
    assert not logits.isnan().any()
    assert torch.equal(cache.ids, torch.cat([case.ids, more], dim=1))


def test_other_ids_on_a_used_cache_raise(attached):
    model = attached()
    case = make_case(model)
    cache = one(case)
    out = generate(model, case.ids, cache)
    other = out.clone()
    other[0, 3] = (other[0, 3] + 1) % 512
    for ids in (case.ids, other, torch.cat([other, other], dim=1), out.repeat(2, 1), out[:, :10]):
        with pytest.raises(CacheStateError, match="fork"):
            generate(model, ids, cache)
    # nothing was lost: the conversation still goes on
    more = torch.cat([out, tokens(3)[None]], dim=1)
    assert torch.equal(generate(model, more, cache), generate(model, more))


def test_same_ids_again_raise(attached):
    model = attached()
    case = make_case(model)
    cache = one(case)
    run(model, case.ids, cache)
    with pytest.raises(CacheStateError, match="already in this cache"):
        generate(model, case.ids, cache)


def test_fork(attached):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.3)
    want = generate(model, case.ids, cache)
    twin = cache.fork()
    assert not twin.is_filled
    assert not twin.report.layers
    assert twin.chunks[0][0] is cache.chunks[0][0]
    assert torch.equal(generate(model, case.ids, twin), want)
    assert str(twin.schedule) == str(cache.schedule)
    cache.reset()
    assert torch.equal(generate(model, case.ids, cache), want)
    gradual = BlendedCache(case.caches, check_layers={1: 0.5, 2: 0.2})
    assert gradual.fork().schedule == {1: 0.5, 2: 0.2}


def test_deep_copy_of_a_filled_cache_goes_on_by_itself(attached):
    model = attached()
    case = make_case(model)
    cache = one(case)
    run(model, case.ids, cache)
    twin = copy.deepcopy(cache)
    a, b = (torch.cat([case.ids, tokens(3, s)[None]], dim=1) for s in (70, 71))
    assert torch.equal(generate(model, a, cache), generate(model, a))
    assert torch.equal(generate(model, b, twin), generate(model, b))


def test_crop(attached, plain):
    model = attached()
    case = make_case(model)
    cache = one(case)
    out = generate(model, case.ids, cache)
    held = cache.get_seq_length()
    cache.crop(_compat.crop_argument(held, held - 5))
    assert cache.get_seq_length() == held - 5 == cache.ids.shape[1]
    ids = torch.cat([out[:, : held - 5], tokens(4, 6)[None]], dim=1)
    same_scores(generate(model, ids, cache, **SCORES), generate(plain(), ids, **SCORES))


# -- failures ---------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["layer", "mlp", "head"])
def test_a_failed_forward_leaves_the_model_usable(where):
    model = attach(tiny_model("llama"))
    case = make_case(model)
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    target = {"layer": model.model.layers[2], "mlp": model.model.layers[1].mlp, "head": model.lm_head}[where]

    def fail(module, args):
        raise Boom

    cache = BlendedCache(case.caches, 0.3)
    handle = target.register_forward_pre_hook(fail)
    with pytest.raises(Boom):
        generate(model, case.ids, cache)
    handle.remove()
    if where != "head":
        for ids in (case.ids, torch.cat([case.ids, tokens(3)[None]], dim=1)):
            with pytest.raises(CacheStateError, match="fork"):
                generate(model, ids, cache)
            with pytest.raises(CacheStateError, match="fork"):
                run(model, ids, cache)
    assert torch.equal(generate(model, case.ids, cache.fork()), want)
    assert torch.equal(generate(model, case.ids), generate(tiny_model("llama"), case.ids))


def test_a_failed_decoding_step_does_not_answer_wrongly():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    cache = one(case)
    out = generate(model, case.ids, cache)
    more = torch.cat([out, tokens(3)[None]], dim=1)

    def fail(module, args):
        raise Boom

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(Boom):
        generate(model, more, cache)
    handle.remove()
    with pytest.raises(CacheStateError):  # two layers hold more tokens than the others
        generate(model, more, cache)


def test_not_attached_names_the_call(plain, attached):
    model = attached()
    case = make_case(model)
    for call in (run, generate):
        with pytest.raises(NotAttachedError, match=r"blendkv\.attach\(model\)"):
            call(plain(), case.ids, BlendedCache(case.caches))


@pytest.mark.parametrize("bad", ["labels", "training", "4d mask", "embeds", "short mask", "long mask"])
def test_forward_refuses_with_a_clear_message(bad):
    model = attach(tiny_model("llama"))
    case = make_case(model)
    length, kwargs, ids = case.ids.shape[1], {}, case.ids
    matches = {"labels": "labels", "training": "eval", "4d mask": "4D", "embeds": "inputs_embeds"}
    if bad == "labels":
        kwargs = {"labels": case.ids}
    elif bad == "training":
        model.train()
    elif bad == "4d mask":
        kwargs = {"attention_mask": torch.zeros(1, 1, length, length)}
    elif bad == "embeds":
        kwargs, ids = {"inputs_embeds": model.get_input_embeddings()(case.ids)}, None
    else:
        kwargs = {"attention_mask": torch.ones(1, length + (-3 if bad == "short mask" else 3), dtype=torch.long)}
    cache = one(case)
    with pytest.raises(ValueError, match=matches.get(bad, "attention_mask")):
        run(model, ids, cache, **kwargs)
    model.eval()
    assert torch.equal(generate(model, case.ids, cache), generate(model, case.ids))  # it was refused, not spoiled


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"cache_implementation": "static"}, "cache_implementation"),
    ],
)
def test_generate_refuses_with_a_clear_message(attached, options, match):
    model = attached()
    case = make_case(model)
    with pytest.raises(ValueError, match=match):
        generate(model, case.ids, one(case), **options)


def test_generate_refuses_ids_and_mask_of_different_lengths(attached):
    model = attached()
    case = make_case(model)
    for length in (case.ids.shape[1] - 2, case.ids.shape[1] + 2):
        with pytest.raises(ValueError, match="attention_mask"):
            generate(model, case.ids, one(case), attention_mask=torch.ones(1, length, dtype=torch.long))


def test_only_new_ids_on_an_empty_cache_raise(attached):
    model = attached()
    case = make_case(model)
    with pytest.raises(CacheStateError, match="whole prompt"):
        generate(model, case.ids[:, -5:], one(case))


def test_generate_refuses_inputs_embeds(attached):
    model = attached()
    case = make_case(model)
    embeds = model.get_input_embeddings()(case.ids).detach()
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds, max_new_tokens=2, pad_token_id=0, **{_compat.CACHE_ARG: one(case)})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recompute_ratio": -0.1}, "outside"),
        ({"recompute_ratio": 1.1}, "outside"),
        ({"recompute_ratio": float("nan")}, "outside"),
        ({"check_layers": {1: 0.2, 2: 0.3}}, "grow"),
        ({"check_layers": {-1: 0.2}}, "layer"),
        ({"selector": "magic"}, "unknown selector"),
        ({"reserve": 0}, "reserve"),
    ],
)
def test_bad_options(attached, options, match):
    case = make_case(attached())
    with pytest.raises(ValueError, match=match):
        BlendedCache(case.caches, **options)


def test_a_check_layer_that_the_model_has_not_is_an_error(attached):
    model = attached()
    case = make_case(model)
    with pytest.raises(ValueError, match="layer"):
        run(model, case.ids, BlendedCache(case.caches, check_layers={9: 0.2}))


def test_chunks_must_be_chunks():
    with pytest.raises(TypeError, match="ChunkCache"):
        BlendedCache(["text"])


def test_a_batch_with_the_wrong_number_of_chunk_lists(attached):
    model = attached()
    case = make_case(model)
    with pytest.raises(ValueError, match="lists of chunks"):
        run(model, case.ids.repeat(3, 1), BlendedCache([case.caches, case.caches]))


def test_no_chunk_in_the_prompt_is_plain_prefill_with_one_warning(attached, plain):
    model = attached()
    case = make_case(model)
    ids = tokens(60, 33)[None]
    with pytest.warns(UserWarning, match="no chunk was found") as caught:
        got = generate(model, ids, BlendedCache(case.caches), **SCORES)
    assert len([w for w in caught if "no chunk" in str(w.message)]) == 1
    same_scores(got, generate(plain(), ids, **SCORES))


def test_no_chunks_at_all(attached, plain):
    model = attached()
    ids = tokens(20, 33)[None]
    got = generate(model, ids, BlendedCache([]), **SCORES)  # nothing was promised, so nothing is warned of
    same_scores(got, generate(plain(), ids, **SCORES))


# -- an attached model and other caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "overrides"), [(f, {}) for f in FAMILIES] + [("mistral", {"sliding_window": 16})])
def test_ordinary_use_is_bit_equal(attached, plain, family, overrides, attn):
    model, other = (f(family, attn_implementation=attn, **overrides) for f in (attached, plain))
    ids = torch.stack([tokens(30, 1), tokens(30, 2)])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.no_grad():
        for kwargs in ({}, {"attention_mask": mask}, {"use_cache": False}):
            assert torch.equal(model(ids, **kwargs).logits, other(ids, **kwargs).logits)
    want, reference = full(other, ids, attention_mask=mask)
    got, cache = full(model, ids, attention_mask=mask)
    assert torch.equal(got, want)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, reference.layers, strict=True))
    for cached in (None, DynamicCache):
        a, b = (
            generate(m, ids, cached and cached(config=m.config), attention_mask=mask, **SCORES) for m in (model, other)
        )
        assert torch.equal(a.sequences, b.sequences)
        assert all(torch.equal(x, y) for x, y in zip(a.scores, b.scores, strict=True))


def test_static_cache_and_prefill_chunks_still_work_without_a_blend(attached, plain):
    ids = tokens(20, 3)[None]
    for options in ({"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 6}):
        a, b = (generate(m, ids, **options) for m in (attached(), plain()))
        assert torch.equal(a, b)


def snapshot(model) -> tuple:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks, model.config._attn_implementation, [sorted(m.__dict__) for m in model.modules()]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_attach_is_idempotent_and_detach_restores(attn):
    model = tiny_model("llama", attn_implementation=attn)
    before = snapshot(model)
    assert attach(model) is model
    once = snapshot(model)
    assert attach(model) is model
    assert snapshot(model) == once
    case = make_case(model)
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    assert detach(model) is model
    assert snapshot(model) == before
    detach(model)
    assert model.prepare_inputs_for_generation.__func__ is type(model).prepare_inputs_for_generation
    with pytest.raises(NotAttachedError):
        generate(model, case.ids, BlendedCache(case.caches))
    attach(model)
    assert torch.equal(generate(model, case.ids, BlendedCache(case.caches, 0.3)), want)


def test_attach_the_decoder_and_then_the_model():
    model = tiny_model("llama")
    before = snapshot(model)
    attach(model.model)
    attach(model)
    case = make_case(model)
    logits, _ = full(model, case.ids)
    assert (run(model, case.ids, one(case)).logits - logits).abs().max() <= 1e-4
    run(model, case.ids, BlendedCache(case.caches, 0.3))
    detach(model)
    detach(model.model)
    assert snapshot(model) == before


def test_attach_the_decoder_after_the_model_was_detached():
    model = tiny_model("llama")
    attach(model)
    detach(model)
    attach(model.model)
    case = make_case(model.model)
    run(model.model, case.ids, BlendedCache(case.caches, 0.3))


def test_detach_through_the_decoder():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    detach(model.model)
    attach(model)
    run(model, case.ids, BlendedCache(case.caches, 0.3))


def test_deep_copy_of_an_attached_model():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    twin = copy.deepcopy(model)
    assert attachment_of(twin).model is twin
    assert torch.equal(generate(twin, case.ids, BlendedCache(case.caches, 0.3)), want)
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight[0, 0] += 1.0
    cache = BlendedCache(case.caches, 0.3)  # the copy has other weights now: its chunks are its own
    generate(twin, case.ids, cache)
    assert cache.report.misses == {"fingerprint": 39}
    detach(twin)
    assert "prepare_inputs_for_generation" not in twin.__dict__
    assert twin.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, case.ids, BlendedCache(case.caches, 0.3)), want)  # the original is untouched
    used = BlendedCache(case.caches, 0.3)
    generate(model, case.ids, used)
    with pytest.raises(CacheStateError):  # its wrapped method too
        generate(model, case.ids, used)


def test_attention_changed_after_attach():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    model.set_attn_implementation("eager")
    with pytest.raises(NotAttachedError, match=r"attach\(model\) again"):
        run(model, case.ids, BlendedCache(case.caches))
    attach(model)
    assert model.config._attn_implementation == "blendkv_eager"
    logits, _ = full(model, case.ids)
    assert (run(model, case.ids, one(case)).logits - logits).abs().max() <= 1e-4
    run(model, case.ids, BlendedCache(case.caches, 0.3))
    detach(model)
    assert model.config._attn_implementation == "eager"  # the user's choice, not the one before it


def test_a_saved_model_does_not_mention_blendkv(tmp_path):
    model = attach(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    assert "blendkv" not in (tmp_path / "config.json").read_text()
    other = type(model).from_pretrained(tmp_path)
    assert other.config._attn_implementation == "sdpa"


def test_changed_weights_are_noticed():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[3, 5] += 0.5
    cache = BlendedCache(case.caches)
    got = run(model, case.ids, cache).logits
    assert cache.report.misses == {"fingerprint": 39}
    assert torch.equal(got, full(model, case.ids)[0])
    cache = BlendedCache(prefill(model, case.chunks, progress=False))
    run(model, case.ids, cache)
    assert all(use.hit for use in cache.report.chunks)


# -- several threads --------------------------------------------------------------------------------------------------


def test_threads_share_a_model(attached):
    model = attached("qwen2")
    cases = [make_case(model, seed=s) for s in range(4)]
    want = [generate(model, case.ids, BlendedCache(case.caches, 0.3)) for case in cases]
    plain_want = [generate(model, case.ids) for case in cases]
    failures: list = []

    def work(i: int) -> None:
        try:
            for turn in range(3):
                j = (i + turn) % 4
                blended = i % 2 == 0
                cache = BlendedCache(cases[j].caches, 0.3) if blended else None
                got = generate(model, cases[j].ids, cache)
                if not torch.equal(got, (want if blended else plain_want)[j]):
                    failures.append((i, turn))
        except Exception as error:  # a thread's exception would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- memory -----------------------------------------------------------------------------------------------------------


def test_no_graph_is_kept(attached):
    model = attached()
    case = make_case(model)
    assert not any(t.requires_grad for chunk in case.caches for t in (*chunk.keys, *chunk.values))
    cache = BlendedCache(case.caches, 0.3)
    generate(model, case.ids, cache)
    assert not any(t.requires_grad for layer in cache.layers for t in (layer.keys, layer.values))


def test_forward_with_gradients_enabled_gives_the_same(attached):
    model = attached()
    case = make_case(model)
    for schedule in ({0: 0.3}, {1: 0.3}, {}):
        want = run(model, case.ids, BlendedCache(case.caches, check_layers=schedule)).logits
        kwargs = {_compat.cache_keyword(model.forward): BlendedCache(case.caches, check_layers=schedule)}
        got = model(case.ids, use_cache=True, **kwargs).logits
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_inference_mode(attached):
    model = attached()
    case = make_case(model)
    cache = BlendedCache(case.caches, 0.3)
    want = run(model, case.ids, BlendedCache(case.caches, 0.3)).logits
    with torch.inference_mode():
        out = run(model, case.ids, cache).logits
        assert rms_ratio(out[:, -1], want[:, -1]) == 0
        assert all(torch.isfinite(layer.keys).all() for layer in cache.layers)
