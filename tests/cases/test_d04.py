import pytest

from blendkv import BlendedCache, CacheStateError, attach, prefill
from tests.cases.common import answer, assert_same_answer, cut_exactly, ids_of, model_of

PROMPT = ids_of(40, 1)


@pytest.mark.parametrize("borders", [[(0, 40)], [(0, 17), (17, 40)], [(0, 13), (13, 39), (39, 40)]])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d04_chunks_may_cover_the_whole_prompt(borders, ratio):
    """With every token cached, generate raised or appended the prompt twice (huggingface/transformers#36151)."""
    model = attach(model_of())
    cache = BlendedCache(cut_exactly(model, PROMPT, *borders), recompute_ratio=ratio)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    assert cache.get_seq_length() == 40 + 6 - 1
    assert all(layer.get_seq_length() == 45 for layer in cache.layers)
    assert all(layer.fresh >= 1 for layer in cache.report.layers)  # logits need the last token's row


@pytest.mark.parametrize("length", [39, 25, 17])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_d04_a_prompt_shorter_than_its_chunk_is_answered_right(length, ratio):
    """The prompt ends inside the chunk: its answer is that of full prefill, and the cache holds no token too many."""
    model = attach(model_of())
    cache = BlendedCache(cut_exactly(model, PROMPT, (0, 40)), recompute_ratio=ratio)
    shorter = PROMPT[:, :length]
    assert_same_answer(answer(model, shorter, cache), answer(model, shorter))
    assert cache.get_seq_length() == length + 6 - 1


@pytest.mark.parametrize("length", [5, 1])
def test_d04_a_prompt_with_next_to_nothing_of_a_longer_chunk_names_both_lengths(length):
    """Too little of the chunk is left to be found: an error with both lengths, for the prompt may be cut by mistake."""
    model = attach(model_of())
    with pytest.raises(CacheStateError, match="40 tokens") as error:
        answer(model, PROMPT[:, :length], BlendedCache(cut_exactly(model, PROMPT, (0, 40))))
    assert f"{length} input_ids" in str(error.value)


def test_d04_chunks_computed_alone_covering_the_whole_prompt():
    """The same with chunks as prefill makes them, at ratio 1, where the answer is known."""
    model = model_of()
    cache = BlendedCache(prefill(model, [PROMPT[0, :20], PROMPT[0, 20:]], progress=False), recompute_ratio=1.0)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    assert cache.get_seq_length() == 45
