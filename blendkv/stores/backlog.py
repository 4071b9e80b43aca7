"""What only memory has: written when memory gives it up, then handed on by each store to the next (`write="back"`)."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch

from blendkv.chunk import ChunkCache
from blendkv.errors import ChunkFileError
from blendkv.stores.filing import Filing
from blendkv.stores.opening import Opener
from blendkv.stores.pool import Encoded, Pool
from blendkv.stores.reading import TieredStats
from blendkv.stores.writing import Writer


class Backlog:
    """Chunks that no store has been given yet. Safe to share among threads.

    Args:
        pool: the memory.
        writers: of stores that can be written, nearest first.
        filing: makes entries.
        opener: says what is good.
        stats: where to count.
    """

    def __init__(
        self, pool: Pool, writers: Sequence[Writer], filing: Filing, opener: Opener, stats: TieredStats
    ) -> None:
        self._pool, self._writers, self._filing = pool, list(writers), filing
        self._opener, self._stats = opener, stats
        self._waiting: dict[str, dict[str, bytes] | None] = {}
        self._lock = threading.Lock()
        pool.on_evict = _both(pool.on_evict, self.evicted)
        for nearer, farther in pairwise(writers):
            nearer.on_refused = self._demoter(farther)
            if hasattr(nearer.store, "on_evict"):
                setattr(nearer.store, "on_evict", self._demoter(farther))  # noqa: B010
        _ALL.add(self)

    def hold(self, key: str, files: dict[str, bytes] | None) -> None:
        """A chunk is to be written later; without files where those can be made of what memory has."""
        with self._lock:
            self._waiting[key] = files

    def forget(self, key: str) -> None:
        """A chunk need not be written any more."""
        with self._lock:
            self._waiting.pop(key, None)

    def evicted(self, key: str, entry: ChunkCache | Encoded) -> None:
        """Memory has given up an entry: the nearest store gets it, if no store has it."""
        with self._lock:
            if key not in self._waiting:
                return
            files = self._waiting[key]
            self._stats.demoted += 1
        self._write(key, files, entry)

    def write_all(self) -> None:
        """Queues everything for the nearest store."""
        with self._lock:
            waiting = dict(self._waiting)
        for key, files in waiting.items():
            self._write(key, files, self._pool.peek(key), wait=True)

    def _write(
        self, key: str, files: Mapping[str, bytes] | None, entry: ChunkCache | Encoded | None, wait: bool = False
    ) -> None:
        if files is None and entry is None:
            return  # memory is just giving it up, and will tell
        if files is None:
            files = self._files(key, entry)
        for name, data in files.items() if self._writers else ():
            nearest = self._writers[0]
            nearest.put(name, data, drop=not (wait or getattr(nearest.store, "local", False)))
        self.forget(key)

    def _files(self, key: str, entry: ChunkCache | Encoded | None) -> dict[str, bytes]:
        """Of what memory has: the very bytes, and levels made of them, for nothing was lost."""
        if isinstance(entry, ChunkCache):
            return self._filing.encode(entry)
        if entry is None or entry.file.tensor is None:
            return {}
        data = entry.file.tensor.cpu().numpy().tobytes()
        if not self._filing.codecs:
            return {key: data}
        return self._filing.encode(entry.file.read()) | {key: data}

    def _demoter(self, farther: Writer) -> Callable[[str, bytes], None]:
        def demote(key: str, data: bytes) -> None:
            try:  # a good copy may be there: only what is good takes its place
                self._opener.checked(key, data, torch.device("cpu")).verify()
            except ChunkFileError:
                return
            if farther.put(key, data, drop=not getattr(farther.store, "local", False)):
                with self._lock:
                    self._stats.demoted += 1

        return demote


_ALL: WeakSet[Backlog] = WeakSet()


@atexit.register
def _write_all() -> None:
    """The process ends: what only memory has is queued, and `writing` waits for the queues."""
    for backlog in list(_ALL):
        backlog.write_all()


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """One call for two who want to know."""
    if first is None:
        return second

    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call
