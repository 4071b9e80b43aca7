import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import answer, assert_same_answer, cut_exactly, ids_of, model_of

DOCUMENTS = [ids_of(20, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS), ids_of(8, 3)[0], DOCUMENTS[0][:6]])[None]  # there is something to look up


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    return attach(model_of(attn_implementation=request.param))


@pytest.fixture(scope="module", params=["prompt lookup", "assistant", "poor assistant"])
def speculation(request, model):
    """Options of assisted generation: n-grams of the prompt, the model itself, and one that is mostly wrong."""
    if request.param == "prompt lookup":
        return {"prompt_lookup_num_tokens": 3, "eos_token_id": 255}  # transformers < 5.24 wants an end
    implementation = model.config._attn_implementation.removeprefix("blendkv_")
    seed = 0 if request.param == "assistant" else 9
    return {"assistant_model": model_of(attn_implementation=implementation, seed=seed)}


@pytest.mark.parametrize("exact", [True, False], ids=["exact chunks", "ratio 1"])
def test_d09_speculation_equals_greedy_full_prefill(model, speculation, exact):
    """With a reused cache assisted generation said something else, silently (huggingface/transformers#32946)."""
    if exact:
        cache = BlendedCache(cut_exactly(model, PROMPT, (0, 20), (20, 40)), recompute_ratio=0.0)
    else:
        cache = BlendedCache(prefill(model, DOCUMENTS, progress=False), recompute_ratio=1.0)
    ending = {k: v for k, v in speculation.items() if k == "eos_token_id"}
    got = answer(model, PROMPT, cache, tokens=12, **speculation)
    assert_same_answer(got, answer(model, PROMPT, tokens=12, **ending))
    assert cache.report.chunk_tokens == 40
    assert cache.get_seq_length() == cache.ids.shape[1] == cache.layers[-1].keys.shape[2]


@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_d09_speculation_over_a_blend_equals_the_blend_without_it(model, speculation, ratio):
    """What is speculated changes speed and nothing else."""
    chunks = prefill(model, DOCUMENTS, progress=False)
    ending = {k: v for k, v in speculation.items() if k == "eos_token_id"}
    got = answer(model, PROMPT, BlendedCache(chunks, ratio), tokens=12, **speculation)
    assert_same_answer(got, answer(model, PROMPT, BlendedCache(chunks, ratio), tokens=12, **ending))


def test_d09_the_next_turn_after_speculation(model, speculation):
    """Rejected candidates are gone from the cache: the conversation goes on with or without speculation."""
    chunks = cut_exactly(model, PROMPT, (0, 20), (20, 40))
    cache = BlendedCache(chunks, recompute_ratio=0.0)
    ending = {k: v for k, v in speculation.items() if k == "eos_token_id"}
    prompt = PROMPT
    for turn, options in enumerate((speculation, ending, speculation)):
        got = answer(model, prompt, cache, tokens=6, **options)
        assert_same_answer(got, answer(model, prompt, tokens=6, **ending))
        prompt = torch.cat([prompt, got[0], ids_of(5, 60 + turn)], dim=1)
