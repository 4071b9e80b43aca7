import pytest
import torch

from blendkv import BlendedCache, _compat, attach, prefill
from tests.cases.common import answer, assert_same_answer, ids_of, model_of

DOCUMENTS = [ids_of(20, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)
LENGTH = PROMPT.shape[1]
KINDS = {"full": ("llama", {}), "sliding": ("mistral", {"sliding_window": 12})}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def implementation(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def model(request, implementation):
    family, overrides = KINDS[request.param]
    return attach(model_of(family, attn_implementation=implementation, **overrides))


@pytest.fixture(scope="module")
def chunks(model):
    return prefill(model, DOCUMENTS, progress=False)


def assert_agrees(cache, length: int) -> None:
    """Every place that tells a length tells the same."""
    assert cache.get_seq_length() == length
    for layer in cache.layers:
        assert layer.get_seq_length() == length
        assert layer.keys is None or layer.keys.shape[-2] == layer.values.shape[-2] == length
    assert length == (0 if cache.ids is None else cache.ids.shape[1])


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d08_rollback_to_the_prompt_and_another_question(model, chunks, ratio):
    """After an answer the cache is cropped to its documents; the next question is answered as by a fresh cache."""
    cache = BlendedCache(chunks, ratio)
    answer(model, PROMPT, cache, tokens=8)
    held = cache.get_seq_length()
    assert held == LENGTH + 7
    cache.crop(_compat.crop_argument(held, 43))
    assert_agrees(cache, 43)
    other = torch.cat([PROMPT[:, :43], ids_of(9, 5)], dim=1)
    if ratio == 1.0:
        assert_same_answer(answer(model, other, cache, tokens=8), answer(model, other, tokens=8))
    else:  # the same first 43 rows were filled by the other question
        twin = BlendedCache(chunks, ratio)
        answer(model, PROMPT, twin, tokens=1)
        twin.crop(_compat.crop_argument(LENGTH, 43))
        assert_same_answer(answer(model, other, cache, tokens=8), answer(model, other, twin, tokens=8))


def test_d08_the_same_prompt_again_after_rollback(model, chunks):
    """One token is taken back too, so that there is something to compute."""
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    first = answer(model, PROMPT, cache, tokens=8)
    cache.crop(_compat.crop_argument(cache.get_seq_length(), LENGTH - 1))
    assert_same_answer(answer(model, PROMPT, cache, tokens=8), first)


@pytest.mark.parametrize("amount", [0, 1, 5, LENGTH, LENGTH + 7, 1000])
def test_d08_amounts_at_the_edges_leave_lengths_and_tensors_in_step(model, chunks, amount):
    """crop(0) kept everything and crop(-5) of 3 tokens left one (huggingface/transformers#47433)."""
    cache = BlendedCache(chunks, recompute_ratio=0.15)
    answer(model, PROMPT, cache, tokens=8)
    held = cache.get_seq_length()
    removed = min(amount, held)
    cache.crop(-amount if amount else _compat.crop_argument(held, held))
    assert_agrees(cache, held - removed)
    if removed == held:
        assert not cache.is_filled
        assert_same_answer(
            answer(model, PROMPT, cache, tokens=2), answer(model, PROMPT, BlendedCache(chunks, 0.15), tokens=2)
        )


@pytest.mark.parametrize("argument", [3, 10**6])
def test_d08_a_positive_argument_means_what_the_installed_transformers_says(model, chunks, argument):
    """A length to keep before 5.20, an error since."""
    cache = BlendedCache(chunks, recompute_ratio=0.0)
    answer(model, PROMPT, cache, tokens=2)
    held = cache.get_seq_length()
    if _compat.crop_argument(10, 4) == 4:
        cache.crop(argument)
        assert_agrees(cache, min(argument, held))
    else:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(argument)
        assert_agrees(cache, held)
