"""What an attack on the library found: each was a wrong answer, a silent miss or a broken model once."""

import copy
import gc
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from blendkv import (
    BlendedCache,
    CacheStateError,
    ChunkLibrary,
    Pool,
    UnsupportedModelError,
    attach,
    model_fingerprint,
    prefill,
)
from blendkv.attaching import attachment_of
from blendkv.prompt import find_spans
from blendkv.testing import byte_tokenizer, tiny_model
from tests.helpers import exact_chunk, full, generate, make_case, run, tokens


def test_weights_that_come_and_go_at_one_address_are_told_apart():
    """The allocator hands an address out again: a new tensor there is not the old one."""
    model = attach(tiny_model("llama"))
    state, layer = attachment_of(model), model.model.layers[0].self_attn.v_proj
    for seed in range(20):
        weight = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed))
        layer.load_state_dict({"weight": weight}, assign=True)
        del weight
        assert state.facts.fingerprint == model_fingerprint(model)


def test_copies_and_pickles_of_an_attached_model_free_nothing_twice():
    """The weak references behind a fingerprint belong to one owner."""
    model = attach(tiny_model("llama"))
    prefill(model, [tokens(10)], progress=False)
    for _ in range(3):
        twin = copy.deepcopy(model)
        assert attachment_of(twin).facts.fingerprint == attachment_of(model).facts.fingerprint
        again = pickle.loads(pickle.dumps(attachment_of(model).fingerprints))
        assert not again.unchanged()
        del twin
        gc.collect()


def test_writes_that_torch_does_not_count_need_one_call():
    model = attach(tiny_model("llama"))
    chunks = prefill(model, [tokens(30)], progress=False)
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2.0)
    attach(model, refresh=True)
    cache = BlendedCache(chunks)
    run(model, tokens(30)[None], cache)
    assert cache.report.misses == {"fingerprint": 29}


def test_threads_that_meet_an_unattached_model():
    """All wait until it is proven; nobody stores a chunk made with half-known facts."""
    model, made, errors = tiny_model("qwen3"), [], []
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        try:
            made.append(prefill(model, [tokens(20)], progress=False)[0])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(a, b) for chunk in made[1:] for a, b in zip(made[0].keys, chunk.keys, strict=True))


def test_an_interrupt_in_the_first_forward_leaves_the_model_usable():
    """Ctrl-C in a notebook: no hook of torch runs then."""
    model = attach(tiny_model("llama"))
    case = make_case(model)
    wanted = generate(model, case.ids)

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_hook(interrupt)
    cache = BlendedCache(case.caches)
    with pytest.raises(KeyboardInterrupt):
        generate(model, case.ids, cache)
    handle.remove()
    assert torch.equal(generate(model, case.ids), wanted)
    with pytest.raises(CacheStateError, match="fork"):
        generate(model, case.ids, cache)
    assert torch.equal(generate(model, case.ids, BlendedCache(case.caches, 1.0)), wanted)


def test_prompt_lookup_in_the_second_turn():
    """Assisted decoding hands the whole prompt to a filled cache in its first step."""
    model = attach(tiny_model("llama", eos_token_id=511))
    case = make_case(model)
    first = generate(model, case.ids, cache := BlendedCache(case.caches, 1.0))
    second = torch.cat([first, tokens(9, 8)[None]], dim=1)
    got = generate(model, second, cache, prompt_lookup_num_tokens=3, eos_token_id=511)
    assert torch.equal(got, generate(model, second, eos_token_id=511))
    assert cache.get_seq_length() == got.shape[1] - 1


def test_the_whole_prompt_in_a_plain_forward_of_a_filled_cache():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    run(model, case.ids, cache := BlendedCache(case.caches, 1.0))
    longer = torch.cat([case.ids, tokens(4, 5)[None]], dim=1)
    got = run(model, longer, cache).logits
    assert got.shape[1] == 4
    assert (got - full(model, longer)[0][:, -4:]).abs().max() <= 1e-4


def test_another_dtype_after_attach_is_asked_for_and_then_works():
    model = attach(tiny_model("llama"))
    model.to(torch.bfloat16)
    cache = BlendedCache(prefill(model, [tokens(30)], progress=False))
    run(model, torch.cat([tokens(30), tokens(5, 1)])[None], cache)
    assert not cache.report.misses


