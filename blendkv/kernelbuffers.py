"""The prompt's keys and values while they are filled, on CUDA: Triton kernels, and copies beside the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendkv import kernels
from blendkv.buffers import Buffers
from blendkv.cache import BlendedLayer
from blendkv.chunk import ChunkCache
from blendkv.kernels.table import address, describe, upload
from blendkv.prompt import Span

Sizes = tuple[int, int, int]
GROUP_BYTES = 1 << 28
"""Layers of pinned chunks are read together until they are so many bytes: thousands of small copies cost more."""


class KernelBuffers(Buffers):
    """Triton kernels: chunks that are on the layers' device are placed in one launch for all layers.

    Args:
        layers: of the cache.
        rotations: one a layer.
        rotary: the model's rotary module, or None.
        positions: `[B, T]` position ids.
        plans: one a batch row.
        clock: where the time of placing is noted.
        sizes: for each layer (KV heads, key dim, value dim).
        dtype: of keys and values.
        devices: one a layer.
        tables: `[L, 4]` int64 on each device, to be filled; kept by the caller if CUDA graphs read them.
    """

    def __init__(
        self,
        *args: Any,
        sizes: Sequence[Sizes],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        tables: dict[torch.device, Tensor],
    ) -> None:
        super().__init__(*args)
        self.sizes, self.dtype, self.devices, self.tables = sizes, dtype, devices, tables
        self._spans: list[tuple[int, Span, ChunkCache]] = []
        self._pieces: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._later: deque[range] = deque()
        self._begun: dict[torch.device, torch.cuda.Event] = {}
        self._coming: dict[int, torch.cuda.Event] = {}

    def table(self, layer_idx: int) -> Tensor:
        """See `Buffers`."""
        return self.tables[self.devices[layer_idx]]

    def prepare(self, first: int) -> None:
        """Places every layer from `first` on whose chunks are all on its device, in as few launches as there are kinds.

        Layers with chunks pinned in host memory follow one by one, beside what the GPU computes; those with chunks
        elsewhere when they are needed.
        """
        batch = self.positions.shape[0]
        for layer, (heads, dim, value_dim), device in zip(self.layers, self.sizes, self.devices, strict=True):
            if not layer.is_initialized:
                layer.allocate_for(batch, heads, dim, value_dim, self.length, self.dtype, device)
        fill_tables(self.tables, self.layers, self.length)
        self.replan()
        homes = {chunk.homes for _, _, chunk in self._spans}
        here = [i for i in range(first, len(self.layers)) if all(home[i] == self.devices[i] for home in homes)]
        for _, run in groupby(here, key=lambda i: (i - here.index(i), *self._kind(i))):
            layers = list(run)
            self._launch(range(layers[0], layers[-1] + 1), [chunk.addresses for _, _, chunk in self._spans])
            self.placed.update(layers)
        rest = (i for i, d in enumerate(self.devices) if d.type == "cuda" and all(h[i] in (None, d) for h in homes))
        self._read_ahead([i for i in rest if i >= first and i not in self.placed])

    def _read_ahead(self, layers: Sequence[int]) -> None:
        """Has layers read from pinned memory beside what the GPU computes, the first of them now."""
        pinned = [chunk for _, _, chunk in self._spans if None in chunk.homes]
        if not layers or not pinned or any(chunk.piece is None for chunk in pinned):
            return
        most = max(1, GROUP_BYTES // max(1, sum(chunk.nbytes for _, _, chunk in self._spans) // len(self.layers)))
        for _, run in groupby(layers, key=lambda i: (i - layers.index(i), *self._kind(i))):
            left, size = list(run), 1
            while left:
                self._later.append(range(left[0], left[0] + len(left[:size])))
                left, size = left[size:], min(2 * size, most)
        for device in {self.devices[i] for i in layers}:
            self._cut(device)
            for rotation in {self.rotations[i] for i in layers}:
                self.angles(rotation, device)
            self._begun[device] = torch.cuda.current_stream(device).record_event()
        self._read_next()
        self._read_next()

    def _read_next(self) -> None:
        """Copies a few more layers to their GPU and places them, on a stream of its own; `ready` waits for them.

        A copy engine does the reading: a kernel that waits for host memory would keep others from the multiprocessors.
        """
        if not self._later:
            return
        layers = self._later.popleft()
        device = self.devices[layers[0]]
        with torch.cuda.stream(_side_stream(device)):
            moved = [_moved(chunk, layers, device) for _, _, chunk in self._spans]
            torch.cuda.current_stream(device).wait_event(self._begun[device])  # until then others may own the buffers
            self._launch(layers, [base for base, _ in moved], whole=False)
            event = torch.cuda.current_stream(device).record_event()
        self._coming.update(dict.fromkeys(layers, event))
        self.placed.update(layers)

    def close(self) -> None:
        """See `Buffers`."""
        self._later.clear()
        for i in list(self._coming):
            self._await(i)

    def _await(self, layer_idx: int) -> None:
        if (event := self._coming.pop(layer_idx, None)) is not None:
            torch.cuda.current_stream(self.devices[layer_idx]).wait_event(event)

    def replan(self) -> None:
        """See `Buffers`."""
        self._spans = [(b, span, chunk) for b, plan in enumerate(self.plans) for span, chunk in plan.placed]
        self._pieces.clear()

    def _kind(self, i: int) -> tuple:
        return self.rotations[i], self.sizes[i], self.devices[i]

    def place(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """See `Buffers`."""
        self.ready(layer_idx)

    def ready(self, layer_idx: int) -> None:
        """See `Buffers`. Chunks that a GPU cannot read go through a copy on the device, of this layer alone."""
        while any(layer_idx in layers for layers in self._later):
            self._read_next()
        if layer_idx in self._coming:
            self._await(layer_idx)
            if layer_idx + 1 not in self._coming:
                self._read_next()
        if layer_idx in self.placed:
            return
        self.placed.add(layer_idx)
        moved, bases = [], []
        for _, _, chunk in self._spans:
            if chunk.homes[layer_idx] in (None, self.devices[layer_idx]):
                bases.append(chunk.addresses[layer_idx : layer_idx + 1])
                continue
            states = [t.to(self.devices[layer_idx], non_blocking=True) for t in chunk.states(layer_idx)]
            moved.append(states)  # until the launch is queued
            bases.append(np.array([[(address(t), t.shape[2] * t.element_size()) for t in states]], np.int64))
        self._launch(range(layer_idx, layer_idx + 1), bases, whole=False)

    def _launch(self, layers: range, bases: list[np.ndarray], whole: bool = True) -> None:
        """One launch for layers of one kind; `bases` of all layers (`whole`) or of these alone."""
        if not self._spans:
            return
        from blendkv.kernels.placing import locate, rotate_and_place

        first = layers[0]
        device, rotation = self.devices[first], self.rotations[first]
        with self.clock.stage("place", device), kernels.on(device):
            located = [(base, span.offset) for base, (_, span, _) in zip(bases, self._spans, strict=True)]
            sources = upload(locate(located, layers if whole else range(len(layers))), device)
            rotate_and_place(
                sources,
                *self._cut(device),
                self.tables[device],
                layers,
                self.sizes[first],
                self.dtype,
                rotation.pairing,
                self.angles(rotation, device),
            )

    def _cut(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The spans as tiles of work, on a device; made once."""
        from blendkv.kernels.placing import cut

        if device not in self._pieces:
            cuts = cut([(b, span.start, span.length, len(chunk)) for b, span, chunk in self._spans])
            self._pieces[device] = upload(cuts[0], device), upload(cuts[1], device)
        return self._pieces[device]

    def write(self, layer_idx: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Buffers`."""
        self.place(layer_idx, keys, values)
        scatter(self.table(layer_idx), layer_idx, rows, keys, values)

    def distance(self, layer_idx: int, rows: Tensor | None, fresh: Tensor, source: str) -> Tensor:
        """See `Buffers`."""
        from blendkv.kernels.rows import deviation

        with kernels.on(fresh.device):
            return deviation(fresh, rows, self.table(layer_idx), layer_idx, "keys" if source == "k" else "values")


def _moved(chunk: ChunkCache, layers: range, device: torch.device) -> tuple[np.ndarray, Tensor | None]:
    """Addresses on a GPU of some layers of a chunk, as `ChunkCache.addresses`; and what holds them, if it is a copy."""
    bases = chunk.addresses[layers.start : layers.stop]
    if chunk.homes[layers[0]] == device:
        return bases, None
    piece = chunk.piece
    assert piece is not None
    start, last = int(bases[0, 0, 0]), layers[-1]
    stop = int(bases[-1, 1, 0]) + chunk.sizes[last][0] * len(chunk) * int(bases[-1, 1, 1])
    here = piece[start - piece.data_ptr() : stop - piece.data_ptr()].to(device, non_blocking=True)
    bases = bases.copy()
    bases[..., 0] += here.data_ptr() - start
    return bases, here


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def new_tables(devices: Sequence[torch.device]) -> dict[torch.device, Tensor]:
    """A table for each device, to be filled."""
    return {d: torch.empty(len(devices), 4, dtype=torch.int64, device=d) for d in set(devices)}


def scatter(table: Tensor, layer_idx: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes fresh `[B, H, S, D]` states at `rows [B, S]` into the buffers that a table names."""
    from blendkv.kernels.rows import scatter

    with kernels.on(keys.device):
        scatter(keys, values, rows, table, layer_idx)


def fill_tables(tables: dict[torch.device, Tensor], layers: Sequence[BlendedLayer], filled: int) -> None:
    """Writes where the buffers of all layers are into the `[L, 4]` table of every device."""
    found = describe([(layer._keys, layer._values) for layer in layers], filled)
    for device, table in tables.items():
        table.copy_(upload(found, device))
