"""Attach a model, so that it understands `BlendedCache`, and detach it again."""

from __future__ import annotations

import threading
from typing import Any

from blendkv import learning, proof
from blendkv.attachment import Attachment
from blendkv.errors import NotAttachedError, UnsupportedModelError
from blendkv.hooks import STATE, find_layers, install, require_eval, switch_attention, uninstall

_LOCK = threading.RLock()


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
    state = unwrapped(model).__dict__.get(STATE)
    if state is None:
        raise NotAttachedError("call blendkv.attach(model) first")
    return state


def attach(model: Any, refresh: bool = False) -> Any:
    """Makes a model understand `BlendedCache`; idempotent, and inert for any other cache.

    The first time a model (by fingerprint) meets this transformers version it is proven: keys re-rotate exactly on
    every layer, exact keys and values stay exact through a blend, ratio 1 equals full prefill (`blendkv.proof`).

    Hooks of others on the layers see the rows that are computed, `[B, S, D]`; one that changes hidden states is not
    part of the fingerprint.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one.
        refresh: read the weights again, for writes that torch does not count (through `tensor.data`).

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: if a check fails or a layer type is known to be impossible, with the reason; the model is
            left as it was.
        ValueError: if the model is in training mode.
    """
    inner = unwrapped(model)
    with _LOCK:  # a thread that finds a model attached finds it proven
        state = inner.__dict__.get(STATE)
        if state is not None and state.dtype == next(inner.parameters()).dtype:
            switch_attention(state)
            if refresh:
                state.fingerprints.forget()
            return model
        if state is not None:
            detach(inner)
        learning.refuse_impossible(inner)
        require_eval(inner)
        decoder, layers = find_layers(inner)
        if STATE in decoder.__dict__:  # the decoder was attached alone before
            detach(decoder)
        state = Attachment(inner, decoder, layers)
        install(state)
        try:
            proof.require(state)
            state.proven = True
        except BaseException:
            uninstall(state)
            raise
    return model


def detach(model: Any) -> Any:
    """Removes every trace of `attach`; idempotent."""
    state = unwrapped(model).__dict__.get(STATE)
    if state is not None:
        uninstall(state)
    return model
