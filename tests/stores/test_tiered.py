"""Chunks in memory over stores of bytes."""

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from blendkv import Pool, encode_chunk
from blendkv.chunk import chunk_key
from blendkv.codecs.raw import Raw
from blendkv.errors import ChunkFileError
from blendkv.stores import Budget, DiskStore, TieredStore
from blendkv.stores.opening import Opener
from tests.chunks import assert_same, make_chunk, payload_start
from tests.fuzz import seal_head
from tests.patience import SLACK_S
from tests.stores.dicts import DictStore

SECRET = b"0123456789abcdef"
CHUNKS = [make_chunk(tokens=5 + seed, seed=seed, namespace="n", text=f"text {seed}") for seed in range(4)]


class Rounding(Raw):
    """Loses half of the bits."""

    name = "rounding"
    needs_profile = True

    def encode_unit(self, first, keys, values):
        return super().encode_unit(first, *([t.bfloat16().to(t.dtype) for t in states] for states in (keys, values)))


KEYS = [chunk.key for chunk in CHUNKS]


@pytest.fixture
def near():
    return DictStore("near", local=True)


@pytest.fixture
def far():
    return DictStore("far")


def assert_chunks(found, wanted=CHUNKS):
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


def test_what_one_process_put_another_gets(near, far):
    with TieredStore(near, far) as tiers:
        assert [kept for _, kept in tiers.put_many(CHUNKS)] == [True] * 4
        assert [got.tier for got in tiers.fetch(KEYS)] == ["memory"] * 4
    other = TieredStore(near, far)
    got = other.fetch(KEYS)
    assert [each.tier for each in got] == ["near://"] * 4
    assert_chunks([each.chunk for each in got])
    assert "get_many" not in far.calls
    assert_chunks(other.get_many(KEYS))
    assert other.stats.hits == {"near://": 4, "memory": 4}
    assert near.calls.count("get_many") == 1  # one question for all, and none for what memory has


def test_what_is_far_comes_near(near, far):
    far.entries = {chunk.key: encode_chunk(chunk) for chunk in CHUNKS}
    tiers = TieredStore(near, far)
    assert [got.tier for got in tiers.fetch(KEYS)] == ["far://"] * 4
    assert tiers.flush(5)
    assert near.entries == far.entries
    assert tiers.stats.promoted == 4
    assert tiers.get("0" * 64) is None
    assert tiers.stats.misses == 1


@pytest.mark.parametrize("write", ["through", "behind", None])
def test_writing(near, far, write):
    far.open.clear()
    tiers = TieredStore(near, far, write=write)
    if write == "through":
        threading.Timer(0.2, far.open.set).start()
    begin = time.monotonic()
    assert tiers.put(CHUNKS[0])
    assert write != "through" or time.monotonic() - begin > 0.15
    assert (KEYS[0] in near.entries) == (write != "behind") or tiers.flush(0.01) is False
    assert (KEYS[0] in far.entries) == (write == "through")
    assert tiers.fetch(KEYS[:1])[0].chunk is not None
    tiers.pool.clear()
    assert_same(tiers.get(KEYS[0]), CHUNKS[0])  # what waits to be written is there already
    far.open.set()
    tiers.close()
    assert KEYS[0] in near.entries
    assert KEYS[0] in far.entries


def test_writing_back_gives_up_nothing(near, far):
    nbytes = CHUNKS[3].nbytes
    tiers = TieredStore(Pool(2 * nbytes), near, far, write="back")
    for chunk in CHUNKS:
        assert tiers.put(chunk)
        assert tiers.flush(0) or True
    assert_chunks(tiers.get_many(KEYS))
    tiers.close()
    assert set(near.entries) == set(KEYS)
    assert not far.entries  # nothing was evicted from the near one


def test_writing_back_waits_until_memory_is_full(near):
    nbytes = CHUNKS[3].nbytes
    tiers = TieredStore(Pool(2 * nbytes), near, write="back")
    assert [kept for _, kept in tiers.put_many(CHUNKS[:2])] == [True, True]
    assert not near.entries
    tiers.put_many(CHUNKS[2:])
    tiers._writers[0].flush(5)
    assert set(near.entries) == set(KEYS[:2])
    assert tiers.stats.demoted == 2
    assert_chunks(tiers.get_many(KEYS))


def test_a_folder_that_is_full_hands_on(tmp_path, far):
    sizes = [len(encode_chunk(chunk)) for chunk in CHUNKS]
    disk = DiskStore(tmp_path / "d", capacity_bytes=max(sizes) * 2)
    tiers = TieredStore(Pool(CHUNKS[3].nbytes), disk, far, write="back")
    for chunk in CHUNKS:
        tiers.put(chunk)
    tiers.close()
    assert set(far.entries) | set(disk.keys()) == set(KEYS)
    assert far.entries
    fresh = TieredStore(DiskStore(tmp_path / "d"), far)
    assert_chunks(fresh.get_many(KEYS))


