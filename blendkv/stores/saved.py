"""A folder of entries that is only read: what `save_pretrained` wrote, or a snapshot of the hub, which is links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

from blendkv.errors import StoreError
from blendkv.stores.base import Entry, StoreStats
from blendkv.stores.files import fault_of, read_range
from blendkv.stores.keys import is_key, key_of, place_of
from blendkv.stores.urls import url_of

_FOLDERS = frozenset(f"{number:02x}" for number in range(256))


class SavedStore:
    """Bytes under keys in `folder/ab/ab12....bkv`, as a `DiskStore` writes them, but never changed from here.

    Links are followed, for the hub's cache is made of them; what they lead to is used only if it is a chunk file of
    that key. An entry that a reader found wanting stays where it is, and is not read again.

    Args:
        folder: with the entries.

    Attributes:
        read_only: True: puts are refused and counted, deletes do nothing.
        local: True: nobody is kept waiting.

    Raises:
        StoreError: if there is no such folder.
    """

    local = read_only = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.path.expanduser(folder))
        if not os.path.isdir(self._root):
            raise StoreError(f"there is no folder {self._root}: look at the path")
        self.url, self.stats = url_of(self._root), StoreStats()
        self._bad: set[str] = set()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None; not checked."""
        if not is_key(key) or key in self._bad:
            return self._missed("quarantined" if is_key(key) else "key")
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return self._missed("link")
                end = status.st_size if stop is None else min(stop, status.st_size)
                data = read_range(fd, start, end)
            finally:
                os.close(fd)
        except OSError as error:
            return self._missed(fault_of(error))
        if len(data) != max(0, end - start):
            return self._missed("length")  # somebody cut the file while it was read
        self.stats.count("hits")
        return data

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, those that there are."""
        return {key: data for key in keys if (data := self.get(key)) is not None}

    def size(self, key: str) -> int | None:
        """Bytes of an entry, or None."""
        if is_key(key) and key not in self._bad:
            with suppress(OSError):
                status = os.stat(self._path(key))
                return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def put(self, key: str, data: bytes) -> bool:
        """False: nothing is written."""
        self.stats.count("put_failures", "readonly")
        return False

    def delete(self, key: str) -> None:
        """Nothing is deleted."""

    def quarantine(self, key: str) -> None:
        """Does not read an entry again."""
        self._bad.add(key)

    def keys(self) -> Iterator[str]:
        """Keys of all entries."""
        for name in sorted(_FOLDERS.intersection(self._listed(""))):
            yield from (key for file in self._listed(name) if (key := key_of(file)) and key not in self._bad)

    def entries(self) -> Iterator[Entry]:
        """All entries; when they were used is not known."""
        return (Entry(key, size) for key in self.keys() if (size := self.size(key)) is not None)

    def close(self) -> None:
        """Nothing to let go of."""

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *place_of(key))

    def _listed(self, name: str) -> list[str]:
        with suppress(OSError):
            return os.listdir(os.path.join(self._root, name))
        return []

    def _missed(self, fault: str) -> None:
        self.stats.count("misses", fault)
