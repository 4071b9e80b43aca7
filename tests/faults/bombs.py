"""F22: heads that promise more than there is, and bytes that would become many more."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.container import Arrangement, Header, LayerShape
from blendkv.container import format as f
from blendkv.container.header import Head
from blendkv.container.packing import pack_head
from blendkv.container.seals import Checksum
from blendkv.errors import ChunkFileError
from blendkv.stores import Pool, TieredStore
from tests.chunks import index_at, payload_start
from tests.drawn import SMALL, chunk_of, profile_of
from tests.faults.entries import HeldStore, same
from tests.faults.rows import Result, row
from tests.fuzz import FIELDS, change_head, raw_seeds, seal_head
from tests.patience import SLACK_S, seconds_of

MAX_SECONDS, MAX_BYTES = 0.1, 16 << 20
STATUS = Path("/proc/self/status")


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes; 0 where there is no /proc."""
    if not STATUS.exists():
        return 0
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def bytes_of(function: Callable[[], Any]) -> int:
    """The most memory beyond what there was: what Python counts, or what the system does, whichever is more."""
    tracemalloc.start()
    try:
        function()
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    function()
    return max(traced, memory("VmHWM") - before)


def good(**fields: Any) -> bytes:
    return encode_chunk(chunk_of(SMALL, 7, namespace="n", tokenizer="t", text="x", **fields))


