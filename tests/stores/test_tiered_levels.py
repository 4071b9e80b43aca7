"""A chunk at several levels: entries beside its own one, that are made, found, used, moved and removed with it."""

import pytest
import torch

from blendkv import Pool
from blendkv.chunk import chunk_key
from blendkv.codecs import get_codec
from blendkv.levelkeys import level_key, level_key_of, name_in, name_of
from blendkv.stores import DiskStore, TieredStore
from blendkv.stores.checking import check_bytes
from tests.chunks import assert_same
from tests.drawn import SMALL, chunk_of, profile_of
from tests.stores.dicts import DictStore

KLT = [get_codec("klt", level=level, profile=profile_of("klt")) for level in (0, 4, 8)]
CHUNKS = [chunk_of(SMALL, 30 + i, seed=i) for i in range(3)]


@pytest.fixture
def near():
    return DictStore("near", local=True)


@pytest.fixture
def far():
    return DictStore("far")


def decoded(chunk, codec):
    from blendkv.chunkfile import decode_chunk
    from blendkv.chunkwriter import encode_chunk

    return decode_chunk(encode_chunk(chunk, codec), profiles=getattr(codec, "profile", None))


def test_every_level_lies_beside_its_chunk(near):
    tiers = TieredStore(near, levels=KLT)
    tiers.put_many(CHUNKS)
    keys = {level_key(chunk.key, codec) for chunk in CHUNKS for codec in KLT}
    assert set(near.entries) == keys | {chunk.key for chunk in CHUNKS}
    for key, data in near.entries.items():
        assert check_bytes(key, data) == ("ok", "")
    for chunk in CHUNKS:
        assert [form.level for form in tiers.forms(chunk.key)] == ["raw", "klt@0", "klt@4", "klt@8"]
        files = [near.entries[form.entry] for form in tiers.forms(chunk.key)]
        assert len(files[0]) > len(files[1]) > len(files[2]) > len(files[3])


def test_without_levels_nothing_is_written_beside(near):
    TieredStore(near).put_many(CHUNKS)
    assert set(near.entries) == {chunk.key for chunk in CHUNKS}


def test_numbers_are_levels_of_the_codec_and_its_own_level_is_the_chunk(near):
    tiers = TieredStore(near, codec=KLT[1], levels=(0, 4, 8))
    assert [name_of(codec) for codec in tiers.levels] == ["klt@0", "klt@8"]
    assert [form.level for form in tiers.forms("0" * 64)] == ["klt@4", "klt@0", "klt@8"]
    two = TieredStore(near, codec=get_codec("klt", level=0, profile=profile_of("klt"), streams=2), levels=(4,))
    assert name_of(two.levels[0]) == "klt@4+2"
    assert [name_of(codec) for codec in tiers.over(DictStore("more")).levels] == ["klt@0", "klt@8"]


@pytest.mark.parametrize(
    ("levels", "said"),
    [((4,), "'raw', which has no levels: give codecs"), ((KLT[0], KLT[0]), "name each once"), (("zip",), "zip")],
)
def test_levels_that_cannot_be(near, levels, said):
    with pytest.raises(ValueError, match=said):
        TieredStore(near, levels=levels)
    with pytest.raises(ValueError, match="klt has levels"):
        TieredStore(near, codec=KLT[0], levels=(1000,))


@pytest.mark.parametrize("encoded", [False, True])
def test_a_level_alone_is_used_and_only_where_the_chunk_is_not(near, far, encoded):
    chunk, other = CHUNKS[:2]
    TieredStore(near, levels=KLT).put_many([other])
    TieredStore(far, levels=KLT, write="through").put_many([chunk])
    far.entries = {key: data for key, data in far.entries.items() if key == level_key(chunk.key, KLT[1])}
    tiers = TieredStore(Pool(codec=KLT[0] if encoded else None), near, far, codec="raw", levels=KLT)
    got, whole, absent = tiers.fetch([chunk.key, other.key, "0" * 64])
    assert (got.tier, got.level, whole.level, absent.chunk) == ("far://", "klt@4", "", None)
    assert_same(got.chunk, decoded(chunk, KLT[1]))
    assert_same(whole.chunk, other)
    assert (tiers.stats.hits, tiers.stats.misses) == ({"far://": 1, "near://": 1}, 1)
    again = tiers.fetch([chunk.key])[0]  # memory has it, as that level
    assert (again.tier, again.level) == ("memory", "klt@4")
    assert chunk.key in tiers
    assert tiers.flush(5)
    assert level_key(chunk.key, KLT[1]) in near.entries  # and the nearer store
    assert not tiers.stats.damaged


def test_memory_has_a_chunk_once_and_a_better_one_takes_the_place_of_a_level(near):
    chunk = CHUNKS[0]
    TieredStore(near, levels=KLT).put(chunk)
    tiers = TieredStore(near, levels=KLT)
    raw, *levels = tiers.forms(chunk.key)
    for form in (*reversed(levels), raw):
        assert tiers.take(0, {chunk.key: form})[chunk.key].level == ("" if form.main else form.level)
        assert tiers.pool.keys() == [form.entry]
    tiers.take(0, {chunk.key: levels[0]})
    assert tiers.pool.keys() == [raw.entry]  # what is there in full stays


