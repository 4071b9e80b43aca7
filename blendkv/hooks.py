"""Attach a model: hooks that turn a forward with an empty `BlendedCache` into a blend, and nothing else.

The decoder's pre-hook starts a `Blend`, a pre-hook on every layer narrows what the layer is given to the rows that are
computed, and a hook after the decoder puts the outputs back where they belong. Another cache passes through untouched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blendkv import _compat, attention, kernels
from blendkv.accounting import write_report
from blendkv.attachment import Attachment, LayerForward
from blendkv.blend import Blend
from blendkv.cache import BlendedCache, BlendedLayer
from blendkv.catching import CaughtUp, catch_up, gives_up
from blendkv.compiling import refuse_compiled
from blendkv.decoding import Step, fits
from blendkv.errors import NotAttachedError, UnsupportedModelError
from blendkv.graphs import devices_of
from blendkv.norms import fuse, restore_forward, unfuse
from blendkv.rows import put_back, take_rows
from blendkv.stopping import stopped_pass

STATE = "_blendkv_attachment"
_OUTPUTS = ("hidden_states", "attentions")


class _Anew(Exception):
    """Ends a question pass in which a chunk turned out not to come."""


def require_eval(model: Any) -> None:
    """Refuses a model in training mode: dropout would make stored and fresh states differ.

    Raises:
        ValueError: with what to do.
    """
    if model.training:
        raise ValueError("blendkv is for inference: call model.eval() first")


def find_layers(model: Any) -> tuple[Any, list[nn.Module]]:
    """The decoder of a model (the module whose `layers` take turns) and those layers.

    Raises:
        UnsupportedModelError: if there is no list of layers with attention in them.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not hasattr(decoder, "config"):  # ModernBERT-decoder calls its head the decoder
        decoder = model.base_model
    config = decoder.config
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.get_text_config().num_hidden_layers:
            parent = decoder.get_submodule(name.rpartition(".")[0])
            if all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in module):
                return parent, list(module)
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {config.get_text_config().num_hidden_layers} decoder layers with a "
        "layer_idx: blendkv works on decoder-only transformers models; use full prefill for this model"
    )


def install(state: Attachment) -> None:
    """Puts hooks and wrappers on a model and switches its attention implementation."""
    model, decoder = state.model, state.decoder
    handles = [decoder.register_forward_pre_hook(partial(_before_decoder, state), with_kwargs=True)]
    if model is not decoder:
        handles.append(model.register_forward_pre_hook(_before_model, with_kwargs=True))
    for i, layer in enumerate(state.layers):
        handles.append(layer.register_forward_pre_hook(partial(_before_layer, i), with_kwargs=True))
        if any(kernels.is_cuda(p.device) for p in layer.parameters()):
            layer.forward = LayerForward(i, layer.forward)
    fuse(state.layers)
    handles.append(decoder.register_forward_hook(_after_decoder, with_kwargs=True, always_call=True))
    state.handles = tuple(handles)
    state.wrapped = _compat.wrap_generation(model, _check_inputs, _check_generation)
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    state.configs = tuple({id(c): c for c in found if getattr(c, "_attn_implementation", None)}.values())
    model.__dict__[STATE] = state
    decoder.__dict__[STATE] = state
    switch_attention(state)


def uninstall(state: Attachment) -> None:
    """Removes every trace of `install`."""
    for handle in state.handles:
        handle.remove()
    unswitch_attention(state)
    for owner in (state.model, state.decoder):
        owner.__dict__.pop(STATE, None)
    unfuse(state.layers)
    for layer in state.layers:
        if isinstance(forward := layer.__dict__.get("forward"), LayerForward):
            restore_forward(layer, forward.own)
    for name in state.wrapped:
        state.model.__dict__.pop(name, None)


def switch_attention(state: Attachment) -> None:
    """Sends attention through `blendkv_<base>`, wherever the user has set a base."""
    for config in state.configs:
        name = config._attn_implementation
        if not name.startswith(attention.PREFIX):
            config._attn_implementation_internal = attention.register(name)


def unswitch_attention(state: Attachment) -> None:
    """Sends attention where the user has set it."""
    for config in state.configs:
        config._attn_implementation_internal = config._attn_implementation.removeprefix(attention.PREFIX)


# -- what `generate` is about to do -----------------------------------------------------------------------------------


def _check_inputs(input_ids: Tensor, attention_mask: Tensor | None, cache: Any) -> None:
    if isinstance(cache, BlendedCache):
        cache.check_continues(input_ids, attention_mask)


def _check_generation(config: Any, cache: Any, mask_length: int | None) -> None:
    if not isinstance(cache, BlendedCache):
        return
    cache.mask_length = mask_length
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise ValueError(
            "prefill_chunk_size cuts the prompt before a BlendedCache sees it, so chunks could not be found; leave it "
            "out: a blend computes few rows anyway"
        )


# -- the forward ------------------------------------------------------------------------------------------------------


