"""A decoded token on a GPU: the layers as CUDA graphs, its keys and values written where they belong.

Anything else (several tokens at once, padding, hooks of others, outputs asked for) goes through the model as usual,
with the user's own attention implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from blendkv.attention import LazyMask, RowMask, blending
from blendkv.cache import BlendedCache
from blendkv.facts import ModelFacts
from blendkv.graphs import GraphPass
from blendkv.kernelbuffers import fill_tables, scatter


def fits(cache: BlendedCache, facts: ModelFacts, devices: Sequence[torch.device]) -> bool:
    """Whether all buffers are what the kernels take them for: one filled under autocast may hold another dtype."""
    if not len(cache.layers) == len(facts.sizes) == len(devices):
        return False
    return all(
        layer.dtype == facts.dtype
        and layer._keys.device == device
        and (layer._keys.shape[1], layer._keys.shape[3], layer._values.shape[3]) == sizes
        for layer, sizes, device in zip(cache.blended, facts.sizes, devices, strict=True)
    )


class Step:
    """The state of a filled `BlendedCache` while one token for each row of the batch is computed.

    Args:
        cache: filled.
        graphs: to use.
        batch: rows of the batch.
    """

    def __init__(self, cache: BlendedCache, graphs: GraphPass, batch: int) -> None:
        self.cache, self.graphs, self.batch = cache, graphs, batch
        self.start = cache.get_seq_length()
        self._masks: dict[tuple[int, torch.device], RowMask] = {}
        self._open = ExitStack()

    def begin(self) -> None:
        """Makes room and tells the graphs where the buffers are and which row is computed."""
        self._open.callback(self.graphs.close)
        for layer in self.cache.blended:
            layer.make_room(1)
        fill_tables(self.graphs.tables, self.cache.blended, self.start + 1)
        device = self.cache.blended[0].device
        self.graphs.enter(torch.full((self.batch, 1), self.start, dtype=torch.int64, device=device))
        self._open.callback(blending.reset, blending.set("lazy"))

    def end(self) -> None:
        """The forward is over, well or not."""
        self._open.close()

    def fill(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends `[B, H, 1, D]` states; returns all keys and values."""
        rows = self.graphs.rows(keys.device)
        assert rows is not None
        scatter(self.graphs.tables[keys.device], layer_idx, rows, keys.detach(), values.detach())
        self.note(layer_idx)
        layer = self.cache.blended[layer_idx]
        return layer.keys, layer.values

    def ready(self, layer_idx: int) -> None:
        """A CUDA graph may be about to run the layer: everything is in place."""

    def note(self, layer_idx: int) -> None:
        """A layer's keys and values are there, written by `fill` or by a CUDA graph."""
        self.cache.blended[layer_idx].resize(self.start + 1)

    def row_mask(self, lazy: LazyMask, layer_idx: int) -> RowMask | None:
        """The mask for a layer that would have been given `lazy`, or None if kernels do not know it."""
        device = self.cache.blended[layer_idx].device
        if (id(lazy), device) not in self._masks:
            rows, table = self.graphs.rows(device), self.graphs.tables[device]
            assert rows is not None
            band = lazy.band()
            self._masks[id(lazy), device] = RowMask(lazy, rows, table, band, padded=False)
        mask = self._masks[id(lazy), device]
        return mask if mask.by_kernel else None
