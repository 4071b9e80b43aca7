"""Chunks in memory over stores of bytes, the nearest first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Literal, Self

import torch

from blendkv.chunk import ChunkCache
from blendkv.codecs import Codec, Profiles, get_codec
from blendkv.container.seals import check_secret
from blendkv.levelkeys import LevelId, id_in
from blendkv.stores.backlog import Backlog
from blendkv.stores.base import Store
from blendkv.stores.coding import Coding
from blendkv.stores.deadline import Budget
from blendkv.stores.filing import Filing, Form
from blendkv.stores.opening import Opener
from blendkv.stores.pool import Encoded, Fetched, Pool, decode_at
from blendkv.stores.reading import Reader, TieredStats, lands
from blendkv.stores.writing import DEFAULT_QUEUE_BYTES, EXIT_SECONDS, Writer

__all__ = ["TieredStats", "TieredStore"]

Write = Literal["through", "behind", "back"]


class TieredStore:
    """A pool over stores of bytes: a folder, a server of the region, a bucket far away. Safe to share among threads.

    A chunk is looked for in memory, then in each store in turn. Bytes are trusted only when every checksum (or tag) and
    the key of what is in them agree; those that do not are quarantined or deleted, and the next store is asked. What a
    farther store had is put into memory and into the nearer ones. No fault of a store raises.

    With levels, each store has a chunk several times: its own entry, and one for each level, under keys of their own
    (`levelkeys.level_key`). A loading controller chooses among them; without one a level is used where the chunk's own
    entry is not to be had. Each entry is evicted for itself; `delete` forgets all of a chunk.

    Args:
        *tiers: a `Pool` first, if it is to be yours, then stores, nearest first.
        codec: how chunks are encoded for the stores; None or "raw" loses nothing. A pool with a codec of its own keeps
            the very bytes of the stores.
        levels: that are written beside each chunk, the least lossy first: numbers of the codec's levels, or codecs.
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
        levels: codecs of the levels.
        secret, key_id, profiles, write: as they were given.

    Raises:
        ValueError: without a store, or for settings that make no sense.
    """

    def __init__(
        self,
        *tiers: Pool | Store,
        codec: str | Codec | None = None,
        levels: Sequence[int | Codec] = (),
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
        self._filing = Filing(self._coding, levels, secret, key_id)
        self.levels = self._filing.codecs
        self.opener = Opener(self.codec, secret, key_id, profiles, self.levels)
        self._reader = Reader(self.opener, self.stats, secret is not None)
        self.discard = self._reader.discard
        self.key_id, self.profiles, self._queue_bytes = key_id, profiles, queue_bytes
        self._writers = [Writer(store, queue_bytes) for store in self.stores]
        self._writable = [w for w in self._writers if not getattr(w.store, "read_only", False)]
        self._lock = threading.Lock()
        self.backlog: Backlog | None = None
        """What only memory has, with `write="back"`."""
        if write == "back":
            self.backlog = Backlog(self.pool, self._writable, self._filing, self.opener, self.stats)

    # -- what a library asks ----------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether others than this user may read or write one of the stores."""
        return not all(getattr(store, "local", False) for store in self.stores)

    @property
    def notes(self) -> list[str]:
        """What who uses these chunks should know."""
        coded = self._coding.notes(instead="not kept in stores")
        return [*coded, *self._filing.notes(), *self.stats.notes(self._writers)]

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
        forms = {key: self.forms(key) for key in dict.fromkeys(keys)}
        found: dict[str, Fetched] = {}
        for number in range(1 + len(self.levels)):
            wanted = {key: those[number] for key, those in forms.items() if key not in found}
            found |= self.remembered(wanted)
            for level in range(len(self.stores)):
                if lacking := {key: form for key, form in wanted.items() if key not in found}:
                    found |= self.take(level, lacking, homes, budget)
        self.count([found[key].tier for key in keys if key in found], len(forms.keys() - found.keys()))
        return [found.get(key, Fetched(None)) for key in keys]

    def forms(self, key: str) -> list[Form]:
        """Forms in which a chunk may be had: as the tiers' codec writes it, then its levels as they were given."""
        return self._filing.forms(key)

    def remembered(self, wanted: Mapping[str, Form]) -> dict[str, Fetched]:
        """Chunks in memory, by key, each in one form that is asked for."""
        asked = {key: form for key, form in wanted.items() if form.main or form.entry in self.pool}
        got = self.pool.fetch([form.entry for form in asked.values()])
        return {
            key: Fetched(one.chunk, one.tier, form.unless(one.chunk))
            for (key, form), one in zip(asked.items(), got, strict=True)
            if one.chunk is not None
        }

    def held(self, form: Form) -> LevelId | None:
        """What memory has under the entry of a form, which another codec may have written; None: nothing."""
        entry = self.pool.peek(form.entry)
        if entry is None:
            return None
        return id_in(entry.file.header) if isinstance(entry, Encoded) else form.id_of(entry)

    def take(
        self,
        level: int,
        wanted: Mapping[str, Form],
        homes: Sequence[torch.device] = (),
        budget: Budget | None = None,
        accepts: Callable[[LevelId], bool] | None = None,
    ) -> dict[str, Fetched]:
        """Chunks from one store, which memory and nearer stores then have too.

        Args:
            level: number of the store.
            wanted: by key of the chunk, the form in which it is asked for.
            homes: where each layer is wanted; the CPU if that is left open.
            budget: how long a store that is not local may be waited for.
            accepts: whether a file of such a level may be used; None: any.

        Returns:
            Those that it has and that are what their keys say, by key of the chunk.
        """
        store, writer, found = self.stores[level], self._writers[level], {}
        homes = tuple(homes) or (torch.device("cpu"),)
        by_codec: dict[Codec | None, list[str]] = {}
        for form in wanted.values():
            by_codec.setdefault(None if form.main else form.codec, []).append(form.entry)
        to_card = lands(store, homes) and not level and self.pool.codec is None  # else somebody wants the bytes
        data = {} if to_card else self._reader.read(writer, [form.entry for form in wanted.values()], budget)
        chunks: dict[str, ChunkCache] = {}
        sizes = {entry: len(content) for entry, content in data.items()}
        for codec, entries in by_codec.items():
            if to_card:
                chunks |= self._reader.land(writer, entries, homes, sizes, codec, accepts)
            else:
                those = {entry: data[entry] for entry in entries if entry in data}
                chunks |= self._reader.decode(store, those, homes, codec, accepts)
        for key, form in wanted.items():
            if form.entry in chunks:
                chunk = chunks[form.entry]
                found[key] = Fetched(chunk, store.url, form.unless(chunk), sizes[form.entry])
                self.keep(level, form.entry, chunk, data.get(form.entry))
        return found

    def waiting(self, level: int, key: str) -> bytes | None:
        """A file that a store is about to be given, or None."""
        return self._writers[level].get(key)

    def keep(self, level: int, entry: str, chunk: ChunkCache, data: bytes | None) -> None:
        """A store had a chunk, or a level of it: memory gets it, and nearer stores its file, if that is at hand."""
        self._remember(entry, chunk, data)
        if data is not None:
            self._promote(level, entry, data)

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
        files = [self._filing.encode(chunk) if wanted else {} for chunk in chunks]
        kept = []
        for chunk, those in zip(self._as_read(chunks, files), files, strict=True):
            if self.backlog is not None and those:  # before memory has it, which may give it up at once
                self.backlog.hold(chunk.key, those if self._coding.lossy else None)
            there = self._remember(chunk.key, chunk, those.get(chunk.key))
            kept.append((chunk, self._write(chunk.key, those, there, budget) if self._writable else there))
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
        """Whether a chunk is in memory, in whatever form; no store is asked."""
        return isinstance(key, str) and any(form.entry in self.pool for form in self.forms(key))

    def keys(self) -> Iterator[str]:
        """Keys of all entries of all tiers, each once; those of levels are among them."""
        seen: set[str] = set()
        for keys in (self.pool.keys(), *(writer.keys() for writer in self._writers), *(s.keys() for s in self.stores)):
            for key in keys:
                if key not in seen:
                    seen.add(key)
                    yield key

    def delete(self, key: str) -> None:
        """Forgets a chunk in every tier, with its levels; an unknown key is fine."""
        if self.backlog is not None:
            self.backlog.forget(key)
        for entry in [form.entry for form in self.forms(key)]:
            self.pool.delete(entry)
            for writer in self._writers:
                writer.drop(entry, wait=True)
                with suppress(Exception):  # a plug-in's, for ours never raise
                    writer.store.delete(entry)

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
            codec=self._coding.writes,
            levels=self.levels,
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
        if self.backlog is not None:
            self.backlog.write_all()
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

    # -- writing ----------------------------------------------------------------------------------------------------

    def _as_read(self, chunks: Sequence[ChunkCache], files: Sequence[dict[str, bytes]]) -> list[ChunkCache]:
        """Chunks as they are read again."""
        if not self._coding.lossy:
            return list(chunks)
        there = [i for i, those in enumerate(files) if chunks[i].key in those]
        made = list(chunks)
        homes = tuple(k.device for k in chunks[0].keys) if chunks else ()
        opened = [self.opener.checked(chunks[i].key, files[i][chunks[i].key], homes[0]) for i in there]
        for i, chunk in zip(there, decode_at(opened, homes) if opened else (), strict=True):
            if isinstance(chunk, ChunkCache):
                made[i] = chunk
        return made

    def _remember(self, entry: str, chunk: ChunkCache, data: bytes | None) -> bool:
        """Puts a chunk into memory, as its bytes where the pool keeps bytes; a level only once, and alone."""
        if self.levels:
            if entry != chunk.key and chunk.key in self.pool:
                return True
            for form in self.forms(chunk.key)[1:]:
                if form.entry != entry:
                    self.pool.delete(form.entry)
        if self.pool.codec is None or data is None:
            return self.pool.put(chunk) if entry == chunk.key else self.pool.put(chunk, entry)
        return self.pool.put_file(entry, data, tuple(k.device for k in chunk.keys), self.opener.open)

    def _write(self, key: str, files: Mapping[str, bytes], in_memory: bool, budget: Budget | None) -> bool:
        """Gives the stores files of a chunk, or says that they are to be given them; whether one took the first."""
        if not files:
            return False
        if self.backlog is not None and in_memory:
            return True
        if self.backlog is not None:
            self.backlog.forget(key)
        writers = self._writable if self.backlog is None else self._writable[:1]
        kept = [[self._write_to(writer, entry, data, budget) for entry, data in files.items()] for writer in writers]
        return any(those[0] for those in kept)

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
