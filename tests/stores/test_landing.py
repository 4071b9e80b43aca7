"""Entries that are read into memory of ours and landed on a device, beside those that are read and then decoded."""

from dataclasses import replace

import pytest
import torch

from blendkv.chunk import chunk_key
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import get_codec
from blendkv.stores import DiskStore, Pool, TieredStore, tiered
from blendkv.stores.reading import lands
from tests.chunks import assert_same, make_chunk
from tests.made_up import make_codec

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["lands", "is decoded"])
def way(request, monkeypatch):
    """Both ways, on the CPU."""
    landed, own = [], tiered.Reader.land
    monkeypatch.setattr(tiered, "lands", lambda store, homes: request.param)
    monkeypatch.setattr(tiered.Reader, "land", lambda self, *args: landed.append(args[1]) or own(self, *args))
    yield
    assert bool(landed) is request.param


def filled(folder, chunks, **options):
    store = DiskStore(folder)
    TieredStore(Pool(1), store, write="through", **options).put_many(chunks)
    return TieredStore(Pool(), store, **options)


def damage(folder, key, at=-200):
    (path,) = folder.rglob(f"{key}.bkv")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("level", [0, 1])
def test_chunks_come_as_they_were_put(way, tmp_path, level):
    chunks = [make_chunk(n, 3, 8, 64, seed=n, text="t", namespace="n") for n in (40, 64, 1, 600)]
    tiers = filled(tmp_path, chunks, codec=get_codec("raw", level=level))
    found = tiers.fetch([chunk.key for chunk in chunks])
    for got, chunk in zip(found, chunks, strict=True):
        assert_same(got.chunk, chunk)
        assert got.tier == tiers.stores[0].url
        assert got.level == ""
        assert chunk.key in tiers.pool
        assert ChunkFile(tiers.stores[0].get(chunk.key)).header.level == level
    assert tiers.stats.hits == {tiers.stores[0].url: 4}
    assert tiers.stores[0].stats.hits == 4 + 4  # those that were looked at just now


def test_what_is_wrong_or_not_there_is_missed(way, tmp_path):
    chunks = [make_chunk(40, 3, 8, 64, seed=n) for n in range(5)]
    tiers = filled(tmp_path, chunks)
    damage(tmp_path, chunks[1].key)
    damage(tmp_path, chunks[2].key, at=50)  # the head
    tiers.stores[0].delete(chunks[3].key)
    tiers.stores[0].put(chunks[4].key, tiers.stores[0].get(chunks[0].key))  # somebody else's
    found = tiers.fetch([chunk.key for chunk in chunks])
    assert [got.chunk is not None for got in found] == [True, False, False, False, False]
    assert_same(found[0].chunk, chunks[0])
    assert tiers.stats.reasons == {"checksum": 2, "key": 1}
    assert tiers.stats.misses == 4
    assert list(tiers.stores[0].keys()) == [chunks[0].key]


def test_lossy_ones_and_raw_ones_in_one_folder(way, tmp_path):
    """A codec refuses what is not of its profile's layers: those chunks are raw."""
    chunks, others = [make_chunk(40, 3, 2, 16, seed=n) for n in range(3)], [make_chunk(40, 3, 8, 64, seed=9)]
    codec = make_codec(chunks[0])
    filled(tmp_path, chunks, codec=codec)
    tiers = filled(tmp_path, others)
    tiers = TieredStore(Pool(), tiers.stores[0], codec=codec)
    found = tiers.fetch([chunk.key for chunk in (*chunks, *others)])
    for got, chunk in zip(found, chunks, strict=False):
        assert_same(got.chunk, ChunkFile(tiers.stores[0].get(chunk.key), profiles=codec.profile).read())
    assert_same(found[3].chunk, others[0])
    assert [got.level for got in found] == ["", "", "", "raw"]


def test_a_level_of_raw_lies_beside_another_codec(way, tmp_path):
    """What is put under the key of a level is of that level."""
    chunk = make_chunk(40, 3, 2, 16)
    tiers = filled(tmp_path, [chunk], codec=make_codec(chunk), levels=[get_codec("raw", level=0)])
    tiers.stores[0].delete(chunk.key)
    (got,) = tiers.fetch([chunk.key])
    assert got.level == "raw@0"
    assert_same(got.chunk, chunk)
    assert not tiers.stats.damaged


def test_sealed_files_are_opened_with_their_secret_alone(way, tmp_path):
    secret = b"s" * 32
    chunk = make_chunk(40, 3, 8, 64, namespace="n")
    own = chunk_key(chunk.ids, chunk.fingerprint, namespace="n", secret=secret)
    chunk = replace(chunk, keyed=own)
    tiers = filled(tmp_path, [chunk], secret=secret)
    assert_same(tiers.get(own), chunk)
    damage(tmp_path, own)
    tiers.pool.clear()
    assert tiers.get(own) is None
    assert tiers.stats.reasons == {"authentication": 1}


def test_a_store_that_raises_has_nothing(tmp_path, monkeypatch):
    chunk = make_chunk(40, 3, 8, 64)
    tiers = filled(tmp_path, [chunk])
    monkeypatch.setattr(tiered, "lands", lambda store, homes: True)
    monkeypatch.setattr(tiers.stores[0], "read_into", lambda *args: 1 / 0)
    assert tiers.get(chunk.key) is None
    assert tiers.stores[0].stats.faults["error"] == 1


class Plain:
    local = True


@pytest.mark.parametrize(
    ("store", "homes", "expected"),
    [
        (DiskStore, ["cuda:0", "cuda:0"], True),
        (DiskStore, ["cuda:0", "cuda:1"], False),  # of two GPUs
        (DiskStore, ["cpu"], False),
        (Plain, ["cuda:0"], False),  # it cannot read into memory
    ],
)
def test_when_files_land(store, homes, expected, tmp_path):
    made = store(tmp_path) if store is DiskStore else store()
    assert lands(made, [torch.device(home) for home in homes]) is expected


def test_a_short_file_is_not_taken_for_a_whole_one(tmp_path):
    store = DiskStore(tmp_path)
    chunk = make_chunk(40)
    TieredStore(Pool(1), store, write="through").put(chunk)
    size = store.size(chunk.key)
    memory = bytearray(size)
    assert store.read_into(chunk.key, 0, memoryview(memory))
    assert bytes(memory) == store.get(chunk.key)
    part = bytearray(100)
    assert store.read_into(chunk.key, 50, memoryview(part))
    assert bytes(part) == bytes(memory[50:150])
    hits = store.stats.hits
    assert not store.read_into(chunk.key, size - 50, memoryview(part))
    assert not store.read_into("f" * 64, 0, memoryview(part))
    assert (store.stats.hits, store.stats.faults["length"]) == (hits, 1)
