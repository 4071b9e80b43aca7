"""What must be known of a model before it can be blended: refused by its config, or learnt by running its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from blendkv import _compat, flops
from blendkv.blend import ModelFacts
from blendkv.errors import UnsupportedModelError
from blendkv.hooks import Attachment, stopped_pass
from blendkv.rope import Rotation, candidates, find_rotary, on_device, refuse_length_dependent

ROTATION_BOUND = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""RMS error of re-rotated keys / RMS of the model's own, by dtype."""
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
        UnsupportedModelError: if no rotation explains how a layer's keys move with position.
    """
    try:
        shape = flops.model_shape(state.model)
    except ValueError:
        shape = None
    rotary = find_rotary(state.decoder)
    return ModelFacts("", find_rotations(state, rotary), rotary, *_sizes(state), shape)


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
    for i, (keys_here, keys_there) in enumerate(own_keys(state, ids, here, there)):
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


def own_keys(state: Attachment, ids: Tensor, here: Tensor, there: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each layer's own keys of the same hidden states at two sets of positions: `[1, H, T, D]` twice."""
    runs = [_layer_arguments(state, ids, positions) for positions in (here, there)]
    for layer, (hidden, at_here), (_, at_there) in zip(state.layers, *runs, strict=True):
        yield stopped_pass(layer, hidden, at_here)[0], stopped_pass(layer, hidden, at_there)[0]


def _layer_arguments(state: Attachment, ids: Tensor, positions: Tensor) -> list[tuple[Tensor, dict[str, Any]]]:
    """What each layer is given in an ordinary forward: hidden states and keyword arguments."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    me = threading.get_ident()

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != me:  # somebody else's forward
            return
        named = _compat.bind_arguments(layer.forward, args, kwargs)
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
