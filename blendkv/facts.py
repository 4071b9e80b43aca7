"""What a blend must know of a model, and whether kernels can fill its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from blendkv import flops, kernels
from blendkv.chunk import ChunkCache
from blendkv.rope import Rotation


@dataclass(frozen=True)
class ModelFacts:
    """What a blend must know of a model; `attach` finds it out (`learning.learn`).

    Attributes:
        fingerprint: `weights.model_fingerprint` of the weights as they are now.
        rotations: one a layer.
        rotary: the model's rotary module, or None.
        dtype: of keys and values.
        sizes: for each layer (KV heads, key dim, value dim).
        shape: what a row costs in each layer, for the charged budget; None if the layers could not be counted.
    """

    fingerprint: str
    rotations: tuple[Rotation, ...]
    rotary: nn.Module | None
    dtype: torch.dtype
    sizes: tuple[tuple[int, int, int], ...]
    shape: flops.ModelShape | None

    def mismatch(self, chunk: ChunkCache) -> str | None:
        """Why a chunk must not be used with this model, or None."""
        if chunk.fingerprint != self.fingerprint:
            return "fingerprint"
        if chunk.dtypes != {self.dtype}:
            return "dtype"
        if len(chunk.sizes) != len(self.rotations):
            return "layers"
        return None if chunk.sizes == self.sizes else "shape"


def kernels_unusable(facts: ModelFacts, devices: Sequence[torch.device]) -> str | None:
    """Why kernels cannot fill this model's cache now, or None."""
    if any(torch.is_autocast_enabled(device.type) for device in set(devices)):
        return "under autocast"
    dims = (dim for _, *pair in facts.sizes for dim in pair)
    return kernels.unusable(devices, facts.dtype, dims)
