"""One entry of a store, as a gateway reads it: open once, read in pieces. Everything here may wait for a disk."""

from __future__ import annotations

from typing import Any

from blendkv.container.format import MAGIC, PRELUDE
from blendkv.stores.base import Store


class OpenEntry:
    """An entry that is being read.

    Attributes:
        size: bytes of it.
        etag: of its contents, with quotes: its size and the checksum of its head, which has the checksums of all its
            segments in it. None if it is no chunk file.
    """

    def __init__(self, size: int, etag: bytes | None) -> None:
        self.size, self.etag = size, etag

    def read(self, start: int, stop: int) -> bytes | None:
        """Bytes `[start, stop)`, all of them, or None."""
        raise NotImplementedError

    def read_at_once(self, start: int, stop: int) -> bytes | bytearray | None:
        """The same, if nothing has to be waited for; else None, and `read` may have them."""
        return None

    def close(self) -> None:
        """Lets go of it."""


class FileEntry(OpenEntry):
    """A file that is open: it stays the same, whoever replaces or evicts it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        try:
            super().__init__(source.size, etag_of(source.read(0, PRELUDE.size), source.size))
        except BaseException:
            source.close()
            raise

    def read(self, start: int, stop: int) -> bytes | None:
        """Bytes of the file."""
        try:
            data = self._source.read(start, stop - start)
        except OSError:
            return None
        return data if len(data) == stop - start else None

    def read_at_once(self, start: int, stop: int) -> bytearray | None:
        """Bytes of a file that the system has in memory."""
        return self._source.read_at_once(start, stop - start)

    def close(self) -> None:
        """Closes the file."""
        self._source.close()


class RemoteEntry(OpenEntry):
    """An entry of a store that is asked for ranges."""

    def __init__(self, store: Store, key: str, size: int, head: bytes) -> None:
        super().__init__(size, etag_of(head, size))
        self._store, self._key, self._head = store, key, head

    def read(self, start: int, stop: int) -> bytes | None:
        """Bytes of it, from what was read to begin with if they are there."""
        if stop <= len(self._head):
            return self._head[start:stop]
        data = self._store.get(self._key, start, stop)
        return bytes(data) if data is not None and len(data) == stop - start else None


class BytesEntry(OpenEntry):
    """An entry that is in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data), etag_of(data, len(data)))
        self._data = data

    def read(self, start: int, stop: int) -> bytes | None:
        """Bytes of it."""
        return self._data[start:stop] if (start, stop) != (0, self.size) else self._data

    read_at_once = read


def open_entry(store: Store, key: str, first: int) -> OpenEntry | None:
    """The entry of a key, or None; one use of it.

    Args:
        store: that has it.
        key: of it.
        first: bytes to read at once where each question costs a round trip: those that are wanted first, if they are
            the first ones.
    """
    source = getattr(store, "source", None)
    if source is not None:
        opened = source(key)
        return None if opened is None else FileEntry(opened)
    head = store.get(key, 0, max(first, PRELUDE.size))
    return None if head is None else _remote(store, key, bytes(head))


def look_at(store: Store, key: str) -> OpenEntry | None:
    """Size and tag of an entry, or None; no use of it, where the store can look like that."""
    head = getattr(store, "peek", store.get)(key, 0, PRELUDE.size)
    return None if head is None else _remote(store, key, bytes(head))


def _remote(store: Store, key: str, head: bytes) -> OpenEntry | None:
    size = declared(head)
    if size is None:
        size = store.size(key)
    return None if size is None else RemoteEntry(store, key, size, head)


def declared(head: bytes) -> int | None:
    """The size that a chunk file says it has; None if these are not the first bytes of one."""
    if len(head) < PRELUDE.size or not head.startswith(MAGIC):
        return None
    return PRELUDE.unpack(head[: PRELUDE.size])[4]


def etag_of(head: bytes, size: int) -> bytes | None:
    """The tag of a chunk file that begins with these bytes."""
    if declared(head) is None:
        return None
    return b'"%x-%016x"' % (size, PRELUDE.unpack(head[: PRELUDE.size])[5])
