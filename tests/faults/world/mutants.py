"""Libraries that are broken on purpose: a simulation that does not notice is worth nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec
from blendkv.container.seals import Checksum
from blendkv.stores import disk
from blendkv.stores.backlog import Backlog
from blendkv.stores.catalog import Region
from blendkv.stores.deadline import Budget
from blendkv.stores.disk import DiskStore
from blendkv.stores.files import DiskSource
from blendkv.stores.inventory import Inventory
from blendkv.stores.opening import Opener
from blendkv.stores.patience import Patience
from blendkv.stores.writing import Writer
from tests.faults.world.calls import Calls


def no_checksums() -> AbstractContextManager[Any]:
    """Segments are believed, whatever their checksums say."""
    return mock.patch.object(Checksum, "holds", return_value=True)


def no_keys() -> AbstractContextManager[Any]:
    """A chunk is believed to be that of the key under which it lay."""

    def checked(self: Opener, key: str, data: bytes, device: object, codec: Codec | None = None) -> ChunkFile:
        file = self.open(data, codec)
        file.keyed = "" if self._secret is None else key
        return file

    return mock.patch.object(Opener, "checked", checked)


def no_rename() -> AbstractContextManager[Any]:
    """Entries are written under their own names."""

    @contextmanager
    def in_place(key: str, data: bytes, at: int, durable: bool) -> Generator[str]:
        name = key if key == "probe" else f"{key}.bkv"
        calls: Any = disk.os
        fd = calls.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=at)
        node = calls._open(fd).node
        node.data = b""
        for start in range(0, len(data), 100):
            calls.write(fd, memoryview(data)[start : start + 100])
        calls.close(fd)
        yield name

    return mock.patch.object(disk, "temporary", in_place)


def no_budget() -> AbstractContextManager[Any]:
    """Prompts wait for ever."""
    return mock.patch.object(Budget, "spend", return_value=nullcontext())


def no_fsync() -> AbstractContextManager[Any]:
    """Nobody waits for the disk."""
    return mock.patch.object(Calls, "fsync", return_value=None)


def no_folder_fsync() -> AbstractContextManager[Any]:
    """Folders that others made are believed to be on the disk."""
    return mock.patch.object(DiskStore, "_keep_folder", return_value=None)


def no_eviction() -> AbstractContextManager[Any]:
    """Folders grow."""
    return mock.patch.object(DiskStore, "_make_room", return_value=True)


def no_looking() -> AbstractContextManager[Any]:
    """What other processes did to a folder is not noticed."""
    look = Inventory.look

    def once(self: Inventory, room: int | None = None) -> None:
        if self._opening:
            look(self, room)

    return mock.patch.object(Inventory, "look", once)


def no_patience() -> AbstractContextManager[Any]:
    """Calls are waited for however long they take."""
    return mock.patch.object(Patience, "call", lambda self, function, seconds: function())


def no_latest() -> AbstractContextManager[Any]:
    """`force_latest` is not heeded."""
    get = Region.get
    return mock.patch.object(Region, "get", lambda self, name, force_latest=False: get(self, name))


def no_doubt() -> AbstractContextManager[Any]:
    """What a region remembers is believed for long."""
    init = Region.__init__
    return mock.patch.object(Region, "__init__", lambda self, centre, delay: init(self, centre, delay=60 + delay))


def no_close() -> AbstractContextManager[Any]:
    """An entry that was read stays open."""
    return mock.patch.object(DiskSource, "close", return_value=None)


def no_notice() -> AbstractContextManager[Any]:
    """Who waits for a writer is not told."""

    def work(self: Writer) -> None:
        while self._waiting:
            key, data = next(iter(self._waiting.items()))
            self.store.put(key, data)
            self._waiting.pop(key, None)
        self._thread = None

    return mock.patch.object(Writer, "_work", work)


def no_suppression() -> AbstractContextManager[Any]:
    """That the centre does not answer is told to who asks."""
    get = Region.get

    def loud(self: Region, name: str, force_latest: bool = False) -> Any:
        unreachable = self.state.unreachable
        named = get(self, name, force_latest)
        if self.state.unreachable > unreachable:
            raise ConnectionError(name)
        return named

    return mock.patch.object(Region, "get", loud)


def unchecked_demotion() -> AbstractContextManager[Any]:
    """Damaged entries are handed on."""

    def demoter(self: Backlog, farther: Writer) -> Callable[[str, bytes], None]:
        return lambda key, data: bool(farther.put(key, data)) and None

    return mock.patch.object(Backlog, "_demoter", demoter)


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    function.__name__: function
    for function in (
        no_checksums,
        no_keys,
        no_rename,
        no_budget,
        no_fsync,
        no_folder_fsync,
        no_eviction,
        no_looking,
        no_patience,
        no_latest,
        no_doubt,
        no_close,
        no_notice,
        no_suppression,
        unchecked_demotion,
    )
}
