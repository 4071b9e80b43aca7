"""Entries of one store after another to chunks that may be trusted; those that may not are put out of use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec
from blendkv.errors import ChunkFileError
from blendkv.landing import Landing
from blendkv.levelkeys import LevelId, id_in
from blendkv.stores.base import Store
from blendkv.stores.coding import CodingStats
from blendkv.stores.deadline import Budget
from blendkv.stores.opening import Opener
from blendkv.stores.pool import decode_at
from blendkv.stores.writing import Writer

_NOT_DAMAGED = frozenset({"codec", "profile", "version", "layer0"})
"""Reasons for which a file cannot be read here that say nothing against it."""
LANDING_THREADS = 8
"""That read files for a GPU."""
_LACKING = "; give what they were coded with, codec=get_codec(..., profile=...) or TieredStore(profiles=...)"


@dataclass
class TieredStats(CodingStats):
    """What a tiered store did since it was made; each store and the pool have counters of their own.

    Attributes:
        hits: chunks by where they came from, "memory" or the URL of a store.
        misses: chunks that no tier had, or none that could be used.
        damaged: entries by URL that were not what they should be, and were taken out of the way.
        reasons: what was wrong with those (`ChunkFileError.reason`): "checksum", "truncated", ... are accidents; "key"
            is an entry of something else, "authentication" one that the secret did not seal.
        unreadable: entries that need what is not here, by reason ("profile", "codec", "version").
        promoted: entries that were put into nearer stores, because a farther one had them.
        demoted: entries that were put into the next tier, because they were evicted.
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    promoted: int = 0
    demoted: int = 0

    def notes(self, writers: Sequence[Writer]) -> list[str]:
        """What who uses these chunks should know."""
        said = [
            f"{writer.dropped} puts into {writer.store.url} were dropped: more bytes waited than queue_bytes"
            for writer in writers
            if writer.dropped
        ]
        if self.unreadable:
            why = ", ".join(f"{count} for {reason}" for reason, count in self.unreadable.items())
            said.append(
                f"entries of stores that could not be read here, and were computed instead: {why}"
                + (_LACKING if self.unreadable["profile"] else "")
            )
        if self.damaged:
            where = ", ".join(f"{count} in {url}" for url, count in self.damaged.items())
            said.append(
                f"entries of stores that were damaged or not what their key says, and were put out of use: {where}"
            )
        if forged := self.reasons["authentication"]:
            said.append(
                f"{forged} of them the secret did not seal: somebody else writes there, or the secret is another"
            )
        return said


def lands(store: Store, homes: Sequence[torch.device]) -> bool:
    """Whether files of a store are best read into memory of ours (`Reader.land`): on this machine, for one GPU."""
    local = bool(getattr(store, "local", False)) and hasattr(store, "read_into")
    return local and len(set(homes)) == 1 and homes[0].type == "cuda"


