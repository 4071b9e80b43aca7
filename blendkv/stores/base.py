"""What a store is: bytes under a key, where every fault is a miss that is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass
class StoreStats:
    """What a store did since it was opened; safe to share among threads.

    Attributes:
        hits: entries that were found.
        misses: entries that were not, for whatever reason.
        puts: entries that were stored.
        put_failures: entries that were not.
        evictions: entries that gave way to others.
        faults: why entries were missed or not stored, other than being absent: a short word and how often.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_failures: int = 0
    evictions: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, what: str, fault: str = "", times: int = 1) -> None:
        """Adds to a counter, and to a fault if one is named."""
        with self._lock:
            setattr(self, what, getattr(self, what) + times)
            if fault:
                self.faults[fault] += times


@dataclass(frozen=True)
class Entry:
    """What a store knows of an entry without reading it.

    Attributes:
        key: of the chunk.
        size: bytes.
        last_used: seconds since 1970; where reads leave no trace (S3), when it was stored; None if unknown.
        hits: how often it was read, about; None if unknown.
    """

    key: str
    size: int
    last_used: float | None = None
    hits: int | None = None


@runtime_checkable
class Store(Protocol):
    """Bytes under a key of 64 hex digits (`chunk_key`). Nothing that goes wrong later than opening raises.

    A store may also have `peek`, which reads as `get` does but is no use of the entry, `sizes(keys)`, which is `size`
    for many in as few round trips as it can and counts misses, `read_into(key, room)`, which is `get` into memory that
    the caller's `room` gives for so many bytes and says whether it was filled, and `quarantine(key)`, for entries that
    a reader found wanting.

    Attributes:
        url: what `open_store` would open again; without passwords.
        stats: counters.
    """

    url: str
    stats: StoreStats

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None. They were not checked: `ChunkFile` does that."""
        ...

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, those that there are, in as few round trips as the store can."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of an entry, or None."""
        ...

    def put(self, key: str, data: bytes) -> bool:
        """Stores an entry whole, or not at all; False if it could not be kept."""
        ...

    def delete(self, key: str) -> None:
        """Forgets an entry; an unknown key is fine."""
        ...

    def keys(self) -> Iterator[str]:
        """Keys of all entries."""
        ...

    def entries(self) -> Iterator[Entry]:
        """All entries with what is known of them. Listing is no use of an entry."""
        ...

    def close(self) -> None:
        """Lets go of files and connections; what was stored stays."""
        ...
