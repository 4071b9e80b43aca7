"""F05 and F06: entries cut off, grown, or with bits flipped, in every codec, with and without a secret."""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

from blendkv.chunkfile import ChunkFile
from blendkv.errors import ChunkFileError
from blendkv.stores import DiskStore
from tests.faults.entries import Entry, HeldStore, real, same, small
from tests.faults.rows import Result, row

FLIPS = 1_000_000
WORKERS = 2


def refused(entry: Entry, data: bytes) -> bool:
    """Whether a chunk file says that something is wrong."""
    try:
        with ChunkFile(data, **entry.reading) as file:
            file.read()
    except ChunkFileError:
        return True
    return False


def cut_entry(result: Result, entry: Entry, lengths: range | list[int]) -> None:
    """Entries of other lengths in a folder: never a chunk, moved out of the way, counted."""
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder)
        tiers = entry.tiers(store)
        place = Path(folder) / entry.key[:2] / f"{entry.key}.bkv"
        result.expect(store.put(entry.key, entry.data), "not stored")
        result.found += same(result.call(tiers.get, entry.key), entry.chunk)
        longer = entry.data + bytes(64)
        for length in lengths:
            place.write_bytes(longer[:length])
            before = tiers.stats.misses
            result.tried += 1
            result.expect(result.call(tiers.get, entry.key) is None, f"{entry.name}: {length} bytes gave a chunk")
            result.expect(tiers.stats.misses == before + 1, f"{entry.name}: {length} bytes were not counted")
            result.expect(not place.exists(), f"{entry.name}: {length} bytes were left in place")
            result.expect(refused(entry, longer[:length]), f"{entry.name}: {length} bytes were read as a chunk file")
        place.write_bytes(entry.data)
        result.found += same(result.call(DiskTiers(entry, folder)), entry.chunk)
        result.figures.update(tiers.stats.reasons, length=store.stats.faults["length"])


class DiskTiers:
    """Another process would read the folder so."""

    def __init__(self, entry: Entry, folder: str) -> None:
        self.entry, self.folder = entry, folder

    def __call__(self):
        return self.entry.tiers(DiskStore(self.folder)).get(self.entry.key)


@row
def f05(full: bool) -> Result:
    result = Result("F05")
    for entry in small():
        size = len(entry.data)
        beyond = [size + 1, size + 8, size + 16, size + 64]
        cut_entry(result, entry, [*range(0, size, 1 if full else 61), *beyond])
    for entry in real(512 if full else 64):
        size = len(entry.data)
        cut_entry(result, entry, [size * step // 64 for step in range(0, 64, 1 if full else 9)])
    return result


def flip(result: Result, entry: Entry, ask, buffer: bytearray, bits: set[int]) -> None:
    """Flips bits, asks, and flips them back."""
    for bit in bits:
        buffer[bit >> 3] ^= 1 << (bit & 7)
    result.tried += 1
    result.expect(ask(entry.key) is None, f"{entry.name}: bits {sorted(bits)[:4]} gave a chunk")
    for bit in bits:
        buffer[bit >> 3] ^= 1 << (bit & 7)


def flip_entry(result: Result, entry: Entry, single: range, random: Random, several: int) -> None:
    """Single bits, then some at random, of an entry in a store that gives what it has."""
    buffer = bytearray(entry.data)
    store = HeldStore({entry.key: buffer})
    tiers = entry.tiers(store)
    result.found += same(result.call(tiers.get, entry.key), entry.chunk)
    for bit in single:
        flip(result, entry, tiers.get, buffer, {bit})
    for _ in range(several):
        first = random.randrange(8 * len(buffer))
        spread = random.choice((16, 4096, 8 * len(buffer)))  # a byte or two, a sector, all over
        wanted = random.choice((1, 2, 3, 8, 64))
        near = {(first + random.randrange(spread)) % (8 * len(buffer)) for _ in range(wanted)}
        flip(result, entry, tiers.get, buffer, near)
    result.found += same(result.call(tiers.get, entry.key), entry.chunk)  # it was the bits, and nothing else
    told = Counter(tiers.stats.reasons) + tiers.stats.unreadable
    result.expect(sum(told.values()) == len(single) + several, f"{entry.name}: not all were counted")
    result.figures.update(told)


def flips(size: str, number: int, single: int, part: int, parts: int, several: int) -> Result:
    """A part of the flips of one entry."""
    result = Result("F06")
    entry = (real() if size == "real" else small())[number]
    bits = range(part * single, 8 * len(entry.data), parts * single) if single else range(0)
    try:
        flip_entry(result, entry, bits, Random(f"{size} {number} {part}"), several)
    except Exception as error:
        result.exceptions += 1
        result.why.append(repr(error))
    return result


@row
def f06(full: bool) -> Result:
    kinds = range(len(small()))
    if not full:
        jobs = [("small", number, 251, 0, 1, 20) for number in kinds]
        done = [flips(*job) for job in jobs]
        return merged(done)
    jobs = [("small", number, 1, part, 4, 0) for number in kinds for part in range(4)]
    parts = 10
    jobs += [
        ("real", number, 0, part, parts, FLIPS // len(kinds) // parts) for number in kinds for part in range(parts)
    ]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        return merged(list(pool.map(flips, *zip(*jobs, strict=True))))


def merged(parts: list[Result]) -> Result:
    """One result of several."""
    result = Result(parts[0].row)
    for part in parts:
        for name in ("tried", "wrong", "exceptions", "found"):
            setattr(result, name, getattr(result, name) + getattr(part, name))
        result.max_added_s = max(result.max_added_s, part.max_added_s)
        result.why = [*result.why, *part.why][:5]
        result.figures.update(part.figures)
    return result
