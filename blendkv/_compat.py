"""The only file that knows which transformers version is installed.

What moved between 5.4 and 5.24: the cache's keyword (`past_key_values` became `cache`) and the meaning of
`Cache.crop` (a target length became a number of tokens to remove).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

TRANSFORMERS_VERSION = transformers.__version__
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")

CACHE_ARG = "cache" if Version(TRANSFORMERS_VERSION) >= Version("5.24") else "past_key_values"
"""The keyword under which the installed transformers wants the cache in `generate` and `forward`."""

_CROP_REMOVES = next(iter(list(inspect.signature(DynamicLayer.crop).parameters)[1:])) == "tokens_to_remove"


_AND, _WINDOW = (
    getattr(function, "__code__", None) for function in (and_masks(causal_mask_function), sliding_window_overlay(1))
)


def causal_window(mask_function: Any) -> tuple[int | None] | None:
    """Of a mask function that is exactly causal, or causal within a window, `(None,)` or `(window,)`; None of others.

    Told by the functions that transformers put it together from: asking it about some keys can be misled.
    """
    if mask_function is causal_mask_function:
        return (None,)
    if _AND is None or getattr(mask_function, "__code__", None) is not _AND:
        return None
    parts = mask_function.__closure__[0].cell_contents
    windows = [part for part in parts if part is not causal_mask_function]
    if len(parts) != 2 or len(windows) != 1 or getattr(windows[0], "__code__", None) is not _WINDOW:
        return None
    return (windows[0].__closure__[0].cell_contents,)


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the cache among a forward's arguments, or None."""
    for name in CACHE_NAMES:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return next((a for a in args if isinstance(a, Cache)), None)


def cache_keyword(forward: Callable) -> str:
    """The name under which `forward` takes its cache."""
    names = parameter_names(forward)
    return next((name for name in CACHE_NAMES if name in names), CACHE_ARG)


def has_rows(argument: str) -> bool:
    """Whether what a decoder layer is given under this name has one row a token, as its hidden states have."""
    return argument.startswith(("position_ids", "position_embeddings", "per_layer_input"))


def parameter_names(forward: Callable) -> tuple[str, ...]:
    """Names of what `forward` takes, without `self`; looked up once for each method's function."""
    if not isinstance(forward, types.MethodType):
        return tuple(inspect.signature(forward).parameters)
    return _names_of(forward.__func__)[1:]


@cache
def _names_of(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def is_idle_hook(hook: Callable) -> bool:
    """Whether a forward hook is one of those that transformers leaves behind after outputs were once collected."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def bind_arguments(forward: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments of a call, all by name (`**kwargs` of the signature flattened)."""
    if not args:
        return dict(kwargs)
    return dict(zip(parameter_names(forward), args, strict=False)) | kwargs


def cached_states(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[B, H, T, D]` of every layer of a cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def crop_length(argument: int, length: int) -> int:
    """The length that `Cache.crop(argument)` leaves of `length` tokens, on the installed transformers.

    Raises:
        ValueError: for a positive number of tokens to remove, which transformers >= 5.20 refuses too.
    """
    if not _CROP_REMOVES:
        return max(0, length + argument) if argument < 0 else min(argument, length)
    if argument > 0:
        raise ValueError(f"crop({argument}): pass a negative number, the tokens to remove from the end of the cache.")
    return max(0, length + argument)


def crop_argument(length: int, target: int) -> int:
    """What to pass to `Cache.crop` so that `target` of `length` tokens stay."""
    return target - length if _CROP_REMOVES else target


def register_attention(name: str, attention: Callable, mask: Callable) -> None:
    """Registers one attention implementation in both registries.

    A name that is missing from the second silently gets no mask (research: padded rows off by 5.8 logits).
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention_functions(name: str) -> tuple[Callable | None, Callable]:
    """The (attention, mask) functions registered under `name`; eager attention lives in each modeling file (None)."""
    return AttentionInterface().get(name), AttentionMaskInterface()[name]


def eager_attention(module: nn.Module) -> Callable:
    """The `eager_attention_forward` of the file that defines an attention module."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise AttributeError(f"{type(module).__module__} has no eager_attention_forward")
    return function


def wrap_generation(model: PreTrainedModel, on_inputs: Callable, on_config: Callable) -> tuple[str, ...]:
    """Wraps two methods of one model instance; returns their names: `del model.name` unwraps them.

    Args:
        model: the instance whose `generate` will call the wrapped methods.
        on_inputs: called as `on_inputs(input_ids, attention_mask, cache)` before `prepare_inputs_for_generation`,
            the one place that sees the full ids.
        on_config: called as `on_config(generation_config, cache, mask_length)` before
            `_prepare_cache_for_generation`, where transformers itself looks for options that contradict a user's
            cache. From 5.24 on a mask of ones is dropped before `on_inputs` could see it: this is its length (None in
            assisted generation, where candidates make the first ids longer than the mask).
    """

    def prepare_inputs_for_generation(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        on_inputs(input_ids, kwargs.get("attention_mask"), cache_in(args, kwargs))
        return originals["prepare_inputs_for_generation"](self, input_ids, *args, **kwargs)

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: Any, *a: Any, **k: Any) -> Any:
        mask = model_kwargs.get("attention_mask")
        length = mask.shape[-1] if mask is not None else getattr(generation_config, "_mask_length", None)
        if any(getattr(mode, "value", None) == "assisted_generation" for mode in (*a, *k.values())):
            length = None
        on_config(generation_config, cache_in((), model_kwargs), length)
        return originals["_prepare_cache_for_generation"](self, generation_config, model_kwargs, *a, **k)

    wrappers = {f.__name__: f for f in (prepare_inputs_for_generation, _prepare_cache_for_generation)}
    originals = {name: getattr(type(model), name) for name in wrappers if hasattr(type(model), name)}
    for name in originals:
        # A bound method, so that a deep copy of the model calls the copy.
        setattr(model, name, types.MethodType(wrappers[name], model))
    return tuple(originals)
