"""Attach a model: hooks that turn a forward with an empty `BlendedCache` into a blend, and nothing else.

The decoder's pre-hook starts a `Blend`, a pre-hook on every layer narrows what the layer is given to the rows that are
computed, and a hook after the decoder puts the outputs back where they belong. Another cache passes through untouched.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from blendkv import _compat, attention
from blendkv.blend import Blend, ModelFacts, take_rows
from blendkv.cache import BlendedCache, BlendedLayer
from blendkv.chunk import model_fingerprint, weights_version
from blendkv.errors import CacheStateError, NotAttachedError, UnsupportedModelError

_STATE = "_blendkv_attachment"


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


def stopped_pass(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Fresh keys and values of a decoder layer, without its attention, output projection and MLP.

    Calls `layer.forward`, not `layer(...)`, so that hooks of others do not run twice.

    Args:
        layer: a decoder layer.
        args: its positional arguments.
        kwargs: its keyword arguments; the cache among them is replaced.

    Returns:
        `[B, H, S, D]` keys, rotated by the model, and `[B, H, S, Dv]` values.
    """
    cache = {_compat.cache_keyword(layer.forward): _Probe()}
    kwargs = {k: v for k, v in kwargs.items() if k not in _compat.CACHE_NAMES} | cache
    try:
        layer.forward(*args, **kwargs)
    except _Stop as stop:
        return stop.states
    raise UnsupportedModelError(f"{type(layer).__name__} never updates its cache: it has no keys and values to blend")


@dataclass
class Attachment:
    """What `attach` put on a model, and what it found out about it."""

    model: Any
    decoder: Any
    layers: list[nn.Module]
    learnt: ModelFacts | None = None
    version: tuple = ()
    handles: tuple = ()
    implementations: tuple = ()
    unwrap: Any = None

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
        if self.learnt is None:
            raise NotAttachedError("call blendkv.attach(model) first")
        version = weights_version(self.model)
        if version != self.version:
            self.version = version
            self.learnt = replace(self.learnt, fingerprint=model_fingerprint(self.model))
        return self.learnt


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT model, or the model itself.

    Raises:
        UnsupportedModelError: for PEFT methods that prepend virtual tokens to the cache.
    """
    for config in getattr(model, "peft_config", {}).values() if hasattr(model, "peft_config") else ():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"PEFT {getattr(config, 'peft_type', 'prompt learning')} puts virtual tokens into the cache, where "
                "chunks cannot be placed around them; use LoRA, or full prefill"
            )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attachment_of(model: Any) -> Attachment:
    """The attachment of a model.

    Raises:
        NotAttachedError: if there is none.
    """
    state = unwrapped(model).__dict__.get(_STATE)
    if state is None:
        raise NotAttachedError("call blendkv.attach(model) first")
    return state


def attach(model: Any) -> Any:
    """Makes a model understand `BlendedCache`; idempotent, and inert for any other cache.

    The first time a model (by fingerprint) meets this transformers version it is proven: keys re-rotate exactly on
    every layer, exact keys and values stay exact through a blend, ratio 1 equals full prefill (`blendkv.proof`).

    Args:
        model: a decoder-only transformers model, or a PEFT model around one.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: if a check fails or a layer type is known to be impossible, with the reason; the model is
            left as it was.
    """
    from blendkv import proof

    model = unwrapped(model)
    state = model.__dict__.get(_STATE)
    if state is not None:
        _switch_attention(state)
        return model
    proof.refuse_impossible(model)
    decoder, layers = find_layers(model)
    state = Attachment(model, decoder, layers)
    install(state)
    try:
        state.learnt = proof.learn(state)
        proof.require(state)
    except BaseException:
        detach(model)
        raise
    return model


def detach(model: Any) -> Any:
    """Removes every trace of `attach`; idempotent."""
    model = unwrapped(model)
    state = model.__dict__.pop(_STATE, None)
    if state is not None:
        for handle in state.handles:
            handle.remove()
        for config, name in state.implementations:
            config._attn_implementation_internal = name
        state.unwrap()
    return model


def find_layers(model: Any) -> tuple[Any, list[nn.Module]]:
    """The decoder of a model (the module whose `layers` take turns) and those layers.

    Raises:
        UnsupportedModelError: if there is no list of layers with attention in them.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    config = decoder.config
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.get_text_config().num_hidden_layers:
            parent = decoder.get_submodule(name.rpartition(".")[0])
            if all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in module):
                return parent, list(module)
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {config.get_text_config().num_hidden_layers} decoder layers with a "
        "layer_idx: blendkv works on decoder-only transformers models"
    )


