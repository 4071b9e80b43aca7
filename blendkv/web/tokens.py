"""The prompt as a picture: which tokens' stored keys and values are off, and which were recomputed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from blendkv.bench.insights import kv_deviations
from blendkv.integrations.detokenizing import HALF, MOST_WAITING
from blendkv.layout import TOKENIZER_LOCK, Piece, Prompt

CLIPPED = 0.98
"""Quantile of the deviations at which the colours end; the few tokens above it have the last one."""


@dataclass(frozen=True)
class Token:
    """A token, or a few that only together are text.

    Attributes:
        text: as it stands in the prompt.
        deviation: how far stored keys and values are from those of full recompute (`deviation_of`); of several tokens
            the largest. None where nothing is stored.
        recomputed: whether the blend computed it although it is stored.
    """

    text: str
    deviation: float | None
    recomputed: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the prompt: the head (template and system prompt), a document, or text that is always computed."""

    title: str
    kind: Literal["head", "document", "text"]
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Picture:
    """A prompt, coloured.

    Attributes:
        sections: in prompt order.
        top: deviation at which the colours end.
        recomputed: how many chunk tokens were recomputed.
        stored: how many tokens are in chunks.
        held: share of the summed squared deviation that the recomputed tokens hold; NaN if there is none.
    """

    sections: tuple[Section, ...]
    top: float
    recomputed: int
    stored: int
    held: float


def deviation_of(full: Sequence[tuple[Tensor, Tensor]], stored: Sequence[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """`[tokens]` distance of stored from fully recomputed keys and values, relative to their size.

    Root of the mean, over layers but the first (whose keys and values depend on nothing else) and over keys and
    values, of the squared distance by the layer's mean square. 0: what is stored is right. 1: it is as far off as keys
    and values are long.

    Args:
        full: keys and values `[1, H, T, D]` of every layer, after full recompute.
        stored: the same after full reuse.
        tokens: of the prompt; what follows is not looked at.
    """
    layers = kv_deviations(full, stored, 0, tokens)
    return (torch.stack([layer.cpu() for layer in layers[1:] or layers]).mean(0) / 2).sqrt()


def picture_of(tokenizer: Any, prompt: Prompt, deviation: Tensor, recomputed: Collection[int]) -> Picture:
    """Puts texts, deviations and choices together.

    Args:
        tokenizer: decodes the prompt's ids.
        prompt: as it was laid out.
        deviation: `[T]` of `deviation_of`.
        recomputed: prompt indices.
    """
    sections: list[Section] = []
    at, documents, chosen = 0, 0, set(recomputed)
    stored: list[int] = []
    for i, piece in enumerate(prompt.pieces):
        own = range(at, at + len(piece.ids))
        at = own.stop
        known = piece.kind != "text"
        stored += own if known else ()
        tokens = tuple(
            Token(text, max(float(deviation[j]) for j in run) if known else None, any(j in chosen for j in run))
            for text, run in _texts(tokenizer, piece, own.start)
        )
        if piece.kind == "chunk" and i and prompt.pieces[i - 1].kind == "chunk":  # a long document, cut
            before = sections.pop()
            sections.append(Section(before.title, "document", before.tokens + tokens))
        elif piece.kind == "chunk":
            documents += 1
            sections.append(Section(f"Document {documents}", "document", tokens))
        elif piece.kind == "head":
            sections.append(Section("System prompt", "head", tokens))
        elif sections and sections[-1].kind == "text":
            before = sections.pop()
            sections.append(Section(before.title, "text", before.tokens + tokens))
        elif not piece.text.strip():  # what separates documents: shown with the one before
            before = sections.pop() if sections else Section("", "text", ())
            sections.append(Section(before.title, before.kind, before.tokens + tokens))
        else:
            sections.append(Section("Question", "text", tokens))
    known_deviation = deviation[stored]
    total = float(known_deviation.square().sum())
    ours = float(deviation[sorted(chosen)].square().sum())
    top = float(torch.quantile(known_deviation.float(), CLIPPED)) if stored else 0.0
    return Picture(tuple(sections), top, len(chosen), len(stored), ours / total if total else float("nan"))


def _texts(tokenizer: Any, piece: Piece, start: int) -> Iterator[tuple[str, range]]:
    """Texts of a piece, and the prompt indices of the tokens that each stands for."""
    begin = 0
    for stop in range(1, len(piece.ids) + 1):
        with TOKENIZER_LOCK:
            text = tokenizer.decode(list(piece.ids[begin:stop]), clean_up_tokenization_spaces=False)
        if not text.endswith(HALF) or stop - begin >= MOST_WAITING or stop == len(piece.ids):
            yield text, range(start + begin, start + stop)
            begin = stop
