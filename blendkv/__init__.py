"""blendkv: key/value caches of RAG chunks, computed once and blended into the next prompt of a transformers model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blendkv._version import __version__

if TYPE_CHECKING:
    from blendkv.attaching import attach, detach
    from blendkv.cache import BlendedCache
    from blendkv.chunk import ChunkCache, MissingChunk, chunk_key
    from blendkv.chunkfile import ChunkFile, decode_chunk
    from blendkv.chunkwriter import encode_chunk
    from blendkv.errors import (
        BlendError,
        CacheStateError,
        ChunkFileError,
        ChunkMissError,
        NotAttachedError,
        StoreError,
        UnsupportedModelError,
    )
    from blendkv.guard import Guard
    from blendkv.library import BlendedInputs, ChunkLibrary
    from blendkv.models import load_model
    from blendkv.prefilling import first_layer_of, prefill
    from blendkv.report import BlendReport
    from blendkv.selectors import HKVD, Boundary, Random, Selector
    from blendkv.stores import DiskStore, Pool, Store, TieredStore, open_store
    from blendkv.weights import model_fingerprint

_HOMES = {
    "blendkv.cache": ("BlendedCache",),
    "blendkv.chunk": ("ChunkCache", "MissingChunk", "chunk_key"),
    "blendkv.chunkfile": ("ChunkFile", "decode_chunk"),
    "blendkv.chunkwriter": ("encode_chunk",),
    "blendkv.errors": (
        "BlendError",
        "CacheStateError",
        "ChunkFileError",
        "ChunkMissError",
        "NotAttachedError",
        "StoreError",
        "UnsupportedModelError",
    ),
    "blendkv.attaching": ("attach", "detach"),
    "blendkv.guard": ("Guard",),
    "blendkv.library": ("BlendedInputs", "ChunkLibrary"),
    "blendkv.models": ("load_model",),
    "blendkv.prefilling": ("first_layer_of", "prefill"),
    "blendkv.report": ("BlendReport",),
    "blendkv.selectors": ("HKVD", "Boundary", "Random", "Selector"),
    "blendkv.stores": ("DiskStore", "Pool", "Store", "TieredStore", "open_store"),
    "blendkv.weights": ("model_fingerprint",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "HKVD",
    "BlendError",
    "BlendReport",
    "BlendedCache",
    "BlendedInputs",
    "Boundary",
    "CacheStateError",
    "ChunkCache",
    "ChunkFile",
    "ChunkFileError",
    "ChunkLibrary",
    "ChunkMissError",
    "DiskStore",
    "Guard",
    "MissingChunk",
    "NotAttachedError",
    "Pool",
    "Random",
    "Selector",
    "Store",
    "StoreError",
    "TieredStore",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "chunk_key",
    "decode_chunk",
    "detach",
    "encode_chunk",
    "first_layer_of",
    "load_model",
    "model_fingerprint",
    "open_store",
    "prefill",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import blendkv` needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'blendkv' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
