"""Chunks of a library as files to be given away: copied where a tier has them, encoded where none has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from blendkv.chunk import ChunkCache, chunk_key
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec, Profile, Profiles, codec_of, load_profile
from blendkv.container import ContainerReader, Header, RangeSource
from blendkv.errors import ChunkFileError
from blendkv.stores import Pool, Store, TieredStore
from blendkv.stores.pool import Encoded

HEADS_AT_ONCE = 16
"""Heads that are asked for at once: stores far away take a round trip for each."""


@dataclass(frozen=True)
class Entry:
    """A chunk file that was verified.

    Attributes:
        key: of the chunk.
        data: the file.
        header: what it says about itself.
        profile: what it was coded with, if its codec needs one.
    """

    key: str
    data: bytes
    header: Header
    profile: Profile | None


@dataclass
class Gatherer:
    """Finds the chunks of one model, tokenizer and namespace in a pool or in tiers.

    Attributes:
        pool: where they are.
        fingerprint, dtype, tokenizer, namespace: of the chunks that are wanted; of others none is.
        secret: that went into their keys, and seals files.
        wanted: how files must be coded; None: as they are kept, and as `pool` codes what it keeps as tensors.
        left_out: chunks of this library that could not be had, by reason.
        refused: chunks that the codec refused, and that are raw for that.
    """

    pool: Pool | TieredStore
    fingerprint: str
    dtype: str
    tokenizer: str
    namespace: str
    secret: bytes | None
    wanted: Codec | None
    left_out: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    def __post_init__(self) -> None:
        """Where profiles are looked for, each once."""
        own = getattr(self.pool, "profiles", None)
        codecs = [codec for codec in (self.wanted, getattr(self.pool, "codec", None)) if codec is not None]
        places = [profile for codec in codecs if isinstance(profile := getattr(codec, "profile", None), Profile)]
        self.profile = cache(lambda wanted: find_profile(wanted, [*places, own, load_profile]))
        self._stores: Sequence[Store] = getattr(self.pool, "stores", ())
        self._memory = self.pool.pool if isinstance(self.pool, TieredStore) else self.pool

    def all(self) -> Iterator[Entry]:
        """Every chunk that a tier has; what is somebody else's is told by its head, and left out."""
        keys = iter(self.pool.keys())
        with ThreadPoolExecutor(HEADS_AT_ONCE) as threads:
            while some := list(islice(keys, HEADS_AT_ONCE)):
                for key, ours in zip(some, threads.map(self._is_ours, some), strict=True):
                    if ours and (entry := self.find(key)) is not None:
                        yield entry
                    elif ours:
                        self.left_out["unreadable"] += 1

    def find(self, key: str) -> Entry | None:
        """The chunk under a key, if a tier has it: copied if it is coded as it should be, or coded again."""
        held = self._memory.peek(key) if hasattr(self._memory, "peek") else self._memory.get(key)
        others: list[bytes] = []
        for data in self._copies(key, held):
            entry = self._verified(key, data)
            if entry is not None and self._as_wanted(entry):
                return entry
            if entry is not None:
                others.append(data)
        if isinstance(held, ChunkCache):
            return self.encode(held) if self._owns(key, held) else None
        for data in others:
            with suppress(ChunkFileError), ChunkFile(data, secret=self.secret, profiles=self.profile) as file:
                file.keyed = "" if self.secret is None else key
                return self.encode(file.read())
        return None

    def encode(self, chunk: ChunkCache) -> Entry | None:
        """A chunk as a file; raw if the codec refuses it, None (and counted) if it can be no file at all."""
        key_id, codec = getattr(self.pool, "key_id", b""), self.wanted or getattr(self.pool, "codec", None) or "raw"
        try:
            data = encode_chunk(chunk, codec, secret=self.secret, key_id=key_id)
        except ValueError:
            try:
                data = encode_chunk(chunk, "raw", secret=self.secret, key_id=key_id)
            except ValueError:
                self.left_out["cannot be stored"] += 1
                return None
            self.refused += 1
        return self._verified(chunk.key, data)

    def _copies(self, key: str, held: Any) -> Iterator[bytes]:
        """Bytes that tiers have under a key, nearest first; a store that raises has none."""
        if isinstance(held, Encoded):
            yield bytes(held.file.tensor.cpu().numpy())
        for store in self._stores:
            with suppress(Exception):
                if (data := store.get(key)) is not None:
                    yield data

    def _verified(self, key: str, data: bytes) -> Entry | None:
        """An entry of bytes that are whole, ours, and of a profile that is at hand."""
        try:
            with ContainerReader(data, secret=self.secret) as reader:
                reader.segments(range(reader.header.segments))
                header = reader.header
        except ChunkFileError:
            return None
        profile = self.profile(header.profile_hash) if header.profile_hash else None
        if not self._is(key, header) or (header.profile_hash and profile is None):
            return None
        return Entry(key, data, header, profile)

    def _as_wanted(self, entry: Entry) -> bool:
        if self.wanted is None:
            return True
        with suppress(ChunkFileError):
            codec_of(entry.header, codec=self.wanted)
            return True
        return False

    def _is_ours(self, key: str) -> bool:
        """Whether an entry is, by its head; whether the rest is sound shows when it is read."""
        held = self._memory.peek(key) if hasattr(self._memory, "peek") else self._memory.get(key)
        if isinstance(held, ChunkCache):
            return self._owns(key, held)
        if isinstance(held, Encoded):
            return self._is(key, held.file.header)
        for store in self._stores:
            with suppress(Exception), ContainerReader(_source(store, key), secret=self.secret) as reader:
                return self._is(key, reader.header)
        return False

    def _owns(self, key: str, chunk: ChunkCache) -> bool:
        said = (chunk.fingerprint, chunk.tokenizer, chunk.namespace, chunk.key)
        return said == (self.fingerprint, self.tokenizer, self.namespace, key)

    def _is(self, key: str, header: Header) -> bool:
        ours = (self.fingerprint, self.tokenizer, self.namespace, self.dtype)
        if (header.fingerprint, header.tokenizer, header.namespace, header.dtype) != ours:
            return False
        ids, before = np.frombuffer(header.ids, "<u4"), np.frombuffer(header.conditioning, "<u4").tolist()
        return key == chunk_key(ids, header.fingerprint, before, header.tokenizer, header.namespace, self.secret)


def _source(store: Store, key: str) -> RangeSource:
    """An entry of a store, of which only the head will be read."""
    return RangeSource(lambda start, length: store.get(key, start, start + length), store.size(key) or 0)


def find_profile(wanted: str, places: Iterable[Profiles | None]) -> Profile | None:
    """The profile of a hash, from the first place that has it; damaged ones are none."""
    for place in places:
        with suppress(ValueError, OSError):
            if isinstance(place, Profile):
                found: Any = place
            elif place is None:
                continue
            else:
                found = place(wanted) if callable(place) else place.get(wanted)
            if isinstance(found, Profile) and found.hash == wanted:
                return found
    return None