def install(state: Attachment) -> None:
    """Puts hooks and wrappers on a model and switches its attention implementation."""
    model, decoder = state.model, state.decoder
    handles = [decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True)]
    if model is not decoder:
        handles.append(model.register_forward_pre_hook(_before_model, with_kwargs=True))
    for i, layer in enumerate(state.layers):
        handles.append(layer.register_forward_pre_hook(partial(_before_layer, i), with_kwargs=True))
    handles.append(decoder.register_forward_hook(_after_decoder, with_kwargs=True, always_call=True))
    state.handles = tuple(handles)
    state.unwrap = _compat.wrap_generation(model, _check_inputs, _check_generation)
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "_attn_implementation", None)}
    state.implementations = tuple((config, config._attn_implementation) for config in configs.values())
    model.__dict__[_STATE] = state
    decoder.__dict__[_STATE] = state
    _switch_attention(state)


def _switch_attention(state: Attachment) -> None:
    for config, _ in state.implementations:
        name = config._attn_implementation
        if not name.startswith(attention.PREFIX):
            config._attn_implementation_internal = attention.register(name)


# -- what `generate` is about to do -----------------------------------------------------------------------------------


def _check_inputs(input_ids: Tensor, attention_mask: Tensor | None, cache: Any) -> None:
    if isinstance(cache, BlendedCache):
        cache.check_continues(input_ids, attention_mask)


def _check_generation(config: Any, cache: Any) -> None:
    if isinstance(cache, BlendedCache) and getattr(config, "prefill_chunk_size", None) is not None:
        raise ValueError(
            "prefill_chunk_size cuts the prompt before a BlendedCache sees it, so chunks could not be found; leave it "
            "out: a blend computes few rows anyway"
        )


# -- the forward ------------------------------------------------------------------------------------------------------


