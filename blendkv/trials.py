"""What a lossy codec costs: the continuation of a text whose context went through it, beside one whose did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from blendkv import _compat
from blendkv.attaching import attach, attachment_of
from blendkv.chunk import ChunkCache
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile
from blendkv.prefilling import prefill
from blendkv.rope import on_device


class Likeness(NamedTuple):
    """How near a continuation is to the one after the exact context.

    Attributes:
        kl: mean KL divergence of its next tokens, in nats a token.
        top1: share of its tokens whose likeliest successor is the same.
    """

    kl: float
    top1: float


@dataclass(frozen=True, eq=False)
class Trial:
    """A context as a chunk, its continuation, and what the model makes of it.

    Attributes:
        model: attached.
        chunk: the context, in the model's dtype.
        ids: `[n]` token ids of the continuation.
        likely: `[n, V]` fp32 log-probabilities of next tokens, with the context's keys and values in 16 bits.
    """

    model: nn.Module
    chunk: ChunkCache
    ids: Tensor
    likely: Tensor

    @classmethod
    def of(cls, model: nn.Module, ids: Tensor, context: int) -> Trial:
        """Runs a model over a text of which the first `context` tokens are the context."""
        (chunk,) = prefill(attach(model), [ids[:context]], progress=False)
        half = torch.float16 if chunk.dtype == torch.float32 else chunk.dtype
        rounded = [(k.to(half), v.to(half)) for k, v in zip(chunk.keys, chunk.values, strict=True)]
        return cls(model, chunk, ids[context:], log_likelihood(model, ids[context:], rounded))

    def through(self, codec: Codec) -> ChunkCache:
        """The context, coded and decoded."""
        profile = getattr(codec, "profile", None)
        profiles = {profile.hash: profile} if isinstance(profile, Profile) else None
        return decode_chunk(encode_chunk(self.chunk, codec), profiles=profiles)

    def compare(self, chunk: ChunkCache) -> Likeness:
        """The continuation's next tokens after a coded context beside those after the exact one."""
        likely = log_likelihood(self.model, self.ids, list(zip(chunk.keys, chunk.values, strict=True)))
        divergence = (self.likely.exp() * (self.likely - likely)).sum(-1).mean()
        same = self.likely.argmax(-1) == likely.argmax(-1)
        return Likeness(float(divergence), float(same.float().mean()))

    def divergence(self, chunk: ChunkCache) -> float:
        """The KL divergence of `compare`."""
        return self.compare(chunk).kl


@torch.no_grad()
def log_likelihood(model: nn.Module, ids: Tensor, states: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities of the tokens after each of a text's, `[n, V]` fp32.

    Args:
        model: attached.
        ids: `[n]` token ids that follow the context.
        states: for each layer of the context keys `[H, T, D]`, un-rotated, and values, of any float dtype.
    """
    state = attachment_of(model)
    facts, device = state.facts, next(model.parameters()).device
    length = states[0][0].shape[1]
    before = torch.arange(length, device=device)[None]
    cache = DynamicCache()
    for layer, (rotation, (keys, values)) in enumerate(zip(facts.rotations, states, strict=True)):
        keys, values = keys[None].to(device, facts.dtype), values[None].to(device, facts.dtype)
        cache.update(rotation.rotate(keys, on_device(rotation.angles(facts.rotary, before), device)), values, layer)
    positions = torch.arange(length, length + len(ids), device=device)[None]
    keyword = {_compat.cache_keyword(state.model.forward): cache}
    logits = model(input_ids=ids[None].to(device), position_ids=positions, use_cache=True, **keyword).logits
    return logits[0].float().log_softmax(-1)
