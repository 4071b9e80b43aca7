"""RMS norms that are fused: recognised by what they compute, inert outside a blend. On the CPU, as if it were a GPU."""

import copy

import pytest
import torch
from torch import nn

from blendkv import BlendedCache, attach, detach, kernels
from blendkv.attention import blending
from blendkv.norms import FusedNorm, fuse, unfuse
from blendkv.testing import FAMILIES, tiny_model
from tests.helpers import full, make_case, run

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "is_cuda", lambda device: True)


@pytest.fixture
def inside():
    """What a blend tells the norms."""
    token = blending.set(True)
    yield
    blending.reset(token)


class RMSNorm(nn.Module):
    """As in most modeling files; `change` makes it another."""

    def __init__(self, change="", dtype=torch.float32, size=24, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size).to(dtype) + 0.5)
        self.variance_epsilon, self.change = eps, change

    def forward(self, hidden_states, *gate):
        x = hidden_states.float()
        if self.change == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.change == "epsilon outside":
            x = x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        elif self.change == "two":
            x = x / x.norm(dim=-1, keepdim=True)
        else:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        x = x.to(hidden_states.dtype)
        weight = 1 + self.weight if self.change == "one plus" else self.weight
        return x * weight if not gate else x * weight * gate[0]


def fused(module):
    """Whether `fuse` takes a module, alone in a layer."""
    fuse([nn.Sequential(module)])
    return isinstance(module.__dict__.get("forward"), FusedNorm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_rms_norm_is_fused_and_gives_the_same(inside, dtype):
    module = RMSNorm(dtype=dtype)
    x = torch.randn(2, 7, 24).to(dtype)
    want = module(x)
    assert fused(module)
    got = module(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)
    assert fused(nn.RMSNorm(24, eps=1e-5))


@pytest.mark.parametrize("change", ["one plus", "centred", "two", "epsilon outside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_computes_something_else_is_not(change, dtype):
    module = RMSNorm(change, dtype)
    assert not fused(module)
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weights_at_their_initial_values_do_not_hide_the_difference(weight):
    """Gemma's norms begin with 0 and mean 1."""
    module = RMSNorm("one plus")
    nn.init.constant_(module.weight, weight)
    assert not fused(module)


def test_modules_of_other_kinds_are_not():
    wide, replaced, double = RMSNorm(), RMSNorm(), RMSNorm()
    wide.weight = nn.Parameter(torch.rand(2, 24))
    replaced.forward = replaced.forward  # somebody's wrapper
    double.weight = nn.Parameter(torch.rand(24).double())
    none = RMSNorm()
    del none.variance_epsilon
    others = [nn.LayerNorm(24), nn.LayerNorm(24, bias=False), nn.Linear(24, 24, bias=False), nn.GroupNorm(2, 24)]
    for module in (wide, double, none, *others):
        assert not fused(module), module
        assert "forward" not in module.__dict__
    before = replaced.__dict__["forward"]
    assert not fused(replaced)
    assert replaced.__dict__["forward"] == before


def test_nothing_is_fused_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    assert not fused(RMSNorm())


def test_inert_outside_a_blend_and_for_other_arguments(monkeypatch):
    module = RMSNorm()
    assert fused(module)
    calls = []
    monkeypatch.setattr(FusedNorm, "fused", lambda self, x: calls.append(1) or x)
    x, gate = torch.randn(3, 24), torch.randn(3, 24)
    torch.testing.assert_close(module(x), RMSNorm.forward(module, x))
    token = blending.set(True)
    module(x, gate)
    module(x.half())  # weights that were kept in fp32
    assert not calls
    module(x)
    blending.reset(token)
    assert calls


def test_the_weight_is_read_anew(inside):
    module = RMSNorm()
    assert fused(module)
    x = torch.randn(3, 24)
    module.weight = nn.Parameter(module.weight.detach() * 2)
    torch.testing.assert_close(module(x), RMSNorm.forward(module, x))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.mul_(3)
    torch.testing.assert_close(twin(x), 3 * module(x))


def test_unfuse_leaves_no_trace():
    module = RMSNorm()
    layer = nn.Sequential(module)
    fuse([layer])
    fuse([layer])  # once is enough
    assert not isinstance(module.__dict__["forward"].own, FusedNorm)
    unfuse([layer])
    assert "forward" not in module.__dict__
    unfuse([layer])


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_families(family):
    """Every norm of the decoder layers, or for Gemma none; a blend gives the same, full prefill to the bit."""
    plain = tiny_model(family, num_hidden_layers=2)
    model = attach(tiny_model(family, num_hidden_layers=2))
    norms = [m for layer in model.model.layers for m in layer.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms
    assert {isinstance(m.__dict__.get("forward"), FusedNorm) for m in norms} == {family != "gemma3_text"}
    case = make_case(model)
    assert torch.equal(full(model, case.ids)[0], full(plain, case.ids)[0])
    attach(plain)
    for module in plain.modules():  # the twin: without fused norms
        if isinstance(module.__dict__.get("forward"), FusedNorm):
            del module.__dict__["forward"]
    got, want = (run(m, case.ids, BlendedCache(case.caches, 0.3), logits_to_keep=1).logits for m in (model, plain))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    detach(model)
    assert not any("forward" in m.__dict__ for m in norms)
