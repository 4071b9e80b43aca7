import pytest

from blendkv import ChunkLibrary, UnsupportedModelError, attach, prefill
from blendkv.families import tiny_family
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, ids_of

FAMILIES = ["deepseek_v2", "deepseek_v3"]


@pytest.fixture(params=["sdpa", "eager"])
def implementation(request):
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_d16_latent_attention_is_refused_and_stores_nothing(family, implementation):
    """What such a cache holds changed between versions (LMCache/LMCache#2881): no entry of it may come to exist."""
    model = tiny_family(family, attn_implementation=implementation)
    before = answer(model, ids_of(30))
    for call in (
        lambda: attach(model),
        lambda: prefill(model, [ids_of(20)[0]], progress=False),
        lambda: ChunkLibrary(model, byte_tokenizer()),
    ):
        with pytest.raises(UnsupportedModelError, match="full prefill for this model"):
            call()
    assert "_blendkv_attachment" not in model.__dict__
    after = answer(model, ids_of(30))
    assert before[1].equal(after[1])
