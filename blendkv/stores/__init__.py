"""Where chunks are kept.

A `Pool` holds `ChunkCache` objects in memory; a `Store` holds bytes under a key (disk, S3, Valkey).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from blendkv.errors import StoreError
from blendkv.stores.base import Entry, Store, StoreStats
from blendkv.stores.deadline import deadline
from blendkv.stores.urls import shown

if TYPE_CHECKING:
    from blendkv.stores.disk import DiskStore
    from blendkv.stores.pool import Pool, PoolStats
    from blendkv.stores.remote import RemoteStore

__all__ = [
    "DiskStore",
    "Entry",
    "Pool",
    "PoolStats",
    "RemoteStore",
    "Store",
    "StoreStats",
    "deadline",
    "open_pool",
    "open_store",
]

_HOME = {
    "DiskStore": "blendkv.stores.disk",
    "Pool": "blendkv.stores.pool",
    "PoolStats": "blendkv.stores.pool",
    "RemoteStore": "blendkv.stores.remote",
}
_REMOTE = "blendkv.stores.remote:RemoteStore"
_VALKEY = "blendkv.stores.valkey:ValkeyStore.from_url"
_STORES = {
    "file": "blendkv.stores.disk:DiskStore.from_url",
    **{scheme + kind: _VALKEY for scheme in ("redis", "rediss", "valkey", "valkeys") for kind in ("", "+cluster")},
    **dict.fromkeys(("s3", "http", "https", "hf", "gs", "abfs", "az", "sftp"), _REMOTE),
}


def open_store(url: str, **options: Any) -> Store:
    """The store behind a URL.

    Args:
        url: a path (`~` is home) or `file://` for a folder; `s3://bucket/folder`, `https://`, `hf://` and whatever else
            fsspec reaches; `redis://`, `rediss://`, `valkey://`; or a scheme that a plug-in registered under the
            entry point group `blendkv.stores`.
        **options: of the store: see `DiskStore`, `RemoteStore`, `ValkeyStore`.

    Raises:
        StoreError: for an unknown scheme, a package that is missing, a folder that cannot be written, a server that
            cannot be reached or refuses.
    """
    url = str(url)
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    if scheme == "memory":
        raise StoreError(
            f"{shown(url)}: memory holds chunks, not bytes: use blendkv.stores.Pool; in tests, RemoteStore(URL)"
        )
    plugin = next((e for e in entry_points(group="blendkv.stores") if e.name == scheme), None)
    if scheme in _STORES:
        opener = _load(url, _STORES[scheme])
    elif plugin is not None:
        opener = plugin.load()
    else:
        remote = import_module("blendkv.stores.remote")
        if scheme not in remote.schemes():
            raise StoreError(f"{shown(url)}: unknown scheme {scheme!r}; a path, or one of {', '.join(store_schemes())}")
        opener = remote.RemoteStore
    try:
        return opener(url, **options)
    except ValueError as error:
        raise StoreError(f"{scheme}:// store: {error}") from error


def store_schemes() -> list[str]:
    """Schemes that `open_store` knows by itself and by plug-ins; fsspec's others work too."""
    return sorted({*_STORES, *(e.name for e in entry_points(group="blendkv.stores"))})


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
    return import_module("blendkv.stores.pool").Pool(capacity_bytes)


def _load(url: str, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise StoreError(f"{shown(url)} needs a package that is not there: {error}") from error
    for part in name.split("."):
        found = getattr(found, part)
    return found


def __getattr__(name: str) -> Any:
    """Imports a class when it is first used: files need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'blendkv.stores' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
