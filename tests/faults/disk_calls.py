"""F03: the n-th call to the system fails, for n = 1, 2, ... until a run has no failure."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from blendkv.contract import bytes_for, key_for
from blendkv.stores import DiskStore
from tests.faults.rows import Result, row
from tests.faults.systems import ERRORS, NthFails, system

OLD, NEW = key_for("old"), key_for("new")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where fsync is quick
DATA = {OLD: bytes_for(OLD, 3000), NEW: bytes_for(NEW, 4000)}


def descriptors(folder: str) -> int:
    """Open files of a folder, and those that were there: other threads of this process open others."""
    fds, paths = Path("/proc/self/fd"), []
    for fd in fds.iterdir() if fds.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            paths.append(os.readlink(fd))
    return sum(path.startswith(os.path.realpath(folder)) for path in paths)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def scenario(result: Result, store: DiskStore, folder: Path, steady: bool) -> None:
    """Put, read, range, quarantine, delete: whatever fails, what is read is right or nothing."""
    there = NEW + ".bkv" in entries(folder)
    stored = result.call(store.put, NEW, DATA[NEW])
    visible = NEW + ".bkv" in entries(folder)
    result.expect(not stored or visible, "a put said it was done, and there is no file")
    left = [name for name in entries(folder) if name.endswith(".tmp")]
    result.expect(not (steady and left), "a temporary file is left")
    if steady and not there:  # one fault only: a put can clean up behind itself
        result.expect(bool(stored) == visible, "a file is visible after a failed put")
    for key in (NEW, OLD):
        for start, stop in ((0, None), (100, 200)):
            data = result.call(store.get, key, start, stop)
            result.expect(data in (None, DATA[key][start:stop]), "wrong bytes")
            result.found += data is not None
    result.call(lambda: list(store.keys()))
    result.call(lambda: list(store.entries()))
    result.call(store.close)
    result.call(store.size, OLD)
    result.call(store.delete, NEW)


def one(result: Result, number: int, code: int, for_ever: bool, durable: bool, tight: bool) -> bool:
    """Whether the fault came to pass."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name) / "store"
        # where room is tight, a put evicts first
        store = DiskStore(folder, capacity_bytes=5000 if tight else 1 << 20, durable=durable)
        store.put(OLD, DATA[OLD])
        open_before = descriptors(name)
        fault = NthFails(number, code, for_ever)
        with system(before=fault):
            scenario(result, store, folder, steady=not for_ever)
        result.expect(descriptors(name) == open_before, "a descriptor leaks")
        scenario(result, store, folder, steady=not for_ever)  # all is well again
        result.expect(store.put(NEW, DATA[NEW]) and store.get(NEW) == DATA[NEW], "it does not recover")
        DiskStore(folder)
        result.expect(not [name for name in entries(folder) if name.endswith(".tmp")], "temporary files are left")
        result.tried += fault.fired
        return fault.fired


@row
def f03(full: bool) -> Result:
    result = Result("F03")
    errors = ERRORS if full else ERRORS[:2]
    for durable in (False, True):
        for tight in (False, True):
            for for_ever in (False, True):
                for code in errors:
                    number = 1
                    while one(result, number, code, for_ever, durable, tight):
                        number += 1
    short_reads_and_writes(result)
    return result


def short_reads_and_writes(result: Result) -> None:
    for at_most in (1, 7, 1000):
        with tempfile.TemporaryDirectory() as folder, system(cut=lambda n, most=at_most: min(n, most)):
            store = DiskStore(folder)
            result.tried += 1
            result.expect(store.put(NEW, DATA[NEW]) and store.get(NEW) == DATA[NEW], f"at most {at_most} bytes a call")
