import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import assert_same_run, forward, ids_of, model_of, worst

DOCUMENTS = [ids_of(30, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "olmo2"])
def model(request):
    """A model whose key norms have learned something, so that a norm applied twice or too late shows."""
    model = model_of(request.param)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        weight = layer.self_attn.k_norm.weight
        weight.data = torch.rand(weight.shape, generator=generator) + 0.5
    return attach(model)


def test_d14_ratio_one_equals_full_prefill(model):
    """Models that normalise keys before they turn them (LMCache/LMCache#1121) are blended right."""
    cache = BlendedCache(prefill(model, DOCUMENTS, progress=False), recompute_ratio=1.0)
    assert_same_run(forward(model, PROMPT, cache), forward(model, PROMPT))


def test_d14_reused_keys_of_layer_zero_are_those_of_full_prefill(model):
    """Stored keys are normed already: reused as they are and turned, layer 0's equal full prefill's."""
    run = forward(model, PROMPT, BlendedCache(prefill(model, DOCUMENTS, progress=False), recompute_ratio=0.0))
    full = forward(model, PROMPT)
    assert worst(run.keys[0], full.keys[0]) < 1e-4
    assert worst(run.values[0], full.values[0]) < 1e-4
