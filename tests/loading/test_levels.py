"""Levels of a chunk lie in a store side by side, and are found again without a list."""

import uuid

import pytest
import torch

from blendkv.chunkfile import ChunkFile
from blendkv.codecs import get_codec
from blendkv.container import read_head
from blendkv.levelkeys import level_key, level_key_of, name_of
from blendkv.loading.levels import base_bytes, find_levels, write_levels
from blendkv.stores import RemoteStore
from blendkv.stores.checking import check_bytes
from tests.drawn import SMALL, chunk_of, profile_of
from tests.stores.dicts import DictStore


@pytest.fixture
def codecs():
    klt, cachegen = profile_of("klt"), profile_of("cachegen")
    return [
        get_codec("raw"),
        get_codec("klt", level=0, profile=klt),
        get_codec("klt", level=4, profile=klt),
        get_codec("klt", level=4, profile=klt, streams=2),
        get_codec("cachegen", level=4, profile=cachegen),
    ]


def test_every_level_has_a_key_of_its_own_which_its_file_tells(codecs):
    store, chunks = DictStore(), [chunk_of(SMALL, 30, seed=seed) for seed in (1, 2)]
    chunks[1] = chunk_of(SMALL, 31, seed=2)
    levels = [level for chunk in chunks for level in write_levels(store, chunk, codecs)]
    assert len(store.entries) == len({level.key for level in levels}) == 2 * len(codecs)
    assert not {chunk.key for chunk in chunks} & set(store.entries)
    for level in levels:
        data = store.entries[level.key]
        assert level_key_of(level.chunk, read_head(data).header) == level.key
        assert level.nbytes == len(data)
        assert check_bytes(level.key, data) == ("ok", "")
        assert check_bytes(level_key("0" * 64, level.codec), data)[0] == "foreign"
    other = get_codec("klt", level=0, profile=profile_of("klt", protected=4))
    assert level_key(chunks[0].key, other) not in store.entries  # what another profile wrote is something else


def test_names(codecs):
    assert [name_of(codec) for codec in codecs] == ["raw", "klt@0", "klt@4", "klt@4+2", "cachegen@4"]


def test_what_is_there_is_found(codecs):
    store = RemoteStore(f"memory://{uuid.uuid4().hex}")
    chunk = chunk_of(SMALL, 30)
    written = write_levels(store, chunk, codecs[:3])
    found, absent = find_levels(store, [chunk.key, "0" * 64], codecs)
    assert [(level.name, level.nbytes) for level in found] == [(level.name, level.nbytes) for level in written]
    assert absent == []
    assert find_levels(store, [], codecs) == []


def test_a_store_that_keeps_nothing(codecs):
    store = DictStore()
    store.refuses = True
    assert [level.nbytes for level in write_levels(store, chunk_of(SMALL, 30), codecs)] == [None] * 5


def test_a_base_is_a_prefix_that_can_be_read(codecs):
    store = DictStore()
    *_, two, anchors = write_levels(store, chunk_of(SMALL, 300), codecs)
    assert base_bytes(store.entries[write_levels(store, chunk_of(SMALL, 30), codecs[:1])[0].key]) is None
    for level in (two, anchors):
        data = store.entries[level.key]
        cut = data[: level.base_bytes] + bytes(len(data) - level.base_bytes)
        base = ChunkFile(cut, codec=level.codec).read(streams=1)
        whole = ChunkFile(data, codec=level.codec)
        assert all(torch.equal(a, b) for a, b in zip(base.keys, whole.read(streams=1).keys, strict=True))
        assert not torch.equal(base.keys[0], whole.read().keys[0])
