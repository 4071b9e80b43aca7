"""F09 to F11: many writers of one key, readers while others evict, a folder that goes away."""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from blendkv.contract import bytes_for, key_for
from blendkv.stores import DiskStore
from tests.faults.rows import Result, row
from tests.faults.systems import system

KEY, SIZE = key_for("shared"), 20_000
WRITERS = 16


def writer(folder: str, number: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Puts and gets one key, all at once; in writer 0 calls fail at random."""
    random, wrong, found, raised = Random(number), 0, 0, 0

    def fail(name: str) -> None:
        if number == 0 and random.random() < 0.05:
            raise OSError(errno.EIO, "injected")

    store = DiskStore(folder)
    with system(before=fail):
        for _ in range(rounds):
            barrier.wait(timeout=60)
            try:
                stored = store.put(KEY, bytes_for(number, SIZE))
                data = store.get(KEY)
            except Exception:
                raised += 1
                continue
            wrong += not stored and number != 0  # who loses the race succeeds too
            wrong += data is None and number != 0
            wrong += data is not None and data not in {bytes_for(other, SIZE) for other in range(WRITERS)}
            found += data is not None
    answers.put((wrong, found, raised))


@row
def f09(full: bool) -> Result:
    result, context, rounds = Result("F09"), get_context("spawn"), 1000 if full else 25
    with tempfile.TemporaryDirectory() as folder:
        barrier, answers = context.Barrier(WRITERS), context.Queue()
        processes = [
            context.Process(target=writer, args=(folder, number, rounds, barrier, answers)) for number in range(WRITERS)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            wrong, found, raised = answers.get(timeout=600)
            result.wrong, result.found, result.exceptions = (
                result.wrong + wrong,
                result.found + found,
                result.exceptions + raised,
            )
        for process in processes:
            process.join()
        result.tried = rounds * WRITERS
        DiskStore(folder)
        files = [path.name for path in Path(folder).rglob("*") if path.is_file()]
        result.expect(files == [f"{KEY}.bkv"], f"files are {files}")
    return result


def there(folder: str) -> set[tuple[int, int]]:
    """Inode and size of each entry; what is in two such sets was there at one time, between them."""
    found = set()
    for path in Path(folder).rglob("*.bkv"):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.add((status.st_ino, status.st_size))
    return found


@row
def f10(full: bool) -> Result:
    result, seconds, entry, cap = Result("F10"), 60.0 if full else 2.0, 20_000, 10
    end, lock = time.monotonic() + seconds, threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        stores = [DiskStore(folder, capacity_bytes=cap * entry) for _ in range(2)]  # as two processes

        def work(number: int) -> None:
            random, mine = Random(number), Result("F10")
            store = stores[number % 2]
            while time.monotonic() < end:
                key = key_for(random.randrange(100))
                data = bytes_for(key, entry)
                mine.tried += 1
                if number < 2:
                    mine.expect(bool(mine.call(store.put, key, data)), "a put failed")
                elif number < 4:  # holds an entry while it is evicted
                    source = mine.call(store.source, key)
                    if source is not None:
                        with source:
                            time.sleep(0.002)
                            mine.expect(mine.call(source.read, 0, source.size) == data, "wrong bytes of a held entry")
                            mine.found += 1
                else:
                    got = mine.call(store.get, key)
                    mine.expect(got in (None, data), "wrong bytes")
                    mine.found += got is not None
            with lock:
                for name in ("tried", "wrong", "exceptions", "found"):
                    setattr(result, name, getattr(result, name) + getattr(mine, name))
                result.why += mine.why
                result.max_added_s = max(result.max_added_s, mine.max_added_s)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        most = 0
        while time.monotonic() < end:
            before = there(folder)
            most = max(most, sum(size for _, size in before & there(folder)))
            time.sleep(0.005)
        for thread in threads:
            thread.join()
        result.expect(most <= (cap + 2) * entry, f"{most:,} bytes: above the cap and an entry a process")
        result.figures["most_bytes"] = most
        result.expect(sum(store.stats.evictions for store in stores) > 10, "nothing was evicted")
    return result


@row
def f11(full: bool) -> Result:
    result, entry = Result("F11"), 5_000
    for _ in range(20 if full else 2):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "store"
            store = DiskStore(folder)
            keys = [key_for(number) for number in range(50)]

            def use(store: DiskStore = store, keys: list[str] = keys) -> int:
                found = 0
                for key in keys:
                    result.tried += 1
                    data = result.call(store.get, key)
                    result.expect(data in (None, bytes_for(key, entry)), "wrong bytes")
                    found += data is not None
                result.call(lambda: list(store.keys()))
                return found

            def fill(store: DiskStore = store, keys: list[str] = keys) -> int:
                return sum(bool(result.call(store.put, key, bytes_for(key, entry))) for key in keys)

            result.expect(fill() == use() == 50, "not stored")
            stop = threading.Event()

            def read(use: Any = use, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    use()

            reader = threading.Thread(target=read)
            reader.start()
            for path in sorted(folder.iterdir())[::2]:
                shutil.rmtree(path)
            time.sleep(0.05)
            shutil.rmtree(folder)
            time.sleep(0.05)
            result.expect(fill() == 0 and not folder.exists(), "a folder that went away was made again")
            folder.write_bytes(b"a file")
            result.expect(fill() == use() == 0, "a file is no folder")
            folder.unlink()
            folder.mkdir()
            stop.set()
            reader.join()
            result.found += fill()
            result.expect(use() == 50, "it does not recover")

            def read_only(name: str) -> None:
                if name in ("mkdir", "rename", "unlink", "utime"):
                    raise OSError(errno.EROFS, "injected")

            with system(before=read_only):
                result.expect(use() == 50, "a read-only file system can be read")
                result.expect(fill() == 0, "nor written")
            result.expect(fill() == 50, "it does not recover")
    return result