def test_what_was_damaged_in_a_folder_is_not_handed_on(tmp_path, far):
    size = max(len(encode_chunk(chunk)) for chunk in CHUNKS)
    tiers = TieredStore(Pool(1), DiskStore(tmp_path, capacity_bytes=2 * size), far, write="back")
    tiers.put_many(CHUNKS[:2])
    tiers.flush(5)
    good = encode_chunk(CHUNKS[1])
    far.entries = {KEYS[0]: encode_chunk(CHUNKS[0])}
    path = tmp_path / KEYS[0][:2] / f"{KEYS[0]}.bkv"
    path.write_bytes(damaged(path.read_bytes(), "flipped"))
    tiers.put_many(CHUNKS[2:])
    tiers.flush(5)
    assert far.entries == {KEYS[0]: encode_chunk(CHUNKS[0]), KEYS[1]: good}


def damaged(data: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "cut": data[:-1],
        "longer": data + b"\0",
        "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "another": encode_chunk(CHUNKS[1]),
    }[how]


@pytest.mark.parametrize("how", ["empty", "cut", "longer", "flipped", "another"])
@pytest.mark.parametrize("place", ["near", "both"])
def test_damage_is_a_miss_that_the_next_tier_makes_good(near, far, how, place):
    good = encode_chunk(CHUNKS[0])
    near.entries[KEYS[0]] = damaged(good, how)
    far.entries[KEYS[0]] = damaged(good, how) if place == "both" else good
    tiers = TieredStore(near, far)
    got = tiers.fetch(KEYS[:1])[0]
    assert (got.chunk is None) == (place == "both")
    assert tiers.stats.damaged["near://"] == 1
    assert tiers.flush(5)
    assert near.entries.get(KEYS[0]) == (None if place == "both" else good)
    assert (KEYS[0] in far.entries) == (place != "both")
    assert any("damaged" in note for note in tiers.notes)
    assert tiers.put(CHUNKS[0])
    tiers.close()
    assert near.entries[KEYS[0]] == far.entries[KEYS[0]] == good


def test_a_folder_keeps_what_was_damaged_aside_and_takes_it_once_more(tmp_path):
    disk = DiskStore(tmp_path)
    TieredStore(disk).put(CHUNKS[0])
    path = next(tmp_path.rglob("*.bkv"))
    for attempt in (1, 2):
        data = bytearray(path.read_bytes())
        data[-20] ^= 4
        path.write_bytes(data)
        assert TieredStore(disk).get(KEYS[0]) is None
        assert (tmp_path / "bad" / f"{KEYS[0]}.{attempt}").exists()
        assert TieredStore(disk).put(CHUNKS[0]) == (attempt == 1)


def test_stores_that_raise_and_refuse_cost_nothing(near, far):
    near.raises = far.raises = RuntimeError("no")
    tiers = TieredStore(near, far)
    assert [kept for _, kept in tiers.put_many(CHUNKS)] == [True] * 4  # far may still take it
    assert tiers.flush(5)
    assert_chunks(tiers.get_many(KEYS))
    tiers.pool.clear()
    assert tiers.get_many(KEYS) == [None] * 4
    assert not TieredStore(near).put(CHUNKS[0])
    near.raises, near.refuses = None, True
    assert not TieredStore(near).put(CHUNKS[0])


def test_a_store_that_cannot_delete_costs_nothing(far):
    class Stubborn(DictStore):
        def delete(self, key):
            raise RuntimeError("no")

    near = Stubborn("near")
    near.entries, far.entries = {KEYS[0]: b"damaged"}, {KEYS[0]: encode_chunk(CHUNKS[0])}
    tiers = TieredStore(near, far)
    assert_same(tiers.get(KEYS[0]), CHUNKS[0])
    tiers.delete(KEYS[0])
    assert not far.entries


def test_the_budget_is_for_all_that_is_not_local(near, far):
    left = []

    class Watched(DictStore):
        def get_many(self, keys):
            from blendkv.stores.deadline import remaining

            left.append(remaining(99.0))
            time.sleep(0.05)
            return super().get_many(keys)

    tiers = TieredStore(Watched("a", local=True), Watched("b"), Watched("c"))
    budget = Budget(20.0)
    tiers.fetch(KEYS, budget=budget)
    assert left[0] == 99.0
    assert 10 < left[1] <= 20.0
    assert left[2] <= left[1] - 0.04
    assert budget.left <= 19.9
    tiers.fetch(KEYS)
    assert left[3:] == [99.0] * 3


