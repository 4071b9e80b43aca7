"""Entries of every codec, small and of a real size, and a store that gives what it is told to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from blendkv.chunk import ChunkCache, chunk_key
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, LayerShape, get_codec
from blendkv.stores import Pool, StoreStats, TieredStore
from tests.drawn import SMALL, chunk_of, profile_of

SECRET = b"a secret that everybody can read"
REAL = (LayerShape(3, 64, 64),) * 8
"""A third of the layers of a small model."""


@dataclass(frozen=True)
class Entry:
    """A file, the key that it belongs under, what is read from it, and what it takes to read it."""

    name: str
    key: str
    data: bytes = field(repr=False)
    chunk: ChunkCache
    codec: Codec | None = None
    secret: bytes | None = None

    def tiers(self, *stores: Any, secret: bytes | None = None) -> TieredStore:
        """Over these stores; memory holds nothing, so that each fetch asks them."""
        return TieredStore(Pool(1), *stores, codec=self.codec, secret=secret or self.secret)

    @property
    def reading(self) -> dict[str, Any]:
        """Arguments of `ChunkFile`."""
        return {"codec": self.codec, "secret": self.secret}


def made(name: str, chunk: ChunkCache, codec: Codec | None = None, secret: bytes | None = None) -> Entry:
    """A chunk as an entry."""
    data = encode_chunk(chunk, codec or "raw", secret=secret)
    profiles = None if codec is None else {codec.profile_hash: codec.profile}  # ty: ignore[unresolved-attribute]
    read = decode_chunk(data, secret=secret, profiles=profiles)
    key = read.key if secret is None else keyed(chunk, secret)
    return Entry(name, key, data, read, codec, secret)


def keyed(chunk: ChunkCache, secret: bytes | None) -> str:
    """The key of a chunk for who has the secret."""
    return chunk_key(chunk.ids, chunk.fingerprint, chunk.conditioning, chunk.tokenizer, chunk.namespace, secret)


def kinds(shapes: tuple[LayerShape, ...]) -> dict[str, tuple[Codec | None, bytes | None]]:
    """Every codec with a secret or without, by a name for people."""
    lossy: dict[str, Codec] = {
        name + ("-2" if streams == 2 else ""): get_codec(
            name, profile=profile_of(name, shapes), level=4, **({} if streams is None else {"streams": streams})
        )
        for name, streams in (("cachegen", None), ("klt", 1), ("klt", 2), ("klt-xl", 1), ("klt-xl", 2))
    }
    plain = {"raw": (None, None), **{name: (codec, None) for name, codec in lossy.items()}}
    return plain | {"raw sealed": (None, SECRET), "klt sealed": (lossy["klt"], SECRET)}


@cache
def small(size: int = 4096) -> tuple[Entry, ...]:
    """An entry of about that many bytes of each kind."""
    names = {"conditioning": (1,), "tokenizer": "t", "namespace": "n", "text": "what is it? A text."}
    found = []
    for name, (codec, secret) in kinds(SMALL).items():
        low, high = 1, 4000  # more tokens are more bytes
        while low < high:
            tokens = (low + high + 1) // 2
            entry = made(name, chunk_of(SMALL, tokens, **names), codec, secret)
            low, high = (tokens, high) if len(entry.data) <= size else (low, tokens - 1)
        found.append(made(name, chunk_of(SMALL, low, **names), codec, secret))
    return tuple(found)


@cache
def real(tokens: int = 64) -> tuple[Entry, ...]:
    """Entries of a chunk of a small model."""
    chunk = chunk_of(REAL, tokens, torch.bfloat16, namespace="n", text="a document " * 20)
    return tuple(made(name, chunk, *how) for name, how in kinds(REAL).items())


class HeldStore:
    """Gives what a test lays into it; nothing is copied.

    Attributes:
        entries: by key.
        gone: entries that were found wanting, and left there.
    """

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        self.url, self.stats, self.local = "held://", StoreStats(), True
        self.entries = {} if entries is None else entries
        self.gone = 0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        return None if key not in self.entries else self.entries[key][start:stop]

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        return {key: self.entries[key] for key in keys if key in self.entries}

    def size(self, key: str) -> int | None:
        return len(self.entries[key]) if key in self.entries else None

    def put(self, key: str, data: bytes) -> bool:
        self.entries[key] = data
        return True

    def quarantine(self, key: str) -> None:
        self.gone += 1

    def delete(self, key: str) -> None:
        self.entries.pop(key, None)

    def keys(self) -> Iterator[str]:
        return iter(list(self.entries))

    def close(self) -> None:
        pass


def same(a: ChunkCache | None, b: ChunkCache) -> bool:
    """Whether it is that chunk, bit by bit."""
    if a is None or len(a.keys) != len(b.keys) or not torch.equal(a.ids, b.ids):
        return False
    names = ("fingerprint", "conditioning", "tokenizer", "namespace")
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(getattr(a, name) == getattr(b, name) for name in names) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in pairs
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)
