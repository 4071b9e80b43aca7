"""Issue 2, "Bad input": what cannot be used is a counted miss; what cannot be meant, an error with a remedy."""

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import StaticCache

from blendkv import (
    BlendedCache,
    ChunkLibrary,
    ChunkMissError,
    NotAttachedError,
    Pool,
    StoreError,
    UnsupportedModelError,
    _compat,
    attach,
    detach,
    prefill,
)
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, assert_same_answer, ids_of, model_of

TEXTS = [ids_of(30, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(TEXTS)[None], ids_of(8, 3)], dim=1)
DOCUMENTS = ["Otters hold hands.", "Rafts of otters drift."]


@pytest.fixture(scope="module")
def model():
    return attach(model_of())


@pytest.fixture(scope="module")
def chunks(model):
    return prefill(model, TEXTS, progress=False)


def assert_counted_miss(model, chunks, reason: str) -> None:
    """None of the chunks is used, all of their tokens are counted under `reason`, and the answer is full prefill's."""
    cache = BlendedCache(chunks)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    assert cache.report.misses == {reason: 60}
    assert all(layer.missed == 60 and layer.reused == layer.recomputed == 0 for layer in cache.report.layers)
    assert not any(use.hit for use in cache.report.chunks)
    with pytest.raises(ChunkMissError, match=reason):
        answer(model, PROMPT, BlendedCache(chunks, strict=True), tokens=1)


# -- a chunk that is not this model's: a counted miss, never use ------------------------------------------------------


def test_chunks_of_another_model_are_missed(model):
    """Other weights of the same shape."""
    assert_counted_miss(model, prefill(model_of(seed=1), TEXTS, progress=False), "fingerprint")


def test_chunks_of_another_config_are_missed(model):
    """The same weights under another RoPE base."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    assert_counted_miss(model, prefill(model_of(rope_parameters=rope), TEXTS, progress=False), "fingerprint")


def test_chunks_of_a_model_with_other_layers_are_missed(model):
    """More layers, and a chunk that claims this model's fingerprint but lacks some."""
    assert_counted_miss(model, prefill(model_of(num_hidden_layers=5), TEXTS, progress=False), "fingerprint")
    short = [replace(c, keys=c.keys[:3], values=c.values[:3]) for c in prefill(model, TEXTS, progress=False)]
    assert_counted_miss(model, short, "layers")


def test_chunks_with_other_heads_are_missed(model, chunks):
    """A chunk that claims this model's fingerprint but has heads of another shape."""
    narrow = [
        replace(c, keys=tuple(k[..., :8] for k in c.keys), values=tuple(v[..., :8] for v in c.values)) for c in chunks
    ]
    assert_counted_miss(model, narrow, "shape")
    one_head = [replace(c, keys=tuple(k[:1] for k in c.keys), values=tuple(v[:1] for v in c.values)) for c in chunks]
    assert_counted_miss(model, one_head, "shape")


def test_chunks_of_another_dtype_are_missed(model, chunks):
    """Cast chunks, with this model's fingerprint or that of the model in the other dtype."""
    cast = [replace(c, keys=tuple(k.bfloat16() for k in c.keys)) for c in chunks]
    assert_counted_miss(model, cast, "dtype")
    assert_counted_miss(model, prefill(model_of(dtype=torch.bfloat16), TEXTS, progress=False), "fingerprint")


def test_chunks_from_before_the_weights_changed_are_missed():
    """One number of one weight updated in place after the chunks were made."""
    model = model_of()
    chunks = prefill(model, TEXTS, progress=False)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1.0
    assert_counted_miss(model, chunks, "fingerprint")


def test_chunks_of_another_tokenizer_are_missed(model):
    """The same text under another tokenizer over one pool: nothing is found, and the answer is full prefill's."""
    pool = Pool()
    ChunkLibrary(model, byte_tokenizer(), pool)(DOCUMENTS, "Why?")
    other = byte_tokenizer(merges=(("t", "t"),))
    inputs = ChunkLibrary(model, other, pool, on_miss="recompute")(DOCUMENTS, "Why?")
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert out.tolist() == model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).tolist()
    assert inputs.report.misses == {"absent": inputs.report.chunk_tokens}
    assert inputs.report.reused_tokens == 0