def test_a_tenant_with_a_secret(near):
    tiers = TieredStore(near, secret=SECRET, key_id=b"1")
    keys = [chunk_key(c.ids, c.fingerprint, c.conditioning, c.tokenizer, c.namespace, SECRET) for c in CHUNKS]
    chunks = [replace(chunk, keyed=key) for chunk, key in zip(CHUNKS, keys, strict=True)]
    tiers.put_many(chunks)
    assert set(near.entries) == set(keys)
    assert not set(keys) & set(KEYS)
    again = TieredStore(near, secret=SECRET, key_id=b"1").get_many(keys)
    assert_chunks(again, chunks)
    assert [chunk.key for chunk in again] == keys
    assert TieredStore(near).get_many(keys) == [None] * 4  # sealed: not read, and left alone
    assert set(near.entries) == set(keys)
    near.entries = {key: encode_chunk(chunk) for key, chunk in zip(keys, CHUNKS, strict=True)}
    assert TieredStore(near, secret=SECRET).get_many(keys) == [None] * 4  # not sealed: not trusted
    assert not near.entries


def test_what_a_codec_loses_is_lost_from_the_first_time_on(near):
    tiers = TieredStore(near, codec=Rounding())
    (made, kept), *_ = tiers.put_many(CHUNKS)
    assert kept
    assert not torch.equal(made.keys[0], CHUNKS[0].keys[0])
    assert_same(tiers.get(KEYS[0]), made)
    tiers.pool.clear()
    assert_same(tiers.get(KEYS[0]), made)


def test_a_chunk_with_nan_stays_in_memory_and_is_told(near):
    keys = (torch.full_like(CHUNKS[0].keys[0], float("nan")), *CHUNKS[0].keys[1:])
    tiers = TieredStore(near)
    ((_, kept),) = tiers.put_many([replace(CHUNKS[0], keys=keys)])
    assert not kept
    assert not near.entries
    assert tiers.get(KEYS[0]) is not None
    assert any("refused 1 chunks" in note for note in tiers.notes)


def test_entries_that_need_what_is_not_here_are_left_alone(near, monkeypatch):
    near.entries = {chunk.key: encode_chunk(chunk) for chunk in CHUNKS}

    def no_codec(self, source, codec=None):
        raise ChunkFileError("no such codec", reason="codec")

    monkeypatch.setattr(Opener, "open", no_codec)
    tiers = TieredStore(near)
    assert tiers.get_many(KEYS) == [None] * 4
    assert len(near.entries) == 4
    assert tiers.stats.unreadable == {"codec": 4}
    assert any("could not be read here" in note for note in tiers.notes)


def test_deleted_everywhere(near, far):
    far.open.clear()
    tiers = TieredStore(near, far)
    tiers.put_many(CHUNKS)
    tiers.delete(KEYS[3])
    far.open.set()
    assert tiers.flush(5)
    assert sorted(tiers.keys()) == sorted(KEYS[:3])
    assert set(near.entries) == set(KEYS[:3])
    assert tiers.get(KEYS[3]) is None


def test_bad_settings(near):
    for tiers, options, match in (
        ((), {}, "at least one store"),
        ((Pool(),), {}, "at least one store"),
        (("~/chunks",), {}, "not a store yet"),
        ((near, Pool()), {}, "is no store"),
        ((near,), {"write": "later"}, "choose 'through'"),
        ((near,), {"secret": b"short"}, "secret of 5 bytes"),
        ((near,), {"codec": "zip"}, "zip"),
    ):
        with pytest.raises(ValueError, match=match):
            TieredStore(*tiers, **options)


def test_an_entry_that_is_refused_leaves_nothing_behind(near):
    """An error that is kept with its traceback keeps the file, and its views, which CPython 3.11 crashes on freeing."""
    data = bytearray(encode_chunk(CHUNKS[0], token_streams={"a": torch.ones(5), "b": torch.ones(5)}))
    data[data.index(b"a" + bytes(15)) + 16] = 9  # the dtype of the first
    seal_head(data, payload_start(data))
    truncated = encode_chunk(CHUNKS[1])
    forged = bytearray(encode_chunk(CHUNKS[2]))
    forged[-1] ^= 1
    near.entries = dict(zip(KEYS, map(bytes, (data, truncated[:-16], forged)), strict=False))
    tiers = TieredStore(near)
    gc.collect()
    before = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert tiers.get_many(KEYS[:3]) == [None] * 3
        gc.collect()
        kept = [each for each in gc.garbage if isinstance(each, ChunkFileError | memoryview)]
        gc.garbage.clear()
    finally:
        gc.set_debug(before)
    assert not kept
    assert tiers.stats.reasons == {"header": 1, "truncated": 1, "checksum": 1}


class Packed(Raw):
    """Loses nothing, and is not raw."""

    name = "packed"


