"""CUDA graphs of decoder layers: one launch for a layer where its Python and its launches take longer than its work.

A graph is recorded for each layer and each shape `[B, S]` of computed rows, around the model's own `layer.forward`. It
reads nothing that changes from prompt to prompt by address: hidden states, rows and position embeddings are copied into
tensors of its own, and the cache's buffers are found through a table on the device (`kernels.table`).

Recorded at first sight, next to the ordinary run whose result is used; checked against an ordinary run the second time,
on other inputs; trusted from then on. What cannot be recorded, or does not agree, runs as usual from then on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from blendkv import _compat, kernels
from blendkv.attention import RowMask
from blendkv.recording import Recorder
from blendkv.waits import Waits

SHAPES = 24
"""Shapes remembered; the least recently used goes first."""
LONG_SECONDS = 4e-3
"""A layer that computes longer gains nothing: its launches are hidden, and so are the gaps between its kernels."""
FLOPS_PER_SECOND = 4e14
"""What a large card computes, about."""
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""RMS of the difference between a replay and an ordinary run / RMS of the latter, at most."""


@dataclass
class Recorded:
    """The graph of one layer.

    Attributes:
        graph: to replay.
        inputs: names and places of the tensors that it reads besides hidden states and rows.
        plain: the layer's other arguments, which were compiled in.
        wrap: the output around the hidden states.
        proved: whether a replay on other inputs has been compared.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Any]
    plain: dict[str, Any]
    wrap: Callable[[Tensor], Any]
    proved: bool = False


@dataclass
class Shape:
    """Everything for one `[B, S]`: the graphs' own tensors on each device, and the graphs.

    Attributes:
        held: by device and name, what a pass over these rows knows besides them.
        outputs: by layer, what it says besides hidden states.
    """

    rows: dict[torch.device, Tensor] = field(default_factory=dict)
    hidden: dict[torch.device, Tensor] = field(default_factory=dict)
    inputs: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)
    layers: dict[int, Recorded] = field(default_factory=dict)
    held: dict[tuple[torch.device, str], Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def put(self, layer_idx: int, value: Tensor) -> Tensor:
        """Keeps what a layer says besides hidden states, where its graph will leave it too; returns it there."""
        if layer_idx not in self.outputs:
            with torch.inference_mode(False):
                self.outputs[layer_idx] = torch.empty_like(value)
        return self.outputs[layer_idx].copy_(value)


class LayerGraphs:
    """The graphs of one model. One pass at a time uses them; another meanwhile runs as usual.

    Args:
        devices: one a layer.
        layers: of the decoder.
        row_flops: of each layer, per row, or None if they could not be counted.
    """

    def __init__(self, devices: Sequence[torch.device], layers: Sequence[nn.Module], row_flops: float | None) -> None:
        self.devices, self.layers = devices, layers
        with torch.inference_mode(False):  # written to in every mode from now on
            self.tables = {d: torch.zeros(len(devices), 4, dtype=torch.int64, device=d) for d in set(devices)}
        self.widest = int(LONG_SECONDS * FLOPS_PER_SECOND / row_flops) if row_flops else 1024
        self.refused: dict[int, str] = {}
        self._shapes: OrderedDict[tuple, Shape] = OrderedDict()
        self.record = Recorder().record
        self._done: dict[torch.device, torch.cuda.Event] = {}
        self._lock = threading.Lock()
        self._modules = [m for layer in layers for m in layer.modules() if m is not layer]
        self._forwards = [m.__dict__.get("forward") for m in self._modules]

    def open(self) -> GraphPass | None:
        """Starts a pass, or None if another is under way or something here needs the ordinary run."""
        autocast = any(torch.is_autocast_enabled(device.type) for device in self.tables)
        usual = not torch.is_grad_enabled() and not autocast and not torch.compiler.is_compiling()
        if not usual or self._watched() or not self._lock.acquire(blocking=False):
            return None
        for device, event in self._done.items():  # a pass on another stream may still be reading these tensors
            torch.cuda.current_stream(device).wait_event(event)
        return GraphPass(self)

    def close(self) -> None:
        """Ends the pass that was opened."""
        try:
            for device in self.tables:
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        event = self._done.setdefault(device, torch.cuda.Event())
                        event.record(torch.cuda.current_stream(device))
        finally:
            self._lock.release()

    def shape(self, name: tuple) -> Shape:
        """What is remembered of a shape."""
        found = self._shapes.setdefault(name, Shape())
        self._shapes.move_to_end(name)
        if len(self._shapes) > SHAPES:
            self._shapes.popitem(last=False)
        return found

    def _watched(self) -> bool:
        """Whether somebody wants to see or change what happens inside the layers (our own hooks do not count)."""
        everywhere = nn.modules.module
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
            return True
        if any(len(layer._forward_pre_hooks) > 1 for layer in self.layers):
            return True
        hooks = (m._forward_hooks for m in (*self.layers, *self._modules) if m._forward_hooks)
        if not all(_compat.is_idle_hook(hook) for found in hooks for hook in found.values()):
            return True
        if any(m._forward_pre_hooks for m in self._modules):
            return True
        pairs = zip(self._modules, self._forwards, strict=True)
        return any(m.__dict__.get("forward") is not forward for m, forward in pairs)


class GraphPass:
    """One forward's use of the graphs."""

    def __init__(self, graphs: LayerGraphs) -> None:
        self.graphs = graphs
        self._shape: Shape | None = None
        self._last = 0
        self._loaded: dict[tuple[torch.device, int], tuple[int, Tensor]] = {}
        self._returned: list[StorageWeakRef] = []
        self._closed = False

    def __del__(self) -> None:
        """An interrupt is not an `Exception`: no hook ran after it."""
        with suppress(Exception):
            self.close()

    @property
    def tables(self) -> dict[torch.device, Tensor]:
        """`[L, 4]` on each device, read by the graphs."""
        return self.graphs.tables

    def close(self) -> None:
        """Lets the next pass in (once)."""
        if not self._closed:
            self._closed = True
            self.graphs.close()

    def width(self, rows: int) -> int:
        """How many rows to compute so that prompts of about this length share graphs (a few percent more)."""
        if rows > self.graphs.widest:
            return rows
        return rows if rows <= 16 else -(-rows // 16) * 16

    def enter(
        self, rows: Tensor, kind: tuple = (), last: int | None = None, held: Mapping[str, Tensor] | None = None
    ) -> Shape | None:
        """From here on `rows [B, S]` are computed.

        Args:
            rows: prompt indices.
            kind: what sets this pass apart from others over as many rows: they share no graphs.
            last: the layer in which this pass ends, half-way: it runs as usual. None: it goes to the end.
            held: what the layers read besides, by name; of the same shapes whenever rows and kind are.

        Returns:
            The graphs' own tensors; None where no graph is used.
        """
        self._shape, self._loaded, self._returned = None, {}, []
        self._last = len(self.graphs.devices) if last is None else last
        if rows.shape[1] > self.graphs.widest:
            return None
        self._shape = self.graphs.shape((*rows.shape, *kind))
        for device in self.graphs.tables:
            self._hold(self._shape.rows, device, rows, device)
            for name, value in (held or {}).items():
                self._hold(self._shape.held, (device, name), value, device)
        return self._shape

    def _hold(self, tensors: dict[Any, Tensor], name: Any, value: Tensor, device: torch.device) -> None:
        if name not in tensors:
            with torch.inference_mode(False):
                tensors[name] = torch.empty_like(value, device=device)
        tensors[name].copy_(value, non_blocking=True)

    def rows(self, device: torch.device) -> Tensor | None:
        """The graphs' own copy of the rows computed; None where no graph is used."""
        return None if self._shape is None else self._shape.rows[device]

    def leave(self) -> None:
        """From here on the layers run as usual."""
        self._shape = None

    def run(
        self, layer_idx: int, forward: Callable, hidden: Tensor, kwargs: dict[str, Any], note: Callable[[], None]
    ) -> Any:
        """What `forward(hidden, **kwargs)` returns.

        Args:
            layer_idx: of the layer.
            forward: the layer's own.
            hidden: `[B, S, D]`, only argument by place.
            kwargs: the others.
            note: called where a replay did what `Cache.update` would have noted.
        """
        shape, mask = self._shape, kwargs.get("attention_mask")
        if shape is None or layer_idx in self.graphs.refused or not isinstance(mask, RowMask) or not mask.by_kernel:
            return forward(hidden, **kwargs)
        if mask.padded or layer_idx >= self._last:
            return forward(hidden, **kwargs)
        device = self.graphs.devices[layer_idx]
        moving = {name: value for name, value in kwargs.items() if _compat.has_rows(name)}
        plain = {
            n: v for n, v in kwargs.items() if n not in moving and n not in ("attention_mask", *_compat.CACHE_NAMES)
        }
        if not all(map(_is_constant, plain.values())) or not all(map(_is_movable, moving.values())):
            return forward(hidden, **kwargs)
        plain["mask"] = mask.band
        own = shape.hidden.get(device)
        if own is None or own.shape != hidden.shape or own.dtype != hidden.dtype:
            if own is not None:
                shape.layers.clear()
            with torch.inference_mode(False):
                own = shape.hidden[device] = torch.empty_like(hidden, device=device)
        if own is not hidden:
            own.copy_(hidden, non_blocking=True)
        inputs = {name: self._load(shape, device, value) for name, value in moving.items()}
        recorded = shape.layers.get(layer_idx)
        if recorded is not None and (recorded.plain != plain or recorded.inputs != inputs):
            return forward(hidden, **kwargs)
        if recorded is None:
            return self._first(shape, layer_idx, forward, own, inputs, plain, kwargs)
        with kernels.on(device):
            if not recorded.proved:
                return self._second(shape, layer_idx, forward, own, recorded, kwargs)
            recorded.graph.replay()
        note()
        last = layer_idx == len(self.graphs.devices) - 1
        return recorded.wrap(own.clone() if last else own)

    def _first(
        self, shape: Shape, layer_idx: int, forward: Callable, own: Tensor, inputs: Any, plain: Any, kwargs: Any
    ) -> Any:
        """Runs as usual on the graph's own tensors, then records the same."""
        device = self.graphs.devices[layer_idx]
        kwargs = kwargs | {name: self._value(shape, device, value) for name, value in inputs.items()}
        with Waits() as waits:
            output = forward(own, **kwargs)
        hidden, wrap = _unwrap(output)
        if waits.first is not None:
            self.graphs.refused[layer_idx] = f"{waits.first} makes the host wait"
            return output
        if hidden is None or hidden.shape != own.shape:
            self.graphs.refused[layer_idx] = "its output is more than hidden states"
            return output
        if hidden.data_ptr() == own.data_ptr():
            self.graphs.refused[layer_idx] = "it writes over its input"
            return wrap(hidden.clone())
        if self._keeps(hidden):
            self.graphs.refused.update(dict.fromkeys(range(len(self.graphs.devices)), "hidden states are kept"))
            return output

        def run() -> None:
            own.copy_(_unwrap(forward(own, **kwargs))[0])

        try:
            graph, _ = self.graphs.record(device, run)
        except RuntimeError as error:  # a layer that asks the device something half-way
            self.graphs.refused[layer_idx] = f"{str(error).splitlines()[0]}"
            return output
        shape.layers[layer_idx] = Recorded(graph, inputs, plain, wrap)
        return output

    def _keeps(self, hidden: Tensor) -> bool:
        """Whether the decoder still holds what layers before the last one returned: a replay would write over it."""
        keeps = not all(ref.expired() for ref in self._returned[:-1])
        self._returned.append(StorageWeakRef(hidden.untyped_storage()))
        return keeps

    def _second(
        self, shape: Shape, layer_idx: int, forward: Callable, own: Tensor, recorded: Recorded, kwargs: Any
    ) -> Any:
        """Replays, runs as usual, and compares; the usual result is used."""
        given = own.clone()
        recorded.graph.replay()
        replayed = [x.clone() for x in (own, shape.outputs.get(layer_idx)) if x is not None]
        own.copy_(given)
        device = self.graphs.devices[layer_idx]
        moving = {name: self._value(shape, device, value) for name, value in recorded.inputs.items()}
        output = forward(own, **kwargs | moving)
        usual = [x for x in (_unwrap(output)[0], shape.outputs.get(layer_idx)) if x is not None]
        error = max(map(_off_by, replayed, usual))
        if error <= AGREES[own.dtype]:
            recorded.proved = True
        else:
            self.graphs.refused[layer_idx] = f"a replay is off by {error:.2g}"
        return output

    def _load(self, shape: Shape, device: torch.device, value: Any) -> Any:
        """Copies tensors into the graphs' own (once a pass); returns their numbers in the same structure."""
        if isinstance(value, tuple | list):
            return tuple(self._load(shape, device, part) for part in value)
        if not isinstance(value, Tensor):
            return value
        if (device, id(value)) not in self._loaded:
            number = sum(d == device for d, _ in self._loaded)
            own = shape.inputs.get((device, number))
            if own is None or own.shape != value.shape or own.dtype != value.dtype:
                if own is not None:
                    shape.layers.clear()
                with torch.inference_mode(False):
                    own = shape.inputs[device, number] = torch.empty_like(value, device=device)
            own.copy_(value, non_blocking=True)
            self._loaded[device, id(value)] = number, value  # held, so that the id stays its own
        return _Number(self._loaded[device, id(value)][0])

    def _value(self, shape: Shape, device: torch.device, value: Any) -> Any:
        """The graphs' own tensors for what `_load` returned."""
        if isinstance(value, tuple):
            return tuple(self._value(shape, device, part) for part in value)
        return shape.inputs[device, value.number] if isinstance(value, _Number) else value


def _off_by(replayed: Tensor, usual: Tensor) -> float:
    """RMS of the difference / RMS of the usual."""
    return float((replayed - usual).float().square().mean().sqrt() / usual.float().square().mean().sqrt())


@dataclass(frozen=True)
class _Number:
    number: int


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_movable(value: Any) -> bool:
    """Whether `_load` finds every tensor in a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_movable, value))
    return isinstance(value, Tensor) or _is_constant(value)


def _unwrap(output: Any) -> tuple[Any, Callable[[Tensor], Any]]:
    """The hidden states in a layer's output, and how to put others in their place; None if there is more in it."""
    if isinstance(output, Tensor):
        return output, lambda hidden: hidden
    if isinstance(output, tuple) and output and all(part is None for part in output[1:]):
        rest = output[1:]
        return output[0], lambda hidden: (hidden, *rest)
    return None, lambda hidden: hidden


def devices_of(layers: Iterable[nn.Module]) -> tuple[torch.device, ...]:
    """Where each layer's weights are."""
    return tuple(next(layer.parameters()).device for layer in layers)