def test_a_pool_that_serves_the_wrong_chunk_serves_nothing(model):
    """Entries under another's key (a broken hash, a swapped file) are compared on a hit and not used."""

    class Swapped(Pool):
        def get(self, key):
            """The entry of some other key."""
            return next((chunk for name, chunk in self._entries.items() if name != key), None)

    kv = ChunkLibrary(model, byte_tokenizer(), Swapped(), recompute_ratio=0.0, condition="none")
    plain = ChunkLibrary(model, byte_tokenizer(), recompute_ratio=0.0)
    wanted = model.generate(**plain(DOCUMENTS, "Why?"), max_new_tokens=4, do_sample=False)
    for _ in range(2):
        assert model.generate(**kv(DOCUMENTS, "Why?"), max_new_tokens=4, do_sample=False).tolist() == wanted.tolist()


# -- adapters ---------------------------------------------------------------------------------------------------------


def lora(model, seed: int = 0):
    """The model with a LoRA adapter that changes what it says."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config).eval()


def test_chunks_without_the_adapter_are_missed_with_it_and_the_other_way_round():
    """A LoRA adapter changes keys and values: chunks of the model without it are not used, nor its own without it."""
    bare = prefill(model_of(), TEXTS, progress=False)
    adapted = lora(model_of())
    attach(adapted)
    assert_counted_miss(adapted, bare, "fingerprint")
    own = prefill(adapted, TEXTS, progress=False)
    cache = BlendedCache(own, recompute_ratio=1.0)
    assert_same_answer(answer(adapted, PROMPT, cache), answer(adapted, PROMPT))
    assert not cache.report.misses
    with adapted.disable_adapter():
        assert_counted_miss(adapted, own, "fingerprint")
    assert_counted_miss(attach(model_of()), own, "fingerprint")


def test_an_adapter_put_on_after_attach_is_noticed():
    """The model was attached and its chunks made before the adapter came."""
    model = model_of()
    bare = prefill(model, TEXTS, progress=False)
    adapted = lora(model)
    assert_counted_miss(adapted, bare, "fingerprint")


def test_chunks_of_another_adapter_are_missed():
    """Same shape, other adapter weights; and the same adapter merged at another scale."""
    one, other = lora(model_of(), 0), lora(model_of(), 1)
    assert_counted_miss(attach(other) and other, prefill(one, TEXTS, progress=False), "fingerprint")
    chunks = prefill(other, TEXTS, progress=False)
    for module in other.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    assert_counted_miss(other, chunks, "fingerprint")


@pytest.mark.parametrize("method", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_prompt_learning_is_refused(method):
    """Virtual tokens stand in the cache where chunks cannot be placed around them."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model_of(), config).eval()
    for call in (lambda: attach(adapted), lambda: prefill(adapted, TEXTS, progress=False)):
        with pytest.raises(UnsupportedModelError, match="use LoRA, or full prefill"):
            call()
    with pytest.raises(UnsupportedModelError, match="use LoRA"):
        ChunkLibrary(adapted, byte_tokenizer())


def test_prompt_learning_put_on_after_attach_is_refused():
    """The model was attached before it became a prefix-tuned one."""
    peft = pytest.importorskip("peft")
    model = model_of()
    chunks = prefill(model, TEXTS, progress=False)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config).eval()
        with pytest.raises((ValueError, NotAttachedError), match=r"LoRA|input_ids|full prefill"):
            answer(adapted, PROMPT, BlendedCache(chunks))


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_without_any_chunk_is_plain_prefill_and_warns_once(model, chunks):
    """One warning that says what to do, then the answer of full prefill; the report says so too."""
    other = ids_of(80, 99)
    wanted = answer(model, other)
    cache = BlendedCache(chunks)
    with pytest.warns(UserWarning, match="chunks' own ids") as seen:
        got = answer(model, other, cache)
    assert len(seen) == 1
    assert_same_answer(got, wanted)
    assert cache.report.notes
    assert cache.report.chunk_tokens == cache.report.reused_tokens == 0
    assert all(layer.fresh == 80 for layer in cache.report.layers)
    assert [use.reason for use in cache.report.chunks] == ["not in the prompt"] * 2


def test_no_chunks_at_all_is_plain_prefill(model):
    """An empty list is a prompt without any chunk: it must answer, and not warn of what nobody expected."""
    got = answer(model, PROMPT, BlendedCache([]))
    assert_same_answer(got, answer(model, PROMPT))


