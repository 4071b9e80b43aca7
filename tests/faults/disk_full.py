"""F08: the disk is full, or the quota used up; in a mount namespace of its own where that can be had."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from blendkv.contract import bytes_for, key_for
from blendkv.stores import DiskStore
from tests.faults.rows import Result, row
from tests.faults.systems import system

ENTRY = 300_000
ROOT = Path(__file__).parent.parent.parent


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Quota:
    """Refuses writes that would not fit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def __call__(self, name: str) -> None:
        if name == "write" and used(self.folder) + ENTRY > self.limit:
            raise OSError(errno.EDQUOT, "quota (injected)")


def scenario(result: Result, disk: Path, space: int) -> None:
    folder, count = disk / "store", 3 * space // ENTRY
    store = DiskStore(folder, capacity_bytes=100 * space)  # the disk ends before the cap
    for number in range(count):
        key = key_for(number)
        result.tried += 1
        result.expect(bool(result.call(store.put, key, bytes_for(key, ENTRY))), "a put did not make room")
        result.found += result.call(store.get, key) == bytes_for(key, ENTRY)
    result.expect(store.stats.evictions > count // 2, "nothing was evicted")

    for key in list(store.keys()):  # now somebody else fills the disk, and there is nothing left to evict
        store.delete(key)
    other = disk / "other"
    other.write_bytes(bytes(space - 50_000))
    for number in range(5):
        result.tried += 1
        result.expect(result.call(store.put, key_for(number), bytes(ENTRY)) is False, "it did not fit")
        result.call(store.get, key_for(number))
    result.expect(store.stats.faults["full"] == 5, f"faults are {dict(store.stats.faults)}")
    result.expect(used(folder) == 0, "something is left of puts that failed")
    other.unlink()
    result.expect(bool(result.call(store.put, key_for(1), bytes(ENTRY))), "it does not recover")

    cap = space // 2
    store = DiskStore(folder, capacity_bytes=cap)
    for number in range(count):
        key = key_for(("cap", number))
        result.call(store.put, key, bytes_for(key, ENTRY))
        result.expect(used(folder) <= cap, "above the cap")
        result.found += result.call(store.get, key) == bytes_for(key, ENTRY)
    result.expect(used(folder) > cap - ENTRY, "below the cap by more than one entry")
    result.expect(result.call(store.put, key_for("huge"), bytes(cap + 1)) is False, "larger than the cap")
    result.expect(used(folder) > cap - ENTRY, "entries gave way to one that cannot fit")


@row
def f08(full: bool) -> Result:
    space = (64 if full else 8) << 20
    with tempfile.TemporaryDirectory() as disk:
        again = f"{sys.executable} -c 'from tests.faults.disk_full import inside; inside(\"{disk}\", {space})'"
        inner = f"mount -t tmpfs -o size={space} none {disk} && exec {again}"
        if shutil.which("unshare"):
            done = subprocess.run(["unshare", "-rm", "sh", "-c", inner], capture_output=True, text=True, cwd=ROOT)
            if done.returncode == 0:
                fields = json.loads(done.stdout)
                return Result(**{**fields, "figures": Counter(fields["figures"])})
        result = Result("F08")
        result.figures["emulated"] = 1
        with system(before=Quota(Path(disk), space)):
            scenario(result, Path(disk), space)
        return result


def inside(disk: str, space: int) -> None:
    """In a mount namespace where `disk` is a small one."""
    result = Result("F08")
    result.figures["tmpfs"] = 1
    scenario(result, Path(disk), space)
    print(json.dumps(vars(result)))
