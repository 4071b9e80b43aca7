"""Looking after a store: what is in it, by whom and since when, and what may go. It needs no torch."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from blendkv.container import Head, RangeSource, read_head
from blendkv.errors import ChunkFileError, StoreError
from blendkv.stores import open_store
from blendkv.stores.base import Entry, Store

SHORTEST_PREFIX = 6
WORKERS = 16
"""Entries that are asked for at a time; what counts is the way to the store and back."""
_HEX = re.compile(r"[0-9a-f]{1,64}")
T = TypeVar("T")
R = TypeVar("R")


def open_existing(url: str, **options: Any) -> Store:
    """The store behind a URL, without making it: a folder that is not there is an error, and opening evicts nothing.

    Raises:
        StoreError: as `open_store`, or because there is none.
    """
    folder = "://" not in url or url.lower().startswith("file://")
    return open_store(url, **({"create": False} if folder else {}), **options)


def peek(store: Store, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
    """Bytes of an entry; no use of it, if the store can read like that."""
    return getattr(store, "peek", store.get)(key, start, stop)


def listing(store: Store) -> list[Entry]:
    """All entries of a store.

    Raises:
        StoreError: if it could not list them all.
    """
    before = store.stats.faults.copy()
    entries = list(store.entries())
    if faults := store.stats.faults - before:
        raise StoreError(
            f"{store.url} could not list its entries ({', '.join(faults)}): look whether it can be reached, and "
            "whether you may list what is in it"
        )
    return entries


def find_key(entries: Iterable[Entry], prefix: str, url: str) -> str:
    """The key that begins with these hex digits.

    Raises:
        ValueError: if they are no hex digits, or too few, or several keys do.
        StoreError: if none does.
    """
    prefix = prefix.lower()
    if not _HEX.fullmatch(prefix) or len(prefix) < SHORTEST_PREFIX:
        raise ValueError(f"{prefix!r} is no key: give its first {SHORTEST_PREFIX} hex digits, or more")
    found = sorted(entry.key for entry in entries if entry.key.startswith(prefix))
    if not found:
        raise StoreError(f"no entry of {url} begins with {prefix}: `blendkv ls` lists them")
    if len(found) > 1:
        some = ", ".join(key[: len(prefix) + 4] + "..." for key in found[:3])
        raise ValueError(f"{len(found)} entries of {url} begin with {prefix} ({some}): give more digits")
    return found[0]


@dataclass(frozen=True)
class Listed:
    """An entry, and what its head says.

    Attributes:
        entry: what the store knows.
        head: of its chunk file; None if it could not be read.
        fault: why not: a reason of `ChunkFileError`, or "unread".
    """

    entry: Entry
    head: Head | None
    fault: str = ""


def heads(store: Store, entries: Sequence[Entry]) -> Iterator[Listed]:
    """Each entry with its head, in order; some kilobytes are read of each, many at a time."""

    def one(entry: Entry) -> Listed:
        source = RangeSource(lambda start, length: peek(store, entry.key, start, start + length), entry.size)
        try:
            return Listed(entry, read_head(source))
        except ChunkFileError as error:
            lost = error.reason == "truncated" and peek(store, entry.key, 0, 1) is None
            return Listed(entry, None, "unread" if lost else error.reason)

    return in_turn(one, entries)


ORDERS: dict[str, Callable[[Entry], Any]] = {
    "size": lambda entry: (-entry.size, entry.key),
    "used": lambda entry: (-(entry.last_used or 0.0), entry.key),
    "hits": lambda entry: (-(entry.hits or 0), entry.key),
    "key": lambda entry: entry.key,
}
"""Ways to sort a list: largest, last used, most often used first; what is not known comes last."""


def least_used(entry: Entry) -> Any:
    """Sorts what may go first to the front: not used for longest; where that is unknown, least often."""
    return (entry.last_used or 0.0, entry.hits or 0, entry.key)


def victims(entries: Iterable[Entry], *, unused_since: float | None = None, to_bytes: int | None = None) -> list[Entry]:
    """Entries to evict, least recently used first.

    Args:
        entries: those that may go at all.
        unused_since: only those that were not used since then, in seconds since 1970. Those of which that is unknown
            stay.
        to_bytes: no more than it takes until the others have at most so many bytes together; None: all.
    """
    entries = sorted(entries, key=least_used)
    left, chosen = sum(entry.size for entry in entries), []
    for entry in entries:
        if to_bytes is not None and left <= to_bytes:
            break
        if unused_since is None or (entry.last_used is not None and entry.last_used < unused_since):
            chosen.append(entry)
            left -= entry.size
    return chosen


def belongs(listed: Listed, model: str | None = None, namespace: str | None = None) -> bool:
    """Whether an entry is of a model, by the first digits of its fingerprint, and of a namespace."""
    if listed.head is None:
        return model is None and namespace is None
    header = listed.head.header
    return (model is None or header.fingerprint.startswith(model)) and namespace in (None, header.namespace)


def remove(store: Store, entries: Sequence[Entry]) -> Iterator[tuple[Entry, bool]]:
    """Deletes entries; each with whether it is gone."""

    def one(entry: Entry) -> tuple[Entry, bool]:
        store.delete(entry.key)
        return entry, store.size(entry.key) is None

    return in_turn(one, entries)


def in_turn(function: Callable[[T], R], items: Sequence[T], workers: int = WORKERS) -> Iterator[R]:
    """Results in order, of a few calls at a time. Who stops early waits for those that have begun, no others."""
    pool, waiting = ThreadPoolExecutor(workers, "blendkv-upkeep"), deque[Future[R]]()
    try:
        for item in items:
            if len(waiting) >= workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
