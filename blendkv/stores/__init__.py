"""Where chunks are kept.

A `Pool` holds `ChunkCache` objects in memory; a `Store` holds bytes under a key (disk, S3, Valkey); a `TieredStore` is
a pool over stores.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blendkv.errors import StoreError
from blendkv.plugins import plugins
from blendkv.stores.base import Entry, Store, StoreStats
from blendkv.stores.deadline import Budget, deadline
from blendkv.stores.urls import path_of, shown

if TYPE_CHECKING:
    from blendkv.stores.disk import DiskStore
    from blendkv.stores.pool import Pool, PoolStats
    from blendkv.stores.remote import RemoteStore
    from blendkv.stores.saved import SavedStore
    from blendkv.stores.tiered import TieredStats, TieredStore
    from blendkv.stores.valkey import ValkeyStore

__all__ = [
    "Budget",
    "DiskStore",
    "Entry",
    "Pool",
    "PoolStats",
    "RemoteStore",
    "SavedStore",
    "Store",
    "StoreStats",
    "TieredStats",
    "TieredStore",
    "ValkeyStore",
    "deadline",
    "faults_of",
    "open_chunks",
    "open_store",
]

_HOME = {
    "DiskStore": "blendkv.stores.disk",
    "Pool": "blendkv.stores.pool",
    "PoolStats": "blendkv.stores.pool",
    "RemoteStore": "blendkv.stores.remote",
    "SavedStore": "blendkv.stores.saved",
    "TieredStats": "blendkv.stores.tiered",
    "TieredStore": "blendkv.stores.tiered",
    "ValkeyStore": "blendkv.stores.valkey",
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
    first, colon, rest = url.partition(":")
    if colon and not rest.startswith("//") and first.lower() in {"memory", *store_schemes()}:
        raise StoreError(f"{shown(url)}: a URL has two slashes, {first}://...; a folder of that name is ./{first}:...")
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    if scheme == "memory":
        raise StoreError(
            f"{shown(url)}: memory holds chunks, not bytes: use blendkv.stores.Pool; in tests, RemoteStore(URL)"
        )
    plugin = plugins("blendkv.stores").get(scheme)
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
    return sorted({*_STORES, *plugins("blendkv.stores")})


_VERBS = ("fetch", "put_many", "clear", "__contains__")
"""What a library asks of the chunks that it was given."""


def open_chunks(
    store: Any, capacity_bytes: int | None = None, codec: Any = None, secret: bytes | None = None
) -> Pool | TieredStore:
    """Where a library keeps chunks.

    Args:
        store: `memory://`, a path or URL (`open_store`) or a `Store`, which get a pool above them; or a `Pool` or
            `TieredStore`, which have settings of their own.
        capacity_bytes: of the pool.
        codec: how chunks are kept, in memory where there is nothing else.
        secret: of a tenant (`TieredStore`).

    Raises:
        StoreError: if a store cannot be opened.
        ValueError: for something that is no store, or settings that go elsewhere.
    """
    if isinstance(store, os.PathLike):
        store = os.fspath(store)
    profiles = None
    if isinstance(store, str) and store != "memory://":
        store = open_store(store)
        if store.url.startswith("file://"):  # maybe a saved library, with its profiles
            profiles = import_module("blendkv.codecs.profile").profiles_near(path_of(store.url))
    pool = import_module("blendkv.stores.pool").Pool
    if isinstance(store, str):
        return pool(capacity_bytes, codec=codec)
    if isinstance(store, Store):
        tiered = import_module("blendkv.stores.tiered").TieredStore
        return tiered(pool(capacity_bytes), store, codec=codec, secret=secret, profiles=profiles)
    if lacking := [name for name in _VERBS if not hasattr(store, name)]:
        raise ValueError(
            f"store={store!r} is no store: it has no {', '.join(lacking)}; give a URL, a Store, a Pool (or a class "
            "derived from it) or a TieredStore"
        )
    given = {"capacity_bytes": capacity_bytes, "codec": codec, "secret": secret}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)} with store={store!r}: give it to that when you make it")
    return store


def faults_of(chunks: Any) -> dict[str, dict[str, int]]:
    """Faults so far of the stores below, by URL."""
    return {store.url: dict(store.stats.faults) for store in getattr(chunks, "stores", ())}


def _load(url: str, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise StoreError(f"{shown(url)} cannot be opened: {error}") from error
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
