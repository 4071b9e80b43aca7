"""D33 behind a library: damage of what lies in a store, and what `generate` makes of it. Of files: test_d33.py."""

import errno
import os
import random

import pytest

from blendkv import Pool, TieredStore
from blendkv.chunkwriter import encode_chunk
from blendkv.stores import DiskStore
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import ask, assert_hit, assert_missed, files_of, library, local
from tests.chunks import assert_same, make_chunk
from tests.faults.systems import system
from tests.stores.dicts import DictStore

ONE, OTHER = ["The tower is 61 m high."], ["Otters hold hands in rafts"]


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def entry(model, tmp_path):
    """(the folder, the file of `ONE`, its bytes); `OTHER` and the head of the template lie there too."""
    with library(model, tmp_path) as kv:
        ask(kv, OTHER)
        before = set(files_of(tmp_path))
        ask(kv, ONE)
    (path,) = set(files_of(tmp_path)) - before
    return tmp_path, path, path.read_bytes()


def other_entry(folder, path):
    """Bytes of another entry, that of a document of a like size."""
    return min(
        (p.read_bytes() for p in files_of(folder) if p != path), key=lambda data: abs(len(data) - path.stat().st_size)
    )


def damages(data: bytes) -> dict[str, bytes | None]:
    """What becomes of an entry; None: it is gone."""
    flip = random.Random(0)
    kinds: dict[str, bytes | None] = {"deleted": None, "emptied": b"", "longer": data + b"\0"}
    kinds |= {f"cut at {part}/64": data[: len(data) * part // 64] for part in (1, 2, 32, 63)}
    for _ in range(4):
        at = flip.randrange(len(data))
        kinds[f"bit of byte {at}"] = data[:at] + bytes([data[at] ^ 1 << flip.randrange(8)]) + data[at + 1 :]
    return kinds


def put(path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def test_d33_damage_is_a_counted_miss_and_is_repaired_once(model, entry):
    """A damaged file took the engine down, or was loaded as if fine (LMCache#1313, #2420, vllm#54363, ds4#146)."""
    folder, path, data = entry
    for name, damaged in (damages(data) | {"another entry": other_entry(folder, path)}).items():
        put(path, damaged)
        reader = library(model, folder, on_miss="recompute")
        report = assert_missed(reader, ONE)
        store, stats = reader.pool.stores[0], reader.pool.stats
        assert store.stats.misses + sum(stats.damaged.values()) == stats.misses == 1, name
        assert not path.exists(), name  # it is out of the way
        assert (folder / "bad").exists() == (damaged is not None), name
        writer = library(model, folder)
        got, report = ask(writer, ONE)
        assert report.prefilled_tokens == report.chunks[1].tokens, name
        assert_same_answer(got, local(writer, ONE))
        assert path.read_bytes() == data, name  # written anew
        assert_hit(library(model, folder), ONE)
        for aside in (folder / "bad").glob("*"):
            aside.unlink()


def test_d33_every_64th(model, entry):
    folder, path, data = entry
    for part in range(64):
        path.write_bytes(data[: len(data) * part // 64])
        kv = library(model, folder, on_miss="recompute")
        cache = kv(ONE, "How high?").cache
        assert sum(map(len, cache.chunks[0])) == sum(cache.report.loaded.values()) + len(cache.chunks[0][1])
        assert kv.pool.stats.misses == 1
    path.write_bytes(data)
    assert_hit(library(model, folder), ONE)


def test_d33_what_is_damaged_twice_is_not_written_a_third_time(model, entry):
    """A disk that always breaks one entry does not get it for ever; answers stay right."""
    folder, path, data = entry
    for attempt in (1, 2, 3):
        if attempt < 3:
            assert path.read_bytes() == data
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
        kv = library(model, folder)
        got, report = ask(kv, ONE)
        assert_same_answer(got, local(kv, ONE))
        assert report.prefilled_tokens == report.chunks[1].tokens
        assert path.exists() == (attempt == 1)
        assert report.put_failures == (attempt > 1)
    assert kv.pool.stores[0].stats.faults == {"quarantined": 1}
    assert report.store_faults == {kv.pool.stores[0].url: {"quarantined": 1}}
    (folder / "bad" / f"{path.stem}.2").unlink()  # somebody looked into it
    ask(library(model, folder), ONE)
    assert_hit(library(model, folder), ONE)


def test_d33_an_unreadable_entry(model, entry):
    """Mode 000, as who is not root; as root, a system that says so."""
    folder, path, data = entry

    def denied(name: str) -> None:
        if name == "pread":
            raise PermissionError(errno.EACCES, "injected")

    reader = library(model, folder, on_miss="recompute")
    if os.geteuid():
        path.chmod(0)
        report = assert_missed(reader, ONE)
    else:
        with system(before=denied):
            report = assert_missed(reader, ONE)
    assert report.store_faults[reader.pool.stores[0].url]["denied"] >= 1
    if os.geteuid():
        ask(library(model, folder), ONE)  # replaces it
    assert path.read_bytes() == data
    assert_hit(library(model, folder), ONE)


def flips(data: bytes, key: str, wanted, bits) -> int:
    """How many flips of single bits a tiered store noticed, each as one damaged entry."""
    store, damaged, found = DictStore(local=True), bytearray(data), 0
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
        store.entries = {key: bytes(damaged)}
        tiers = TieredStore(Pool(), store)
        assert tiers.get(key) is None
        assert not store.entries or tiers.stats.unreadable
        found += sum(tiers.stats.damaged.values()) + sum(tiers.stats.unreadable.values())
        damaged[bit // 8] ^= 1 << bit % 8
    store.entries = {key: bytes(damaged)}
    assert_same(TieredStore(Pool(), store).get(key), wanted)
    return found


def test_d33_every_bit_of_a_small_entry():
    chunk = make_chunk(tokens=2, layers=1, heads=1, key_dim=2, namespace="n")
    data = encode_chunk(chunk)
    assert flips(data, chunk.key, chunk, range(8 * len(data))) == 8 * len(data)


def test_d33_bits_of_an_entry_of_4_kib():
    """22 of 60 flips in bf16 values had changed the answer."""
    chunk = make_chunk(tokens=12, layers=3, heads=2, key_dim=6, text="x" * 300)
    data = encode_chunk(chunk)
    assert 3_500 < len(data) < 5_000
    assert flips(data, chunk.key, chunk, random.Random(1).sample(range(8 * len(data)), 1000)) == 1000


def test_d33_a_folder_in_the_place_of_an_entry(model, entry):
    folder, path, data = entry
    path.unlink()
    path.mkdir()
    assert_missed(library(model, folder, on_miss="recompute"), ONE)
    kv = library(model, folder)
    assert_same_answer(ask(kv, ONE)[0], local(kv, ONE))
    path.rmdir()
    path.write_bytes(data)
    assert_hit(library(model, DiskStore(folder)), ONE)
