"""Requests for `blendkv bench throughput`: each asks something of its own about documents that are asked for again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        documents: numbers of its documents, in the order of the prompt.
        question: ids after them.
    """

    documents: tuple[int, ...]
    question: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Documents of random ids, and who asks for which.

    Attributes:
        documents: ids of each.
        requests: in order.
    """

    documents: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]

    def ids(self, request: Request) -> list[int]:
        """The whole prompt."""
        return [token for number in request.documents for token in self.documents[number]] + list(request.question)


def zipf_workload(
    vocabulary: int,
    *,
    documents: int,
    chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    requests: int,
    zipf: float,
    seed: int,
) -> Workload:
    """Draws a workload: the document of rank r is wanted in proportion to r ** -zipf, in no special order.

    Args:
        vocabulary: number of ids.
        documents: in all.
        chunks: different documents of a request.
        chunk_tokens: of a document.
        question_tokens: of each request, never the same.
        requests: number of them.
        zipf: exponent of the law.
        seed: of everything.

    Raises:
        ValueError: for a number below 1, more documents in a request than there are, or an exponent below 0.
    """
    if min(documents, chunks, chunk_tokens, question_tokens, requests) < 1:
        raise ValueError("documents, chunks, chunk_tokens, question_tokens and requests must be at least 1")
    if chunks > documents:
        raise ValueError(f"{chunks} documents in a request, but only {documents} in all: give more documents")
    if not zipf >= 0:
        raise ValueError(f"zipf={zipf}: give an exponent of at least 0 (0: all alike)")
    rng = np.random.default_rng(seed)
    share = np.arange(1, documents + 1, dtype=float) ** -zipf
    texts = rng.integers(0, vocabulary, (documents, chunk_tokens))
    drawn = [
        Request(
            tuple(rng.choice(documents, size=chunks, replace=False, p=share / share.sum()).tolist()),
            tuple(rng.integers(0, vocabulary, question_tokens).tolist()),
        )
        for _ in range(requests)
    ]
    return Workload(tuple(map(tuple, texts.tolist())), tuple(drawn))
