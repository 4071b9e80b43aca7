import pytest
import torch

from blendkv import BlendedCache, ChunkLibrary, _compat, prefill
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, ids_of, model_of

DOCUMENTS = [ids_of(15, seed)[0] for seed in (1, 2)]
NEW = ids_of(10, 3)
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], NEW], dim=1)


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def chunks(model):
    return prefill(model, DOCUMENTS, progress=False)


def test_d05_with_and_without_a_full_mask_answers_are_identical(model, chunks):
    """Whole ids with no mask and whole ids with a mask of the same length are the same prompt."""
    plain = answer(model, PROMPT, BlendedCache(chunks))
    masked = answer(model, PROMPT, BlendedCache(chunks), attention_mask=torch.ones_like(PROMPT))
    assert torch.equal(plain[0], masked[0])
    assert torch.equal(plain[1], masked[1])


def test_d05_the_librarys_own_call_is_the_explicit_one(model):
    """What ChunkLibrary hands to generate equals the explicit form on the same ids, with or without a mask."""
    kv = ChunkLibrary(model, byte_tokenizer())
    documents = ["The otter sleeps on its back.", "A group of otters is a raft."]
    inputs = kv(documents, "How does it sleep?")
    ids = inputs["input_ids"]
    own = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for mask in ({}, {"attention_mask": torch.ones_like(ids)}):
        cache = kv(documents, "How does it sleep?").cache
        out = model.generate(ids, max_new_tokens=6, do_sample=False, **{_compat.CACHE_ARG: cache}, **mask)
        assert out.tolist() == own.tolist()


def test_d05_new_ids_with_a_mask_over_everything(model, chunks):
    """Only the new ids but a mask for the whole prompt: an error that says to pass the whole prompt."""
    with pytest.raises(ValueError, match="ids of the whole prompt") as error:
        answer(model, NEW, BlendedCache(chunks), attention_mask=torch.ones_like(PROMPT))
    assert "10" in str(error.value)
    assert "40" in str(error.value)


def test_d05_new_ids_alone(model, chunks):
    """Only the new ids, in which no chunk is: an error with both lengths, not an answer without the documents."""
    with pytest.raises(ValueError, match="ids of the whole prompt") as error:
        answer(model, NEW, BlendedCache(chunks))
    assert "30 tokens" in str(error.value)
    assert "10 input_ids" in str(error.value)


def test_d05_whole_ids_with_a_mask_for_the_new_ones(model, chunks):
    """Whole ids but a mask as long as the new ones only: an error with both lengths and the remedy."""
    with pytest.raises(ValueError, match="mask of the same length") as error:
        answer(model, PROMPT, BlendedCache(chunks), attention_mask=torch.ones_like(NEW))
    assert "40 tokens" in str(error.value)
    assert "10" in str(error.value)


def test_d05_the_forward_itself_checks_too(model, chunks):
    """Without generate nobody slices ids, but a mask of another length is refused all the same."""
    arguments = {"input_ids": PROMPT, "attention_mask": torch.ones_like(NEW)}
    with pytest.raises(ValueError, match="mask over everything"), torch.no_grad():
        model(**arguments, **{_compat.CACHE_ARG: BlendedCache(chunks)})
