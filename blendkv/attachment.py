"""What `attach` put on a model and found out about it: its facts as they are now, and the CUDA graphs of its layers."""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from blendkv import _compat
from blendkv.cache import BlendedCache
from blendkv.errors import NotAttachedError
from blendkv.facts import ModelFacts, kernels_unusable
from blendkv.graphs import GraphPass, LayerGraphs, devices_of
from blendkv.weights import Fingerprints

facts_instead: ContextVar[ModelFacts | None] = ContextVar("blendkv_facts_instead", default=None)
"""What a proof wants this context, and no other thread, to take for the facts of a model."""


@dataclass
class Attachment:
    """What `attach` put on a model, and what it found out about it."""

    model: Any
    decoder: Any
    layers: list[nn.Module]
    learnt: ModelFacts | None = None
    dtype: torch.dtype | None = None
    fingerprints: Fingerprints = field(init=False)
    handles: tuple = ()
    configs: tuple = ()
    wrapped: tuple[str, ...] = ()
    proven: bool = False
    devices: tuple[torch.device, ...] = ()
    graphs: LayerGraphs | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Starts with nothing known."""
        self.fingerprints = Fingerprints(self.model)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle of a model starts without graphs."""
        return self.__dict__ | {"graphs": None}

    def open_graphs(self) -> GraphPass | None:
        """CUDA graphs of the layers, if this model can use them; `facts` or `unchanged` was asked just before."""
        off = any(os.environ.get(f"BLENDKV_{what}", "") == "off" for what in ("GRAPHS", "KERNELS"))
        if off or not self.proven or self.learnt is None:
            return None
        if self.masks != "lazy":
            return None
        if not all(isinstance(layer.__dict__.get("forward"), LayerForward) for layer in self.layers):
            return None
        if self.graphs is None:
            if kernels_unusable(self.learnt, self.devices) is not None:
                return None
            shape = self.learnt.shape
            row_flops = None if shape is None else sum(la.row_flops for la in shape.layers) / len(shape.layers)
            self.graphs = LayerGraphs(self.devices, self.layers, row_flops)
        return self.graphs.open()

    @property
    def masks(self) -> Literal["lazy", "dense"]:
        """How masks are made for a blend: a model whose attention is its own code wants tensors."""
        return "lazy" if getattr(self.model, "_supports_attention_backend", False) else "dense"

    @property
    def homes(self) -> tuple[torch.device, ...]:
        """Where each layer wants its keys and values; the CPU where weights come and go."""
        devices = self.devices or devices_of(self.layers)
        return tuple(torch.device("cpu") if device.type == "meta" else device for device in devices)

    @property
    def config(self) -> Any:
        """The text config of the decoder."""
        return self.decoder.config.get_text_config()

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model; its fingerprint is computed again if weights or adapters changed.

        Raises:
            NotAttachedError: while nothing is known yet.
        """
        if (given := facts_instead.get()) is not None:
            return given
        if self.learnt is None:
            raise NotAttachedError("call blendkv.attach(model) first")
        if self.dtype != next(self.model.parameters()).dtype:
            raise NotAttachedError("the model's dtype was changed after attach: call blendkv.attach(model) again")
        watch, fingerprint = self.fingerprints.watch, self.fingerprints.now()
        if watch is not self.fingerprints.watch:  # graphs hold addresses of weights
            self.graphs, self.devices = None, devices_of(self.layers)
        return replace(self.learnt, fingerprint=fingerprint)


class LayerForward:
    """A layer's own `forward`, or the CUDA graph of it where a blend has one. Inert for any other cache."""

    def __init__(self, layer_idx: int, own: Any) -> None:
        self.layer_idx, self.own = layer_idx, own
        functools.update_wrapper(self, own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`."""
        cache = _compat.cache_in(args, kwargs)
        work = cache.work if isinstance(cache, BlendedCache) else None
        if work is None or work.graphs is None or len(args) != 1:
            return self.own(*args, **kwargs)
        work.ready(self.layer_idx)
        return work.graphs.run(self.layer_idx, self.own, args[0], kwargs, partial(work.note, self.layer_idx))
