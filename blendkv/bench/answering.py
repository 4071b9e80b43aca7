"""Greedy answers: where they end, what of them counts, and how they go on after forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from blendkv.bench.methods import forward
from blendkv.bench.scores import first_line


@dataclass(frozen=True)
class Stops:
    """Where an answer ends: at an end of text, or at the end of its first line that is not blank.

    Attributes:
        tokenizer: decodes.
        end: ids that finish an answer.
    """

    tokenizer: Any
    end: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any) -> Stops:
        """Of a model's generation settings."""
        return cls(tokenizer, ends(model, tokenizer))

    def finished(self, tokens: Sequence[int]) -> bool:
        """Whether nothing that could follow these tokens would count."""
        return any(token in self.end for token in tokens) or "\n" in self.tokenizer.decode(tokens).lstrip()

    def text(self, tokens: Sequence[int]) -> str:
        """What counts of an answer."""
        stop = next((i for i, token in enumerate(tokens) if token in self.end), len(tokens))
        return first_line(self.tokenizer.decode(tokens[:stop], skip_special_tokens=True))


def ends(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that finish an answer."""
    settings = getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None)
    listed = given if isinstance(given, list) else [given]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)


@torch.no_grad()
def go_on(
    model: PreTrainedModel, cache: Cache, said: Sequence[int], stops: Stops, limit: int, held: int | None = None
) -> list[int]:
    """An answer carried on greedily until it is finished.

    Args:
        model: the model.
        cache: holds the prompt and, of the answer, all tokens but the last.
        said: the answer so far, at least one token.
        stops: where it ends.
        limit: most tokens of an answer.
        held: tokens that the cache is to be cropped to before, or None.

    Returns:
        The answer's tokens, at most `limit`.
    """
    tokens = list(said)[:limit]
    if stops.finished(tokens) or len(tokens) >= limit:
        return tokens
    if held is not None and held < cache.get_seq_length():
        crop(cache, held)
    device = next(model.parameters()).device
    while len(tokens) < limit and not stops.finished(tokens):
        logits = forward(model, torch.tensor([tokens[-1:]], device=device), cache)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def own_answer(
    model: PreTrainedModel, cache: Cache, prompt: int, forced: Tensor, chosen: Sequence[int], stops: Stops, limit: int
) -> list[int]:
    """What a method says by itself, after a forward that forced another's answer on it.

    Up to the first token that it would have chosen otherwise both answers are the same, so the forward counts for both.

    Args:
        model: the model.
        cache: holds the prompt and all forced tokens but the last.
        prompt: tokens of the prompt.
        forced: `[N]` the other's answer.
        chosen: N tokens that the method would have chosen at each step.
        stops: where an answer ends.
        limit: most tokens of it.
    """
    said = forced.tolist()
    agreed = next((i for i in range(len(said)) if said[i] != chosen[i]), len(said) - 1)
    return go_on(model, cache, [*said[:agreed], chosen[agreed]], stops, limit, held=prompt + agreed)


def crop(cache: Any, length: int) -> None:
    """Leaves the first `length` tokens of a cache, whatever its `crop` wants to be told."""
    cache.crop(length - cache.get_seq_length())
