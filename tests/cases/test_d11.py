import pytest
import torch

from blendkv import attach
from blendkv.attaching import attachment_of
from tests.cases.common import ids_of, model_of, relative, worst
from tests.helpers import own_keys

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
KINDS = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
}


@pytest.fixture(scope="module", params=KINDS)
def state(request):
    family, overrides = KINDS[request.param]
    return attachment_of(attach(model_of(family, **overrides, max_position_embeddings=2048)))


@torch.no_grad()
def moved(state, shift: int):
    """For every layer: keys at positions 5.., the same moved by `shift`, and the layer's own keys over there."""
    facts, ids = state.facts, ids_of(24, 1)
    here = torch.arange(24)[None] + 5
    for i, (keys, own) in enumerate(own_keys(state, ids, here, here + shift)):
        rotation = facts.rotations[i]
        plain = rotation.unrotate(keys, rotation.angles(facts.rotary, here))
        yield keys, rotation.rotate(plain, rotation.angles(facts.rotary, here + shift)), own


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_d11_moved_keys_are_the_layers_own_keys_at_the_new_place(state, shift):
    """One set of rotary parameters for all layers garbled Llama-3 and Gemma keys (LMCache/LMCache#4666)."""
    for layer, (keys, there, own) in enumerate(moved(state, shift)):
        assert worst(there, own) < 1e-4, f"layer {layer}"
        assert relative(keys, own) > 1e-3, f"layer {layer} does not move at all"


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_d11_the_length_of_keys_stays(state, shift):
    """Turning with the model's own scaled tables scaled keys twice (yarn: 1.2): norms must not change."""
    for keys, there, _ in moved(state, shift):
        assert float((there.norm(dim=-1) / keys.norm(dim=-1) - 1).abs().max()) < 1e-4


@torch.no_grad()
def test_d11_there_and_back_is_where_it_was(state):
    """Every layer's keys, brought to no position and back again, are the keys they were."""
    here = torch.arange(24)[None] + 5
    for i, (keys, _) in enumerate(own_keys(state, ids_of(24, 1), here, here)):
        rotation = state.facts.rotations[i]
        angles = rotation.angles(state.facts.rotary, here)
        assert worst(rotation.rotate(rotation.unrotate(keys, angles), angles), keys) < 1e-4


def test_d11_yarn_scales_and_gemma_has_two_bases():
    """The two traps are really in the models used here."""
    yarn = attachment_of(attach(model_of("llama", rope_parameters=YARN)))
    assert yarn.facts.rotary.attention_scaling > 1.2
    gemma = attachment_of(attach(model_of("gemma3_text", **KINDS["gemma3"][1])))
    angles = [r.angles(gemma.facts.rotary, torch.tensor([[7]]))[0] for r in set(gemma.facts.rotations)]
    assert len(angles) == 2
    assert not torch.allclose(*angles)
