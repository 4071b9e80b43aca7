import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import EXACT, answer, assert_same_answer, ids_of, model_of

DOCUMENTS = [ids_of(15, seed)[0] for seed in (1, 2)]
QUESTIONS = [ids_of(6, 3)[0], ids_of(10, 4)[0]]
KINDS = {
    "full": ("llama", {}),
    "sliding": ("mistral", {"sliding_window": 12}),
    "qk-norm": ("qwen3", {}),
    "two bases": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12}),
}


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


def padded(where: str):
    """Both prompts as a batch, padded in front, or between the documents and the question; ids and mask."""
    rows, masks = [], []
    for question in QUESTIONS:
        pad = torch.full((10 - len(question) + 3,), 7)
        parts = [(torch.cat(DOCUMENTS), 1), (pad, 0), (question, 1)]
        if where == "left":
            parts = [parts[1], parts[0], parts[2]]
        if where == "between the chunks":
            parts = [(DOCUMENTS[0], 1), (pad, 0), (torch.cat([DOCUMENTS[1], question]), 1)]
        rows.append(torch.cat([part for part, _ in parts]))
        masks.append(torch.cat([torch.full_like(part, seen) for part, seen in parts]))
    return torch.stack(rows), torch.stack(masks)


@pytest.mark.parametrize("where", ["left", "in the middle", "between the chunks"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d07_each_row_of_a_padded_batch_is_its_own_prompt(model, chunks, where, ratio):
    """The padded row of a batch differed from its single run (huggingface/transformers#18104)."""
    ids, mask = padded(where)
    cache = BlendedCache(chunks, ratio)
    got = answer(model, ids, cache, tokens=4, attention_mask=mask)
    assert cache.report.tokens == sum(30 + len(question) for question in QUESTIONS)
    assert all(use.found for use in cache.report.chunks)
    if where != "left" and getattr(model.config, "sliding_window", None):
        # padding inside a window takes room in it, in transformers' own masks too: no single run is the same
        if ratio == 1.0:
            assert_same_answer(got, answer(model, ids, tokens=4, attention_mask=mask))
        return
    for b, question in enumerate(QUESTIONS):
        prompt = torch.cat([*DOCUMENTS, question])[None]
        want = answer(model, prompt, BlendedCache(chunks, ratio), tokens=4)
        assert got[0][b].tolist() == want[0][0].tolist()
        assert float((got[1][b] - want[1][0]).abs().max()) < EXACT


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d07_a_rows_neighbour_changes_nothing(model, chunks, ratio):
    """Another prompt beside it, with other text, other chunks or none, leaves a row's answer as it is."""
    ids, mask = padded("left")
    first = answer(model, ids, BlendedCache([chunks, chunks], ratio), attention_mask=mask)
    other = ids.clone()
    other[1, 3:] = torch.flip(ids[1, 3:], dims=(0,))
    for rows in ([chunks, chunks], [chunks, []]):
        again = answer(model, other, BlendedCache(rows, ratio), attention_mask=mask)
        assert again[0][0].tolist() == first[0][0].tolist()
        assert float((again[1][0] - first[1][0]).abs().max()) < EXACT
