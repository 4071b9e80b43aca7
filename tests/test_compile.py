"""A compiled model: right, or refused before any answer."""

import pytest
import torch

from blendkv import BlendedCache, UnsupportedModelError, attach, prefill
from blendkv.testing import tiny_model
from tests.helpers import Case, generate, make_case, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo's own, of Python that it cannot trace


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    return attach(tiny_model("llama"))


@pytest.fixture
def case(model) -> Case:
    return make_case(model)


def compile_decoder(model):
    model.model.compile(backend="eager")


def compile_a_layer(model):
    model.model.layers[2].compile(backend="eager")


def compile_a_layers_forward(model):
    model.model.layers[2].forward = torch.compile(model.model.layers[2].forward, backend="eager")


def compile_an_attention(model):
    model.model.layers[2].self_attn.compile(backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


WAYS = [
    compile_in_place,
    compile_forward,
    compile_decoder,
    compile_a_layer,
    compile_a_layers_forward,
    compile_an_attention,
]


@pytest.mark.parametrize("how", WAYS)
def test_what_is_compiled_after_attach_is_refused(model, case, how):
    """Traced without its guards, a blend ran and was off by half (ratio 0 and 0.15)."""
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    how(model)
    cache = BlendedCache(case.caches, 0.3)
    for _ in range(2):
        with pytest.raises(ValueError, match="not compiled"):
            run(model, case.ids, cache.fork())
        with pytest.raises(ValueError, match="not compiled"):
            generate(model, case.ids, cache.fork())
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(generate(model, case.ids, cache), want)


def test_a_compiled_wrapper_generates_uncompiled(model, case):
    """`torch.compile(model).generate` is the model's own; a forward through the wrapper is refused."""
    wants = [generate(model, case.ids, BlendedCache(case.caches, ratio)) for ratio in (0.0, 0.3, 1.0)]
    wrapped = torch.compile(model, backend="eager")
    for ratio, want in zip((0.0, 0.3, 1.0), wants, strict=True):
        assert torch.equal(generate(wrapped, case.ids, BlendedCache(case.caches, ratio)), want)
    with pytest.raises(ValueError, match="not compiled"):
        run(wrapped, case.ids, BlendedCache(case.caches, 0.3))


def test_compiled_parts_that_no_cache_reaches_are_right(model, case):
    """An MLP alone may be compiled."""
    want = generate(model, case.ids, BlendedCache(case.caches, 0.3))
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    assert torch.equal(generate(model, case.ids, BlendedCache(case.caches, 0.3)), want)


def test_a_model_that_was_compiled_before_is_not_attached():
    model = tiny_model("llama", rope_theta=9999.0)
    model.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="not compiled"):
        attach(model)


def test_ordinary_caches_of_a_compiled_attached_model_are_right(model, case):
    want = generate(model, case.ids)
    model.compile(backend="eager")
    assert torch.equal(generate(model, case.ids), want)


def test_prefill_of_a_compiled_model(model, case):
    """Chunks of a model compiled in place are those of the model."""
    model.compile(backend="eager")
    for chunk, own in zip(prefill(model, case.chunks, progress=False), case.caches, strict=True):
        for a, b in zip((*chunk.keys, *chunk.values), (*own.keys, *own.values), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
