"""Where chunks are kept.

A `Pool` holds `ChunkCache` objects in memory; a `Store` holds bytes under a key (disk, S3, Valkey).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from blendkv.stores.pool import Pool, PoolStats

__all__ = ["Pool", "PoolStats", "Store", "open_pool"]


@runtime_checkable
class Store(Protocol):
    """Bytes under a key. A fault is a miss: `get` returns None, it does not raise."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None."""
        ...

    def put(self, key: str, data: bytes) -> bool:
        """Stores an entry whole; False if it could not be kept."""
        ...

    def delete(self, key: str) -> None:
        """Forgets an entry; an unknown key is fine."""
        ...

    def keys(self) -> Iterator[str]:
        """Keys of all entries."""
        ...


_VERBS = ("get_many", "put_many", "clear", "__contains__")
"""What a library asks of a pool."""


def open_pool(url: str | Pool, capacity_bytes: int | None = None) -> Pool:
    """The pool behind a URL; `memory://` is what this version has.

    Raises:
        ValueError: for another scheme, or something that is no pool.
    """
    if not isinstance(url, str):
        if lacking := [name for name in _VERBS if not hasattr(url, name)]:
            raise ValueError(f"store={url!r} is no pool: it has no {', '.join(lacking)}; derive it from Pool")
        return url
    if url != "memory://":
        raise ValueError(
            f"store={url!r}: this version keeps chunks in memory only; pass store='memory://' or a blendkv.stores.Pool"
        )
    return Pool(capacity_bytes)
