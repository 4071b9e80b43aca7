"""Shapes of known models, with random weights."""

import pytest
import torch

from blendkv.bench.gates import require_exact, require_exact_states
from blendkv.bench.prompts import random_case
from blendkv.bench.shapes import SHAPES, shape_config, shape_model

PARAMETERS = {
    "llama-8b": 8.030,
    "llama-1b": 1.236,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "mistral-7b": 7.248,
    "gemma3-4b": 3.880,
}
"""In thousand millions, as published (Gemma's text model alone)."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name):
    model = shape_model(name, dtype=torch.bfloat16, device="meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == PARAMETERS[name]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.eos_token_id is None


def test_every_shape_is_tested():
    assert {*PARAMETERS, "tiny"} == set(SHAPES)


def test_weights_are_the_same_each_time_and_leave_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two, other = shape_model("tiny"), shape_model("tiny"), shape_model("tiny", seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shape_passes_the_gates_and_says_more_than_one_token(dtype):
    model = shape_model("tiny", dtype=dtype)
    case = random_case(model, 96, 32, 8)
    assert require_exact(case) < 1e-2
    require_exact_states(case)
    with torch.no_grad():
        said = model(input_ids=case.ids).logits.argmax(-1)
    assert len(said.unique()) > 30


def test_an_unknown_shape_names_those_known():
    with pytest.raises(ValueError, match=r"unknown shape 'gpt-5'; choose one of llama-8b, .*, tiny"):
        shape_config("gpt-5")
