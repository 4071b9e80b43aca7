"""Scores of a chunk's tokens, computed once with the chunk and stored with it, for `stored-NAME` selectors.

A selector that ranks by them knows its rows before anything is loaded or computed for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from blendkv import _compat
from blendkv.cache import BlendedCache
from blendkv.chunk import ChunkCache
from blendkv.layout import encode
from blendkv.prefilling import prefill
from blendkv.selectors import Attention, Candidates

QUESTION = "Question: What is said here, about whom, where and when?\nAnswer:"
"""What is asked of every chunk where nothing better is known (FusionRAG and others ask generated questions)."""
CONTEXT = (
    "Marie Curie: Marie Curie was a physicist and chemist who conducted research on radioactivity. She was born in "
    "Warsaw in 1867 and died in France in 1934.\n\n"
)
"""What stands in front of every chunk where its real neighbours are not known."""


def asked(model: nn.Module, chunks: Sequence[ChunkCache], tokenizer: Any) -> list[Tensor]:
    """The attention that a question about anything pays to each token of a chunk that stands alone.

    Args:
        model: a transformers decoder; it is attached.
        chunks: that it computed.
        tokenizer: of the model.
    """
    question = torch.tensor(encode(tokenizer, QUESTION), dtype=torch.long)
    return [_attention(model, chunk, question) for chunk in chunks]


def moved(model: nn.Module, chunks: Sequence[ChunkCache], tokenizer: Any) -> list[Tensor]:
    """How far values move when other text stands in front: squared distance, summed over layers, heads and dims.

    What HKVD measures at one layer for the prompt at hand, this expects, over all of them.

    Args:
        model: a transformers decoder; it is attached.
        chunks: that it computed.
        tokenizer: of the model.
    """
    context = tuple(encode(tokenizer, CONTEXT))
    found: dict[int, Tensor] = {}
    for conditioning in dict.fromkeys(chunk.conditioning for chunk in chunks):
        group = [i for i, chunk in enumerate(chunks) if chunk.conditioning == conditioning]
        ids = [chunks[i].ids for i in group]
        others = prefill(model, ids, conditioning=(*conditioning, *context), progress=False)
        for i, other in zip(group, others, strict=True):
            pairs = zip(chunks[i].values, other.values, strict=True)
            found[i] = sum((_distance(a, b) for a, b in pairs), torch.zeros(len(other)))
    return [found[i] for i in range(len(chunks))]


SCORES: dict[str, Callable[[nn.Module, Sequence[ChunkCache], Any], list[Tensor]]] = {"asked": asked, "moved": moved}
"""Name of a score -> `(model, chunks, tokenizer) -> [T] fp32 for each chunk`."""


def add_scores(
    model: nn.Module, chunks: Sequence[ChunkCache], names: Collection[str], tokenizer: Any
) -> list[ChunkCache]:
    """Chunks with scores of these names, beside those that they have.

    Args:
        model: that computed the chunks.
        chunks: in any number.
        names: of `SCORES`.
        tokenizer: of the model.

    Raises:
        ValueError: for an unknown name.
    """
    unknown = sorted(set(names) - SCORES.keys())
    if unknown:
        raise ValueError(f"unknown score {unknown[0]!r}; choose of {', '.join(sorted(SCORES))}, or set chunk.scores")
    made = {name: SCORES[name](model, chunks, tokenizer) for name in sorted(names)}
    return [
        replace(chunk, scores={**chunk.scores, **{name: scores[i].cpu() for name, scores in made.items()}})
        for i, chunk in enumerate(chunks)
    ]


class _Heard(Attention):
    """Keeps the attention that it was given."""

    heard: Tensor

    def score(self, candidates: Candidates) -> Tensor:
        self.heard = super().score(candidates)
        return self.heard


@torch.no_grad()
def _attention(model: Any, chunk: ChunkCache, question: Tensor) -> Tensor:
    """`[T]` what a question after the chunk attends to; nothing of one token has to be ranked."""
    if len(chunk) == 1:
        return torch.ones(1)
    selector = _Heard()
    ids = torch.cat([torch.tensor(chunk.conditioning, dtype=torch.long), chunk.ids, question])[None]
    cache = BlendedCache([chunk], selector=selector, check_layers={0: 1 / len(chunk)}, strict=True, reserve=1)
    device = next(model.parameters()).device
    model(input_ids=ids.to(device), use_cache=True, logits_to_keep=1, **{_compat.cache_keyword(model.forward): cache})
    return selector.heard


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """`[T]` of two `[H, T, D]`."""
    return (a.float() - b.float()).square().sum((0, 2)).cpu()