def test_writing_back_loses_nothing_to_a_short_queue(near, far):
    far.waits = 0.05
    files = [encode_chunk(chunk) for chunk in CHUNKS]
    tiers = TieredStore(near, far, write="back", queue_bytes=len(files[0]))
    tiers.put_many(CHUNKS)
    tiers.close()
    assert set(near.entries) == set(KEYS)
    small = TieredStore(Pool(CHUNKS[3].nbytes), far, write="back", queue_bytes=1)
    small.put_many(CHUNKS)
    small.close()
    assert KEYS[3] in far.entries  # what is still in memory; for what prompts evict nobody waits
    assert small._writers[0].dropped == 3


def test_memory_that_evicts_into_a_folder_writes_what_the_queue_has_no_room_for(tmp_path):
    disk = DiskStore(tmp_path)
    tiers = TieredStore(Pool(CHUNKS[3].nbytes), disk, write="back", queue_bytes=1)
    tiers.put_many(CHUNKS)
    tiers.close()
    assert set(disk.keys()) == set(KEYS)
    assert not tiers.notes


def test_what_the_near_store_refuses_goes_to_the_next(tmp_path, far):
    disk = DiskStore(tmp_path, capacity_bytes=10)
    with TieredStore(disk, far, write="back") as tiers:
        tiers.put_many(CHUNKS)
    assert set(far.entries) == set(KEYS)


@pytest.mark.parametrize("evicts", [False, True])
def test_writing_back_keeps_the_bytes_of_a_codec_that_loses_nothing(near, evicts):
    codec = Packed()
    room = len(encode_chunk(CHUNKS[3], codec)) if evicts else None
    with TieredStore(Pool(room, codec=codec), near, write="back") as tiers:
        tiers.put_many(CHUNKS)
    assert set(near.entries) == set(KEYS)


def test_a_chunk_that_memory_gives_up_at_once_is_written(near):
    class Hurried(Pool):
        """Another thread's chunk comes in before the first one's put returns."""

        def put(self, chunk):
            kept = super().put(chunk)
            super().put(make_chunk(tokens=30, seed=99))
            return kept

    with TieredStore(Hurried(make_chunk(tokens=30).nbytes), near, write="back") as tiers:
        assert tiers.put(CHUNKS[0])
    assert KEYS[0] in near.entries


def test_flushing_leaves_what_is_just_given_up_to_who_gives_it_up(near):
    tiers = TieredStore(near, write="back")
    tiers.put(CHUNKS[0])
    entry = tiers.pool.peek(KEYS[0])
    tiers.pool.delete(KEYS[0])  # as an eviction does, before it tells
    tiers.flush()
    tiers.backlog.evicted(KEYS[0], entry)
    tiers.flush()
    assert KEYS[0] in near.entries


def test_stores_below_others_take_over_what_is_not_written(near, far):
    far.read_only = True
    tiers = TieredStore(near, write="back")
    tiers.put_many(CHUNKS)
    with tiers.over(far) as over:
        assert over.pool is tiers.pool
    assert set(near.entries) == set(KEYS)


def test_one_memory_over_two_stores_hands_on_to_both(near, far):
    told = []
    pool = Pool(CHUNKS[3].nbytes)
    pool.on_evict = lambda key, entry: told.append(key)
    one, two = TieredStore(pool, near, write="back"), TieredStore(pool, far, write="back")
    one.put(CHUNKS[0])
    two.put(CHUNKS[1])
    one.put(CHUNKS[2])
    one.close()
    two.close()
    assert set(near.entries) == {KEYS[0], KEYS[2]}
    assert set(far.entries) == {KEYS[1]}
    assert told == KEYS[:2]


def test_a_process_that_ends_writes_back(tmp_path):
    code = f"""
from blendkv import Pool, TieredStore
from blendkv.stores import DiskStore
from tests.chunks import make_chunk

tiers = TieredStore(Pool(), DiskStore({str(tmp_path)!r}), write="back")
tiers.put(make_chunk())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [path.stem for path in tmp_path.rglob("*.bkv")] == [make_chunk().key]


def test_what_is_deleted_while_it_is_written_does_not_come_back(near):
    near.waits = 0.2
    tiers = TieredStore(near, write="behind")
    tiers.put(CHUNKS[0])
    while "put" not in near.calls:
        time.sleep(0.001)
    tiers.delete(KEYS[0])
    time.sleep(0.3)
    assert not near.entries


def test_flushing_several_stores_takes_no_longer_than_was_said():
    stores = [DictStore(name) for name in "abc"]
    for store in stores:
        store.open.clear()
    tiers = TieredStore(*stores)
    tiers.put(CHUNKS[0])
    begin = time.monotonic()
    assert not tiers.flush(0.3)
    assert time.monotonic() - begin < 0.6 + SLACK_S
    for store in stores:
        store.open.set()
    assert tiers.flush(5)
