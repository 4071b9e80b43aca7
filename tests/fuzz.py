"""Hostile chunk files by the million: each gives a chunk or a ChunkFileError, quickly, in little memory.

`python -m tests.fuzz --count 1000000 --workers 2`. To have a codec fuzzed, append to SEEDS a function that makes a few
small valid files of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import xxhash

from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.codecs.raw import Raw
from blendkv.container import ContainerReader, Header, LayerShape
from blendkv.container.packing import pack_head
from blendkv.errors import ChunkFileError
from tests.chunks import index_at, make_chunk, payload_start
from tests.drawn import chunk_of, profile_of
from tests.patience import seconds_of

MAX_SECONDS = 1.0
MAX_BYTES = 64 << 20
"""Of one chunk: what the reader is told, and what it may take at most."""
FAILURES = Path(".cache/fuzz")


@dataclass(frozen=True)
class Seed:
    """A valid file, and what it takes to read it."""

    data: bytes
    secret: bytes | None = None
    profiles: Any = None

    @cached_property
    def header(self) -> Header:
        with ContainerReader(self.data, secret=self.secret) as reader:
            return reader.header

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """For each segment where its index entry is, where it begins and where it ends."""
        entry, at, start, found = 12 if self.secret is None else 20, index_at(self.data, self.header), 0, []
        start = payload_start(self.data)
        for number in range(self.header.segments):
            (length,) = struct.unpack_from("<I", self.data, at + entry * number)
            found.append((at + entry * number, start, start + length))
            start += length
        return found


def raw_seeds() -> list[Seed]:
    """Shapes, dtypes, names, token streams, without layer 0, sealed."""
    names = {"conditioning": (1,), "tokenizer": "t", "namespace": "n", "text": "x"}
    small = make_chunk(tokens=3, layers=2, heads=1, key_dim=8, **names)
    mixed = make_chunk(tokens=5, layers=3, heads=2, key_dim=6, value_dim=10, dtype=torch.bfloat16)
    half = make_chunk(tokens=17, layers=1, heads=1, key_dim=16, dtype=torch.float16)
    scores = {"hkvd": torch.ones(5), "other": torch.ones(5).half()}
    plain = [encode_chunk(small), encode_chunk(half), encode_chunk(mixed, token_streams=scores)]
    sealed = encode_chunk(small, secret=b"s" * 32, key_id=b"k")
    levels = [encode_chunk(make_chunk(tokens=n, layers=2, key_dim=2), Raw(level)) for n, level in ((7, 0), (35, 1))]
    return [*map(Seed, [*plain, *levels]), Seed(encode_chunk(mixed, layer0=False)), Seed(sealed, b"s" * 32)]


def profiled_seeds() -> list[Seed]:
    """`cachegen`, `klt` and `klt-xl` in one stream and in two: a few tokens, and some of more than a group."""
    shapes, seeds = (LayerShape(2, 6, 4), LayerShape(1, 4, 6), LayerShape(1, 2, 2)), []
    both = (12, torch.float16), (260, torch.float32)
    for name, settings in (("cachegen", {}), *((n, {"streams": s}) for n in ("klt", "klt-xl") for s in (1, 2))):
        profile = profile_of(name, shapes)
        codec = get_codec(name, profile=profile, level=4, **settings)
        for tokens, dtype in both[:1] if settings == {"streams": 1} else both:
            data = encode_chunk(chunk_of(shapes, tokens, dtype), codec)
            seeds.append(Seed(data, profiles={profile.hash: profile}))
    return seeds


SEEDS: list[Callable[[], list[Seed]]] = [raw_seeds, profiled_seeds]

# -- mutations --------------------------------------------------------------------------------------------------------

FIELDS = [(8, "H"), (10, "H"), (12, "I"), (16, "Q"), (48, "h"), (72, "I"), (76, "I"), (92, "I"), (96, "I")]
FIELDS += [(at, "B") for at in range(50, 56)] + [(at, "H") for at in (*range(80, 92, 2), 100, 102, 104)]
"""Where a field of the head is, and what: docs/format.md."""


def _cut(random: Random, data: bytes | bytearray, longest: int = 64) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.randint(1, longest))


def flip_bits(random: Random, data: bytearray) -> bytearray:
    for _ in range(random.choice((1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def set_bytes(random: Random, data: bytearray) -> bytearray:
    start, stop = _cut(random, data, 8)
    data[start:stop] = random.choice((bytes(stop - start), b"\xff" * (stop - start), random.randbytes(stop - start)))
    return data


def remove(random: Random, data: bytearray) -> bytearray:
    start, stop = _cut(random, data)
    del data[start:stop]
    return data


def duplicate(random: Random, data: bytearray) -> bytearray:
    start, stop = _cut(random, data)
    data[stop:stop] = data[start:stop]
    return data


def truncate(random: Random, data: bytearray) -> bytearray:
    return data[: random.randrange(len(data))]


def extend(random: Random, data: bytearray) -> bytearray:
    return data + random.choice((bytes(16), random.randbytes(random.randint(1, 40))))


BLIND = (flip_bits, set_bytes, remove, duplicate, truncate, extend)


def set_field(random: Random, data: bytearray) -> None:
    """A field of the head, at its bounds or beside them."""
    at, code = random.choice(FIELDS)
    size = struct.calcsize(code)
    old = int.from_bytes(data[at : at + size], "little")
    top = (1 << 8 * size) - 1
    beside = (old + 1, old - 1, old * 2, old + 16)
    value = random.choice((0, 1, 2, 255, 65535, top, top >> 1, random.randint(0, top), *beside))
    data[at : at + size] = (value & top).to_bytes(size, "little")


def seal_head(data: bytearray, end: int, measure: bool = False) -> None:
    """Makes the head's checksum right, and if wanted its lengths."""
    if measure:
        data[12:24] = struct.pack("<IQ", max(0, end - 32), len(data))
    data[24:32] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:24] + data[32:end])))