def test_a_damaged_level_is_put_away_and_the_next_one_used(near):
    chunk = CHUNKS[0]
    TieredStore(near, levels=KLT).put(chunk)
    first, second = (level_key(chunk.key, codec) for codec in KLT[:2])
    del near.entries[chunk.key]
    near.entries[first] = near.entries[first][:-9] + bytes([near.entries[first][-9] ^ 1]) + near.entries[first][-8:]
    tiers = TieredStore(near, levels=KLT)
    got = tiers.fetch([chunk.key])[0]
    assert got.level == "klt@4"
    assert_same(got.chunk, decoded(chunk, KLT[1]))
    assert (tiers.stats.damaged, tiers.stats.reasons) == ({"near://": 1}, {"checksum": 1})
    assert first not in near.entries
    assert second in near.entries


def test_a_level_of_another_chunk_is_found_out(near):
    a, b = CHUNKS[:2]
    TieredStore(near, levels=KLT[:1]).put_many([a, b])
    entry = level_key(a.key, KLT[0])
    near.entries = {entry: near.entries[level_key(b.key, KLT[0])]}
    tiers = TieredStore(near, levels=KLT[:1])
    assert tiers.get(a.key) is None
    assert tiers.stats.reasons == {"key": 1}
    assert not near.entries


def test_what_is_asked_for_by_the_key_of_a_level_is_no_damage(near):
    TieredStore(near, levels=KLT).put(CHUNKS[0])
    entry, tiers = level_key(CHUNKS[0].key, KLT[1]), TieredStore(near, levels=KLT)
    assert_same(tiers.get(entry), decoded(CHUNKS[0], KLT[1]))
    assert sorted(tiers.keys()) == sorted(near.entries)
    assert not tiers.stats.damaged


def test_deleting_a_chunk_deletes_its_levels_everywhere(near, far):
    tiers = TieredStore(near, far, levels=KLT)
    tiers.put_many(CHUNKS[:2])
    tiers.flush(5)
    assert len(near.entries) == len(far.entries) == 8
    tiers.delete(CHUNKS[0].key)
    assert len(near.entries) == len(far.entries) == 4
    tiers.delete(CHUNKS[1].key)
    assert not near.entries
    assert not far.entries
    assert not len(tiers.pool)


def test_eviction_is_by_entry_and_leaves_levels_that_can_be_used(tmp_path):
    sizes = {}
    for chunk in CHUNKS:
        store = DictStore(local=True)
        TieredStore(store, levels=KLT[2:]).put(chunk)
        sizes |= {key: len(data) for key, data in store.entries.items()}
    room = sum(sizes.values()) - 1
    disk = DiskStore(tmp_path, capacity_bytes=room)
    tiers = TieredStore(Pool(1), disk, levels=KLT[2:])
    tiers.put_many(CHUNKS)
    assert CHUNKS[0].key not in set(disk.keys())  # the first that was written
    got = tiers.fetch([chunk.key for chunk in CHUNKS])
    assert [each.level for each in got] == ["klt@8", "", ""]
    assert disk.stats.evictions == 1


@pytest.mark.parametrize("write", ["behind", "back"])
@pytest.mark.parametrize("encoded", [False, True])
def test_writing_later_writes_levels_too(near, write, encoded):
    codec = KLT[0] if encoded else None
    tiers = TieredStore(Pool(codec=codec), near, levels=(KLT[2],), write=write)
    tiers.put_many(CHUNKS)
    assert tiers.flush(10)
    assert set(near.entries) == {form.entry for chunk in CHUNKS for form in tiers.forms(chunk.key)}
    assert TieredStore(near, levels=(KLT[2],)).fetch([CHUNKS[0].key])[0].tier == "near://"


def test_a_tenants_levels_have_the_tenants_keys(near):
    from dataclasses import replace

    secret, chunk = bytes(range(32)), CHUNKS[0]
    keyed = replace(chunk, keyed=chunk_key(chunk.ids, chunk.fingerprint, secret=secret))
    TieredStore(near, levels=KLT[:1], secret=secret).put(keyed)
    entry = level_key(keyed.key, KLT[0])
    assert set(near.entries) == {keyed.key, entry}
    assert check_bytes(entry, near.entries[entry], secret) == ("ok", "")
    del near.entries[keyed.key]
    tiers = TieredStore(near, levels=KLT[:1], secret=secret)
    assert tiers.fetch([keyed.key])[0].level == "klt@0"
    assert TieredStore(near, levels=KLT[:1], secret=bytes(32)).fetch([keyed.key])[0].chunk is None


def test_a_level_that_cannot_be_made_is_told_and_the_chunk_is_kept(near):
    wrong = chunk_of(SMALL[:2], 30)  # not of the profile's layers
    tiers = TieredStore(near, levels=KLT[:2])
    assert tiers.put(wrong)
    assert set(near.entries) == {wrong.key}
    assert "2 levels of chunks could not be made" in " ".join(tiers.notes)


def test_names_are_told_by_heads(near):
    from blendkv.container import read_head

    tiers = TieredStore(near, levels=[*KLT, get_codec("klt", level=4, profile=profile_of("klt"), streams=2)])
    tiers.put(CHUNKS[0])
    for form in tiers.forms(CHUNKS[0].key):
        header = read_head(near.entries[form.entry]).header
        assert name_in(header) == form.level
        assert form.main or level_key_of(CHUNKS[0].key, header) == form.entry
    assert torch.equal(tiers.get(CHUNKS[0].key).keys[0], CHUNKS[0].keys[0])
