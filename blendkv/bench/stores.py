"""What stores and the pool take for an entry: `blendkv bench stores`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch

from blendkv.bench.measure import median
from blendkv.bench.results import Row, device_name, versions
from blendkv.chunk import ChunkCache
from blendkv.container.format import MAGIC, PRELUDE, VERSION
from blendkv.errors import StoreError
from blendkv.stores import DiskStore, Pool, Store, open_store
from blendkv.stores.eviction import POLICIES

MOST_BYTES = 1 << 30
"""Of one size and direction; of large entries fewer are moved than were asked for, but at least `FEWEST`."""
FEWEST = 5
GETS = 20_000
"""Timed gets of each pool."""


def store_rows(url: str | None, sizes: Sequence[int], repeats: int = 200, seed: int = 0) -> Iterator[Row]:
    """Rates of get and put; for a folder beside a plain file read and write of the same bytes, in turn.

    What is written is removed again, also after an error. In a folder all of it happens in a new folder within, with a
    store of its own, so that nothing that is there is touched or gives way.

    Args:
        url: of `open_store`; None is a folder of the system's for temporary files, and is called `disk`.
        sizes: bytes of entries.
        repeats: turns of each size, at most `MOST_BYTES` of each; the median counts.
        seed: of the bytes.

    Yields:
        For each size `store`, `size`, `turns`, `get_mb_s`, `put_mb_s` (10^6 bytes a second), and for a folder
        `plain_get_mb_s`, `plain_put_mb_s`, `get_ratio` and `put_ratio`: medians over turns of the plain time by the
        store's. A ratio of two times that followed each other says more than that of two medians where a machine's
        speed changes meanwhile.

    Raises:
        StoreError: if the store cannot be opened.
        ValueError: if an entry cannot be put, or is not what was put.
    """
    folder = _folder_of(url)
    with _opened(url, folder) as (store, plain):
        for size in sizes:
            turns = max(FEWEST, min(repeats, MOST_BYTES // size))
            data = _entry(size, seed)
            seconds = _turns(store, plain, data, turns)
            rates = {f"{name}_mb_s": size / median(times) / 1e6 for name, times in seconds.items()}
            ratios = {
                f"{name}_ratio": median(p / s for p, s in zip(seconds[f"plain_{name}"], seconds[name], strict=True))
                for name in ("get", "put")
                if plain is not None
            }
            yield {
                "bench": "stores",
                "device": device_name(torch.device("cpu")),
                "store": store.url if folder is None else url or "disk",
                "size": size,
                "turns": turns,
                **rates,
                **ratios,
                "versions": versions(),
            }


def pool_rows(entries: Sequence[int] = (10, 1_000, 10_000), gets: int = GETS, seed: int = 0) -> Iterator[Row]:
    """Microseconds of `Pool.get` of a chunk that is there, not encoded, by the number of chunks and eviction policy.

    Yields:
        `eviction`, `entries`, `get_us` (median) and `get_us_p99`; keys are asked for at random.
    """
    for count in entries:
        chunks = [_chunk(number) for number in range(count)]
        keys = [chunks[i].key for i in np.random.default_rng(seed).integers(0, count, gets)]
        for policy in POLICIES:
            pool = Pool(eviction=policy)
            for chunk in chunks:
                pool.put(chunk)
            seconds = [_timed(pool.get, key)[0] for key in keys]
            if pool.stats.hits != gets:
                raise ValueError(f"a pool of {count} chunks missed {pool.stats.misses} of them: it is broken")
            yield {
                "bench": "pool",
                "device": device_name(torch.device("cpu")),
                "eviction": policy,
                "entries": count,
                "get_us": median(seconds) * 1e6,
                "get_us_p99": float(np.quantile(seconds, 0.99)) * 1e6,
                "versions": versions(),
            }


def _turns(store: Store, plain: Path | None, data: bytes, turns: int) -> dict[str, list[float]]:
    """Seconds of each turn of `put`, `get`, and of `plain_put`, `plain_get` if there is a plain file.

    Every put is of what is not there: removing the last one is not timed. (Some file systems write a file that replaces
    another to the disk at once.)
    """
    key = token_hex(32)
    calls: dict[str, Callable[[], Any]] = {"put": lambda: store.put(key, data), "get": lambda: store.get(key)}
    before: dict[str, Callable[[], Any]] = {"put": lambda: store.delete(key)}
    if plain is not None:
        calls |= {"plain_put": lambda: _write(plain, data), "plain_get": lambda: _read(plain)}
        before["plain_put"] = lambda: plain.unlink(missing_ok=True)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for way in ("put", "get"):
            names = [name for name in calls if name.endswith(way)]
            for turn in range(-1, turns):  # the first is not counted
                for name in names if turn % 2 else reversed(names):  # who goes first changes
                    before.get(name, bool)()
                    taken, what = _timed(calls[name])
                    if what is not True and what != data:
                        faults = ", ".join(store.stats.faults) or "none"
                        raise ValueError(f"{store.url}: {name} of {len(data)} bytes failed (faults: {faults})")
                    if turn >= 0:
                        seconds[name].append(taken)
                    del what
    finally:
        store.delete(key)
    return seconds


@contextmanager
def _opened(url: str | None, folder: str | None) -> Generator[tuple[Store, Path | None]]:
    """A store, and where a plain file may be written beside its entries, if they are files."""
    if folder is None:
        store = open_store(str(url))
        try:
            yield store, None
        finally:
            store.close()
        return
    if url is not None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}; choose another folder") from error
    with tempfile.TemporaryDirectory(prefix="blendkv-bench-", dir=folder or None) as within:
        yield DiskStore(Path(within) / "store"), Path(within) / "plain"


def _folder_of(url: str | None) -> str | None:
    """The folder that a URL names, "" for one of the system's choice, None if it names none."""
    if url is None:
        return ""
    if "://" not in url:
        return os.path.expanduser(url)
    return unquote(urlsplit(url).path) if url.lower().startswith("file://") else None


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: Path, data: bytes) -> bool:
    with open(path, "wb") as file:
        return file.write(data) == len(data)


def _entry(size: int, seed: int) -> bytes:
    """Random bytes that begin as a chunk file does, so that a store that checks its length does so."""
    if size < PRELUDE.size:
        raise ValueError(f"an entry of {size} bytes is none: at least {PRELUDE.size}")
    head = PRELUDE.pack(MAGIC, VERSION, 0, 0, size, 0)
    return head + np.random.default_rng(seed).bytes(size - len(head))


def _chunk(number: int) -> ChunkCache:
    """A chunk of two tokens that is small, and like no other."""
    states = (torch.zeros(1, 2, 2),)
    return ChunkCache(torch.tensor([number, 0]), states, states, fingerprint="0" * 32)


def _timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    what = call(*arguments)
    return time.perf_counter() - start, what