def change_head(random: Random, seed: Seed, data: bytearray) -> bytearray:
    """Fields, or anything else in the head, with a checksum that is right."""
    end = payload_start(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.7:
            set_field(random, data)
        else:
            data[random.randrange(32, end)] = random.randrange(256)
    if random.random() < 0.2:  # another length, which the head knows of
        at, size = random.randrange(32, end), random.choice((1, 2, 4, 6, 12, 16))
        if random.random() < 0.5:
            data[at:at] = random.randbytes(size)
            end += size
        else:
            size = min(size, end - at)
            del data[at : at + size]
            end -= size
        seal_head(data, end, measure=True)
    else:
        seal_head(data, end)
    return data


def change_payload(random: Random, seed: Seed, data: bytearray) -> bytearray:
    """Segments whose checksums are right, so that the codec sees them."""
    segments = seed.segments
    for number in {random.randrange(len(segments)) for _ in range(random.choice((1, 1, 2, 4)))}:
        _, start, stop = segments[number]
        if start < stop:
            piece = bytearray(data[start:stop])
            mutated = random.choice((flip_bits, set_bytes, remove, duplicate))(random, piece)
            data[start:stop] = (mutated + bytes(stop - start))[: stop - start]
    _seal(data, segments)
    return data


def resize_segment(random: Random, seed: Seed, data: bytearray) -> bytearray:
    """A segment that is shorter or longer by 16 bytes or a few times that."""
    segments, number = list(seed.segments), random.randrange(len(seed.segments))
    entry, start, stop = segments[number]
    step = 16 * random.choice((1, 1, 2, 5))
    if random.random() < 0.5 and stop - start >= step:
        del data[stop - step : stop]
        step = -step
    else:
        data[stop:stop] = random.choice((bytes(step), random.randbytes(step)))
    segments[number] = (entry, start, stop + step)
    segments[number + 1 :] = [(at, a + step, b + step) for at, a, b in segments[number + 1 :]]
    _seal(data, segments)
    return data


def swap_segments(random: Random, seed: Seed, data: bytearray) -> bytearray:
    """Two segments of one length, each with the other's bytes."""
    (_, a, b), (_, c, d) = random.choice(seed.segments), random.choice(seed.segments)
    if b - a == d - c:
        data[a:b], data[c:d] = data[c:d], data[a:b]
    _seal(data, seed.segments)
    return data


def _seal(data: bytearray, segments: Sequence[tuple[int, int, int]]) -> None:
    for number, (entry, start, stop) in enumerate(segments):
        check = xxhash.xxh3_64_intdigest(bytes(data[start:stop]), number)
        data[entry : entry + 12] = struct.pack("<IQ", stop - start, check)
    seal_head(data, payload_start(data), measure=True)


def mutate(random: Random, seeds: Sequence[Seed]) -> tuple[bytes, Seed]:
    """One input, and the seed that it came from."""
    seed = random.choice(seeds)
    data, kind = bytearray(seed.data), random.random()
    if kind < 0.2:
        for _ in range(random.choice((1, 1, 2))):
            data = random.choice(BLIND)(random, data) or bytearray(1)
    elif kind < 0.25:
        other = random.choice(seeds).data
        data = data[: random.randrange(len(data))] + other[random.randrange(len(other)) :]
    elif kind < 0.3:
        other = random.choice(seeds).data
        data = data[: payload_start(data)] + other[payload_start(other) :]
        seal_head(data, payload_start(data), measure=True)
    elif kind < 0.6 or seed.secret is not None:
        data = change_head(random, seed, data)
    elif kind < 0.85:
        data = change_payload(random, seed, data)
    elif kind < 0.95:
        data = resize_segment(random, seed, data)
    else:
        data = swap_segments(random, seed, data)
    return bytes(data), seed


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What became of the inputs."""

    inputs: int = 0
    decoded: int = 0
    refused: Counter = field(default_factory=Counter)
    worst_seconds: float = 0.0
    peak_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.inputs += other.inputs
        self.decoded += other.decoded
        self.refused += other.refused
        self.worst_seconds = max(self.worst_seconds, other.worst_seconds)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.failures += other.failures


def read(data: bytes, seed: Seed, way: int) -> None:
    """Reads a file whole, in part or by layers, and checks that it is what it says."""
    with ChunkFile(data, secret=seed.secret, profiles=seed.profiles, max_bytes=MAX_BYTES) as file:
        header = file.header
        if way == 0:
            layer = header.layers[-1]
            keys, values = file.layer(len(header.layers) - 1)
            assert keys.shape == (layer.heads, header.tokens, layer.key_dim)
            assert values.shape == (layer.heads, header.tokens, layer.value_dim)
            for stream in header.token_streams:
                assert len(file.token_stream(stream.name)) == header.tokens
        else:
            chunk = file.read(1 if way == 1 else None)
            assert len(chunk) == header.tokens
            assert chunk.nbytes == header.decoded_bytes <= MAX_BYTES
            assert file.key == chunk.key
        if seed.secret is None:  # a head that is read has one encoding
            assert pack_head(file._reader._head) == data[: payload_start(data)]


def run(count: int, seed: int, sample: int = 64) -> Result:
    """Reads `count` inputs; memory is measured for one in `sample`."""
    random, result = Random(seed), Result()
    seeds = [each for make in SEEDS for each in make()]
    for each in seeds:
        for way in range(4):
            if each.header.layer0 or way == 0:
                read(each.data, each, way)
    for number in range(count):
        data, origin = mutate(random, seeds)
        measured = number % sample == 0
        if measured:
            tracemalloc.start()
        begin = time.process_time()
        try:
            read(data, origin, number % 4)
            result.decoded += 1
        except ChunkFileError as error:
            result.refused[error.reason] += 1
        except Exception:
            _fail(result, data, traceback.format_exc(limit=-3))
        took = time.process_time() - begin
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            result.peak_bytes = max(result.peak_bytes, peak)
            if peak > 2 * MAX_BYTES:
                _fail(result, data, f"{peak} bytes")
        if took > MAX_SECONDS / 4:  # of a garbage collection of all that the process holds, or of this input?
            took = min(took, seconds_of(partial(_tried, data, origin, number % 4)))
        result.worst_seconds = max(result.worst_seconds, took)
        if took > MAX_SECONDS:
            _fail(result, data, f"{took} s")
        result.inputs += 1
    return result


def _tried(data: bytes, seed: Seed, way: int) -> None:
    with suppress(Exception):
        read(data, seed, way)


def _fail(result: Result, data: bytes, what: str) -> None:
    FAILURES.mkdir(parents=True, exist_ok=True)
    path = FAILURES / f"{sha256(data).hexdigest()[:16]}.bin"
    path.write_bytes(data)
    if len(result.failures) < 20:
        result.failures.append(f"{path}: {what}")


def _worker(count: int, seed: int) -> Result:
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))  # memory that tracemalloc does not see
    return run(count, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if any input did what it must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    begin, total, step = time.perf_counter(), Result(), 5_000
    jobs = [(min(step, options.count - at), options.seed + at // step) for at in range(0, options.count, step)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for result in pool.map(_worker, *zip(*jobs, strict=True)):
            total.add(result)
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps(asdict(total) | {"refused": dict(total.refused.most_common()), "seconds": seconds}))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
