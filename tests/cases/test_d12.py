import pytest

from blendkv import ChunkLibrary, UnsupportedModelError, attach, prefill
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, ids_of, model_of, without_forward

THETA = {"rope_theta": 10000.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention"] * 2
KINDS = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}),
    "longrope": ("phi3", {"rope_parameters": {"rope_type": "longrope", **LONG, **THETA}}),
    "one layer type": (
        "gemma3_text",
        {
            "layer_types": MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", **THETA},
                "full_attention": {"rope_type": "dynamic", "factor": 4.0, **THETA},
            },
        },
    ),
}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def implementation(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_d12_frequencies_that_depend_on_the_total_length_are_refused_before_any_forward(kind, implementation):
    """Keys stored at a short length were wrong beyond the trained one (huggingface/transformers#25104)."""
    family, overrides = KINDS[kind]
    model = without_forward(model_of(family, attn_implementation=implementation, **overrides))
    for call in (
        lambda: attach(model),
        lambda: prefill(model, [ids_of(40)[0]], progress=False),
        lambda: ChunkLibrary(model, byte_tokenizer()),
    ):
        with pytest.raises(UnsupportedModelError, match=r"rope_type '(dynamic|longrope)'") as error:
            call()
        assert "full prefill" in str(error.value)
    assert "_blendkv_attachment" not in model.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_d12_the_model_answers_as_before(kind, implementation):
    """A refused model is left as it was, short of its trained length and across it."""
    family, overrides = KINDS[kind]
    model, twin = (model_of(family, attn_implementation=implementation, **overrides) for _ in range(2))
    with pytest.raises(UnsupportedModelError):
        attach(model)
    for total in (50, 63, 64, 65, 80):
        ids = ids_of(total, total)
        got, want = (answer(m, ids, tokens=4) for m in (model, twin))
        assert got[0].tolist() == want[0].tolist()
        assert got[1].equal(want[1])