def test_ids_and_mask_of_different_lengths(model, chunks):
    """Both lengths and what to pass."""
    short = torch.ones_like(PROMPT)[:, 1:]
    with pytest.raises(ValueError, match="mask of the same length") as error:
        answer(model, PROMPT, BlendedCache(chunks), attention_mask=short)
    assert "68" in str(error.value)
    assert "67" in str(error.value)
    long = torch.ones(1, 80, dtype=torch.long)
    with pytest.raises(ValueError, match="mask of the same length"):
        answer(model, PROMPT, BlendedCache(chunks), attention_mask=long)
    with pytest.raises(ValueError, match="mask over everything"), torch.no_grad():
        model(input_ids=PROMPT, attention_mask=short, **{_compat.CACHE_ARG: BlendedCache(chunks)})


def test_masks_that_hide_something_are_compared_too(model, chunks):
    """The same with masks that are not all ones, which take another way through generate."""
    mask = torch.ones_like(PROMPT)[:, 1:]
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="mask of the same length"):
        answer(model, PROMPT, BlendedCache(chunks), attention_mask=mask)


def test_a_batch_and_lists_of_chunks_that_do_not_fit(model, chunks):
    """Two prompts, three lists of chunks."""
    with pytest.raises(ValueError, match="one list per prompt"):
        answer(model, PROMPT.repeat(2, 1), BlendedCache([chunks, chunks, chunks]))


def test_embeddings_instead_of_ids(model, chunks):
    """Chunks are found in ids."""
    embeddings = model.get_input_embeddings()(PROMPT)
    with pytest.raises(ValueError, match="pass those, not inputs_embeds"), torch.no_grad():
        model(inputs_embeds=embeddings, **{_compat.CACHE_ARG: BlendedCache(chunks)})


def test_a_model_in_training_mode(chunks):
    """Dropout would make kept and fresh states differ."""
    model = attach(model_of()).train()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        answer(model, PROMPT, BlendedCache(chunks))


# -- options of the cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 15, float("nan")])
def test_a_ratio_outside_0_and_1(model, chunks, ratio):
    """In every place where a ratio can be given."""
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        BlendedCache(chunks, recompute_ratio=ratio)
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        BlendedCache(chunks, check_layers={1: ratio})
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        ChunkLibrary(model, byte_tokenizer(), recompute_ratio=ratio)


@pytest.mark.parametrize("schedule", [{1: 0.1, 3: 0.2}, {3: 0.2, 1: 0.1}, {0: 0.0, 1: 0.5}])
def test_a_growing_schedule(model, chunks, schedule):
    """A row that was dropped has no hidden state to go on with."""
    with pytest.raises(ValueError, match="may not grow"):
        BlendedCache(chunks, check_layers=schedule)
    with pytest.raises(ValueError, match="may not grow"):
        ChunkLibrary(model, byte_tokenizer(), check_layers=schedule)


@pytest.mark.parametrize("layer", [-1, 1.5, "1"])
def test_a_schedule_with_something_that_is_no_layer(chunks, layer):
    """Layers are counted from 0."""
    with pytest.raises((ValueError, TypeError), match="layer"):
        BlendedCache(chunks, check_layers={layer: 0.5})


def test_a_schedule_beyond_the_last_layer(model, chunks):
    """A check layer that the model does not have would be silently ignored: everything recomputed."""
    with pytest.raises(ValueError, match="layer"):
        answer(model, PROMPT, BlendedCache(chunks, check_layers={7: 0.1}))


def test_an_unknown_selector(model, chunks):
    """The error lists the names there are."""
    for call in (
        lambda: BlendedCache(chunks, selector="hkdv"),
        lambda: ChunkLibrary(model, byte_tokenizer(), selector="hkdv"),
    ):
        with pytest.raises(ValueError, match=r"unknown selector 'hkdv'; choose one of .*boundary.*hkvd"):
            call()


def test_things_that_are_no_chunks(chunks):
    """A path, a string or a tensor in place of a chunk."""
    for thing in ("text", PROMPT, None):
        with pytest.raises(TypeError, match="prefill"):
            BlendedCache([chunks[0], thing])
        with pytest.raises(TypeError, match="prefill"):
            BlendedCache([thing])


@pytest.mark.parametrize("reserve", [0, -5])
def test_no_reserve(chunks, reserve):
    """Buffers grow by at least one token."""
    with pytest.raises(ValueError, match="at least one token"):
        BlendedCache(chunks, reserve=reserve)


