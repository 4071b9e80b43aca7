"""Channels of a unit to uncorrelated ones and back, as a profile says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from blendkv.codecs.base import LayerShape
from blendkv.codecs.profile import FAR_OUTSIDE, Profile
from blendkv.codecs.statistics import units_of
from blendkv.container.format import MAX_LAYERS

EXACT = 64
"""Components, the largest, that are multiplied in fp32 where the rest may be in bf16."""


@dataclass(frozen=True, eq=False)
class Slot:
    """Keys or values of one layer within a unit."""

    layer: int
    values: bool
    heads: int
    dim: int

    @property
    def channels(self) -> int:
        """Heads times head dim."""
        return self.heads * self.dim


@dataclass(frozen=True, eq=False)
class Part:
    """Channels that share sections: keys or values of a layer, or everything in a unit.

    Attributes:
        slots: what they are, in order.
        mean: `[C]` fp32.
        matrix: `[B, n, n]` fp32 with B * n = C: a state is the mean plus symbols times step times this. Components are
            rows, the largest first.
        scale: `[C]` int64, log2 of each component's standard deviation in the profile's steps, in 1/16 octave.
    """

    slots: tuple[Slot, ...]
    mean: Tensor
    matrix: Tensor
    scale: np.ndarray

    @cached_property
    def heads(self) -> list[int]:
        """Channels of each head."""
        return [slot.dim for slot in self.slots for _ in range(slot.heads)]

    @cached_property
    def forward_matrix(self) -> Tensor:
        """The inverse of `matrix`.

        Raises:
            ValueError: if it has none.
        """
        inverse, failed = torch.linalg.inv_ex(self.matrix.double())
        if failed.any() or not bool(inverse.float().isfinite().all()):
            raise ValueError("a matrix of the profile has no inverse: nothing can be encoded with it; make it again")
        return inverse.float()

    @cached_property
    def _rounded(self) -> Tensor:
        return self.matrix.bfloat16()

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """`[T, C]` fp32 of the unit's layers."""
        parts = [(values if slot.values else keys)[slot.layer] for slot in self.slots]
        return torch.cat([part.float().transpose(0, 1).flatten(1) for part in parts], 1)

    def scatter(self, rows: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], at: int) -> None:
        """Puts `[t, C]` fp32 where tokens `at`, `at + 1`, ... of the unit's layers are."""
        for slot, own in zip(self.slots, rows.split([slot.channels for slot in self.slots], 1), strict=True):
            self._put(own.unflatten(1, (slot.heads, slot.dim)).transpose(0, 1), slot, keys, values, at)

    @staticmethod
    def _put(states: Tensor, slot: Slot, keys: Sequence[Tensor], values: Sequence[Tensor], at: int) -> None:
        """Puts `[heads, t, dim]` where tokens `at`, `at + 1`, ... of a slot are; what is too large stays finite."""
        out = (values if slot.values else keys)[slot.layer][:, at : at + states.shape[1]]
        limit = torch.finfo(out.dtype).max
        out.copy_(states.clamp(-limit, limit) if out.dtype == torch.float16 else states)

    def forward(self, step: float, coded: np.ndarray) -> Callable[[Tensor], np.ndarray]:
        """What makes symbols of states.

        Args:
            step: what a symbol is worth.
            coded: `[C]` bool, components that are wanted.

        Returns:
            A function of states `[T, C]` fp32 that returns `[T, C']` int16 of these components, and raises `ValueError`
            for states so large that they cannot be meant by this profile.
        """
        matrix = self.forward_matrix / step
        wanted = None if coded.all() else torch.from_numpy(coded)
        if len(matrix) == 1 and wanted is not None:
            matrix = matrix[:, :, wanted]  # once, not for every group: a quarter of the time

        def symbols_of(states: Tensor) -> np.ndarray:
            blocks = (states - self.mean).unflatten(1, matrix.shape[:2]).transpose(0, 1)
            symbols = (blocks @ matrix).transpose(0, 1).flatten(1)
            symbols = symbols if wanted is None or len(matrix) == 1 else symbols[:, wanted]
            symbols = symbols.round_()
            if symbols.numel() and not bool(symbols.abs().amax() <= 0x7FFF):
                raise ValueError(FAR_OUTSIDE)
            return symbols.to(torch.int16).numpy()

        return symbols_of

    def inverse(
        self,
        symbols: np.ndarray,
        step: float,
        coded: np.ndarray,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        at: int,
    ) -> None:
        """Puts the states of symbols where tokens `at`, `at + 1`, ... of the unit's layers are.

        Args:
            symbols: `[T, C']` int16, as the function of `forward` returned them.
            step: as there.
            coded: as there.
            keys: of the unit's layers.
            values: likewise.
            at: first token.
        """
        if len(self.matrix) > 1:
            if not coded.all():
                full = np.zeros((len(symbols), len(coded)), np.int16)
                full[:, coded] = symbols
                symbols = full
            blocks = torch.from_numpy(symbols).float().unflatten(1, self.matrix.shape[:2]).transpose(0, 1)
            mean = self.mean.view(len(self.matrix), 1, -1)
            states = torch.baddbmm(mean, blocks, self.matrix, alpha=step)
            self._put(states, self.slots[0], keys, values, at)  # a block is a head
            return
        chosen = np.flatnonzero(coded)
        large, numbers = int((chosen < EXACT).sum()) if bf16_is_fast() else len(chosen), torch.from_numpy(symbols)
        matrix = self.matrix[0] if len(chosen) == len(coded) else self.matrix[0][chosen[:large]]
        states = torch.addmm(self.mean, numbers[:, :large].float(), matrix[:large], alpha=step)
        if large < len(chosen):
            matrix = self._rounded[0][chosen[large:]]
            states.add_(numbers[:, large:].bfloat16() @ matrix, alpha=step)
        self.scatter(states, keys, values, at)


@cache
def bf16_is_fast() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def slots_of(shapes: Sequence[LayerShape]) -> list[Slot]:
    """Layer by layer keys, then values."""
    return [
        slot
        for layer, shape in enumerate(shapes)
        for slot in (Slot(layer, False, shape.heads, shape.key_dim), Slot(layer, True, shape.heads, shape.value_dim))
    ]


@lru_cache(maxsize=8)
def parts_of(profile: Profile) -> list[list[Part]]:
    """The parts of each unit of a profile of transform coding.

    Raises:
        ValueError: if settings or tensors are missing, or do not fit the model's layers.
    """
    joint = bool(profile.setting("joint", range(2)))
    unit_layers = profile.setting("unit_layers", range(1, MAX_LAYERS + 1 if joint else 2))
    units = []
    for unit, layers in enumerate(units_of(profile.shapes, unit_layers)):
        slots = slots_of([profile.shapes[layer] for layer in layers])
        groups = [tuple(slots)] if joint else [(slot,) for slot in slots]
        units.append([_part(profile, f"{unit}.{number}", group) for number, group in enumerate(groups)])
    return units


def _part(profile: Profile, name: str, slots: tuple[Slot, ...]) -> Part:
    size = sum(slot.channels for slot in slots)
    blocks = slots[0].heads if len(slots) == 1 else 1
    matrix = profile.tensor(f"matrix.{name}", (blocks, size // blocks, size // blocks), torch.float16)
    scale = profile.tensor(f"scale.{name}", (size,), torch.int16)
    mean = profile.tensor(f"mean.{name}", (size,), torch.float32)
    return Part(slots, mean, matrix.float(), scale.numpy().astype(np.int64))