def _before_model(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Notes which logits the caller wants: those rows are always computed."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache):
        return
    if kwargs.get("labels") is not None:
        raise ValueError("a BlendedCache has no logits for reused tokens, so there is no loss: leave out labels")
    keep = kwargs.get("logits_to_keep", 1)
    cache.logits_to_keep = max(1, keep) if isinstance(keep, int) else 1
    if isinstance(keep, Tensor):
        length = kwargs["input_ids"].shape[1] if kwargs.get("input_ids") is not None else args[0].shape[1]
        cache.logits_to_keep = length - int(keep.min()) if keep.numel() else 1


def _before_decoder(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Starts the blend of an empty `BlendedCache`, or records the ids that a filled one is given."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache):
        return None
    cache.check_usable()
    state: Attachment = decoder.__dict__[_STATE]
    named = _compat.bind_arguments(decoder.forward, args, kwargs)
    mask = named.get("attention_mask")
    ids = _checked_ids(decoder, cache, named.get("input_ids"), mask)
    if cache.is_filled:
        cache.record(ids)
        return None
    position_ids = named.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
    visible = None if mask is None or bool(mask.bool().all()) else mask.bool()
    cache.layers = [BlendedLayer(cache.reserve) for _ in state.layers]
    cache._failed = True  # until the forward has ended well
    blend = Blend(cache, state.facts, ids, position_ids.expand(ids.shape), visible)
    _warn_if_nothing_found(cache, ids)
    cache._blend = blend
    blend.begin()
    named["position_ids"] = position_ids
    return (), named


def _checked_ids(decoder: Any, cache: BlendedCache, ids: Tensor | None, mask: Any) -> Tensor:
    """The ids of a forward, or an error for what a blend cannot do, before anything is computed."""
    if ids is None:
        raise ValueError("a BlendedCache finds its chunks in input_ids: pass those, not inputs_embeds")
    if decoder.training:
        raise ValueError("a BlendedCache is for inference: call model.eval() first")
    if not decoder.config._attn_implementation.startswith(attention.PREFIX):
        raise NotAttachedError(
            f"the attention implementation was changed to {decoder.config._attn_implementation!r} after attach: call "
            "blendkv.attach(model) again"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError("pass attention_mask as [batch, tokens]: a ready-made 4D mask cannot be narrowed exactly")
    held = cache.get_seq_length()
    if mask is not None and mask.shape[1] != held + ids.shape[1]:
        raise ValueError(
            f"{ids.shape[1]} input_ids and {held} tokens in the cache, but an attention_mask of {mask.shape[1]}: pass "
            "the ids of the whole prompt to an empty BlendedCache, and a mask over everything"
        )
    return ids


def _warn_if_nothing_found(cache: BlendedCache, ids: Tensor) -> None:
    if any(use.found for use in cache.report.chunks):
        return
    longest_row = max((sum(map(len, row)) for row in cache.chunks), default=0)
    if longest_row > ids.shape[1]:
        raise CacheStateError(
            f"none of the chunks ({longest_row} tokens) is in the {ids.shape[1]} input_ids: a BlendedCache wants the "
            "ids of the whole prompt, chunks included, not only the new ones"
        )
    warnings.warn(
        "no chunk was found in the prompt, so everything is computed: build the prompt from the chunks' own ids "
        "(ChunkLibrary does), or compare tokenisers",
        stacklevel=2,
    )
    cache.report.notes.append("no chunk was found in the prompt: plain prefill")


def _before_layer(layer_idx: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Gives a layer the rows that are computed in it."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache) or cache._blend is None:
        return None
    blend = cache._blend
    hidden = args[0] if args else kwargs["hidden_states"]
    kwargs = dict(kwargs)
    rows = blend.rows
    narrowed = kwargs if rows is None else _narrow(kwargs, rows)
    if blend.wants_selection(layer_idx):
        with cache.report.clock.stage("select", hidden.device):
            fresh = ()
            if blend.wants_probe(layer_idx):
                given = {k: v for k, v in narrowed.items() if k not in ("hidden_states", "attention_mask")}
                fresh = stopped_pass(layer, (hidden,), given | {"attention_mask": None})
            hidden = take_rows(hidden, blend.select(layer_idx, *fresh))
        narrowed = _narrow(kwargs, blend.rows)
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, attention.LazyMask):
        raise UnsupportedModelError(
            f"layer {layer_idx} ({type(layer).__name__}) makes its own attention mask, which cannot be narrowed exactly"
        )
    narrowed["attention_mask"] = mask.dense() if blend.rows is None else blend.row_mask(mask)
    narrowed.pop("hidden_states", None)
    return (hidden, *args[1:]), narrowed


def _narrow(kwargs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Position ids and embeddings of some rows; everything else as it is."""

    def take(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim >= 2:
            return take_rows(x, rows)
        return tuple(map(take, x)) if isinstance(x, tuple | list) else x

    return {k: take(v) if k.startswith("position_") else v for k, v in kwargs.items()}


def _after_decoder(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Puts computed rows back to their places and closes the blend; runs after an error too."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache) or cache._blend is None:
        return None
    blend, cache._blend = cache._blend, None
    blend.end()
    if output is None or len(blend.rows_by_layer) != len(cache.layers):
        return None
    last = blend.rows_by_layer[-1]
    blend.finish()
    cache._failed = False
    cache.record(blend.ids)
    if isinstance(output, tuple):
        return (blend.expand(output[0], last), *output[1:])
    output.last_hidden_state = blend.expand(output.last_hidden_state, last)
    if getattr(output, "hidden_states", None) is not None:
        rows = [blend.rows_by_layer[0], *blend.rows_by_layer]
        output.hidden_states = tuple(blend.expand(h, r) for h, r in zip(output.hidden_states, rows, strict=False))
    if getattr(output, "attentions", None) is not None:
        output.attentions = tuple(
            a if a is None else blend.expand(a.transpose(1, 2), r).transpose(1, 2)
            for a, r in zip(output.attentions, blend.rows_by_layer, strict=False)
        )
    return output
