"""What every store does, ours and a plug-in's: a class of tests for pytest. Import it from `blendkv.testing`."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from random import Random
from typing import Any

from blendkv.stores.base import Store, StoreStats

_BAD_KEYS = (
    "",
    "..",
    "../" + "a" * 61,
    "/etc/passwd",
    "a" * 63,
    "a" * 65,
    "A" * 64,
    "g" * 64,
    "a" * 63 + "\n",
    "é" * 64,
)


def key_for(name: object) -> str:
    """A key like those of chunks."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


def bytes_for(name: object, size: int = 1000) -> bytes:
    """Bytes that show whose they are."""
    return Random(repr(name)).randbytes(size)


class StoreContract:
    """Subclass it, and give it a fixture `store` that yields an empty store with room for 64 MiB.

    ```python
    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            store = MyStore(tmp_path)
            yield store
            store.close()
    ```
    """

    large = 9 << 20
    """Bytes of a large entry."""

    def test_is_a_store(self, store: Store) -> None:
        """All methods are there, with counters."""
        assert isinstance(store, Store)
        assert isinstance(store.stats, StoreStats)
        assert isinstance(store.url, str)

    def test_gives_back_what_was_put(self, store: Store) -> None:
        """Bytes, bit by bit, under the key that they were put under."""
        entries = {key_for(i): bytes_for(i, 100 + i) for i in range(20)}
        assert all(store.put(key, data) is True for key, data in entries.items())
        for key, data in entries.items():
            assert store.get(key) == data
            assert store.size(key) == len(data)
        assert sorted(store.keys()) == sorted(entries)

    def test_entries(self, store: Store) -> None:
        """Sizes, and what else is known, of all that is there and of nothing else."""
        assert list(store.entries()) == []
        sizes = {key_for(i): 10 * i for i in range(20)}
        before = time.time()
        for key, size in sizes.items():
            store.put(key, bytes_for(key, size))
        store.get(key_for(1))
        store.delete(key_for(19))
        del sizes[key_for(19)]
        found = list(store.entries())
        assert {entry.key: entry.size for entry in found} == sizes
        assert len(found) == len(sizes)
        for entry in found:  # clocks of some stores tick in seconds
            assert entry.last_used is None or before - 2 < entry.last_used < time.time() + 2
            assert entry.hits is None or entry.hits >= 0
        assert not +store.stats.faults

    def test_unknown_keys_are_misses(self, store: Store) -> None:
        """Absent is None, and no fault."""
        key = key_for("unknown")
        assert store.get(key) is None
        assert store.get(key, 0, 10) is None
        assert store.get(key, 5, 5) is None
        assert store.size(key) is None
        assert store.get_many([key]) == {}
        assert list(store.keys()) == []
        assert not +store.stats.faults

    def test_ranges(self, store: Store) -> None:
        """As slices of bytes; an empty range of an entry is empty, and one behind its end is empty or a miss."""
        key, data = key_for("ranges"), bytes_for("ranges")
        store.put(key, data)
        spans = ((0, 0), (0, 1), (7, 7), (7, 300), (999, 1000), (0, 1000), (990, 2000), (0, None), (500, None))
        for start, stop in spans:
            assert store.get(key, start, stop) == data[start:stop], (start, stop)
        assert not store.get(key, 2000, 2010)
        assert not store.get(key, 300, 7)

    def test_many(self, store: Store) -> None:
        """Those that there are; a key asked for twice is answered once."""
        entries = {key_for(i): bytes_for(i) for i in range(12)}
        for key, data in entries.items():
            store.put(key, data)
        asked = [*entries, key_for("unknown"), next(iter(entries))]
        assert store.get_many(asked) == entries
        assert store.get_many(iter(asked)) == entries
        assert store.get_many([]) == {}

    def test_large(self, store: Store) -> None:
        """More than fits in one message."""
        key, data = key_for("large"), bytes_for("large", self.large)
        assert store.put(key, data)
        assert store.get(key) == data
        assert store.size(key) == len(data)
        for start in (0, 1, (4 << 20) - 1, 4 << 20, len(data) - 5):
            assert store.get(key, start, start + 5) == data[start : start + 5]
        middle = slice((1 << 20) + 3, len(data) - 7)
        assert store.get(key, middle.start, middle.stop) == data[middle]

    def test_overwriting(self, store: Store) -> None:
        """The last put counts, longer or shorter; there is one entry."""
        key = key_for("twice")
        for name, size in (("a", 1000), ("b", 10), ("c", 5000)):
            assert store.put(key, bytes_for(name, size))
            assert store.get(key) == bytes_for(name, size)
            assert store.size(key) == size
        assert list(store.keys()) == [key]

    def test_puts_any_buffer(self, store: Store) -> None:
        """Also one that is changed afterwards."""
        key, data = key_for("buffer"), bytearray(bytes_for("buffer"))
        assert store.put(key, data)  # ty: ignore[invalid-argument-type]
        data[:] = bytes(len(data))
        assert store.get(key) == bytes_for("buffer")

    def test_deleting(self, store: Store) -> None:
        """Gone, and an unknown key is fine."""
        keep, drop = key_for("keep"), key_for("drop")
        store.put(keep, b"keep")
        store.put(drop, b"drop")
        for key in (drop, drop, key_for("unknown")):
            store.delete(key)
        assert store.get(drop) is None
        assert store.size(drop) is None
        assert list(store.keys()) == [keep]
        assert store.get(keep) == b"keep"
        assert store.put(drop, b"again")
        assert store.get(drop) == b"again"

    def test_bad_keys_are_refused(self, store: Store) -> None:
        """No key names a file, or an object, of somebody else; and none raises."""
        for key in _BAD_KEYS:
            assert store.put(key, b"x") is False
            assert store.get(key) is None
            assert store.size(key) is None
            assert store.get_many([key]) == {}
            store.delete(key)
        assert list(store.keys()) == []
        assert store.stats.puts == 0

    def test_counters_add_up(self, store: Store) -> None:
        """Every get is a hit or a miss, every put is counted; nothing else is."""
        keys = [key_for(i) for i in range(6)]
        for key in keys[:3]:
            store.put(key, b"data")
        for key in keys:
            store.get(key)
            store.get(key, 1, 2)
        store.get_many(keys)
        for key in keys:
            store.size(key)
        list(store.keys())
        s = store.stats
        assert (s.hits, s.misses, s.puts, s.put_failures) == (9, 9, 3, 0)
        assert not +s.faults

    def test_threads(self, store: Store) -> None:
        """Many at once: what is read is what somebody put, whole."""
        names, wrong = [f"thread {i}" for i in range(8)], Counter[str]()

        def work(seed: int) -> None:
            random = Random(seed)
            try:
                for _ in range(15):
                    name = random.choice(names)
                    action: Any = random.choice(("put", "get", "get", "range", "delete"))
                    if action == "put":
                        store.put(key_for(name), bytes_for(name, 20_000))
                    elif action == "delete":
                        store.delete(key_for(name))
                    else:
                        start, stop = (0, None) if action == "get" else (77, 9_000)
                        data = store.get(key_for(name), start, stop)
                        wrong["bytes"] += data is not None and data != bytes_for(name, 20_000)[start:stop]
            except Exception as error:
                wrong[repr(error)] += 1

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not +wrong
        for name in names:  # and it still works
            assert store.put(key_for(name), bytes_for(name))
            assert store.get(key_for(name)) == bytes_for(name)

    def test_closing(self, store: Store) -> None:
        """Twice is fine, and nothing raises afterwards."""
        key = key_for("close")
        store.put(key, b"data")
        store.close()
        store.close()
        assert store.get(key) in (None, b"data")
        store.put(key, b"data")
        store.get_many([key])
        store.size(key)
        list(store.keys())
        list(store.entries())
        store.delete(key)
