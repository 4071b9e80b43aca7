"""Where chunks are kept.

A `Pool` holds `ChunkCache` objects in memory; a `Store` holds bytes under a key (disk, S3, Valkey).
"""

from __future__ import annotations

from blendkv.stores.base import Store, StoreStats
from blendkv.stores.deadline import deadline
from blendkv.stores.pool import Pool, PoolStats

__all__ = ["Pool", "PoolStats", "Store", "StoreStats", "deadline", "open_pool"]


def open_pool(url: str | Pool, capacity_bytes: int | None = None) -> Pool:
    """The pool behind a URL; `memory://` is what this version has.

    Raises:
        ValueError: for another scheme.
    """
    if not isinstance(url, str):
        return url
    if url != "memory://":
        raise ValueError(
            f"store={url!r}: this version keeps chunks in memory only; pass store='memory://' or a blendkv.stores.Pool"
        )
    return Pool(capacity_bytes)
