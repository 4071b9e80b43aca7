"""Entries that are read into memory of ours and landed on a device, beside those that are read and then decoded."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from blendkv.chunk import chunk_key
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.landing import Landing
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


def test_an_entry_is_read_whole_or_not_at_all(tmp_path):
    store, rooms = DiskStore(tmp_path), []
    chunk = make_chunk(40)
    TieredStore(Pool(1), store, write="through").put(chunk)

    def room(size):
        rooms.append(bytearray(size))
        return memoryview(rooms[-1])

    assert store.read_into(chunk.key, room)
    assert rooms == [store.get(chunk.key)]
    hits = store.stats.hits
    assert not store.read_into("f" * 64, room)
    assert len(rooms) == 1
    (path,) = tmp_path.rglob(f"{chunk.key}.bkv")

    def cut(size):
        os.truncate(path, size - 50)
        return room(size)

    assert not store.read_into(chunk.key, cut)
    assert (store.stats.hits, store.stats.faults["length"]) == (hits, 1)


@pytest.mark.parametrize("longer", [True, False])
def test_what_is_replaced_while_it_is_read_is_good(tmp_path, monkeypatch, longer):
    """By another process, with another text, level or codec: what was there comes, and what is there now stays."""
    chunk = make_chunk(40, 3, 8, 64)
    short, long = encode_chunk(chunk), encode_chunk(replace(chunk, text="t" * 5000))
    tiers, own = filled(tmp_path, [chunk]), Landing.room
    tiers.stores[0].put(chunk.key, short if longer else long)

    def replaced(self, nbytes):
        tiers.stores[0].put(chunk.key, long if longer else short)
        return own(self, nbytes)

    monkeypatch.setattr(tiered, "lands", lambda store, homes: True)
    monkeypatch.setattr(Landing, "room", replaced)
    got = tiers.get(chunk.key)
    assert got is not None
    assert torch.equal(got.keys[1], chunk.keys[1])
    assert not tiers.stats.damaged
    assert tiers.stores[0].get(chunk.key) == (long if longer else short)


def test_what_is_not_there_is_counted_by_the_store_too(way, tmp_path):
    tiers = filled(tmp_path, [])
    assert tiers.get("e" * 64) is None
    assert tiers.stores[0].stats.misses == 1


@pytest.mark.parametrize("most", [0, 1])
def test_a_process_that_can_have_no_more_threads_reads_all_the_same(tmp_path, monkeypatch, most):
    chunks = [make_chunk(40, 3, 8, 64, seed=n) for n in range(3)]
    tiers, own, begun = filled(tmp_path, chunks), threading.Thread.start, []

    def start(self):
        begun.append(self)
        if len(begun) > most:
            raise RuntimeError("can't start new thread")
        own(self)

    monkeypatch.setattr(tiered, "lands", lambda store, homes: True)
    monkeypatch.setattr(threading.Thread, "start", start)
    for got, chunk in zip(tiers.get_many([chunk.key for chunk in chunks]), chunks, strict=True):
        assert_same(got, chunk)
