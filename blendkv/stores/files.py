"""Files of a store: no links followed, short reads and writes finished, and one word for each kind of failure."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Self

from blendkv.container.format import MAGIC, PRELUDE

_AHEAD_NS = 1_000_000
"""By how much a file's time of access is ahead: where it is not (relatime), each read afterwards writes it again."""
ABANDONED_S = 900
"""A temporary file older than this has no writer, whatever its lock says."""
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _SAFE
_ENTRY = os.O_RDONLY | os.O_NONBLOCK | _SAFE
_AT_ONCE: int | None = getattr(os, "RWF_NOWAIT", None)
_FAULTS = {
    errno.ENOENT: "",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "readonly",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ELOOP: "link",
    errno.ENOTDIR: "folder",
    errno.EISDIR: "folder",
}


def fault_of(error: OSError) -> str:
    """A word for counters; none for a file that is not there."""
    return _FAULTS.get(error.errno or 0, "io")


@contextmanager
def folder(path: str) -> Generator[int]:
    """A descriptor of a folder, which is no link to one."""
    fd = os.open(path, _FOLDER)
    try:
        yield fd
    finally:
        _let_go(fd)


def read_range(fd: int, start: int, stop: int) -> bytes:
    """Bytes `[start, stop)` of a file, or fewer if it ends before."""
    if start >= stop:
        return b""
    part = os.pread(fd, stop - start, start)
    if len(part) == stop - start:
        return part
    parts = [part]
    while part and start + len(part) < stop:
        start += len(part)
        part = os.pread(fd, stop - start, start)
        parts.append(part)
    return b"".join(parts)


@contextmanager
def temporary(key: str, data: bytes, at: int, durable: bool) -> Generator[str]:
    """Writes a file of its own beside the entries; gives its name, to be renamed. Nothing is left of it after an error.

    It is locked as long as it has that name, so that no other process takes it for one whose writer died.
    """
    name = f"{key}.{os.getpid()}-{token_hex(4)}.tmp"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=at)
    try:
        with suppress(OSError):  # a file system without locks: temporary files are known by their age alone
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(fd, view) :]
        now = time.time_ns()
        os.utime(fd, ns=(now, now))  # the kernel's own times are coarse
        if durable:
            os.fsync(fd)
        os.close(os.dup(fd))  # NFS tells of failed writes when a descriptor is closed: before this is published
        yield name
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=at)
        raise
    finally:
        with suppress(OSError):
            os.close(fd)


def sweep(name: str, at: int, locks: bool) -> None:
    """Removes a temporary file that nobody writes any more, for it is old, or, if locks are asked, has none."""
    with suppress(OSError):
        fd = os.open(name, _ENTRY, dir_fd=at)
        try:
            old = time.time() - os.fstat(fd).st_mtime > ABANDONED_S
            if locks and not old:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locks or old:
                os.unlink(name, dir_fd=at)
        finally:
            os.close(fd)


def make_folders(path: str, durable: bool = False) -> None:
    """Makes a folder and those above it, for this user only; if durable, they outlive a loss of power."""
    above, there = os.path.dirname(path), os.path.isdir(path)
    if not there:
        make_folders(above, durable)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    if durable:
        with suppress(PermissionError), folder(above) as at:  # what may not be read was not made by this user
            os.fsync(at)


class DiskSource:
    """An open entry. It stays readable when the entry is evicted, replaced or deleted.

    Every read comes by here, with the processor's caches full of what was read before: few calls, and no helpers where
    a line will do, are worth 10 microseconds an entry, a sixth of the time that a megabyte takes.

    Attributes:
        size: bytes of the entry.
    """

    __slots__ = ("_fd", "_mode", "size")

    def __init__(self, fd: int, status: os.stat_result) -> None:
        self._fd, self._mode, self.size = fd, status.st_mode, status.st_size

    @classmethod
    def open(cls, folder: str, name: str) -> Self:
        """The entry of that name in a folder, neither of them a link; a pipe that somebody put there does not block."""
        at = os.open(folder, _FOLDER)
        try:
            fd = os.open(name, _ENTRY, dir_fd=at)
        finally:
            _let_go(at)
        try:
            return cls(fd, os.fstat(fd))
        except OSError:
            os.close(fd)
            raise

    def read(self, start: int, length: int) -> bytes:
        """Bytes `[start, start + length)`, or fewer at the end."""
        return read_range(self._fd, start, min(start + length, self.size))

    def read_into(self, start: int, memory: memoryview) -> int:
        """Bytes from `start` on, into memory: how many there were for it."""
        filled = 0
        while filled < len(memory) and (got := os.preadv(self._fd, [memory[filled:]], start + filled)):
            filled += got
        return filled

    def read_at_once(self, start: int, length: int) -> bytearray | None:
        """Those bytes if the system has all of them in memory, and None if a disk must be waited for, or who knows."""
        if _AT_ONCE is None or start + length > self.size:
            return None
        data = bytearray(length)
        try:
            return data if os.preadv(self._fd, [data], start, _AT_ONCE) == length else None
        except OSError:
            return None

    def close(self) -> None:
        """Lets go of the file; once more is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _let_go(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """An entry that nobody closed does not stay open for ever."""
        self.close()

    def fault(self) -> str:
        """What shows at a glance that this is no entry: it is no file, or no chunk file of the length that it says."""
        if not stat.S_ISREG(self._mode):
            return "folder" if stat.S_ISDIR(self._mode) else "link"
        head = read_range(self._fd, 0, min(PRELUDE.size, self.size))
        if not head.startswith(MAGIC):
            return ""
        return "" if len(head) == PRELUDE.size and PRELUDE.unpack(head)[4] == self.size else "length"

    def touch(self) -> int:
        """Sets the time of the last use, where that may be done, and gives it, in ns."""
        now = time.time_ns()
        try:  # noqa: SIM105
            os.utime(self._fd, ns=(now + _AHEAD_NS, now))
        except OSError:  # a read-only file system, somebody else's file
            pass
        return now


def _let_go(fd: int) -> None:
    """Closes what nothing was written through."""
    try:  # noqa: SIM105
        os.close(fd)
    except OSError:
        pass
