import pytest
import torch

from blendkv import UnsupportedModelError, attach
from blendkv.attaching import attachment_of
from blendkv.families import families, tiny_family
from tests.cases.common import ids_of, model_of, worst
from tests.helpers import own_keys

KINDS = {
    "llama": ({}, 16),
    "glm": ({"partial_rotary_factor": 0.5, "pad_token_id": 0}, 8),
    "phi": ({"partial_rotary_factor": 0.5}, 8),
    "gpt_neox": ({"rotary_pct": 0.25}, 4),
    "cohere": ({"pad_token_id": 0}, 16),
}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def implementation(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def state(kind, implementation):
    return attachment_of(attach(model_of(kind, attn_implementation=implementation, **KINDS[kind][0])))


@torch.no_grad()
def assert_moves_as_the_model(state, shift: int) -> set[int]:
    """Checks every layer's rotation at a shift; returns which dimensions of keys moved, in any layer."""
    facts, ids, moved_dims = state.facts, ids_of(16, 1), set()
    here = torch.arange(16)[None] + 5
    for i, (keys, own) in enumerate(own_keys(state, ids, here, here + shift)):
        rotation, random = facts.rotations[i], torch.randn(keys.shape, generator=torch.Generator().manual_seed(i))
        from_, to = (rotation.angles(facts.rotary, here + s) for s in (0, shift))

        def moved(x, a, b, rotation=rotation):
            return rotation.rotate(rotation.unrotate(x, a), b)

        assert worst(moved(keys, from_, to), own) < 1e-4, f"layer {i}"
        there = moved(random, from_, to)
        assert worst(moved(there, to, from_), random) < 1e-5, f"layer {i} there and back"
        changed = (there != random).any(dim=2).any(dim=1)[0]
        moved_dims |= set(changed.nonzero()[:, 0].tolist())
        still = [d for d in range(keys.shape[-1]) if not changed[d]]
        assert torch.equal(there[..., still], random[..., still])
    return moved_dims


@pytest.mark.parametrize("shift", [1, 17, 300])
def test_d13_only_the_rotary_part_moves_and_as_the_model_moves_it(state, kind, shift):
    """Partial rotary and other pairings degraded with distance, while position 0 looked right."""
    assert assert_moves_as_the_model(state, shift) == set(range(KINDS[kind][1]))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about itself (BioGPT on 5.4)
@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_d13_every_supported_family_generated_from_its_config(family):
    """The same for every decoder family of the installed transformers that attach accepts."""
    try:
        model = tiny_family(family)
        model(ids_of(16, 1), use_cache=False)
    except Exception as error:
        pytest.skip(f"not built: {type(error).__name__}")
    try:
        state = attachment_of(attach(model))
    except UnsupportedModelError as error:
        if "='eager'" not in str(error):
            pytest.skip("refused by name")
        state = attachment_of(attach(tiny_family(family, attn_implementation="eager")))
    for shift in (1, 17, 100):
        assert_moves_as_the_model(state, shift)
