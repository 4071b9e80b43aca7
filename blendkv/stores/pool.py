"""Chunks in memory, on CPU or GPU, as they are or encoded: LRU by bytes, with pins and counters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile, encode_chunk
from blendkv.codecs import Codec, Profile, get_codec
from blendkv.errors import ChunkFileError
from blendkv.expanding import decode_each
from blendkv.stores.eviction import Eviction, get_eviction

DEFAULT_CAPACITY_BYTES = 8 * 2**30


@dataclass
class PoolStats:
    """What a pool did since it was made.

    Attributes:
        hits: chunks that were there.
        misses: chunks that were not, damaged ones included.
        puts: chunks that are kept, each key counted once while it is there.
        rejected: chunks that did not fit.
        evictions: chunks that made room.
        bytes: held now.
        damaged: encoded chunks that could not be decoded, and were forgotten.
        uncoded: puts that the codec refused; they are kept as they are.
        refusal: what the codec said when it last refused one.
        foreign: puts of chunks of another model than the codec's profile; of layers of the same shapes, or refused.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    rejected: int = 0
    evictions: int = 0
    bytes: int = 0
    damaged: int = 0
    uncoded: int = 0
    refusal: str = ""
    foreign: int = 0


@dataclass(frozen=True)
class Encoded:
    """The bytes of a chunk.

    Attributes:
        file: open for a tensor.
        homes: device of each layer when the chunk was put, where it is wanted again.
    """

    file: ChunkFile
    homes: tuple[torch.device, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.file.size


class Pool:
    """A bounded map from key to `ChunkCache`. Safe to share among threads.

    With a codec, chunks are kept as the bytes of chunk files, and decoded by every `get` to where they were when they
    were put: on a GPU by kernels, many at once. What the codec refuses (NaN, Inf, layers that are not those of its
    profile, numbers far outside it) is kept as it is, so that nothing is lost, and counted as `uncoded`. Bytes stay in
    this memory, so kernels do not compare their checksums; damage that shows is a miss, and the entry is forgotten.

    Args:
        capacity_bytes: most bytes to hold (default 8 GiB), of keys and values or of their files; what is
            pinned stays.
        device: move chunks, or their bytes, there when they are put; by default chunks stay where they were computed,
            and bytes are in host memory.
        pin_memory: keep chunks, or their bytes, in page-locked host memory, which a GPU reads directly; `device` is
            then not used.
        codec: `get_codec("klt", profile=...)`, or another; None or "raw" keeps chunks as they are.
        eviction: which chunk goes first: "lru", "lfu" (least often used, with ageing), "gdsf" (least often used for its
            size), or an `Eviction` of your own.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        codec: str | Codec | None = None,
        eviction: str | Eviction = "lru",
    ) -> None:
        self.capacity_bytes = DEFAULT_CAPACITY_BYTES if capacity_bytes is None else int(capacity_bytes)
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes={capacity_bytes}: give a positive number of bytes")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs a CUDA device: leave it out to keep chunks in ordinary memory")
        codec = None if codec is None else get_codec(codec)
        self.codec = None if codec is None or codec.name == "raw" else codec
        self.device, self.pin_memory = device, pin_memory
        self.stats = PoolStats()
        self._entries: dict[str, ChunkCache | Encoded] = {}
        self._eviction = get_eviction(eviction)
        self._pins: Counter[str] = Counter()
        self._lock = threading.RLock()

    @property
    def notes(self) -> list[str]:
        """What who uses these chunks should know: that they are not exact, or take more memory than was meant."""
        if self.codec is None:
            return []
        said, name = [], f"codec {self.codec.name!r}"
        if self.codec.needs_profile:
            said.append(
                f"chunks are kept with {name}, level {self.codec.level}, which is lossy: answers may differ from those "
                "of exact chunks"
            )
        if self.stats.uncoded:
            said.append(
                f"{name} refused {self.stats.uncoded} chunks since the store was made, which are kept as they are; the "
                f"last because: {self.stats.refusal}"
            )
        if self.stats.foreign:
            said.append(
                f"{self.stats.foreign} chunks are of another model than the profile of {name}, or of the same in "
                "another dtype: far more may be lost than was measured; make one of this model (`blendkv profile`)"
            )
        return said

    def get(self, key: str) -> ChunkCache | None:
        """The chunk under `key`, now the most recently used, or None; counted as a hit or a miss."""
        return self._fetch([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[ChunkCache | None]:
        """`get` for every key; encoded chunks are decoded together."""
        return [self.get(key) for key in keys] if self.codec is None else self._fetch(keys)

    def put(self, chunk: ChunkCache) -> bool:
        """Keeps a chunk under its key; False (and counted) if it cannot fit beside what is pinned."""
        return self._keep(chunk.key, self._entry(chunk))

    def put_many(self, chunks: Sequence[ChunkCache]) -> list[tuple[ChunkCache, bool]]:
        """`put` for every chunk.

        Returns:
            For each chunk what `get` makes of it, which is another with a codec that loses something, and whether it
            was kept.
        """
        if self.codec is None:
            return [(chunk, self.put(chunk)) for chunk in chunks]
        entries = [self._entry(chunk) for chunk in chunks]
        kept = [self._keep(chunk.key, entry) for chunk, entry in zip(chunks, entries, strict=True)]
        decoded = [
            chunk if isinstance(made, ChunkFileError) else made
            for chunk, made in zip(chunks, _decode(entries), strict=True)
        ]
        return list(zip(decoded, kept, strict=True))

    def _entry(self, chunk: ChunkCache) -> ChunkCache | Encoded:
        """A chunk in the form and the memory in which it is kept."""
        if self.codec is not None:
            profile = getattr(self.codec, "profile", None)
            made_of = profile.about.get("fingerprint") if isinstance(profile, Profile) else None
            if made_of not in (None, chunk.fingerprint):
                with self._lock:
                    self.stats.foreign += 1
            try:
                data = encode_chunk(chunk, self.codec)
            except ValueError as error:
                with self._lock:
                    self.stats.uncoded += 1
                    self.stats.refusal = str(error)
            else:
                tensor = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
                if self.pin_memory:
                    tensor = tensor.pin_memory()
                elif self.device is not None:
                    tensor = tensor.to(self.device)
                return Encoded(ChunkFile(tensor, codec=self.codec), tuple(k.device for k in chunk.keys))
        if self.pin_memory:
            return chunk.pin_memory()
        return chunk if self.device is None else chunk.to(self.device)

    def _keep(self, key: str, entry: ChunkCache | Encoded) -> bool:
        with self._lock:
            known = key in self._entries
            if known:
                self._drop(key)  # what was there may be what somebody found wanting
            pinned = sum(self._entries[key].nbytes for key in self._pins if key in self._entries)
            if entry.nbytes + pinned > self.capacity_bytes:
                self.stats.rejected += 1
                return False
            while self.stats.bytes + entry.nbytes > self.capacity_bytes:
                self._drop(next(key for key in self._eviction.victims() if not self._pins[key]))
                self.stats.evictions += 1
            self._entries[key] = entry
            self._eviction.put(key, entry.nbytes)
            self.stats.puts += not known
            self.stats.bytes += entry.nbytes
            return True

    def _fetch(self, keys: Sequence[str]) -> list[ChunkCache | None]:
        """Looks keys up, decodes what is encoded without holding the lock, and counts."""
        with self._lock:
            found = {key: self._entries[key] for key in keys if key in self._entries}
            for key in found:
                self._eviction.used(key)
        decoded = dict(zip(found, _decode(list(found.values())), strict=True))
        with self._lock:
            for key, chunk in decoded.items():
                if isinstance(chunk, ChunkFileError):
                    self.stats.damaged += 1
                    if self._entries.get(key) is found[key]:
                        self._drop(key)
            chunks = [None if isinstance(chunk := decoded.get(key), ChunkFileError) else chunk for key in keys]
            self.stats.misses += (missed := sum(chunk is None for chunk in chunks))
            self.stats.hits += len(keys) - missed
        return chunks

    def delete(self, key: str) -> None:
        """Forgets a chunk, pinned or not; an unknown key is fine."""
        with self._lock:
            if key in self._entries:
                self._drop(key)
            self._pins.pop(key, None)

    @contextmanager
    def pin(self, *keys: str) -> Generator[None]:
        """Keeps entries from being evicted while the context lasts. Pins nest."""
        with self._lock:
            self._pins.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._pins.subtract(keys)
                self._pins = +self._pins

    def keys(self) -> list[str]:
        """Keys, that which would be evicted first at the front."""
        with self._lock:
            return list(self._eviction.victims())

    def clear(self) -> None:
        """Forgets everything that is not pinned."""
        with self._lock:
            for key in [key for key in self._entries if not self._pins[key]]:
                self._drop(key)

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Whether a key is held; not counted."""
        return key in self._entries

    def _drop(self, key: str) -> None:
        self.stats.bytes -= self._entries.pop(key).nbytes
        self._eviction.drop(key)


def _decode(entries: Sequence[ChunkCache | Encoded]) -> list[ChunkCache | ChunkFileError]:
    """Chunks of entries, those of one device together; an error for each that is damaged."""
    decoded: dict[int, ChunkCache | ChunkFileError] = {}
    encoded: dict[torch.device, list[tuple[int, Encoded]]] = {}
    for i, entry in enumerate(entries):
        if isinstance(entry, Encoded):
            encoded.setdefault(entry.homes[0], []).append((i, entry))
        else:
            decoded[i] = entry
    for device, those in encoded.items():
        for (i, entry), chunk in zip(those, decode_each([entry.file for _, entry in those], device), strict=True):
            decoded[i] = chunk if isinstance(chunk, ChunkFileError) else _spread(chunk, entry.homes)
    return [decoded[i] for i in range(len(entries))]


def _spread(chunk: ChunkCache, homes: Sequence[torch.device]) -> ChunkCache:
    """A chunk with each layer on its own device."""
    if len(set(homes)) == 1:
        return chunk
    keys, values = (tuple(t.to(home) for t, home in zip(s, homes, strict=True)) for s in (chunk.keys, chunk.values))
    return replace(chunk, keys=keys, values=values)
