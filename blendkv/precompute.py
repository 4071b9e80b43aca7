"""Many documents through a library, so that their chunks are in its store before anybody asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blendkv.errors import StoreError

ASK_BATCHES = 4
"""Batches of a forward for which a store is asked at once: pieces of similar length then share a forward."""


_COUNTS = ("documents", "chunks", "tokens", "found", "computed", "refused", "evicted")


class Library(Protocol):
    """What is asked of a `ChunkLibrary`."""

    pool: Any
    layout: Any
    batch_tokens: int

    def prefill(self, documents: Iterable[Any], system: str | None = None) -> Sequence[Any]:
        """Chunks of documents, found or computed and stored."""
        ...


@dataclass(frozen=True)
class Precomputed:
    """What was done.

    Attributes:
        documents: texts.
        chunks: that they were cut into.
        tokens: of all chunks.
        found: chunks that the store had, or that came twice; they were not computed.
        computed: chunks that were computed.
        refused: of these, those that the codec or a store refused.
        evicted: entries of stores that gave way meanwhile.
        seconds: that it took; of several processes, the slowest.
    """

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    found: int = 0
    computed: int = 0
    refused: int = 0
    evicted: int = 0
    seconds: float = 0.0

    def __add__(self, other: Precomputed) -> Precomputed:
        """Both together, done at the same time."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return Precomputed(**sums, seconds=max(self.seconds, other.seconds))


def precompute(
    library: Library,
    documents: Iterable[str],
    *,
    system: str | None = None,
    on_batch: Callable[[Precomputed], None] | None = None,
) -> Precomputed:
    """Computes and stores the chunks of documents that the store does not have.

    Documents are cut into chunks as they come, and the store is asked for several batches of chunks at once, whatever
    documents they are of; no more than that is in memory. Whoever stops it and starts it again goes on.

    Args:
        library: whose store is filled.
        documents: texts.
        system: the system prompt they will be used under (matters with `condition="system"`).
        on_batch: called after each batch with what was done so far.

    Returns:
        What was done.

    Raises:
        StoreError: if the store kept nothing of what a batch computed.
    """
    begin, done, first = time.perf_counter(), Precomputed(), _counters(library.pool)
    before = first
    for texts, finished in _batches(library, documents):
        chunks = library.prefill(texts, system=system)
        getattr(library, "flush", lambda: True)()
        now = _counters(library.pool)
        distinct = len({chunk.key for chunk in chunks})
        computed = max(0, distinct - (now["hits"] - before["hits"]))
        refused = now["refused"] - before["refused"]
        done = Precomputed(
            documents=done.documents + finished,
            chunks=done.chunks + len(chunks),
            tokens=done.tokens + sum(map(len, chunks)),
            found=done.found + len(chunks) - computed,
            computed=done.computed + computed,
            refused=done.refused + refused,
            evicted=now["evicted"] - first["evicted"],
            seconds=time.perf_counter() - begin,
        )
        before = now
        if on_batch is not None:
            on_batch(done)
        if computed and refused >= computed:
            raise StoreError(
                f"the store kept none of {computed} chunks{_why(library.pool)}: make room or put that right, and start "
                "again; what is stored is not computed again"
            )
    return done


def _batches(library: Library, documents: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Texts of chunks that are asked for together, and how many documents end among them."""
    most = ASK_BATCHES * library.batch_tokens
    texts: list[str] = []
    tokens = finished = 0
    for document in documents:
        for piece in library.layout.document(document):
            if texts and tokens + len(piece.ids) > most:
                yield texts, finished
                texts, tokens, finished = [], 0, 0
            texts.append(piece.text)
            tokens += len(piece.ids)
        finished += 1
    if texts:
        yield texts, finished


def _counters(pool: Any) -> Counter[str]:
    """Hits, refused puts and evictions of a pool alone, or of stores with one above them."""
    stores = getattr(pool, "stores", None)
    hits = pool.stats.hits
    if stores is None:
        return Counter(hits=hits, refused=pool.stats.rejected, evicted=pool.stats.evictions)
    return Counter(
        hits=hits.total(),
        refused=sum(store.stats.put_failures for store in stores) + pool.stats.uncoded,
        evicted=sum(store.stats.evictions for store in stores),
    )


def _why(pool: Any) -> str:
    said = [word for store in getattr(pool, "stores", ()) for word in +store.stats.faults]
    said += [pool.stats.refusal] if pool.stats.refusal else []
    return f" ({', '.join(dict.fromkeys(said))})" if said else ""
