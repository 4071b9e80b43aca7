import pytest
import torch

from blendkv import BlendedCache, _compat, attach, prefill
from tests.cases.common import EXACT, answer, cut_exactly, digest, ids_of, model_of, peak_bytes

DOCUMENTS = [ids_of(20, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)
SEVERAL = {
    "beams": {"num_beams": 4},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3},
    "samples": {"num_return_sequences": 3, "do_sample": True},
}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    return attach(model_of(attn_implementation=request.param))


@pytest.fixture(scope="module")
def chunks(model):
    return prefill(model, DOCUMENTS, progress=False)


def sequences(model, cache=None, **options):
    """Ids and logits of every sequence that generate returns."""
    torch.manual_seed(3)
    options = {"do_sample": False} | options
    given = {} if cache is None else {_compat.CACHE_ARG: cache}
    return model.generate(
        PROMPT, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **options, **given
    )


@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d06_several_sequences_are_those_of_full_prefill(model, chunks, options, ratio):
    """generate widened ids but not a given cache (huggingface/transformers#34232): no expansion by hand is needed."""
    if ratio < 1.0:
        chunks = cut_exactly(model, PROMPT, (0, 20), (20, 40))
    before = [digest(chunk) for chunk in chunks]
    cache = BlendedCache(chunks, ratio)
    got, wanted = sequences(model, cache, **options), sequences(model, **options)
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for a, b in zip(got.logits, wanted.logits, strict=True):
        assert float((a - b).abs().max()) < EXACT
    assert cache.report.chunk_tokens == 40 * len(cache.layers[0].keys)
    assert [digest(chunk) for chunk in chunks] == before


def test_d06_two_prompts_share_their_chunks(model, chunks):
    """A batch whose rows use the same chunks in another order needs the chunks once, and each row its own places."""
    other = torch.cat([DOCUMENTS[1], DOCUMENTS[0], ids_of(8, 4)[0]])[None]
    ids = torch.cat([PROMPT, other])
    for ratio in (0.0, 0.15, 1.0):
        both = answer(model, ids, BlendedCache(chunks, ratio))
        for b, row in enumerate((PROMPT, other)):
            alone = answer(model, row, BlendedCache(chunks, ratio))
            assert both[0][b].tolist() == alone[0][0].tolist()
            assert float((both[1][b] - alone[1][0]).abs().max()) < EXACT


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_return_sequences": 4, "do_sample": True}], ids=str)
def test_d06_no_second_copy_of_stored_chunks(options):
    """Four sequences hold four rows of keys and values in the cache, and nothing else of the chunks."""
    model = attach(model_of(num_hidden_layers=24, num_key_value_heads=4))
    chunks = prefill(model, [ids_of(500, 1)[0], ids_of(500, 2)[0]], progress=False)
    stored = sum(chunk.nbytes for chunk in chunks)
    ids = torch.cat([*(chunk.ids for chunk in chunks), ids_of(8, 3)[0]])[None]
    cache = BlendedCache(chunks, recompute_ratio=0.0, reserve=16)
    given = {_compat.CACHE_ARG: cache}
    most = peak_bytes(lambda: model.generate(ids, max_new_tokens=1, **({"do_sample": False} | options), **given))
    for chunk, own in zip(chunks, cache.chunks[0], strict=True):
        assert chunk is own
    assert cache.report.cache_bytes <= 1.03 * 4 * stored  # the question and the reserve
    assert most < 1.10 * 4 * stored
