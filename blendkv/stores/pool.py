"""Chunks in memory, on CPU or GPU: LRU by bytes, with pins and counters."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from blendkv.chunk import ChunkCache

DEFAULT_CAPACITY_BYTES = 8 * 2**30


@dataclass
class PoolStats:
    """What a pool did since it was made."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    rejected: int = 0
    evictions: int = 0
    bytes: int = 0


class Pool:
    """A bounded map from key to `ChunkCache`. Safe to share among threads.

    Args:
        capacity_bytes: most bytes of keys and values to hold (default 8 GiB); the least recently used chunk that is
            not pinned goes first.
        device: move chunks there when they are put; by default they stay where they were computed.
        pin_memory: keep chunks in page-locked host memory, which a GPU reads directly; `device` is then not used.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.capacity_bytes = DEFAULT_CAPACITY_BYTES if capacity_bytes is None else int(capacity_bytes)
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes={capacity_bytes}: give a positive number of bytes")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs a CUDA device: leave it out to keep chunks in ordinary memory")
        self.device, self.pin_memory = device, pin_memory
        self.stats = PoolStats()
        self._entries: OrderedDict[str, ChunkCache] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._lock = threading.RLock()

    def get(self, key: str) -> ChunkCache | None:
        """The chunk under `key`, now the most recently used, or None; counted as a hit or a miss."""
        with self._lock:
            chunk = self._entries.get(key)
            if chunk is None:
                self.stats.misses += 1
                return None
            self._entries.move_to_end(key)
            self.stats.hits += 1
            return chunk

    def put(self, chunk: ChunkCache) -> bool:
        """Keeps a chunk under its key; False (and counted) if it cannot fit beside what is pinned."""
        if self.pin_memory:
            chunk = chunk.pin_memory()
        elif self.device is not None:
            chunk = chunk.to(self.device)
        with self._lock:
            known = chunk.key in self._entries
            if known:
                self._drop(chunk.key)  # what was there may be what somebody found wanting
            pinned = sum(self._entries[key].nbytes for key in self._pins if key in self._entries)
            if chunk.nbytes + pinned > self.capacity_bytes:
                self.stats.rejected += 1
                return False
            while self.stats.bytes + chunk.nbytes > self.capacity_bytes:
                self._drop(next(key for key in self._entries if not self._pins[key]))
                self.stats.evictions += 1
            self._entries[chunk.key] = chunk
            self.stats.puts += not known
            self.stats.bytes += chunk.nbytes
            return True

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
        """Keys, least recently used first."""
        with self._lock:
            return list(self._entries)

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
