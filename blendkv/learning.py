"""What must be known of a model before it can be blended: refused by its config, or learnt by running its layers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from blendkv import _compat, flops
from blendkv.attachment import Attachment
from blendkv.errors import UnsupportedModelError
from blendkv.facts import ModelFacts
from blendkv.rope import Rotation, candidates, find_rotary, on_device, refuse_length_dependent
from blendkv.stopping import stopped_pass

ROTATION_BOUND = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""RMS error of re-rotated keys / RMS of the model's own, by dtype."""
States = tuple[Tensor, Tensor]
KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


def rms_ratio(value: Tensor, reference: Tensor) -> float:
    """RMS of the difference / RMS of the reference, in fp64."""
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp_min(1e-30))


# -- known to be impossible, before any forward -----------------------------------------------------------------------


def refuse_impossible(model: nn.Module) -> None:
    """Refuses, without running the model, what cannot be blended.

    Raises:
        UnsupportedModelError: naming the layer type, config field or model kind.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model: blendkv needs its config")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder: only decoder-only models are blended"
        )
    text = config.get_text_config()
    for name in ("layer_types", "layers_block_type", "block_types"):
        strange = sorted({str(t) for t in getattr(text, name, None) or ()} - set(KNOWN_LAYER_TYPES))
        if strange:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {', '.join(strange)}: only layers that keep keys and "
                "values of single tokens can be put together from chunks; use full prefill for this model"
            )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is stateful (recurrent): its state is a fold over all tokens, which cannot be put "
            "together from chunks; use full prefill for this model"
        )
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap and str(getattr(text, "_attn_implementation", "")).endswith("sdpa"):
        raise UnsupportedModelError(
            f"{type(model).__name__}: attn_logit_softcapping={cap:g} is silently left out by "
            "attn_implementation='sdpa'; load the model with attn_implementation='eager'"
        )
    if getattr(text, "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"{type(model).__name__}: cross_attention_layers={text.cross_attention_layers}: layers that attend to "
            "images do not take part in every forward; use full prefill for this model"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{type(model).__name__}: num_kv_shared_layers={text.num_kv_shared_layers}: layers that read the keys of "
            "another layer are not supported; use full prefill for this model"
        )
    for layer in _default_layers(text):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{type(model).__name__} caches in {type(layer).__name__}, which is not plain keys and values of "
                "single tokens; use full prefill for this model"
            )
    refuse_length_dependent(text)


def _default_layers(config: Any) -> list:
    try:
        return list(DynamicCache(config=config).layers)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise UnsupportedModelError(f"transformers cannot make a cache for this config: {error!r}") from error


# -- found out by running layers --------------------------------------------------------------------------------------


def learn(state: Attachment) -> ModelFacts:
    """Finds out what a blend must know of a model.

    Raises:
        UnsupportedModelError: if something cannot be found out, as a rotation that explains how a layer's keys move.
    """
    if "input_ids" not in inspect.signature(state.decoder.forward).parameters:
        raise UnsupportedModelError(
            f"{type(state.model).__name__} keeps its layers in a {type(state.decoder).__name__}, which is not given "
            "input_ids, so no chunk can be found there (an encoder with a causal head); use full prefill for this model"
        )
    try:
        shape = flops.model_shape(state.model)
    except ValueError:
        shape = None
    rotary = find_rotary(state.decoder)
    return ModelFacts("", find_rotations(state, rotary), rotary, *_sizes(state), shape)


@torch.no_grad()
def refuse_unmovable(state: Attachment) -> None:
    """Refuses what shows in an ordinary forward: embeddings that depend on the place, arguments that stay full length.

    Raises:
        UnsupportedModelError: naming the reason.
    """
    name, tokens, front = type(state.model).__name__, 13, 6
    ids = probe_ids(state, tokens, seed=2)
    if not _decoder_is_given_ids(state, ids):
        raise UnsupportedModelError(
            f"{name} gives its {type(state.decoder).__name__} embeddings of text and images instead of input_ids, so "
            "chunks cannot be found in them; load the text model alone, or use full prefill for this model"
        )
    behind = _layer_arguments(state, ids, torch.arange(tokens, device=ids.device)[None])
    first = _layer_arguments(state, ids[:, front:], torch.arange(tokens - front, device=ids.device)[None])
    error = rms_ratio(first[0][0][:, -1], behind[0][0][:, -1])
    if not error <= bound_of(ROTATION_BOUND, first[0][0].dtype):
        raise UnsupportedModelError(
            f"{name} adds a token's position to its embedding (learned or sinusoidal; error {error:.2g}), so the keys "
            "and values of a chunk fit one place only; use full prefill for this model"
        )
    for i, (_, named) in enumerate(behind):
        for argument, value in named.items():
            narrowed = _compat.has_rows(argument) or argument == "attention_mask"
            if not narrowed and isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == tokens:
                raise UnsupportedModelError(
                    f"{name}: layer {i} is given {argument!r} for every token, which is not narrowed to the rows that "
                    "are computed; use full prefill for this model"
                )


def _decoder_is_given_ids(state: Attachment, ids: Tensor) -> bool:
    """Whether the decoder inside a model finds ids among its arguments."""
    given: list[bool] = []

    def note(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given.append(_compat.bind_arguments(decoder.forward, args, kwargs).get("input_ids") is not None)

    handle = state.decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        state.model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return all(given)


@torch.no_grad()
def _sizes(state: Attachment) -> tuple[torch.dtype, tuple[tuple[int, int, int], ...]]:
    """The dtype of keys, and of each layer (KV heads, key dim, value dim)."""
    ids = probe_ids(state, 2)
    arguments = _layer_arguments(state, ids, torch.arange(2, device=ids.device)[None])
    states = [stopped_pass(layer, *given) for layer, given in zip(state.layers, arguments, strict=True)]
    return states[0][0].dtype, tuple((k.shape[1], k.shape[3], v.shape[3]) for k, v in states)


@torch.no_grad()
def find_rotations(state: Attachment, rotary: nn.Module | None) -> tuple[Rotation, ...]:
    """For every layer the rotation that maps its own keys at one position onto its own keys at another."""
    ids = probe_ids(state, 12)
    here, there = (torch.arange(12, device=ids.device)[None] + offset for offset in (3, 3 + 17))
    rotations = []
    for i, (own_here, own_there) in enumerate(own_states(state, ids, here, there)):
        (keys_here, values_here), (keys_there, values_there) = own_here, own_there
        if not rms_ratio(values_here, values_there) <= bound_of(ROTATION_BOUND, values_here.dtype):
            raise UnsupportedModelError(
                f"layer {i} ({type(state.layers[i]).__name__}): what it caches as values moves with position (a cache "
                "of latents and rotary parts, as in DeepSeek's MLA); use full prefill for this model"
            )
        errors = {
            rotation: moved_error(rotation, rotary, keys_here, here, keys_there, there)
            for rotation in candidates(rotary, state.config, i, keys_here.shape[-1])
        }
        best = min(errors, key=errors.__getitem__)
        if not errors[best] <= bound_of(ROTATION_BOUND, keys_here.dtype):
            raise UnsupportedModelError(
                f"layer {i}: no known rotation explains how its keys move with position (best: {best.pairing} pairs, "
                f"error {errors[best]:.2g}); use full prefill for this model"
            )
        rotations.append(best)
    return tuple(rotations)


def moved_error(
    rotation: Rotation, rotary: nn.Module | None, keys_here: Tensor, here: Tensor, keys_there: Tensor, there: Tensor
) -> float:
    """How far keys `[1, H, T, D]` moved from `here` to `there` `[1, T]` are from the model's own keys there."""
    from_, to = (on_device(rotation.angles(rotary, p), keys_here.device) for p in (here, there))
    return rms_ratio(rotation.rotate(rotation.unrotate(keys_here, from_), to), keys_there)


