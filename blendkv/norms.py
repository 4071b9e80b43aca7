"""RMS norms by torch's fused kernel while a blend runs: one launch instead of seven, which few rows would wait for.

A norm is recognised by what it computes, not by its name: its output on random rows must be that of
`torch.nn.functional.rms_norm` with its weight. Outside a blend the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blendkv import kernels
from blendkv.attention import blending

EPSILON = ("variance_epsilon", "eps", "epsilon")
AGREES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""RMS of the difference / RMS of the module's own output, at most: rounded once instead of twice."""


class FusedNorm:
    """Takes the place of an RMS norm's `forward`."""

    def __init__(self, module: Any, eps: float) -> None:
        self.module, self.eps, self.own = module, eps, module.forward
        functools.update_wrapper(self, self.own, updated=())

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `forward`."""
        weight = self.module.weight
        elsewhere = hidden_states.dtype != weight.dtype or hidden_states.device != weight.device
        if args or kwargs or elsewhere or not blending.get():
            return self.own(hidden_states, *args, **kwargs)
        return self.fused(hidden_states)

    def fused(self, hidden_states: Tensor) -> Tensor:
        """`[..., n]` normed over the last dimension."""
        weight = self.module.weight
        return F.rms_norm(hidden_states, weight.shape, weight, self.eps)


def fuse(layers: Iterable[nn.Module]) -> None:
    """Replaces the forward of every RMS norm in layers on CUDA."""
    for module in _candidates(layers):
        norm = FusedNorm(module, next(getattr(module, name) for name in EPSILON if hasattr(module, name)))
        if _agrees(norm):
            module.__dict__["forward"] = norm


def unfuse(layers: Iterable[nn.Module]) -> None:
    """Undoes `fuse`."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(norm := module.__dict__.get("forward"), FusedNorm):
                restore_forward(module, norm.own)


def restore_forward(module: nn.Module, own: Any) -> None:
    """Puts back a forward that was replaced on an instance: its class's, or another one that was there before."""
    if getattr(own, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own


def _candidates(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules on CUDA with one row of weights and an epsilon, whose forward nobody replaced."""
    for layer in layers:
        for module in layer.modules():
            weights = dict(module.named_parameters())
            if list(weights) != ["weight"] or ("forward" in module.__dict__ and not hasattr(module, "_hf_hook")):
                continue  # accelerate's hook only moves what is elsewhere, and this module's input is not
            weight = weights["weight"]
            has_epsilon = any(hasattr(module, name) for name in EPSILON)
            if kernels.is_cuda(weight.device) and weight.ndim == 1 and weight.dtype in AGREES and has_epsilon:
                yield module


@torch.no_grad()
def _agrees(norm: FusedNorm) -> bool:
    weight = norm.module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    scales = torch.tensor([3, 1e-2, 1e-3], device=weight.device)[:, None, None]  # the small ones show the epsilon
    rows = torch.randn(3, 1, *weight.shape, generator=generator, dtype=torch.float32, device=weight.device)
    rows = (rows * scales).to(weight.dtype)
    try:
        own, fused = norm.own(rows).float(), norm.fused(rows).float()
    except (TypeError, RuntimeError):  # it wants something else
        return False
    if own.shape != fused.shape:
        return False
    error = (own - fused).square().mean().sqrt() / own.square().mean().sqrt().clamp_min(1e-30)
    return float(error) <= AGREES[weight.dtype]