def _before_model(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Notes how many last logits the caller wants (None: nothing is known): those rows are always computed."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache):
        return
    refuse_compiled()
    if kwargs.get("output_router_logits"):
        raise ValueError("a BlendedCache has no router logits for reused tokens: leave out output_router_logits")
    if kwargs.get("labels") is not None:
        raise ValueError("a BlendedCache has no logits for reused tokens, so there is no loss: leave out labels")
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        ids = _compat.bind_arguments(model.forward, args, kwargs).get("input_ids")
        length = ids.shape[1] if ids is not None else 0
        keep = length - int((keep % length).min()) if length and keep.numel() else 0
    cache.logits_to_keep = keep or None


def _before_decoder(state: Attachment, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Starts the blend of an empty `BlendedCache`, or records the ids that a filled one is given."""
    if attention.blending.get():  # a forward before this one was interrupted where no hook could clean up
        attention.blending.set(None)
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache):
        return None
    refuse_compiled()
    if cache.work is not None:  # likewise
        cache.work.end()
        cache.work = None
    cache.check_usable()
    named = _compat.bind_arguments(decoder.forward, args, kwargs)
    mask, position_ids = named.get("attention_mask"), named.get("position_ids")
    ids = _checked_ids(state, cache, named.get("input_ids"), mask)
    if cache.is_filled:
        new = cache.new_ids(ids)
        cache.record(new)
        if new is ids:
            _begin_step(state, cache, ids, mask, _collects(state, named))
            return None
        if position_ids is not None:
            named["position_ids"] = position_ids[..., -new.shape[1] :]
        return (), named | {"input_ids": new}
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
    if position_ids.shape[-1] != ids.shape[1]:
        raise ValueError(f"{ids.shape[1]} input_ids, but position_ids for {position_ids.shape[-1]}: pass one for each")
    visible = None if mask is None or bool(mask.bool().all()) else mask.bool()
    blend = Blend(cache, state.facts, ids, position_ids.expand(ids.shape), visible)
    blend.masks = state.masks
    blend.collects = _collects(state, named)
    blend.reads_all = cache.logits_to_keep is None or blend.collects
    cache.layers = [BlendedLayer(cache.reserve) for _ in state.layers]
    if visible is None and not blend.collects and cache.corrector is None:
        blend.graphs = state.open_graphs()
    cache.work, cache._failed = blend, True  # until the forward has ended well
    blend.begin(state.devices or devices_of(state.layers))
    named["position_ids"] = position_ids
    quiet = {f"output_{what}": False for what in _OUTPUTS} if blend.collects else {}
    blend.again = partial(decoder.forward, **named | quiet)
    while blend.wants_question and not _asked(state, blend):
        pass
    return (), named


def _asked(state: Attachment, blend: Blend) -> bool:
    """Runs the question pass: a forward of the decoder inside the one that is about to begin.

    It calls `decoder.forward`, so that hooks of others on the decoder do not run twice; those on layers do, because
    what they do to hidden states belongs to what the model computes.

    Returns:
        Whether it came to its end: False if a chunk did not come, so that it has to be asked again without it.
    """
    if blend.masks != "lazy":
        raise UnsupportedModelError(
            f"selector {blend.cache.selector.name!r} needs to know what the question attends to, but "
            f"{type(state.model).__name__} has attention code of its own that does not say it: choose a selector "
            "without attention, such as 'hkvd'"
        )
    try:
        with blend.ask(), torch.no_grad():
            blend.again()
    except _Anew:
        return False
    return True


def _collects(state: Attachment, named: dict[str, Any]) -> bool:
    """Whether hidden states or attentions of all layers are asked for."""
    return any(named.get(f"output_{what}", getattr(state.config, f"output_{what}", False)) for what in _OUTPUTS)


def _begin_step(state: Attachment, cache: BlendedCache, ids: Tensor, mask: Tensor | None, collects: bool) -> None:
    """Has one more token computed by CUDA graphs, if they can."""
    one = kernels.is_cuda(ids.device) and ids.shape == (len(cache.blended[0].keys), 1)
    if collects or not one or (mask is not None and not bool(mask.all())):
        return
    ready = state.learnt is not None and fits(cache, state.learnt, state.devices) and state.fingerprints.unchanged()
    graphs = state.open_graphs() if ready else None
    if graphs is not None:
        cache.work = Step(cache, graphs, len(ids))
        cache.work.begin()


def _checked_ids(state: Attachment, cache: BlendedCache, ids: Tensor | None, mask: Any) -> Tensor:
    """The ids of a forward, or an error for what a blend cannot do, before anything is computed."""
    if ids is None:
        raise ValueError("a BlendedCache finds its chunks in input_ids: pass those, not inputs_embeds")
    require_eval(state.decoder)
    implementation = state.decoder.config._attn_implementation
    if not implementation.startswith(attention.PREFIX):
        raise NotAttachedError(
            f"the attention implementation was changed to {implementation!r} after attach: call "
            "blendkv.attach(model) again"
        )
    beyond = [layer for layer in cache.schedule if layer >= len(state.layers)]
    if beyond:
        raise ValueError(f"check_layers names layer {beyond[0]}, but the model's last is {len(state.layers) - 1}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError("pass attention_mask as [batch, tokens]: a ready-made 4D mask cannot be narrowed exactly")
    if getattr(state.config, "output_router_logits", False):
        raise ValueError("a BlendedCache has no router logits for reused tokens: set config.output_router_logits=False")
    held = cache.get_seq_length()
    if mask is not None and mask.shape[1] != held + cache.new_ids(ids).shape[1]:
        raise ValueError(
            f"{ids.shape[1]} input_ids and {held} tokens in the cache, but an attention_mask of {mask.shape[1]}: pass "
            "the ids of the whole prompt to an empty BlendedCache, and a mask over everything"
        )
    return ids


def _before_layer(layer_idx: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Gives a layer the rows that are computed in it."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache) or cache.work is None:
        return None
    refuse_compiled()
    blend = cache.work
    kwargs = dict(kwargs) if len(args) == 1 else _compat.bind_arguments(layer.forward, args, kwargs)
    hidden, mask = args[0] if len(args) == 1 else kwargs.pop("hidden_states"), kwargs.get("attention_mask")
    if isinstance(blend, Step):
        if isinstance(mask, attention.LazyMask):
            kwargs["attention_mask"] = blend.row_mask(mask, layer_idx) or mask.dense()
        return (hidden,), kwargs
    if layer_idx == blend.first_narrowed:
        blend.prepare()
    if (blend.asking or blend.until is not None) and layer_idx == 0:
        hidden = take_rows(hidden, blend.rows)
    if blend.until == layer_idx:
        raise CaughtUp(hidden)
    if gives_up(blend, layer_idx):
        if blend.asking:
            raise _Anew
        if blend.rows is not None:
            hidden = catch_up(blend, layer_idx, hidden)
    narrowed = _narrow(blend, kwargs)
    if blend.wants_selection(layer_idx):
        with cache.report.clock.stage("select", hidden.device):
            fresh = ()
            if blend.wants_probe(layer_idx):
                fresh = stopped_pass(layer, hidden, narrowed | {"attention_mask": None})
            hidden = take_rows(hidden, blend.select(layer_idx, *fresh))
        narrowed = _narrow(blend, kwargs)
    if blend.wants_last_only(layer_idx):
        blend.fill(layer_idx, *stopped_pass(layer, hidden, narrowed | {"attention_mask": None}))
        hidden = take_rows(hidden, blend.select_last())
        narrowed = _narrow(blend, kwargs)
    if isinstance(mask, attention.LazyMask):
        narrowed["attention_mask"] = mask.dense() if blend.rows is None else blend.row_mask(mask, layer_idx)
    elif blend.masks == "dense" and isinstance(mask, Tensor) and mask.shape[2:3] == (blend.length,):
        narrowed["attention_mask"] = blend.taken.of_mask(mask)
    else:
        raise UnsupportedModelError(
            f"layer {layer_idx} ({type(layer).__name__}) makes its own attention mask, which cannot be narrowed exactly"
        )
    return (hidden,), narrowed


def _narrow(blend: Blend, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What has a row for each token, for the rows computed; everything else as it is."""
    return {k: blend.taken.of(v) if _compat.has_rows(k) else v for k, v in kwargs.items()}


def _after_decoder(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Puts computed rows back to their places and closes the blend; runs after an error too."""
    cache = _compat.cache_in(args, kwargs)
    if not isinstance(cache, BlendedCache) or cache.work is None:
        return None
    blend, cache.work = cache.work, None
    blend.end()
    if isinstance(blend, Step):
        return None
    if output is None:  # an error is on its way
        return None
    if len(blend.filled) != len(cache.layers):
        raise UnsupportedModelError(
            f"only {len(blend.filled)} of {len(cache.layers)} layers ran in the first forward: a blend needs "
            "all of them (no early exit, no layer skipping)"
        )
    last = blend.rows
    write_report(blend)
    cache._failed = False
    cache.record(blend.ids)
    blend.report.listeners.tell(blend.report)
    if isinstance(output, tuple):
        return (put_back(output[0], last, blend.length), *output[1:])
    output.last_hidden_state = put_back(output.last_hidden_state, last, blend.length)
    if getattr(output, "hidden_states", None) is not None:
        rows = [rows for rows, _ in blend.filled]
        if len(output.hidden_states) > len(rows):  # embeddings first, but not for a list of layers on transformers 5.17
            rows.insert(0, rows[0])
        output.hidden_states = tuple(
            h if h is None else put_back(h, r, blend.length) for h, r in zip(output.hidden_states, rows, strict=True)
        )
    if getattr(output, "attentions", None):  # without eager attention transformers gives none of them
        output.attentions = tuple(
            a if a is None else put_back(a.transpose(1, 2), r, blend.length).transpose(1, 2)
            for a, (r, _) in zip(output.attentions, blend.filled, strict=True)
        )
    return output
