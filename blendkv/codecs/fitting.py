"""Statistics to profiles of transform coding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blendkv.codecs.profile import Profile
from blendkv.codecs.statistics import Statistics, scale_of, units_of
from blendkv.codecs.transform import slots_of

GUESS = 0.005
FINEST = 256
"""Most steps of a standard deviation at level 0: even 16 times finer ones are within int16."""
COARSEST = 1024
"""What a step may be worth in keys or values: where gradients are next to nothing, it would be beyond fp16."""
SMOOTHING = 1.0
"""Share of its mean diagonal that is added to the metric: gradients of few texts are a noisy estimate."""


def fit_transform(statistics: Statistics, joint: bool, about: Mapping[str, Any]) -> Profile:
    """Fits `klt`, or with `joint` `klt-xl`.

    In the metric M of the gradients the KL divergence is half the squared error, so all components have the same step;
    they are the eigenvectors of the covariance in that metric. The step is a guess, which `coarser` corrects.

    Args:
        statistics: of at least a few thousand tokens.
        joint: one transform a unit instead of one a head.
        about: for people.
    """
    parts = []
    for unit, layers in enumerate(units_of(statistics.shapes, statistics.unit_layers)):
        slots = slots_of([statistics.shapes[layer] for layer in layers])
        metrics = [statistics.metric(layers[slot.layer])[slot.values] for slot in slots]
        moments, spread, first = statistics.states[unit], statistics.states[unit].spread, 0
        if joint:
            parts.append((f"{unit}.0", moments.mean, *_blocks(spread, torch.block_diag(*metrics), 1)))
            continue
        for slot, metric in zip(slots, metrics, strict=True):
            own = slice(first, first := first + slot.channels)
            name = f"{layers[slot.layer]}.{int(slot.values)}"
            parts.append((name, moments.mean[own], *_blocks(spread[own, own], metric, slot.heads)))
    count = sum(sd.numel() for *_, sd in parts)
    step = (12 * GUESS * statistics.continuation / statistics.context / count) ** 0.5
    step = max(step, *(float(sd.max()) / FINEST for *_, sd in parts))
    tensors: dict[str, Tensor] = {}
    for name, mean, matrix, sd in parts:
        tensors[f"mean.{name}"] = mean.float()
        finer = (COARSEST / step / matrix.abs().amax((1, 2), keepdim=True)).clamp_max(1)
        tensors[f"matrix.{name}"] = (matrix * finer * step).half()
        tensors[f"scale.{name}"] = scale_of(sd / finer[:, 0] / step).flatten()
    settings = {
        "joint": joint,
        "unit_layers": statistics.unit_layers if joint else 1,
        "protected": statistics.protected,
    }
    return Profile("klt-xl" if joint else "klt", statistics.shapes, tensors, settings, about)


def coarser(profile: Profile, sixteenths: int) -> Profile:
    """The same transform with steps larger by that many sixteenths of an octave."""
    factor = 2.0 ** (sixteenths / 16)
    tensors = {
        name: (tensor.float() * factor).half()
        if name.startswith("matrix.")
        else tensor - sixteenths
        if name.startswith("scale.")
        else tensor
        for name, tensor in profile.tensors.items()
    }
    return replace(profile, tensors=tensors)


def _blocks(spread: Tensor, metric: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of `count` blocks of channels the inverse transform and the standard deviations."""
    size = len(spread) // count
    fitted = []
    for block in range(count):
        own = slice(block * size, (block + 1) * size)
        fitted.append(_components(spread[own, own], metric[own, own]))
    matrix, sd = (torch.stack(each) for each in zip(*fitted, strict=True))
    return matrix, sd


def _components(spread: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The transform of one block: rows of the inverse `[n, n]`, and their standard deviations `[n]`."""
    smooth = metric + SMOOTHING * metric.diagonal().mean().clamp_min(1e-30) * torch.eye(len(metric), dtype=metric.dtype)
    values, vectors = torch.linalg.eigh(smooth)
    root, inverse = ((vectors * values.pow(power)) @ vectors.T for power in (0.5, -0.5))
    variances, components = torch.linalg.eigh(root @ spread @ root)
    return components.flip(1).T @ inverse, variances.flip(0).clamp_min(0).sqrt()