def own_states(state: Attachment, ids: Tensor, here: Tensor, there: Tensor) -> Iterator[tuple[States, States]]:
    """Each layer's own keys and values of the same hidden states at two sets of positions, `[1, H, T, D]` each."""
    runs = [_layer_arguments(state, ids, positions) for positions in (here, there)]
    for layer, (hidden, at_here), (_, at_there) in zip(state.layers, *runs, strict=True):
        yield stopped_pass(layer, hidden, at_here), stopped_pass(layer, hidden, at_there)


def _layer_arguments(state: Attachment, ids: Tensor, positions: Tensor) -> list[tuple[Tensor, dict[str, Any]]]:
    """What each layer is given in an ordinary forward: hidden states and keyword arguments."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    me = threading.get_ident()

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != me:  # somebody else's forward
            return
        named = _compat.bind_arguments(layer.forward, args, kwargs)
        if "hidden_states" not in named:
            raise UnsupportedModelError(
                f"{type(layer).__name__} has no argument hidden_states to narrow; use full prefill for this model"
            )
        seen.append((named.pop("hidden_states"), named))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in state.layers]
    try:
        state.decoder(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def probe_ids(state: Attachment, tokens: int, seed: int = 0) -> Tensor:
    """`[1, tokens]` random ids on the model's first device."""
    ids = torch.randint(0, state.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return ids.to(next(state.model.parameters()).device)


def bound_of(bounds: dict[torch.dtype, float], dtype: torch.dtype) -> float:
    """The bound of a dtype.

    Raises:
        UnsupportedModelError: for a dtype nobody has set a bound for.
    """
    if dtype not in bounds:
        raise UnsupportedModelError(f"keys of dtype {dtype}: supported are {', '.join(map(str, bounds))}")
    return bounds[dtype]