def changed(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    """Fields of a head, with a checksum that is right."""
    copy = bytearray(data)
    for at, code, value in fields:
        struct.pack_into("<" + code, copy, at, value)
    end = min(payload_start(copy), len(copy))
    seal_head(copy, end)
    return bytes(copy)


def heads() -> Iterator[tuple[str, bytes]]:
    """Every field at its bounds and beyond, alone and with those that multiply it."""
    data = good()
    for at, code in FIELDS:
        top = (1 << 8 * struct.calcsize(code)) - 1
        for value in (top, top >> 1, (top >> 1) + 1, top - 15, 1 << 16 if top > 1 << 16 else 255):
            signed = value - top - 1 if code == "h" and value > top >> 1 else value
            yield f"field at {at} is {value}", changed(data, (at, code, signed))
    yield "all counts", changed(data, *[(at, c, (1 << 8 * struct.calcsize(c)) - 1) for at, c in FIELDS if at >= 72])
    for tokens, group, unit, layers, parts, streams in (
        (131072, 1, 1, 1024, 16, 8),
        (131072, 131072, 1024, 1024, 1, 1),
        (131072, 1, 1024, 1024, 16, 8),
        ((1 << 32) - 1, 1, 1, 65535, 255, 255),
        ((1 << 32) - 1, (1 << 32) - 1, 65535, 65535, 255, 255),
    ):
        counts = ((72, "I", tokens), (76, "I", group), (80, "H", unit), (82, "H", layers), (51, "B", parts))
        yield f"{tokens} tokens in groups of {group}", changed(data, *counts, (52, "B", streams))
    at = f.PRELUDE.size + f.FIELDS.size
    huge = [(at + 2 * i, "H", 65535) for i in range(3 * len(SMALL))]
    yield "dims of 65,535", changed(data, *huge)
    with ChunkFile(data) as file:
        index, entries = index_at(data, file.header), file.header.segments
    for value in ((1 << 32) - 16, 1 << 31, 16, 0, (1 << 32) - 1):
        yield f"segments of {value}", changed(data, *[(index + 12 * i, "I", value) for i in range(entries)])
    for total in (0, 1, len(data) - 16, len(data) + 16, 1 << 40, (1 << 64) - 1):
        yield f"{total} bytes in all", changed(data, (16, "Q", total))
    for length in (0, 16, 1 << 20, (1 << 32) - 1):
        copy = bytearray(data)
        struct.pack_into("<I", copy, 12, length)
        yield f"a head of {length} bytes", bytes(copy)


def payload_bombs() -> Iterator[tuple[str, bytes]]:
    """Heads that are right, and say as much as they may of a payload that is small, or of zeros."""
    dims = (LayerShape(65535, 65535, 65535),)
    for shapes, tokens, size in (
        (dims, 1, 1 << 21),  # 16 GiB and more of 2 MiB
        ((LayerShape(16, 256, 256),) * 32, 512, 1 << 17),  # half a GiB
        ((LayerShape(1, 4, 4),) * 1024, 4096, 1 << 16),
    ):
        header = Header("raw", 0, "fp32", Arrangement(tokens), shapes, "f" * 32, bytes(4 * tokens))
        yield f"raw, {header.decoded_bytes:,} bytes of {size:,}", filled(header, size)
    # segments without end: as many as a head has room for
    many = Header("raw", 0, "fp32", Arrangement(1), (LayerShape(1, 1, 1),) * 1024, "f" * 32, bytes(4 * 42))
    yield "86,016 segments", filled(many, 16 * 86016)
    for name in ("cachegen", "klt", "klt-xl"):
        codec = get_codec(name, profile=profile_of(name), level=4)
        for tokens, fill in ((131072, 0), (131072, 255), (4096, 170)):
            shape = codec.arrangement(SMALL, tokens)
            header = Header(
                *(name, codec.level, "fp32", shape, SMALL, "f" * 32, bytes(4 * tokens)), profile_hash=codec.profile_hash
            )
            if tokens * 4 + header.segments * 12 < f.MAX_HEAD - 1000:
                yield f"{name}, {tokens} tokens of {fill}", filled(header, header.decoded_bytes // 4000, fill)


def filled(header: Header, size: int, fill: int = 0) -> bytes:
    """A file of that head, whose checksums are right, with segments of one size."""
    each = f.aligned(-(-size // header.segments))
    segment = bytes([fill]) * each
    checks = tuple(Checksum().segment(number, segment) for number in range(header.segments))
    return pack_head(Head(header, (each,) * header.segments, checks)) + segment * header.segments


def tiers_of(data: bytes) -> tuple[str, TieredStore]:
    """Over a store that has the file, under the key that it says, so that nothing but its size is wrong."""
    key = "0" * 64
    with suppress(ChunkFileError), ChunkFile(data, profiles=PROFILES) as file:
        key = file.key
    return key, TieredStore(Pool(1), HeldStore({key: data}), profiles=PROFILES)


def PROFILES(digest: str) -> Any:
    return next((p for p in map(profile_of, ("cachegen", "klt", "klt-xl")) if p.hash == digest), None)


def tried(result: Result, what: str, ask: Callable[[], Any]) -> None:
    result.tried += 1
    result.expect(result.call(ask) is None, f"{what}: a chunk")
    took = min(seconds_of(ask) for _ in range(1 if what.startswith("drawn") else 3))  # the machine is busy with others
    most = bytes_of(ask)
    result.expect(took < MAX_SECONDS + SLACK_S, f"{what}: {took:.3f} s")
    result.expect(most < MAX_BYTES, f"{what}: {most:,} bytes")
    result.figures["worst_ms"] = max(result.figures["worst_ms"], round(1000 * took))
    result.figures["most_kib"] = max(result.figures["most_kib"], most >> 10)


def read(data: bytes) -> Any:
    try:
        with ChunkFile(data, profiles=PROFILES) as file:
            return file.read()
    except ChunkFileError:
        return None


@row
def f22(full: bool) -> Result:
    result, random = Result("F22"), Random(22)
    data = good()
    for _ in range(2):  # what is made once is made now
        key, tiers = tiers_of(data)
        result.found += same(tiers.get(key), read(data))
    bombs = [*heads(), *payload_bombs()]
    seeds = [seed for seed in raw_seeds() if seed.secret is None]
    for number in range(20_000 if full else 300):
        seed = seeds[number % len(seeds)]
        bombs.append((f"drawn {number}", bytes(change_head(random, seed, bytearray(seed.data)))))
    for what, bomb in bombs:
        if what.startswith("drawn") and read(bomb) is not None:
            result.figures["drawn and harmless"] += 1
            continue
        tried(result, what, lambda bomb=bomb: read(bomb))
        key, tiers = tiers_of(bomb)
        tried(result, f"{what}, in a store", lambda tiers=tiers, key=key: tiers.get(key))
    key, tiers = tiers_of(data)
    result.found += same(tiers.get(key), read(data))
    return result
