"""F01: a process that puts is killed, at random moments and at each call to the system."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from blendkv.contract import bytes_for, key_for
from blendkv.stores import DiskStore
from tests.faults.rows import Result, row
from tests.faults.systems import KillAt, system
from tests.patience import SLACK_S

POINTS = [f"{when}:{what}" for what in ("open", "write", "utime", "fsync", "rename") for when in ("before", "after")]
ROOT = Path(__file__).parent.parent.parent
NAMES, SIZE = 40, 60_000


def data_for(key: str, version: int) -> bytes:
    """All versions of an entry have a head that says which, so that old and new are told apart."""
    return f"{key} {version:012d} ".encode() + bytes_for((key, version), SIZE)


def child(folder: str, durable: bool, seed: int, point: str, number: int) -> None:
    """Puts for ever, and writes down each key and version when its put has returned."""
    random = Random(seed)
    store = DiskStore(folder, durable=durable)
    kill = KillAt(point, number)
    with open(f"{folder}.log", "a") as log, system(before=kill.before, after=kill.after):
        for version in range(1 << 20):
            key = key_for(random.randrange(NAMES))
            unique = seed * 1_000_000 + version
            if store.put(key, data_for(key, unique)):
                log.write(f"{key} {unique}\n")
                log.flush()


def run(folder: str, durable: bool, seed: int, point: str, number: int, wait: float) -> None:
    code = f"from tests.faults.kills import child; child({folder!r}, {durable}, {seed}, {point!r}, {number})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        if point:
            process.wait(timeout=30)
        else:
            log = Path(f"{folder}.log")
            size, end = log.stat().st_size if log.exists() else 0, time.monotonic() + 30
            while not (log.exists() and log.stat().st_size > size) and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(wait)
    finally:
        process.kill()
        process.wait()


def check(result: Result, folder: str) -> None:
    """Every entry is one that was put, and no older than the last that was acknowledged."""
    start = time.monotonic()
    store = DiskStore(folder)
    result.max_added_s = max(result.max_added_s, round(time.monotonic() - start, 3))
    log = Path(f"{folder}.log")
    acknowledged: dict[str, int] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        key, version = line.split()
        acknowledged[key] = int(version)
    for key in list(store.keys()):
        data = result.call(store.get, key)
        version = int(data[65:77]) if data else -1
        result.expect(data == data_for(key, version), "an entry is not what was put")
        result.found += 1
    for key, version in acknowledged.items():
        data = store.get(key)
        result.expect(data is not None and int(data[65:77]) >= version, "a put that was acknowledged is lost")
    DiskStore(folder)
    left = [path.name for path in Path(folder).rglob("*") if path.name.endswith(".tmp")]
    result.expect(not left, f"temporary files are left: {left}")


def reopening(result: Result, count: int) -> None:
    """Seconds that it takes to open a folder of many entries."""
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder)
        for number in range(count):
            store.put(key_for(number), b"x")
        start = time.monotonic()
        again = DiskStore(folder)
        took = time.monotonic() - start
        result.expect(len(list(again.keys())) == count, "entries are missing after opening again")
        result.expect(took < 5 + SLACK_S, f"it took {took:.1f} s to open {count} entries")
        result.figures[f"ms_to_open_{count}"] = round(took * 1000)


@row
def f01(full: bool) -> Result:
    result, random = Result("F01"), Random(1)
    with tempfile.TemporaryDirectory() as parent:
        folders = {durable: os.path.join(parent, f"store-{int(durable)}") for durable in (False, True)}
        for number in range(500 if full else 25):
            point = random.choice(POINTS) if number % 4 else ""
            durable = point.endswith("fsync") or random.random() < 0.5
            run(folders[durable], durable, number + 1, point, random.randrange(1, 60), random.random() * 0.05)
            result.tried += 1
            check(result, folders[durable])
    reopening(result, 10_000 if full else 2_000)
    return result
