"""Chunks in memory, on CPU or GPU, as they are or encoded: LRU by bytes, with pins and counters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec, get_codec
from blendkv.errors import ChunkFileError
from blendkv.expanding import decode_each
from blendkv.stores.coding import Coding, CodingStats
from blendkv.stores.deadline import Budget
from blendkv.stores.eviction import Eviction, get_eviction

DEFAULT_CAPACITY_BYTES = 8 * 2**30


@dataclass
class PoolStats(CodingStats):
    """What a pool did since it was made; `CodingStats` are of what it was to encode, and kept as it is if refused.

    Attributes:
        hits: chunks that were there.
        misses: chunks that were not, damaged ones included.
        puts: chunks that are kept, each key counted once while it is there.
        rejected: chunks that did not fit.
        evictions: chunks that made room.
        bytes: held now.
        damaged: encoded chunks that could not be decoded, and were forgotten.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    rejected: int = 0
    evictions: int = 0
    bytes: int = 0
    damaged: int = 0


@dataclass(frozen=True)
class Fetched:
    """What came of asking for a chunk.

    Attributes:
        chunk: or None.
        tier: where it came from: "memory", or the URL of a store.
        level: name of the level that it is of, where it is not as the tiers' codec writes chunks.
        nbytes: that were read for it, if it was read whole.
    """

    chunk: ChunkCache | None
    tier: str = ""
    level: str = ""
    nbytes: int = 0


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
        self.device, self.pin_memory = device, pin_memory
        self.stats = PoolStats()
        self._coding = Coding(None if codec is None else get_codec(codec), self.stats)
        self.codec = self._coding.codec
        self.on_evict: Callable[[str, ChunkCache | Encoded], None] | None = None
        """Called with what has just made room for something else."""
        self._entries: dict[str, ChunkCache | Encoded] = {}
        self._eviction = get_eviction(eviction)
        self._pins: Counter[str] = Counter()
        self._lock = threading.RLock()

    @property
    def notes(self) -> list[str]:
        """What who uses these chunks should know: that they are not exact, or take more memory than was meant."""
        return [] if self.codec is None else self._coding.notes(instead="kept as they are")

    def get(self, key: str) -> ChunkCache | None:
        """The chunk under `key`, now the most recently used, or None; counted as a hit or a miss."""
        return self._fetch([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[ChunkCache | None]:
        """`get` for every key; encoded chunks are decoded together."""
        return [self.get(key) for key in keys] if self.codec is None else self._fetch(keys)

    def fetch(
        self, keys: Sequence[str], homes: Sequence[torch.device] = (), budget: Budget | None = None
    ) -> list[Fetched]:
        """What a library asks: chunks, and where they came from. Memory has no use for homes and budget."""
        return [Fetched(chunk, "" if chunk is None else "memory") for chunk in self.get_many(keys)]

    def peek(self, key: str) -> ChunkCache | Encoded | None:
        """What is kept under a key; neither counted nor decoded, and no more recently used than before."""
        return self._entries.get(key)

    def put(self, chunk: ChunkCache, key: str | None = None) -> bool:
        """Keeps a chunk under its key, or another one; False (and counted) if it cannot fit beside what is pinned."""
        return self._keep(chunk.key if key is None else key, self._entry(chunk))

    def put_file(
        self, key: str, data: bytes, homes: Sequence[torch.device], opened: Callable[[Tensor], ChunkFile] = ChunkFile
    ) -> bool:
        """Keeps the bytes of a chunk file that was verified; they are decoded by every `get`.

        Args:
            key: of the chunk.
            data: the file.
            homes: where each layer is wanted.
            opened: opens it, with whatever secret or codec that takes.

        Raises:
            ChunkFileError: if this is no chunk file that can be read here.
        """
        return self._keep(key, self._encoded(data, homes, opened))

    def put_many(self, chunks: Sequence[ChunkCache], budget: Budget | None = None) -> list[tuple[ChunkCache, bool]]:
        """`put` for every chunk; memory has no use for a budget.

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
        if self.codec is not None and (data := self._coding.encode(chunk)) is not None:
            return self._encoded(data, tuple(k.device for k in chunk.keys), self._open)
        if self.pin_memory:
            return chunk.pin_memory()
        return chunk if self.device is None else chunk.to(self.device)

    def _open(self, tensor: Tensor) -> ChunkFile:
        return ChunkFile(tensor, codec=self.codec)

    def _encoded(self, data: bytes, homes: Sequence[torch.device], opened: Callable[[Tensor], ChunkFile]) -> Encoded:
        tensor = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if self.pin_memory:
            tensor = tensor.pin_memory()
        elif self.device is not None:
            tensor = tensor.to(self.device)
        return Encoded(opened(tensor), tuple(homes))

    def _keep(self, key: str, entry: ChunkCache | Encoded) -> bool:
        evicted: list[tuple[str, ChunkCache | Encoded]] = []
        kept = self._store(key, entry, evicted)
        if self.on_evict is not None:
            for gone in evicted:
                self.on_evict(*gone)
        return kept

    def _store(self, key: str, entry: ChunkCache | Encoded, evicted: list[tuple[str, ChunkCache | Encoded]]) -> bool:
        with self._lock:
            known = key in self._entries
            if known:
                self._drop(key)  # what was there may be what somebody found wanting
            pinned = sum(self._entries[key].nbytes for key in self._pins if key in self._entries)
            if entry.nbytes + pinned > self.capacity_bytes:
                self.stats.rejected += 1
                return False
            while self.stats.bytes + entry.nbytes > self.capacity_bytes:
                victim = next(key for key in self._eviction.victims() if not self._pins[key])
                evicted.append((victim, self._entries[victim]))
                self._drop(victim)
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


def decode_at(files: Sequence[ChunkFile], homes: Sequence[torch.device]) -> list[ChunkCache | ChunkFileError]:
    """Chunks of files of one model, or an error for each that is damaged, with every layer where it is wanted."""
    return [
        chunk if isinstance(chunk, ChunkFileError) else _spread(chunk, homes) for chunk in decode_each(files, homes[0])
    ]


def _decode(entries: Sequence[ChunkCache | Encoded]) -> list[ChunkCache | ChunkFileError]:
    """Chunks of entries, those of the same homes together; an error for each that is damaged."""
    decoded: dict[int, ChunkCache | ChunkFileError] = {}
    encoded: dict[tuple[torch.device, ...], list[tuple[int, Encoded]]] = {}
    for i, entry in enumerate(entries):
        if isinstance(entry, Encoded):
            encoded.setdefault(entry.homes, []).append((i, entry))
        else:
            decoded[i] = entry
    for homes, those in encoded.items():
        decoded |= zip([i for i, _ in those], decode_at([entry.file for _, entry in those], homes), strict=True)
    return [decoded[i] for i in range(len(entries))]


def _spread(chunk: ChunkCache, homes: Sequence[torch.device]) -> ChunkCache:
    """A chunk with each layer on its own device."""
    if len(set(homes)) == 1:
        return chunk
    keys, values = (tuple(t.to(home) for t, home in zip(s, homes, strict=True)) for s in (chunk.keys, chunk.values))
    return replace(chunk, keys=keys, values=values)