def test_chunks_made_under_autocast_are_the_models_own():
    model = attach(tiny_model("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = prefill(model, [tokens(30)], progress=False)[0]
    plain = prefill(model, [tokens(30)], progress=False)[0]
    assert all(
        torch.equal(a, b) for a, b in zip((*under.keys, *under.values), (*plain.keys, *plain.values), strict=True)
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_blend_under_autocast(batch, ratio):
    """Values are bf16 then and keys, turned by fp32 angles, fp32."""
    model = attach(tiny_model("llama"))
    case = make_case(model)
    cache = BlendedCache(case.caches, ratio)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = run(model, case.ids.expand(batch, -1), cache, logits_to_keep=1).logits[:, -1].float()
    plain = run(model, case.ids, BlendedCache(case.caches, ratio), logits_to_keep=1).logits[:, -1]
    assert (logits - plain).square().mean().sqrt() <= 0.1 * plain.square().mean().sqrt()


def test_an_entry_found_wanting_is_replaced():
    """A chunk of the wrong dtype under the right key is computed again, once."""
    model, tokenizer, pool = attach(tiny_model("llama")), byte_tokenizer(), Pool()
    kv = ChunkLibrary(model, tokenizer, pool)
    [good] = kv.prefill(["Otters hold hands."])
    pool._entries[good.key] = replace(good, keys=tuple(k.half() for k in good.keys))
    assert kv.prefill(["Otters hold hands."])[0].keys[0].dtype == torch.float32
    assert pool.get(good.key).keys[0].dtype == torch.float32


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] | upper }}",
        "{{ messages[-1]['content'] }}{{ messages[-1]['content'] }}",
        "{% for part in messages[-1]['content'] %}{{ part.text }}{% endfor %}",
    ],
)
def test_a_template_that_changes_content_is_refused(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template"):
        ChunkLibrary(attach(tiny_model("llama")), tokenizer)(["a document"], "why?")


def test_a_system_prompt_that_the_template_contains_is_not_lost():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "You are asked: {{ messages[-1]['content'] }}"
    text = ChunkLibrary(attach(tiny_model("llama")), tokenizer).assemble(["doc"], "why?", system="You are").text
    assert text == "You are asked: You are\n\ndoc\n\nwhy?"


def test_periodic_text_is_found_whole():
    """A match that overlaps what is taken must not hide the one behind it."""
    short = np.array([1, 2] * 5)
    long = np.array([9, 8, 7] * 5 + [1, 2])
    prompt = np.concatenate([long, short, [50], short])
    assert sum(span.length for span in find_spans(prompt, [short, long])) == 37


def test_a_cache_filled_under_inference_mode_goes_on_outside_it():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    with torch.inference_mode():
        first = generate(model, case.ids, cache := BlendedCache(case.caches, 1.0))
    second = torch.cat([first.clone(), tokens(6, 3)[None]], dim=1)
    assert torch.equal(generate(model, second, cache), generate(model, second))


def test_crop_to_nothing_empties_the_cache():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    run(model, case.ids, cache := BlendedCache(case.caches, 0.0))
    cache.crop(-case.ids.shape[1])
    assert not cache.is_filled
    run(model, case.ids, cache)
    assert cache.report.reused_tokens == sum(map(len, case.chunks))


def test_a_chunk_among_the_last_rows_is_no_hit_and_no_miss():
    model = attach(tiny_model("llama"))
    ids = torch.cat([tokens(20), tokens(1, 1)])[None]
    chunks = [exact_chunk(model, ids, 0, 20), exact_chunk(model, ids, 20, 21)]
    cache = BlendedCache(chunks, 0.0, strict=True)
    got = run(model, ids, cache).logits[:, -1]
    assert [use.hit for use in cache.report.chunks] == [True, False]
    assert (got - run(model, ids, DynamicCache()).logits[:, -1]).abs().max() <= 1e-4


def test_negative_indices_of_logits_to_keep_count_from_the_end():
    model = attach(tiny_model("llama"))
    case = make_case(model)
    run(model, case.ids, cache := BlendedCache(case.caches, 0.0), logits_to_keep=torch.tensor([-1]))
    assert cache.report.reused_tokens == sum(map(len, case.chunks))


def test_a_forward_that_skips_layers_is_refused():
    """Early exit leaves layers without keys and values: said at once, not at the next token."""
    model = attach(tiny_model("llama"))
    case = make_case(model)
    model.config.num_hidden_layers = 3
    try:
        with pytest.raises(UnsupportedModelError, match="3 of 4 layers"):
            run(model, case.ids, BlendedCache(case.caches))
    finally:
        model.config.num_hidden_layers = 4
    run(model, case.ids, BlendedCache(case.caches))


def test_selected_hidden_states_belong_to_their_layers():
    """Newer versions may be asked for single hidden states: each keeps its shape, its place and its NaN."""
    model = attach(tiny_model("llama"))
    case = make_case(model)
    everything = run(model, case.ids, BlendedCache(case.caches, 0.3), output_hidden_states=True).hidden_states
    some = run(model, case.ids, BlendedCache(case.caches, 0.3), output_hidden_states=[1, 3]).hidden_states
    for mine, all_of_them in zip(some, everything[len(everything) - len(some) :], strict=True):  # 5.17: no embeddings
        assert mine is None or torch.equal(mine.nan_to_num(7.0), all_of_them.nan_to_num(7.0))
