"""Chunks in memory over stores of bytes, the nearest first."""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from weakref import WeakSet

import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec, Profiles, get_codec
from blendkv.container.seals import check_secret
from blendkv.errors import ChunkFileError
from blendkv.stores.base import Store
from blendkv.stores.coding import Coding, CodingStats
from blendkv.stores.deadline import Budget
from blendkv.stores.opening import Opener
from blendkv.stores.pool import Encoded, Fetched, Pool, decode_at
from blendkv.stores.writing import DEFAULT_QUEUE_BYTES, EXIT_SECONDS, Writer

Write = Literal["through", "behind", "back"]
_NOT_DAMAGED = frozenset({"codec", "profile", "version", "layer0"})
"""Reasons for which a file cannot be read here that say nothing against it."""
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


class TieredStore:
    """A pool over stores of bytes: a folder, a server of the region, a bucket far away. Safe to share among threads.

    A chunk is looked for in memory, then in each store in turn. Bytes are trusted only when every checksum (or tag) and
    the key of what is in them agree; those that do not are quarantined or deleted, and the next store is asked. What a
    farther store had is put into memory and into the nearer ones. No fault of a store raises.

    Args:
        *tiers: a `Pool` first, if it is to be yours, then stores, nearest first.
        codec: how chunks are encoded for the stores; None or "raw" loses nothing. A pool with a codec of its own keeps
            the very bytes of the stores.
        write: when stores are written. "through": before `put_many` returns. "behind": by a thread for each store, from
            a queue of bounded size. "back": when memory gives a chunk up, then when the nearer store does or refuses
            it, on `flush`, and when the process ends. None: through to local stores, behind to others.
        secret: of a tenant, 16 to 64 bytes: files are sealed with it, only files that it sealed are read, and keys are
            those that `chunk_key(secret=...)` makes.
        key_id: of the secret, up to 16 bytes, in the head of each file.
        profiles: where profiles of codecs are found (`ChunkFile`); None: where `blendkv profile` puts them.
        queue_bytes: most bytes that wait to be written, for each store; what does not fit is dropped and counted.
            Writing back drops only what a prompt would have to wait for: `flush`, and memory above a local store,
            write it at once.

    Attributes:
        pool: the memory.
        stores: the others, nearest first.
        stats: counters.
        secret, key_id, profiles, write: as they were given.

    Raises:
        ValueError: without a store, or for settings that make no sense.
    """

    def __init__(
        self,
        *tiers: Pool | Store,
        codec: str | Codec | None = None,
        write: Write | None = None,
        secret: bytes | None = None,
        key_id: bytes = b"",
        profiles: Profiles | None = None,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
    ) -> None:
        first = tiers[0] if tiers and isinstance(tiers[0], Pool) else None
        self.pool = Pool() if first is None else first
        self.stores: tuple[Store, ...] = tuple(tiers if first is None else tiers[1:])  # ty: ignore[invalid-assignment]
        _check(self.stores, write, secret)
        codec = self.pool.codec if codec is None else get_codec(codec)
        self.stats, self.secret, self.write = TieredStats(), secret, write
        self._coding = Coding(codec, self.stats, secret, key_id)
        self.codec = self._coding.codec
        self.opener = Opener(self.codec, secret, key_id, profiles)
        self.key_id, self.profiles, self._queue_bytes = key_id, profiles, queue_bytes
        self._writers = [Writer(store, queue_bytes) for store in self.stores]
        self._writable = [w for w in self._writers if not getattr(w.store, "read_only", False)]
        self._dirty: dict[str, bytes | None] = {}
        self._lock = threading.Lock()
        if write == "back":
            self.pool.on_evict = _both(self.pool.on_evict, self._demote)
            for nearer, farther in zip(self._writable, self._writable[1:], strict=False):
                nearer.on_refused = self._demoter(farther)
                if hasattr(nearer.store, "on_evict"):
                    setattr(nearer.store, "on_evict", self._demoter(farther))  # noqa: B010
            _BACK.add(self)

    # -- what a library asks ----------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether others than this user may read or write one of the stores."""
        return not all(getattr(store, "local", False) for store in self.stores)

    @property
    def notes(self) -> list[str]:
        """What who uses these chunks should know."""
        said = self._coding.notes(instead="not kept in stores")
        for writer in self._writers:
            if writer.dropped:
                said.append(
                    f"{writer.dropped} puts into {writer.store.url} were dropped: more bytes waited than queue_bytes"
                )
        if self.stats.unreadable:
            why = ", ".join(f"{count} for {reason}" for reason, count in self.stats.unreadable.items())
            said.append(
                f"entries of stores that could not be read here, and were computed instead: {why}"
                + (_LACKING if self.stats.unreadable["profile"] else "")
            )
        if self.stats.damaged:
            where = ", ".join(f"{count} in {url}" for url, count in self.stats.damaged.items())
            said.append(
                f"entries of stores that were damaged or not what their key says, and were put out of use: {where}"
            )
        if forged := self.stats.reasons["authentication"]:
            said.append(
                f"{forged} of them the secret did not seal: somebody else writes there, or the secret is another"
            )
        return said

    def fetch(
        self, keys: Sequence[str], homes: Sequence[torch.device] = (), budget: Budget | None = None
    ) -> list[Fetched]:
        """Chunks, and where they came from.

        Args:
            keys: of chunks.
            homes: where each layer is wanted; the CPU if that is left open.
            budget: how long stores that are not local may be waited for.

        Returns:
            One a key.
        """
        found = {key: got for key, got in zip(keys, self.pool.fetch(keys), strict=True) if got.chunk is not None}
        lacking = list(dict.fromkeys(key for key in keys if key not in found))
        for level, store in enumerate(self.stores):
            if not lacking:
                break
            data = self._read(level, lacking, budget)
            for key, chunk in self._decoded(store, data, tuple(homes) or (torch.device("cpu"),)).items():
                found[key] = Fetched(chunk, store.url)
                self.keep(level, key, chunk, data[key])
            lacking = [key for key in lacking if key not in found]
        self.count([found[key].tier for key in keys if key in found], len(lacking))
        return [found.get(key, Fetched(None)) for key in keys]

    def waiting(self, level: int, key: str) -> bytes | None:
        """A file that a store is about to be given, or None."""
        return self._writers[level].get(key)

    def keep(self, level: int, key: str, chunk: ChunkCache, data: bytes | None) -> None:
        """A store had a chunk: memory gets it, and nearer stores its file, if that is at hand."""
        self._remember(key, chunk, data)
        if data is not None:
            self._promote(level, key, data)

    def lost(self, url: str) -> None:
        """A chunk that was counted as a hit of a store did not come whole."""
        with self._lock:
            self.stats.hits[url] -= 1
            self.stats.misses += 1

    def count(self, tiers: Sequence[str], misses: int) -> None:
        """Adds hits, by where they came from, and misses."""
        with self._lock:
            self.stats.misses += misses
            self.stats.hits.update(tiers)

    def put_many(self, chunks: Sequence[ChunkCache], budget: Budget | None = None) -> list[tuple[ChunkCache, bool]]:
        """Keeps chunks in memory and in the stores.

        Args:
            chunks: of one model.
            budget: how long stores that are not local may be waited for.

        Returns:
            For each chunk what `get` makes of it, which is another with a codec that loses something, and whether a
            store kept it, or will be asked to; memory, where no store can be written.
        """
        wanted = bool(self._writable) or self.pool.codec is not None
        files = [self._coding.encode(chunk) if wanted else None for chunk in chunks]
        kept = []
        for chunk, data in zip(self._as_read(chunks, files), files, strict=True):
            if self.write == "back" and data is not None:
                with self._lock:  # before memory has it, which may give it up at once
                    self._dirty[chunk.key] = data if self._coding.lossy else None
            there = self._remember(chunk.key, chunk, data)
            kept.append((chunk, self._write(chunk.key, data, there, budget) if self._writable else there))
        return kept

    def get(self, key: str) -> ChunkCache | None:
        """The chunk under a key, or None."""
        return self.fetch([key])[0].chunk

    def get_many(self, keys: Sequence[str]) -> list[ChunkCache | None]:
        """`get` for every key, with one question for all to each store."""
        return [got.chunk for got in self.fetch(keys)]

    def put(self, chunk: ChunkCache) -> bool:
        """Keeps a chunk; False if no store did, or will be asked to."""
        return self.put_many([chunk])[0][1]

    def __contains__(self, key: object) -> bool:
        """Whether a key is in memory; no store is asked."""
        return key in self.pool

    def keys(self) -> Iterator[str]:
        """Keys of all tiers, each once."""
        seen: set[str] = set()
        for keys in (self.pool.keys(), *(writer.keys() for writer in self._writers), *(s.keys() for s in self.stores)):
            for key in keys:
                if key not in seen:
                    seen.add(key)
                    yield key

    def delete(self, key: str) -> None:
        """Forgets a chunk in every tier; an unknown key is fine."""
        with self._lock:
            self._dirty.pop(key, None)
        self.pool.delete(key)
        for writer in self._writers:
            writer.drop(key, wait=True)
            with suppress(Exception):  # a plug-in's, for ours never raise
                writer.store.delete(key)

    def over(self, *stores: Store, profiles: Profiles | None = None) -> TieredStore:
        """The same tiers and settings, with more stores below; to be used instead of this one from then on.

        Args:
            *stores: farther than those that there are.
            profiles: where profiles are found from then on; None: where they are found now.
        """
        self.flush()  # what only memory has is known here alone
        return TieredStore(
            self.pool,
            *self.stores,
            *stores,
            codec=self.codec or "raw",
            write=self.write,
            secret=self.secret,
            key_id=self.key_id,
            profiles=self.profiles if profiles is None else profiles,
            queue_bytes=self._queue_bytes,
        )

    def clear(self) -> None:
        """Forgets every chunk in memory that is written."""
        self.flush()
        self.pool.clear()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until stores have been given everything; False if that took longer than `timeout` seconds."""
        with self._lock:
            dirty = dict(self._dirty)
        for key, data in dirty.items():
            self._write_back(key, data, self.pool.peek(key), wait=True)
        end = None if timeout is None else time.monotonic() + timeout
        done = [writer.flush(None if end is None else max(0.0, end - time.monotonic())) for writer in self._writers]
        return all(done)

    def close(self) -> None:
        """Writes what is not written yet, and closes the stores; memory stays as it is."""
        self.flush(EXIT_SECONDS)
        for store in self.stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, level: int, keys: Sequence[str], budget: Budget | None) -> dict[str, bytes]:
        """Bytes that a store has, or is about to be given; one that raises has none."""
        store, writer = self.stores[level], self._writers[level]
        data = {key: waiting for key in keys if (waiting := writer.get(key)) is not None}
        local = budget is None or getattr(store, "local", False)
        try:
            with nullcontext() if local else budget.spend():
                return data | store.get_many([key for key in keys if key not in data])
        except Exception:  # a plug-in's, for ours never raise
            store.stats.count("misses", "error", len(keys) - len(data))
            return data

    def _decoded(self, store: Store, data: dict[str, bytes], homes: tuple[torch.device, ...]) -> dict[str, ChunkCache]:
        """Chunks of files that are what their keys say; others are taken out of the store."""
        files: dict[str, ChunkFile] = {}
        wrong: dict[str, ChunkFileError] = {}
        for key, content in data.items():
            try:
                files[key] = self.opener.checked(key, content, homes[0])
            except ChunkFileError as error:
                wrong[key] = error.bare()
        chunks: dict[str, ChunkCache] = {}
        for key, chunk in zip(files, decode_at(list(files.values()), homes) if files else (), strict=True):
            if isinstance(chunk, ChunkFileError):
                wrong[key] = chunk
            else:
                chunks[key] = chunk
        for key, error in wrong.items():
            self.discard(store, key, error)
        return chunks

    def discard(self, store: Store, key: str, error: ChunkFileError) -> None:
        """Takes a wrong entry out of use, and counts it; what only cannot be read here stays."""
        if error.reason in _NOT_DAMAGED or (error.reason == "authentication" and self.secret is None):
            with self._lock:
                self.stats.unreadable[error.reason] += 1
            return
        with self._lock:
            self.stats.damaged[store.url] += 1
            self.stats.reasons[error.reason] += 1
        with suppress(Exception):  # a plug-in's, for ours never raise
            getattr(store, "quarantine", store.delete)(key)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _as_read(self, chunks: Sequence[ChunkCache], files: Sequence[bytes | None]) -> list[ChunkCache]:
        """Chunks as they are read again."""
        if not self._coding.lossy:
            return list(chunks)
        there = [i for i, data in enumerate(files) if data is not None]
        made = list(chunks)
        homes = tuple(k.device for k in chunks[0].keys) if chunks else ()
        opened = [self.opener.checked(chunks[i].key, files[i] or b"", homes[0]) for i in there]
        for i, chunk in zip(there, decode_at(opened, homes) if opened else (), strict=True):
            if isinstance(chunk, ChunkCache):
                made[i] = chunk
        return made

    def _remember(self, key: str, chunk: ChunkCache, data: bytes | None) -> bool:
        """Puts a chunk into memory, as its bytes where the pool keeps bytes."""
        if self.pool.codec is None or data is None:
            return self.pool.put(chunk)
        return self.pool.put_file(key, data, tuple(k.device for k in chunk.keys), self.opener.open)

    def _write(self, key: str, data: bytes | None, in_memory: bool, budget: Budget | None) -> bool:
        """Gives the stores a file, or says that they are to be given it; whether one took it."""
        if data is None:
            return False
        if self.write == "back" and in_memory:
            return True
        if self.write == "back":
            with self._lock:
                self._dirty.pop(key, None)
        writers = self._writable[:1] if self.write == "back" else self._writable
        kept = [self._write_to(writer, key, data, budget) for writer in writers]
        return any(kept)

    def _write_to(self, writer: Writer, key: str, data: bytes, budget: Budget | None) -> bool:
        local = getattr(writer.store, "local", False)
        if not (self.write == "through" or (self.write is None and local)):
            return writer.put(key, data, drop=not (local and self.write == "back"))
        with nullcontext() if local or budget is None else budget.spend():
            return writer.put_now(key, data)

    def _promote(self, level: int, key: str, data: bytes) -> None:
        """Puts into the nearer stores what a farther one had."""
        for writer in self._writable:
            if writer in self._writers[:level] and writer.put(key, data):
                with self._lock:
                    self.stats.promoted += 1

    def _demote(self, key: str, entry: ChunkCache | Encoded) -> None:
        """Memory has given up an entry: the nearest store gets it, if no store has it."""
        with self._lock:
            if key not in self._dirty:
                return
            data = self._dirty[key]
            self.stats.demoted += 1
        self._write_back(key, data, entry)

    def _write_back(self, key: str, data: bytes | None, entry: ChunkCache | Encoded | None, wait: bool = False) -> None:
        if data is None and entry is None:
            return  # memory is just giving it up, and will tell
        if isinstance(entry, ChunkCache) and data is None:
            data = self._coding.encode(entry)
        elif isinstance(entry, Encoded) and data is None:
            data = _bytes_of(entry)
        if data is not None and self._writable:
            nearest = self._writable[0]
            nearest.put(key, data, drop=not (wait or getattr(nearest.store, "local", False)))
        with self._lock:
            self._dirty.pop(key, None)

    def _demoter(self, farther: Writer) -> Callable[[str, bytes], None]:
        def demote(key: str, data: bytes) -> None:
            try:  # a good copy may be there: only what is good takes its place
                self.opener.checked(key, data, torch.device("cpu")).verify()
            except ChunkFileError:
                return
            if farther.put(key, data, drop=not getattr(farther.store, "local", False)):
                with self._lock:
                    self.stats.demoted += 1

        return demote


_BACK: WeakSet[TieredStore] = WeakSet()
"""Those that write back, and may have what nobody has written."""


@atexit.register
def _flush_all() -> None:
    """The process ends: what only memory has is queued, and `writing` waits for the queues."""
    for tiers in list(_BACK):
        tiers.flush(0.0)


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """One call for two who want to know."""
    if first is None:
        return second

    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


def _bytes_of(entry: Encoded) -> bytes:
    tensor = entry.file.tensor
    return b"" if tensor is None else tensor.cpu().numpy().tobytes()


def _check(stores: Sequence[Store], write: str | None, secret: bytes | None) -> None:
    if not stores:
        raise ValueError("give at least one store, such as open_store('~/chunks'); for memory alone use a Pool")
    for store in stores:
        if isinstance(store, str):
            raise ValueError(f"{store!r} is not a store yet: open_store({store!r})")
        if not isinstance(store, Store):
            raise ValueError(f"{store!r} is no store; the pool, if any, comes first, then stores")
    if write not in (None, "through", "behind", "back"):
        raise ValueError(f"write={write!r}: choose 'through', 'behind', 'back', or None")
    check_secret(secret)