# -- options of generate ----------------------------------------------------------------------------------------------


def test_prefill_chunk_size(model, chunks):
    """Cuts the prompt before the chunks are found."""
    with pytest.raises(ValueError, match="leave it out"):
        answer(model, PROMPT, BlendedCache(chunks), prefill_chunk_size=16)


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded", "dynamic"])
def test_cache_implementation(model, chunks, implementation):
    """Names a second cache beside the first."""
    with pytest.raises(ValueError, match=r"only one of the two|leave it out|leave out"):
        answer(model, PROMPT, BlendedCache(chunks), cache_implementation=implementation)


def test_cache_implementation_in_the_generation_config(chunks):
    """The same, set on the model beforehand."""
    model = attach(model_of())
    model.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match=r"only one of the two|leave it out|leave out"):
        answer(model, PROMPT, BlendedCache(chunks))


def test_a_static_cache_beside_a_blended_one(model, chunks):
    """Two caches under the two names that newer versions have: transformers warns, and takes `cache`."""
    if "cache" not in inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters:
        pytest.skip("this transformers has one name for a cache")
    static = StaticCache(config=model.config, max_cache_len=128)
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    with pytest.warns(FutureWarning, match="past_key_values"):
        out = model.generate(PROMPT, cache=cache, past_key_values=static, max_new_tokens=4, do_sample=False)
    assert out.tolist() == model.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist()
    assert cache.is_filled
    assert static.get_seq_length() == 0


def test_generate_does_not_compile_a_forward_whose_rows_are_chosen_at_run_time(model, chunks):
    """generate compiles decoding by itself only where a cache says that it can be compiled: this one never does."""
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    assert not cache.is_compileable
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    assert not cache.is_compileable


# -- a model without hooks --------------------------------------------------------------------------------------------


def test_a_model_that_is_not_attached(chunks):
    """Names the call to make; before attach, and after detach."""
    model = model_of()
    for _ in range(2):
        with pytest.raises(NotAttachedError, match=r"blendkv.attach\(model\)"):
            answer(model, PROMPT, BlendedCache(chunks))
        detach(attach(model))


def test_an_attention_implementation_switched_after_attach(chunks):
    """Names the call to make again."""
    model = attach(model_of())
    model.set_attn_implementation("eager")
    with pytest.raises(NotAttachedError, match=r"blendkv.attach\(model\) again"):
        answer(model, PROMPT, BlendedCache(chunks))
    cache = BlendedCache(prefill(attach(model), TEXTS, progress=False), recompute_ratio=1.0)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))


# -- the library ------------------------------------------------------------------------------------------------------


def test_options_of_the_library(model):
    """Each refused at once, with the choices."""
    tokenizer = byte_tokenizer()
    for options, match in (
        ({"condition": "sys"}, "'none', 'bos', 'system', 'dummy'"),
        ({"on_miss": "skip"}, "'prefill' or 'recompute'"),
        ({"chunk_tokens": 0}, "at least one"),
        ({"condition": "bos"}, "no BOS token: choose"),
        ({"store": "s4://bucket"}, "unknown scheme 's4'"),
        ({"capacity_bytes": 0}, "positive"),
    ):
        with pytest.raises((ValueError, StoreError), match=match):
            ChunkLibrary(model, tokenizer, **options)


def test_documents_that_are_none(model):
    """One string instead of a list, something without text, an empty document."""
    kv = ChunkLibrary(model, byte_tokenizer())
    for documents, error, match in (
        ("one string", TypeError, "list of documents"),
        ([3], TypeError, "pass text"),
        ([""], ValueError, "leave it out"),
    ):
        with pytest.raises(error, match=match):
            kv(documents, "Why?")


def test_no_documents(model):
    """A question without documents is answered, by plain prefill."""
    inputs = ChunkLibrary(model, byte_tokenizer(), recompute_ratio=1.0)([], "Why?")
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert out.tolist() == model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).tolist()


def test_empty_chunks_and_text_without_a_tokenizer(model):
    """What prefill cannot compute."""
    with pytest.raises(ValueError, match="at least one token"):
        prefill(model, [[]], progress=False)
    with pytest.raises(ValueError, match="tokenizer"):
        prefill(model, ["text"], progress=False)
