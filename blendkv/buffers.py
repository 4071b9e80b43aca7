"""The prompt's keys and values while they are filled: stored ones placed, fresh ones written, the two compared.

`Buffers` does it layer by layer with torch operations, on any device; `kernelbuffers.py` has its fast twin on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blendkv.cache import BlendedLayer
from blendkv.plan import RowPlan
from blendkv.report import Clock
from blendkv.rope import Rotation, on_device


class Buffers:
    """Torch operations: the slow, obvious twin.

    Args:
        layers: of the cache.
        rotations: one a layer.
        rotary: the model's rotary module, or None.
        positions: `[B, T]` position ids.
        plans: one a batch row.
        clock: where the time of placing is noted.
    """

    def __init__(
        self,
        layers: Sequence[BlendedLayer],
        rotations: Sequence[Rotation],
        rotary: nn.Module | None,
        positions: Tensor,
        plans: Sequence[RowPlan],
        clock: Clock,
    ) -> None:
        self.layers, self.rotations, self.rotary = layers, rotations, rotary
        self.positions, self.plans, self.clock = positions, plans, clock
        self.length = positions.shape[1]
        self.placed: set[int] = set()
        self._angles: dict = {}

    def table(self, layer_idx: int) -> Tensor | None:
        """`[L, 4]` for kernels (`kernels.table`) on the layer's device; None where torch does the work."""
        return None

    def prepare(self, first: int) -> None:
        """The plans are there, and from layer `first` on stored states are wanted."""

    def replan(self) -> None:
        """Some chunks of the plans will not come: from here on they are not placed."""

    def close(self) -> None:
        """Nothing is written from here on; what is under way comes before anything that follows."""

    def ready(self, layer_idx: int) -> None:
        """Sees to it that a CUDA graph, which places nothing, finds the layer's stored states."""

    def place(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Writes the layer's stored keys, rotated to the prompt's positions, and values (once).

        Args:
            layer_idx: of the layer.
            keys: `[B, H, S, D]`, for dtype, device and sizes.
            values: `[B, H, S, Dv]`, likewise.
        """
        if layer_idx in self.placed:
            return
        self.placed.add(layer_idx)
        device = keys.device
        with self.clock.stage("place", device):
            to_keys, to_values = self.layers[layer_idx].allocate(keys, values, self.length)
            rotation = self.rotations[layer_idx]
            angles = self.angles(rotation, device)
            for b, plan in enumerate(self.plans):
                for run in plan.runs:
                    here = slice(run[0][0].start, run[-1][0].stop)
                    parts = [tuple(map(span.of, chunk.states(layer_idx))) for span, chunk in run]
                    stored = _join([keys for keys, _ in parts], device)
                    turn = None if angles is None else (angles[0][b : b + 1, :, here], angles[1][b : b + 1, :, here])
                    rotation.rotate(stored[None], turn, out=to_keys[b : b + 1, :, here])
                    to_values[b, :, here] = _join([values for _, values in parts], device)

    def write_all(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Writes fresh `[B, H, T, D]` states of every row; nothing stored is placed over them."""
        self.placed.add(layer_idx)
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.allocate(keys, values, self.length)
        layer._keys[:, :, : self.length] = keys
        layer._values[:, :, : self.length] = values

    def write(self, layer_idx: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes fresh `[B, H, S, D]` states at `rows [B, S]`, over what was placed."""
        self.place(layer_idx, keys, values)
        layer = self.layers[layer_idx]
        _scatter(layer._keys, rows, keys)
        _scatter(layer._values, rows, values)

    def distance(self, layer_idx: int, rows: Tensor | None, fresh: Tensor, source: str) -> Tensor:
        """`[B, S]` fp32 squared distance of fresh from stored states, over heads and dims.

        Args:
            layer_idx: of a layer that was placed.
            rows: `[B, S]` prompt indices of the fresh states; None for the first S.
            fresh: `[B, H, S, D]`.
            source: "k" or "v".
        """
        layer = self.layers[layer_idx]
        buffer = layer._keys if source == "k" else layer._values
        stored = buffer[:, :, : fresh.shape[2]] if rows is None else gather(buffer, rows)
        return (fresh - stored).float().square_().sum((1, 3))

    def angles(self, rotation: Rotation, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the prompt's positions, made once for each rotation and device."""
        if (rotation, device) not in self._angles:
            self._angles[rotation, device] = on_device(rotation.angles(self.rotary, self.positions), device)
        return self._angles[rotation, device]


def _join(parts: list[Tensor], device: torch.device) -> Tensor:
    """`[H, n, D]` parts joined along tokens, on a device."""
    here = [part.to(device, non_blocking=True) for part in parts]
    return here[0] if len(here) == 1 else torch.cat(here, dim=1)


def gather(buffer: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, S, D]` of a buffer `[B, H, capacity, D]` at `rows [B, S]`."""
    index = rows.to(buffer.device)[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    return buffer.gather(2, index)


def _scatter(buffer: Tensor, rows: Tensor, states: Tensor) -> None:
    """Writes `[B, H, S, D]` into a buffer `[B, H, capacity, D]` at `rows [B, S]`."""
    rows, states = rows.to(buffer.device), states.to(buffer.dtype)  # under autocast values and keys may differ
    if rows.shape[0] == 1:
        buffer.index_copy_(2, rows[0], states)
    else:
        buffer.scatter_(2, rows[:, None, :, None].expand_as(states), states)