class Reader:
    """Reads entries of stores whole. Safe to share among threads.

    Args:
        opener: says what may be trusted.
        stats: where to count.
        sealed: whether a secret is at hand, so that an entry that it did not seal is a wrong one.
    """

    def __init__(self, opener: Opener, stats: TieredStats, sealed: bool) -> None:
        self._opener, self._stats, self._sealed = opener, stats, sealed
        self._lock = threading.Lock()

    def read(self, writer: Writer, entries: Sequence[str], budget: Budget | None) -> dict[str, bytes]:
        """Bytes that a store has, or is about to be given; one that raises has none."""
        store = writer.store
        data = {entry: waiting for entry in entries if (waiting := writer.get(entry)) is not None}
        local = budget is None or getattr(store, "local", False)
        try:
            with nullcontext() if local else budget.spend():
                return data | store.get_many([entry for entry in entries if entry not in data])
        except Exception:  # a plug-in's, for ours never raise
            store.stats.count("misses", "error", len(entries) - len(data))
            return data

    def decode(
        self,
        store: Store,
        data: Mapping[str, bytes],
        homes: tuple[torch.device, ...],
        codec: Codec | None = None,
        accepts: Callable[[LevelId], bool] | None = None,
    ) -> dict[str, ChunkCache]:
        """Chunks of entries that are what their keys say; others are taken out of the store.

        Args:
            store: that has them.
            data: by key.
            homes: where each layer is wanted.
            codec: that should have written them; None: that of most.
            accepts: whether a file of such a level may be used; None: any.

        Returns:
            By key of the entry.
        """
        files: dict[str, ChunkFile] = {}
        wrong: dict[str, ChunkFileError] = {}
        for entry, content in data.items():
            try:
                file = self._opener.checked(entry, content, homes[0], codec)
                if accepts is None or accepts(id_in(file.header)):
                    files[entry] = file
            except ChunkFileError as error:
                wrong[entry] = error.bare()
        for entry, error in wrong.items():
            self.discard(store, entry, error)
        return self._decoded(store, files, homes)

    def _decoded(
        self, store: Store, files: Mapping[str, ChunkFile], homes: tuple[torch.device, ...]
    ) -> dict[str, ChunkCache]:
        """Chunks of files whose heads are what they should be; those that are damaged are taken out of the store."""
        chunks: dict[str, ChunkCache] = {}
        for entry, chunk in zip(files, decode_at(list(files.values()), homes) if files else (), strict=True):
            if isinstance(chunk, ChunkFileError):
                self.discard(store, entry, chunk)
            else:
                chunks[entry] = chunk
        return chunks

    def land(
        self,
        writer: Writer,
        entries: Sequence[str],
        homes: tuple[torch.device, ...],
        sizes: dict[str, int],
        codec: Codec | None = None,
        accepts: Callable[[LevelId], bool] | None = None,
    ) -> dict[str, ChunkCache]:
        """As `read` and `decode` together, for a store that reads into memory and layers on one device.

        Files are read, verified and copied to the device by several threads, each on its own, so that Python is asked
        few times for a file, however many layers it has. `sizes` gets the bytes of each.
        """
        landing, store = Landing(homes[0]), writer.store
        into: Any = getattr(store, "read_into", None)

        def one(entry: str) -> ChunkFile | ChunkCache | ChunkFileError | None:
            try:
                data: bytes | Tensor | None = writer.get(entry)
                data = landing.filled(partial(into, entry)) if data is None else data
                if data is None:
                    return None
                sizes[entry] = len(data)
                file = self._opener.checked(entry, data, homes[0], codec)
                if accepts is not None and not accepts(id_in(file.header)):
                    return None
                chunk = landing.land(file)
                return file if chunk is None else chunk
            except ChunkFileError as error:
                return error.bare()
            except Exception:  # a plug-in's, for ours never raise
                store.stats.count("misses", "error")
                return None

        try:
            with ThreadPoolExecutor(min(LANDING_THREADS, len(entries)), "blendkv-landing") as threads:
                landed = dict(zip(entries, threads.map(one, entries), strict=True))
        except RuntimeError:  # this process can have no more threads
            landed = {entry: one(entry) for entry in entries}
        for entry, found in landed.items():
            if isinstance(found, ChunkFileError):
                self.discard(store, entry, found)
        files = {entry: found for entry, found in landed.items() if isinstance(found, ChunkFile)}
        chunks = {entry: found for entry, found in landed.items() if isinstance(found, ChunkCache)}
        return chunks | self._decoded(store, files, homes)

    def discard(self, store: Store, entry: str, error: ChunkFileError) -> None:
        """Takes a wrong entry out of use, and counts it; what only cannot be read here stays."""
        if error.reason in _NOT_DAMAGED or (error.reason == "authentication" and not self._sealed):
            with self._lock:
                self._stats.unreadable[error.reason] += 1
            return
        with self._lock:
            self._stats.damaged[store.url] += 1
            self._stats.reasons[error.reason] += 1
        with suppress(Exception):  # a plug-in's, for ours never raise
            getattr(store, "quarantine", store.delete)(entry)
