"""Where the bytes of a chunk file come from: anything that can give a range of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from blendkv.errors import ChunkFileError

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class Source(Protocol):
    """Bytes that can be read in ranges.

    Attributes:
        size: how many there are.
    """

    size: int

    def read(self, start: int, length: int) -> Buffer:
        """Bytes `[start, start + length)`, which lie inside `size`; `OSError` if they cannot be had."""
        ...


class MemorySource:
    """Bytes in memory: `bytes`, `bytearray`, `memoryview`, `mmap`. They must not change while a chunk file is read."""

    def __init__(self, data: Any) -> None:
        self._view = memoryview(data).toreadonly().cast("B")
        self.size = len(self._view)

    def read(self, start: int, length: int) -> memoryview:
        """A view, no copy."""
        return self._view[start : start + length]

    def close(self) -> None:
        """Lets go of the bytes."""
        self._view = memoryview(b"")


class FileSource:
    """A seekable binary file object, or a path to a file, which is then open until `close`.

    Args:
        file: the path, or the object; files of fsspec are fine.
    """

    def __init__(self, file: Any) -> None:
        self._owned = isinstance(file, (str, os.PathLike))
        self._file = open(file, "rb", buffering=0) if self._owned else file  # noqa: SIM115
        self._lock = threading.Lock()
        self.size = self._file.seek(0, os.SEEK_END)

    def read(self, start: int, length: int) -> Buffer:
        """The bytes, in memory of their own."""
        data, at = bytearray(length), 0
        with self._lock, memoryview(data) as view:
            self._file.seek(start)
            while at < length and (got := self._read_into(view[at:])):
                at += got
        return data if at == length else data[:at]

    def _read_into(self, view: memoryview) -> int:
        if hasattr(self._file, "readinto"):
            return self._file.readinto(view) or 0
        data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes the file if a path was given."""
        if self._owned:
            self._file.close()


class RangeSource:
    """A function that fetches ranges, as of an object store.

    Args:
        fetch: `fetch(start, length)` gives bytes, or None if the object is gone.
        size: bytes of the object.
    """

    def __init__(self, fetch: Callable[[int, int], Buffer | None], size: int) -> None:
        self._fetch, self.size = fetch, size

    def read(self, start: int, length: int) -> Buffer:
        """What the function gives."""
        return self._fetch(start, length) or b""


def as_source(data: Any) -> Source:
    """A source for whatever was given: bytes and the like, a path, a seekable file object, or a source.

    Raises:
        TypeError: for something else.
        OSError: if a file cannot be opened.
    """
    if isinstance(data, (str, os.PathLike)) or hasattr(data, "seek"):
        try:
            return MemorySource(data)  # an mmap is a file and a buffer
        except TypeError:
            return FileSource(data)
    if isinstance(data, Source):
        return data
    try:
        return MemorySource(data)
    except TypeError:
        raise TypeError(
            f"cannot read a chunk file from {type(data).__name__}: pass bytes, a path, a seekable binary file, or "
            "blendkv.container.RangeSource(fetch, size)"
        ) from None


def read_exactly(source: Source, start: int, length: int) -> memoryview:
    """Bytes of a source, all of those asked for.

    Raises:
        ChunkFileError: with reason "truncated" if there were fewer, "length" if more.
    """
    data = memoryview(source.read(start, length))
    if data.nbytes != length:
        raise ChunkFileError(
            f"asked for {length:,} bytes at {start:,} of a chunk file, got {data.nbytes:,}; delete the entry, or look "
            "at what delivers it",
            reason="truncated" if data.nbytes < length else "length",
        )
    return data
