"""A pass through a decoder layer that ends where its keys and values are there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from blendkv import _compat
from blendkv.errors import UnsupportedModelError


class _Stop(Exception):
    """Carries the fresh states out of a layer whose pass ends at `update`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.states = keys, values


class _Probe(Cache):
    """A cache that ends the pass of a layer as soon as its keys and values are there."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        raise _Stop(key_states, value_states)


def stopped_pass(layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Fresh keys and values of a decoder layer, without its attention, output projection and MLP.

    Calls `layer.forward`, not `layer(...)`, so that hooks of others do not run twice.

    Args:
        layer: a decoder layer.
        hidden: `[B, S, D]` hidden states of the rows that are wanted.
        kwargs: the layer's other arguments, for those rows; the cache among them is replaced.

    Returns:
        `[B, H, S, D]` keys, rotated by the model, and `[B, H, S, Dv]` values.
    """
    cache = {_compat.cache_keyword(layer.forward): _Probe()}
    kwargs = {k: v for k, v in kwargs.items() if k not in _compat.CACHE_NAMES} | cache
    try:
        layer.forward(hidden, **kwargs)
    except _Stop as stop:
        return stop.states
    raise UnsupportedModelError(
        f"{type(layer).__name__} never updates its cache: it has no keys and values to blend; use full "
        "prefill for this model"
    )
