"""A store in a dict, that fails when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from blendkv.stores import StoreStats


class DictStore:
    """Bytes in memory.

    Attributes:
        raises: what every call raises.
        refuses: whether puts are refused.
        waits: seconds that a put takes.
        open: puts wait until it is set.
        calls: names of the calls so far.
    """

    def __init__(self, name: str = "dict", local: bool = False) -> None:
        self.url, self.stats, self.local = f"{name}://", StoreStats(), local
        self.entries: dict[str, bytes] = {}
        self.raises: Exception | None = None
        self.refuses, self.waits = False, 0.0
        self.open = threading.Event()
        self.open.set()
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.raises is not None:
            raise self.raises

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        self._called("get")
        data = self.entries.get(key)
        self.stats.count("misses" if data is None else "hits")
        return None if data is None else data[start:stop]

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        self._called("get_many")
        return {key: self.entries[key] for key in keys if key in self.entries}

    def size(self, key: str) -> int | None:
        return len(self.entries[key]) if key in self.entries else None

    def put(self, key: str, data: bytes) -> bool:
        self._called("put")
        self.open.wait(10)
        time.sleep(self.waits)
        if self.refuses:
            self.stats.count("put_failures", "full")
            return False
        self.entries[key] = data
        return True

    def delete(self, key: str) -> None:
        self._called("delete")
        self.entries.pop(key, None)

    def keys(self) -> Iterator[str]:
        return iter(list(self.entries))

    def close(self) -> None:
        self._called("close")
