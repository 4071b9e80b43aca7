"""A stand-in for a GPU on the CPU: what kernels do with addresses, and CUDA graphs that run again what they recorded.

Kernels read and write through the addresses they are given, as the Triton ones do, so that a stale address shows. A
recording executes nothing, a replay nothing of Python's: no cache is told of new keys, no hook is called.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
from contextvars import ContextVar

import torch

from blendkv import kernels
from blendkv.cache import BlendedCache
from blendkv.graphs import Shape
from blendkv.kernels import naive
from blendkv.recording import Recorder

_graph: ContextVar = ContextVar("graph", default=None)
_recording: ContextVar = ContextVar("recording", default=False)


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype, head_stride: int | None = None) -> torch.Tensor:
    """The memory at an address, as a contiguous tensor; with `head_stride` as `[H, n, D]` of a longer one."""
    count = math.prod(shape) if head_stride is None else (shape[0] - 1) * head_stride + math.prod(shape[1:])
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.view(shape) if head_stride is None else flat.as_strided(shape, (head_stride, shape[2], 1))


def buffers(table, layer, batch, heads, dim, value_dim, dtype):
    keys, values, capacity, filled = table[layer].tolist()
    return *(at(a, (batch, heads, capacity, d), dtype) for a, d in ((keys, dim), (values, value_dim))), filled


def scatter(keys, values, rows, table, layer):
    if _recording.get():
        _graph.get().scatter = rows, table, layer
        return
    batch, heads, _, dim = keys.shape
    to_keys, to_values, _ = buffers(table, layer, batch, heads, dim, values.shape[3], keys.dtype)
    naive.scatter(keys, values, rows, to_keys, to_values)


def deviation(fresh, rows, table, layer, which):
    keys, values, capacity, _ = table[layer].tolist()
    batch, heads, _, dim = fresh.shape
    stored = at(keys if which == "keys" else values, (batch, heads, capacity, dim), fresh.dtype)
    return naive.deviation(fresh, rows, stored)


def rotate_and_place(sources, pieces, tiles, table, layers, sizes, dtype, pairing, angles):
    heads, dim, value_dim = sizes
    batch = int(pieces[:, 0].max()) + 1
    for i, layer in enumerate(layers):
        to_keys, to_values, _ = buffers(table, layer, batch, heads, dim, value_dim, dtype)
        for (keys, values), (row, start, length, tokens) in zip(sources[i].tolist(), pieces.tolist(), strict=True):
            chunk = at(keys, (heads, length, dim), dtype, tokens * dim)
            chunk = chunk, at(values, (heads, length, value_dim), dtype, tokens * value_dim)
            naive.rotate_and_place([chunk], [(row, start)], to_keys, to_values, pairing, angles)


def scattered_attention(query, rows, table, layer, heads, value_dim, scaling, **options):
    keys, values, filled = buffers(table, layer, query.shape[0], heads, query.shape[3], value_dim, query.dtype)
    if _recording.get():
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value_dim)
    keys, values = keys[:, :, :filled], values[:, :, :filled]
    return naive.scattered_attention(query, rows, keys, values, scaling, **options).to(query.dtype)


def attention_mass(query, rows, table, layer, heads, tokens, scaling, **options):
    batch, _, _, dim = query.shape
    keys, _, capacity, filled = table[layer].tolist()
    mass = torch.zeros(batch, tokens)
    if not _recording.get():
        filled = min(filled, tokens)
        stored = at(keys, (batch, heads, capacity, dim), query.dtype)[:, :, :filled]
        mass[:, :filled] = naive.attention_mass(query, rows, stored, scaling, **options)
    return mass


class FakeGraph:
    def __init__(self, gpu, run):
        self.gpu, self.run, self.scatter = gpu, run, None

    def replay(self):
        self.gpu.replays.append(self)
        token = _graph.set(self)
        try:
            self.run()
        finally:
            _graph.reset(token)
        if self.gpu.wrong:
            inspect.getclosurevars(self.run).nonlocals["own"].add_(self.gpu.wrong)


class FakeGPU:
    """Counts what happens.

    Attributes:
        graphs: recorded.
        replays: of which graph, in order.
        updates: layers whose own forward ran (recordings and replays do not count).
        error: raised by every recording, if set.
        wrong: added to what replays leave.
    """

    def __init__(self, patch) -> None:
        self.graphs, self.replays, self.updates, self.error, self.wrong = [], [], 0, None, 0.0
        patch.setattr(kernels, "unusable", lambda *args: "off" if os.environ.get("BLENDKV_KERNELS") == "off" else None)
        patch.setattr(kernels, "is_cuda", lambda device: True)
        patch.setattr("blendkv.kernels.rows.scatter", scatter)
        patch.setattr("blendkv.kernels.rows.deviation", deviation)
        patch.setattr("blendkv.kernels.placing.rotate_and_place", rotate_and_place)
        patch.setattr("blendkv.kernels.attention.scattered_attention", scattered_attention)
        patch.setattr("blendkv.kernels.mass.attention_mass", attention_mass)
        patch.setattr(Recorder, "record", lambda recorder, device, run: self.record(run))
        own_put = Shape.put
        patch.setattr(Shape, "put", lambda shape, i, x: shape.outputs[i] if _recording.get() else own_put(shape, i, x))
        own_update = BlendedCache.update

        def update(cache, keys, values, layer_idx, *args, **kwargs):
            graph = _graph.get()
            if graph is None:
                self.updates += 1
            elif not _recording.get():
                scatter(keys, values, *graph.scatter)
                return keys, values
            return own_update(cache, keys, values, layer_idx, *args, **kwargs)

        patch.setattr(BlendedCache, "update", update)

    def record(self, run):
        if self.error is not None:
            raise self.error
        graph = FakeGraph(self, run)
        own = inspect.getclosurevars(run).nonlocals["own"]
        before, tokens = own.clone(), (_graph.set(graph), _recording.set(True))
        try:
            out = run()
        finally:
            _graph.reset(tokens[0])
            _recording.reset(tokens[1])
            own.copy_(before)
        self.graphs.append(graph)
        return graph, out

    def count(self):
        """(recorded, replayed, layers run as usual) since it was last asked."""
        now = len(self.graphs), len(self.replays), self.updates
        last, self._last = getattr(self, "_last", (0, 0, 0)), now
        return tuple(a - b for a, b in zip(now, last, strict=True))
