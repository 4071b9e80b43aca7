"""Rotation: inverse, composition, and against every family's own code."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.attaching import attachment_of
from blendkv.attachment import Attachment
from blendkv.families import tiny_family
from blendkv.hooks import find_layers
from blendkv.learning import find_rotations, moved_error, rms_ratio
from blendkv.rope import Rotation, candidates, find_rotary, rotary_tables
from blendkv.testing import FAMILIES, tiny_model
from tests.helpers import full, own_keys, tokens
from tests.test_promises import ROPES, with_rope

PAIRINGS = ("half", "interleaved")
positions_ = st.integers(0, 100_000)


def angles_at(position, n, tokens_=1, base=10_000.0, scale=1.0):
    at = torch.arange(tokens_, dtype=torch.float64) + position
    turn = at[:, None] * base ** (-torch.arange(n, dtype=torch.float64) / n)
    return (turn.cos() * scale).float()[None, None], (turn.sin() * scale).float()[None, None]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PAIRINGS), positions_, st.integers(1, 8), st.integers(0, 3), st.floats(0.5, 2.0), st.integers(0, 9)
)
def test_unrotate_inverts_rotate(pairing, position, n, rest, scale, seed):
    keys = torch.randn(1, 2, 5, 2 * n + rest, generator=torch.Generator().manual_seed(seed))
    angles = angles_at(position, n, 5, scale=scale)
    rotation = Rotation(pairing)
    turned = rotation.rotate(keys, angles)
    torch.testing.assert_close(rotation.unrotate(turned, angles), keys, atol=1e-5, rtol=1e-5)
    assert torch.equal(turned[..., 2 * n :], keys[..., 2 * n :])  # partial rotary: the rest stays


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_half_precision_is_turned_in_fp32_and_rounded_once(pairing, dtype):
    keys = torch.randn(1, 2, 50, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotation, angles = Rotation(pairing), angles_at(1234, 8, 50)
    assert torch.equal(rotation.rotate(keys, angles), rotation.rotate(keys.float(), angles).to(dtype))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PAIRINGS), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 9))
def test_shifts_compose_and_keep_lengths(pairing, a, b, seed):
    keys = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    rotation = Rotation(pairing)
    twice = rotation.rotate(rotation.rotate(keys, angles_at(a, 8)), angles_at(b, 8))
    torch.testing.assert_close(twice, rotation.rotate(keys, angles_at(a + b, 8)), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(twice.norm(dim=-1), keys.norm(dim=-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_writes_where_it_is_told_and_leaves_the_source(pairing):
    keys = torch.randn(1, 2, 5, 12)
    before, angles = keys.clone(), angles_at(7, 4, 5)
    want = Rotation(pairing).rotate(keys, angles)
    buffer = torch.full((1, 2, 9, 12), 5.0)
    Rotation(pairing).rotate(keys, angles, out=buffer[:, :, 2:7])
    assert torch.equal(buffer[:, :, 2:7], want)
    assert (buffer[:, :, :2] == 5).all()
    assert (buffer[:, :, 7:] == 5).all()
    assert torch.equal(keys, before)
    half = torch.empty(1, 2, 5, 12, dtype=torch.bfloat16)
    assert torch.equal(Rotation(pairing).rotate(keys, angles, out=half), want.bfloat16())  # rounded once
    nope = Rotation("none").rotate(keys, None)
    assert torch.equal(nope, keys)
    assert nope.data_ptr() != keys.data_ptr()
    assert Rotation("none").unrotate(keys, None).data_ptr() != keys.data_ptr()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(PAIRINGS), positions_, positions_, st.integers(0, 9))
def test_bf16_error_is_two_roundings(pairing, here, there, seed):
    """Stored un-rotated in bf16: one rounding of 2^-8 at most on the way in, one on the way out."""
    exact = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(seed))
    rotation = Rotation(pairing)
    at_here, at_there = angles_at(here, 16, 64), angles_at(there, 16, 64)
    cached = rotation.rotate(exact, at_here).bfloat16()
    stored = rotation.unrotate(cached, at_here)
    assert stored.dtype == torch.bfloat16
    moved = rotation.rotate(stored, at_there)
    assert rms_ratio(moved.float(), rotation.rotate(exact, at_there)) <= 4.5e-3
    assert rms_ratio(moved.float(), rotation.rotate(exact, at_there)) > 0


def own(module_name: str, rotary, keys, positions):
    """A family's own apply function on keys."""
    cos, sin = rotary(keys, positions)
    return sys.modules[module_name].apply_rotary_pos_emb(keys, keys, cos, sin)[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offset", [0, 900])
def test_equals_each_familys_own_function(attached, family, offset):
    model = attached(family)
    facts = attachment_of(model).facts
    keys, positions = torch.randn(1, 2, 12, 16), torch.arange(12)[None] + offset
    want = own(type(model).__module__, model.model.rotary_emb, keys, positions)
    rotation = facts.rotations[0]
    got = rotation.rotate(keys, rotation.angles(facts.rotary, positions))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_zero_keys_are_those_of_the_model(attached, family):
    """Layer 0's keys depend on token and position only: moved from one place they are the model's own at another."""
    model = attached(family)
    facts, rotation = attachment_of(model).facts, attachment_of(model).facts.rotations[0]
    ids = tokens(10, 3)
    here = torch.arange(10)[None]
    _, alone = full(model, ids[None])
    longer = torch.cat([tokens(37, 4), ids])[None]
    _, together = full(model, longer)
    stored = rotation.unrotate(alone.layers[0].keys, rotation.angles(facts.rotary, here))
    moved = rotation.rotate(stored, rotation.angles(facts.rotary, here + 37))
    torch.testing.assert_close(moved, together.layers[0].keys[:, :, 37:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone.layers[0].values, together.layers[0].values[:, :, 37:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_ropes(rope):
    model = with_rope(rope)
    state = attachment_of(model)
    ids, here = tokens(9)[None], torch.arange(9)[None]
    with torch.no_grad():
        pairs = list(own_keys(state, ids, here + 2, here + 500))
    for i, (a, b) in enumerate(pairs):
        assert moved_error(state.facts.rotations[i], state.facts.rotary, a, here + 2, b, here + 500) < 1e-5


def test_yarn_scale_is_applied_once():
    model = with_rope("yarn")
    state = attachment_of(model)
    assert state.facts.rotary.attention_scaling > 1.05
    keys, at = torch.randn(1, 2, 4, 16), torch.arange(4)[None]
    rotation = state.facts.rotations[0]
    turned = rotation.rotate(keys, rotation.angles(state.facts.rotary, at))
    ratio = turned.norm(dim=-1) / keys.norm(dim=-1)
    torch.testing.assert_close(ratio, torch.full_like(ratio, state.facts.rotary.attention_scaling))


def test_nope_layers_are_found(attached):
    model = attached("smollm3")
    assert [r.pairing for r in attachment_of(model).facts.rotations] == ["half", "none", "half", "none"]


@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_partial_rotary(factor):
    from blendkv import attach

    model = attach(tiny_model("phi3", partial_rotary_factor=factor))
    facts = attachment_of(model).facts
    cos, _ = facts.rotations[0].angles(facts.rotary, torch.arange(3)[None])
    assert cos.shape == (1, 1, 3, round(16 * factor) // 2)


@pytest.mark.parametrize("family", ["glm", "cohere"])
def test_interleaved_rotary(family):
    from blendkv import attach

    model = attach(tiny_model(family, pad_token_id=0))
    assert attachment_of(model).facts.rotations[0].pairing == "interleaved"


def test_backwards_is_the_other_way_round():
    """NanoChat's own function: the halves change places."""
    rotary = find_rotary(tiny_model("llama").model)
    keys, at = torch.randn(1, 2, 5, 16), torch.arange(5)[None] + 40
    a, b = keys.chunk(2, dim=-1)
    cos, sin = (t[:, None, :, :8] for t in rotary_tables(rotary, at))
    want = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
    rotation = Rotation("half", backwards=True)
    torch.testing.assert_close(rotation.rotate(keys, rotation.angles(rotary, at)), want)


@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_a_table_of_sines_and_cosines(family):
    """GPT-J and CodeGen turn keys by a table that their attention, or a module that gives sines first, holds."""
    model = tiny_family(family)
    rotary = find_rotary(model.transformer)
    cos, sin = rotary_tables(rotary, torch.tensor([[0, 3, 500]]))
    assert torch.equal(cos[0, 0], torch.ones(4))
    torch.testing.assert_close(sin[0, 1, 0], torch.tensor(3.0).sin())
    state = Attachment(model, *find_layers(model))
    rotations = find_rotations(state, rotary)
    assert set(rotations) == {Rotation("interleaved", table="all")}


def test_a_layer_type_without_rope_parameters_does_not_rotate():
    rotary = find_rotary(tiny_model("llama").model)
    config = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"full_attention": None, "sliding_attention": {"rope_type": "default"}},
    )
    assert list(candidates(rotary, config, 0, 16)) == [Rotation("none")]
    assert next(candidates(rotary, config, 1, 16)).pairing == "half"


def test_tables_are_fp32_whatever_the_model():
    model = tiny_model("llama", dtype=torch.bfloat16)
    exact = tiny_model("llama")
    at = torch.arange(5)[None] + 1000
    for a, b in zip(*(rotary_tables(find_rotary(m.model), at) for m in (model, exact)), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_keys_of_a_stopped_pass_are_those_cached(attached):
    model = attached("qwen3")
    state = attachment_of(model)
    ids, at = tokens(9)[None], torch.arange(9)[None]
    _, cache = full(model, ids)
    with torch.no_grad():
        pairs = list(own_keys(state, ids, at, at + 5))
    for (keys, moved), layer in zip(pairs, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, atol=1e-5, rtol=1e-5)
        assert (moved - layer.keys).abs().max() > 0.1
