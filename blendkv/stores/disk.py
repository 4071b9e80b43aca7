"""Entries as files of a folder that any number of processes may share."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from blendkv.errors import StoreError
from blendkv.stores.base import Entry, StoreStats
from blendkv.stores.deadline import remaining
from blendkv.stores.files import DiskSource, fault_of, folder, make_folders, temporary
from blendkv.stores.hits import EXIT_SECONDS, Hits
from blendkv.stores.inventory import BAD, Inventory
from blendkv.stores.keys import is_key, key_of, place_of
from blendkv.stores.urls import path_of, url_of

DEFAULT_CAPACITY_BYTES = 64 << 30
MAX_BAD = 16
"""Files kept of entries that were found wanting."""
_ADVICE = {
    errno.ENOENT: "there is no such folder; look at its name",
    errno.ENOTDIR: "there is a file of that name, or on the way to it; choose another folder",
    errno.EACCES: "permission denied; give this user the right to read, write and enter it, or choose another folder",
    errno.EPERM: "permission denied; give this user the right to read, write and enter it, or choose another folder",
    errno.EROFS: "the file system is read-only; mount it for writing, or choose another folder",
    errno.ENOSPC: "the disk is full; make room, or choose another folder",
    errno.EDQUOT: "the quota is used up; make room, or choose another folder",
}


class DiskStore:
    """Bytes under keys, one file each: `folder/ab/ab12....bkv`. Safe to share among threads and processes.

    A put writes a temporary file and renames it, so that an entry is there whole or not at all, whoever is killed. The
    entry that was not used for longest goes first, by the time of its file, which a read sets.

    Args:
        folder: made if it is not there, for this user only.
        capacity_bytes: most bytes of entries (default 64 GiB), of all processes together; one entry a process more for
            a moment.
        durable: what was put outlives a loss of power, at the price of waiting for the disk.
        create: False opens a folder only if it is there, writes nothing into it, and lets no entry give way for that.

    Attributes:
        local: True, as of every store that nobody but this user reaches and that never keeps anybody waiting.
        on_evict: called with key and bytes of what is about to make room for something else; it must be quick.

    Raises:
        StoreError: if the folder cannot be used.
    """

    local = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        durable: bool = False,
        create: bool = True,
    ) -> None:
        self.capacity_bytes = DEFAULT_CAPACITY_BYTES if capacity_bytes is None else int(capacity_bytes)
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes={capacity_bytes}: give a positive number of bytes")
        if not os.fspath(folder):
            raise StoreError("the path of the store is empty: give a folder ('.' is the one that you are in)")
        self.durable, self.stats = durable, StoreStats()
        self._root = os.path.realpath(os.path.expanduser(folder))
        self.url = url_of(self._root)
        self._lock = threading.RLock()
        self._reserved = 0
        self._kept: dict[str, int] = {}
        self.on_evict: Callable[[str, bytes], None] | None = None
        self._inventory, self._hits = Inventory(self._root), Hits(self._root)
        weakref.finalize(self, self._hits.write, EXIT_SECONDS)
        try:
            if create:
                make_folders(self._root, durable)
            os.listdir(self._root)
            self._inventory.look()
            if create:
                self._probe()
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
            raise StoreError(f"cannot keep chunks in the folder {self._root}: {advice}") from error
        if create:
            with self._lock, suppress(OSError):
                self._make_room(0)

    @classmethod
    def from_url(cls, url: str, **options: object) -> DiskStore:
        """The store of a path or a `file://` URL; options are arguments of the class."""
        if "://" in url:
            try:
                url = path_of(url)
            except ValueError as error:
                raise StoreError(str(error)) from error
        return cls(url, **options)  # ty: ignore[invalid-argument-type]

    def source(self, key: str) -> DiskSource | None:
        """An open entry, for `ChunkFile`, or None; counted. The caller closes it."""
        source = self._open(key)
        if source is not None:
            self.stats.count("hits")
        return source

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None; not checked, but for the length of a chunk file."""
        return self._read(self._open(key), start, stop)

    def peek(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """As `get`, but it is no use of the entry, and a file that is shorter or longer than it says is read too."""
        return self._read(self._open(key, use=False), start, stop)

    def read_into(self, key: str, room: Callable[[int], memoryview]) -> bool:
        """Reads an entry whole, as `get` does, into memory that `room` gives for so many bytes; False if there is none.

        It is opened once: whoever replaces it meanwhile changes neither how long it is nor what is in it.
        """
        source = self._open(key)
        if source is None:
            return False
        try:
            filled = source.read_into(0, room(source.size)) == source.size
        except OSError as error:
            self._missed(fault_of(error) or "io")
            return False
        finally:
            source.close()
        if filled:
            self.stats.count("hits")
        else:
            self._missed("length")  # somebody cut the file while it was read
        return filled

    def _read(self, source: DiskSource | None, start: int, stop: int | None) -> bytes | None:
        if source is None:
            return None
        length = max(0, (source.size if stop is None else min(stop, source.size)) - start)
        try:
            data = source.read(start, length)
        except OSError as error:
            return self._missed(fault_of(error) or "io")
        finally:
            source.close()
        if len(data) != length:
            return self._missed("length")  # somebody cut the file while it was read
        self.stats.count("hits")
        return data

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, those that there are."""
        return {key: data for key in keys if (data := self.get(key)) is not None}

    def size(self, key: str) -> int | None:
        """Bytes of an entry, or None."""
        if not is_key(key):
            return None
        path, name = place_of(key)
        try:
            with folder(f"{self._root}/{path}") as at:
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def put(self, key: str, data: bytes) -> bool:
        """Stores an entry whole, or not at all; False if it could not be kept. One that is there is replaced."""
        fault = self._put(key, data) if is_key(key) else "key"
        if fault is None:
            self.stats.count("puts")
        else:
            self.stats.count("put_failures", fault)
        return fault is None

    def delete(self, key: str) -> None:
        """Forgets an entry; an unknown key is fine."""
        if not is_key(key):
            return
        path, name = place_of(key)
        with suppress(OSError), folder(f"{self._root}/{path}") as at:
            os.unlink(name, dir_fd=at)
        with self._lock:
            self._inventory.drop(f"{path}/{name}")

    def quarantine(self, key: str) -> None:
        """Takes an entry that a reader found wanting out of the way, into the folder `bad`.

        It may be put again; when that is found wanting too, puts of it are refused for as long as its file is in `bad`,
        where the last 16 are kept.
        """
        if not is_key(key):
            return
        path, name = place_of(key)
        with self._lock:
            number = 2 if f"{BAD}/{key}.1" in self._inventory.files else 1
            try:
                self._make_folder(BAD)
                with folder(f"{self._root}/{path}") as at, folder(f"{self._root}/{BAD}") as bad:
                    size = os.stat(name, dir_fd=at, follow_symlinks=False).st_size
                    os.rename(name, f"{key}.{number}", src_dir_fd=at, dst_dir_fd=bad)
            except OSError:
                self.delete(key)
                return
            self._inventory.drop(f"{path}/{name}")
            self._inventory.add(f"{BAD}/{key}.{number}", size, time.time_ns())
            for oldest in self._inventory.bad()[:-MAX_BAD]:
                self._remove(oldest)

    def keys(self) -> Iterator[str]:
        """Keys of all entries."""
        with self._lock:
            self._inventory.look()
            names = [name.partition("/")[2] for name in self._inventory.files if not name.startswith(f"{BAD}/")]
        return (key for name in names if (key := key_of(name)))

    def entries(self) -> Iterator[Entry]:
        """All entries, with the time and the hits that their files tell of now."""
        for key in self.keys():
            name = "/".join(place_of(key))
            try:
                status = os.stat(f"{self._root}/{name}", follow_symlinks=False)
            except OSError:
                continue  # it is gone
            if stat.S_ISREG(status.st_mode):
                yield Entry(key, status.st_size, status.st_mtime_ns / 1e9, self._hits.of(name))

    def close(self) -> None:
        """Writes down what was counted; there is nothing to let go of."""
        self._hits.write()

    def _open(self, key: str, use: bool = True) -> DiskSource | None:
        if not is_key(key):
            return self._missed("key")
        if remaining(1.0) <= 0:
            return self._missed("deadline")
        path, name = place_of(key)
        source = None
        try:
            source = DiskSource.open(f"{self._root}/{path}", name)
            fault = source.fault()
            if fault == "length" and not use:
                fault = ""
        except OSError as error:
            fault = fault_of(error)
            if source is None:
                return self._missed(fault)
        if fault:
            source.close()
            if fault == "length":
                self.quarantine(key)
            return self._missed(fault)
        if use:
            used = source.touch()
            with self._lock:
                self._inventory.touch(f"{path}/{name}", used)
                self._hits.add(f"{path}/{name}")
        return source

    def _put(self, key: str, data: bytes) -> str | None:
        """Why not, or None."""
        size = memoryview(data).nbytes
        for last in (False, True):
            with self._lock:
                self._inventory.look(self.capacity_bytes - self._inventory.bytes - self._reserved - size)
                if f"{BAD}/{key}.2" in self._inventory.files:
                    return "quarantined"
                try:
                    if not self._make_room(size):
                        return "capacity"
                except OSError as error:
                    return fault_of(error) or "io"
                self._reserved += size
            try:
                self._write(key, data, size)
                return None
            except OSError as error:
                fault = fault_of(error) or "folder"
                with self._lock, suppress(OSError):
                    if last or not (self._evict(size) if fault == "full" else error.errno == errno.ENOENT):
                        return fault
            finally:
                with self._lock:
                    self._reserved -= size
        raise AssertionError("the second attempt is the last")

    def _write(self, key: str, data: bytes, size: int) -> None:
        path, name = place_of(key)
        self._make_folder(path)
        with folder(f"{self._root}/{path}") as at:
            self._keep_folder(path, at)
            with temporary(key, data, at, self.durable) as written, self._lock:
                os.rename(written, name, src_dir_fd=at, dst_dir_fd=at)
                self._inventory.add(f"{path}/{name}", size, time.time_ns())
                self._hits.drop(f"{path}/{name}")
            if self.durable:
                try:
                    os.fsync(at)
                except OSError:
                    self.delete(key)
                    raise

    def _make_folder(self, name: str) -> None:
        """Makes a folder below the root; the root itself is never made again, for it may be a disk that went away."""
        with suppress(FileExistsError):
            os.mkdir(f"{self._root}/{name}", 0o700)

    def _keep_folder(self, name: str, at: int) -> None:
        """A durable entry needs a durable folder, whoever made it."""
        if self.durable and self._kept.get(name) != (number := os.fstat(at).st_ino):
            with folder(self._root) as root:
                os.fsync(root)
            self._kept[name] = number

    def _make_room(self, size: int) -> bool:
        excess = self._inventory.bytes + self._reserved + size - self.capacity_bytes
        return size <= self.capacity_bytes and (excess <= 0 or self._evict(excess))

    def _evict(self, size: int) -> bool:
        """Removes what was not used for longest until so many bytes are gone; False if there were not so many."""
        before = self._inventory.bytes
        while self._inventory.bytes > before - size and (oldest := self._inventory.oldest()):
            name, used = oldest
            with suppress(FileNotFoundError):
                status = os.stat(f"{self._root}/{name}", follow_symlinks=False)
                if status.st_mtime_ns > used:  # another process read it
                    self._inventory.touch(name, status.st_mtime_ns)
                    continue
            self._hand_on(name)
            self.stats.count("evictions", times=self._remove(name))
        return self._inventory.bytes <= before - size

    def _hand_on(self, name: str) -> None:
        """Tells who wants to know what is about to be evicted."""
        key = key_of(name.partition("/")[2])
        if self.on_evict is None or key is None or name.startswith(f"{BAD}/"):
            return
        with suppress(OSError):
            source = DiskSource.open(f"{self._root}/{name.partition('/')[0]}", name.partition("/")[2])
            try:
                data = bytes(source.read(0, source.size))
            finally:
                source.close()
            self.on_evict(key, data)

    def _remove(self, name: str) -> bool:
        """False if somebody else did."""
        gone = False
        with suppress(FileNotFoundError):
            os.unlink(f"{self._root}/{name}")
            gone = True
        self._inventory.drop(name)
        return gone

    def _probe(self) -> None:
        """Whether files can be made here; where the disk is full, entries that are there can give way."""
        self._make_folder("00")
        with folder(f"{self._root}/00") as at:
            try:
                with temporary("probe", bytes(4096), at, durable=False) as written, suppress(FileNotFoundError):
                    os.unlink(written, dir_fd=at)
            except OSError as error:
                if fault_of(error) != "full" or not self._inventory.files:
                    raise

    def _missed(self, fault: str) -> None:
        self.stats.count("misses", fault)
