"""Listing, peeking, evicting and checking: as pure functions over stores."""

import os
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

from blendkv.chunk import chunk_key, ids_bytes
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.container import read_head
from blendkv.contract import bytes_for, key_for
from blendkv.errors import ChunkFileError, StoreError
from blendkv.stores import DiskStore, Entry, RemoteStore
from blendkv.stores import hits as hits_module
from blendkv.stores.checking import check_all, check_bytes, judge
from blendkv.stores.inspection import inspect_bytes
from blendkv.stores.upkeep import belongs, find_key, heads, in_turn, listing, open_existing, peek, remove, victims
from blendkv.stores.urls import shown
from tests.chunks import make_chunk, payload_start
from tests.faults.systems import system
from tests.stores.servers import BINARY, Server

SECRET, OTHER = b"s" * 32, b"o" * 32


def keeps_attributes(folder):
    try:
        os.setxattr(folder, hits_module.ATTRIBUTE, b"1")
    except (OSError, AttributeError):
        return False
    return True


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path / "store")


def put(store, seed=0, secret=None, **fields):
    """A chunk of its own in a store; its key."""
    chunk = make_chunk(seed=seed, **fields)
    assert store.put(chunk.key, encode_chunk(chunk, secret=secret))
    return chunk.key


def file_of(store, key):
    return f"{store._root}/{key[:2]}/{key}.bkv"


# -- entries ----------------------------------------------------------------------------------------------------------


def test_hits_and_last_use_are_of_all_processes(store, tmp_path):
    if not keeps_attributes(tmp_path):
        pytest.skip("this file system keeps no extended attributes")
    key, other = key_for(1), key_for(2)
    for each in (key, other):
        store.put(each, b"data")
    code = f"from blendkv.stores import open_store\ns = open_store({str(tmp_path / 'store')!r})\n"
    code += f"for _ in range({hits_module.EVERY + 3}):\n    s.get({key!r})\n"  # and ends without closing it
    subprocess.run([sys.executable, "-c", code], check=True)
    long_ago = time.time() - 5000
    os.utime(file_of(store, other), (long_ago, long_ago))
    store.get(key, 1, 2)
    found = {entry.key: entry for entry in store.entries()}
    assert (found[key].hits, found[other].hits) == (hits_module.EVERY + 4, 0)
    assert found[key].last_used == pytest.approx(time.time(), abs=60)
    assert found[other].last_used == pytest.approx(long_ago)
    store.close()
    assert next(e.hits for e in DiskStore(tmp_path / "store").entries() if e.key == key) == hits_module.EVERY + 4
    store.put(key, b"new")
    assert next(e.hits for e in store.entries() if e.key == key) == 0


def test_hits_are_unknown_where_they_cannot_be_kept(store):
    store.put(key_for(1), b"data")

    def fail(name):
        if name in ("getxattr", "setxattr"):
            raise OSError(95, "not supported")

    with system(before=fail):
        for _ in range(2 * hits_module.EVERY):
            assert store.get(key_for(1)) == b"data"
        assert [entry.hits for entry in store.entries()] == [None]
    assert not +store.stats.faults


def test_hits_that_somebody_scribbled_over_are_none(store, tmp_path):
    if not keeps_attributes(tmp_path):
        pytest.skip("this file system keeps no extended attributes")
    store.put(key_for(1), b"data")
    for value in (b"many", b"9" * 5000, b"-4"):
        os.setxattr(file_of(store, key_for(1)), hits_module.ATTRIBUTE, value[:3000])
        assert [entry.hits for entry in store.entries()] == [0]


def test_the_end_of_a_process_is_not_held_up_by_hits(tmp_path):
    counted = hits_module.Hits(str(tmp_path))
    for number in range(100):
        counted.add(f"{number}")
    counted.write(0)
    assert len(counted._new) == 99
    counted.write()
    assert not counted._new


def test_a_fork_does_not_write_what_its_parent_counted(store, tmp_path):
    if not keeps_attributes(tmp_path):
        pytest.skip("this file system keeps no extended attributes")
    store.put(key_for(1), b"data")
    store.get(key_for(1))
    store._hits._pid += 1  # as a child sees it
    store._hits.write()
    assert hits_module.Hits(store._root).of(f"{key_for(1)[:2]}/{key_for(1)}.bkv") == 0


def test_peek_leaves_no_trace(store):
    key = put(store)
    os.utime(file_of(store, key), (1000, 1000))
    data = store.peek(key)
    assert data == store.peek(key, 0)
    assert store.peek(key, 5, 9) == data[5:9]
    assert store.peek(key_for("unknown")) is None
    assert [(entry.last_used, entry.hits or 0) for entry in store.entries()] == [(1000, 0)]
    with open(file_of(store, key), "ab") as file:
        file.write(b"more")
    assert len(store.peek(key)) == len(data) + 4  # and it is where it was
    assert store.get(key) is None  # who uses it has it put away
    assert store.peek(key) is None


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
def test_valkey_knows_the_last_use_or_how_often():
    from blendkv.stores.valkey import ValkeyStore

    with Server("--maxmemory-policy", "allkeys-lru") as server:
        store = ValkeyStore.from_url(server.url, piece_bytes=1024)
        keys = [key_for(i) for i in range(1500)]
        for key in keys[:1499]:
            store.put(key, b"x" * 1500)
        store.put(keys[-1], b"")
        time.sleep(3.1)
        for key in keys[:5]:
            store.get(key, 0, 10)
        server.tell("SET", "blendkv:{mine}", "no entry")
        server.tell("CONFIG", "RESETSTAT")
        found = {entry.key: entry for entry in store.entries()}
        assert set(found) == set(keys)
        now = time.time()
        assert all(now - found[key].last_used < 2.9 for key in keys[:5])
        assert all(2.0 < now - found[key].last_used < 20 for key in keys[5:-1])
        assert {entry.hits for entry in found.values()} == {None}
        again = {entry.key: entry.last_used for entry in store.entries()}
        assert all(time.time() - again[key] > 2.0 for key in keys[5:-1])  # listing is no use
        assert peek(store, keys[0], 1400) == b"x" * 100
        server.tell("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
        for _ in range(50):
            store.get(keys[7])
        often = {entry.key: entry for entry in store.entries()}
        assert {entry.last_used for entry in often.values()} == {None}
        assert often[keys[7]].hits > often[keys[8]].hits
        store.close()


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
def test_valkey_lists_in_few_round_trips(monkeypatch):
    from blendkv.stores.valkey import ValkeyStore
    from blendkv.stores.valkey_server import Server as Connected

    with Server() as server:
        store = ValkeyStore.from_url(server.url)
        for i in range(300):
            store.put(key_for(i), b"data")
        trips, plain = [], Connected._exchange
        monkeypatch.setattr(Connected, "_exchange", lambda self, asks: trips.append(len(asks)) or plain(self, asks))
        assert len(list(store.entries())) == 300
        batches = sum(trip == 1 for trip in trips)  # a SCAN, and a word of the first
        assert len(trips) <= 4 * batches
        assert len(trips) < 30
        store.close()


def test_listings_that_fail_are_no_empty_stores():
    store = RemoteStore(f"memory://{uuid.uuid4().hex}")
    assert listing(store) == []
    store.put(key_for(1), b"data")
    assert [entry.size for entry in listing(store)] == [4]

    def fail(*args, **kwargs):
        raise PermissionError("may not list")

    store._fs.find = fail
    with pytest.raises(StoreError, match=r"could not list its entries \(denied\)"):
        listing(store)


# -- opening, finding, heads ------------------------------------------------------------------------------------------


def test_opening_what_is_not_there_makes_nothing(tmp_path):
    for url in (f"{tmp_path}/none", f"file://{tmp_path}/none"):
        with pytest.raises(StoreError, match="there is no such folder"):
            open_existing(url)
    assert list(tmp_path.iterdir()) == []


def test_opening_evicts_and_writes_nothing(tmp_path, monkeypatch):
    store = DiskStore(tmp_path)
    for i in range(5):
        store.put(key_for(i), bytes(1000))
    os.rmdir(tmp_path / "00")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("blendkv.stores.disk.DEFAULT_CAPACITY_BYTES", 2000)
    assert len(listing(open_existing(str(tmp_path)))) == 5
    assert sorted(tmp_path.rglob("*")) == before
    assert len(listing(DiskStore(tmp_path))) == 2  # the ordinary way


def test_find_key():
    entries = [Entry(key, 1) for key in ("ab" * 32, "ab" * 31 + "cd", "cd" * 32)]
    assert find_key(entries, "cdcdcd", "u") == "cd" * 32
    assert find_key(entries, "CDCDCD", "u") == "cd" * 32
    assert find_key(entries, "ab" * 32, "u") == "ab" * 32
    with pytest.raises(ValueError, match=r"2 entries of u begin with ababab \(ababababab\.\.\..*give more digits"):
        find_key(entries, "ababab", "u")
    with pytest.raises(StoreError, match="no entry of u begins with 123456"):
        find_key(entries, "123456", "u")
    for wrong in ("cdcdc", "", "xyzxyz", "../../", "a" * 65):
        with pytest.raises(ValueError, match="is no key"):
            find_key(entries, wrong, "u")


def test_heads_by_range(store):
    long = put(store, 1, tokens=9000, layers=1, heads=1, namespace="n")  # its head needs two reads
    sealed, junk = put(store, 2, secret=SECRET), key_for("junk")
    store.put(junk, b"junk")
    read, plain = [], store.peek
    store.peek = lambda key, start=0, stop=None: read.append((key, stop - start)) or plain(key, start, stop)
    found = {one.entry.key: one for one in heads(store, listing(store))}
    assert found[long].head.header.tokens == 9000
    assert found[sealed].head.header.key_id == b""
    assert (found[junk].head, found[junk].fault) == (None, "magic")
    size = found[long].entry.size
    assert sum(length for key, length in read if key == long) < size / 2
    assert belongs(found[long], model="fff", namespace="n")
    assert not belongs(found[long], model="abc")
    assert not belongs(found[long], namespace="")
    assert belongs(found[junk])
    assert not belongs(found[junk], namespace="")


def test_heads_of_what_is_gone(store):
    key = put(store)
    entries = listing(store)
    store.delete(key)
    assert [one.fault for one in heads(store, entries)] == ["unread"]


def test_in_turn_keeps_order_and_stops():
    began, gate = [], threading.Event()

    def work(number):
        began.append(number)
        if number == 0:
            gate.wait(5)
        return number

    numbers = in_turn(work, range(100), workers=3)
    gate.set()
    assert [next(numbers) for _ in range(10)] == list(range(10))
    numbers.close()
    assert len(began) <= 14
    assert list(in_turn(work, range(1, 40), workers=3)) == list(range(1, 40))
    assert list(in_turn(work, [], workers=3)) == []


# -- evicting ---------------------------------------------------------------------------------------------------------


def test_victims():
    rows = (("a", 10, 50.0, 9), ("b", 20, 10.0, 5), ("c", 30, None, 7), ("d", 40, None, 2), ("e", 50, 30.0, 0))
    entries = [Entry(name * 64, *rest) for name, *rest in rows]

    def names(**options):
        return "".join(entry.key[0] for entry in victims(entries, **options))

    assert names() == "dcbea"  # unknown first, of these the least used
    assert names(to_bytes=150) == ""
    assert names(to_bytes=149) == "d"
    assert names(to_bytes=110) == "d"
    assert names(to_bytes=109) == "dc"
    assert names(to_bytes=0) == "dcbea"
    assert names(unused_since=30.0) == "b"
    assert names(unused_since=31.0) == "be"
    assert names(unused_since=100.0, to_bytes=100) == "be"
    assert victims([], to_bytes=0) == []


def test_remove_says_what_is_gone(store):
    keys = [put(store, seed) for seed in range(3)]
    entries = sorted(listing(store), key=lambda entry: keys.index(entry.key))
    store.delete, delete = lambda key: None if key == keys[1] else delete(key), store.delete
    assert [gone for _, gone in remove(store, entries)] == [True, False, True]
    assert [entry.key for entry in listing(store)] == [keys[1]]


# -- checking ---------------------------------------------------------------------------------------------------------


def verdict_of(store, secret=None, delete=False):
    *_, verdict = judge(store, check_all(store, listing(store), secret), delete)
    return verdict


def damage(store, key, how):
    path = file_of(store, key)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    with open(path, "wb") as file:
        file.write(how(data))


def flip(at):
    def how(data):
        data[at(data)] ^= 1
        return data

    return how


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (flip(lambda data: len(data) - 20), "checksum"),
        (flip(payload_start), "checksum"),
        (flip(lambda data: 60), "checksum"),
        (flip(lambda data: 0), "magic"),
        (lambda data: data[:-16], "truncated"),
        (lambda data: data + b"0", "length"),
        (lambda data: data[:10], "truncated"),
        (lambda data: b"", "truncated"),
    ],
    ids=["end", "payload", "head", "magic", "cut", "longer", "prelude", "empty"],
)
def test_damage_is_found_and_nothing_else(store, how, reason):
    good, bad = put(store, 1), put(store, 2)
    damage(store, bad, how)
    verdict = verdict_of(store)
    assert (verdict.ok, verdict.entries, verdict.holds) == (1, 2, False)
    assert verdict.damaged == [{"key": bad, "reason": reason}]
    assert sorted(store.keys()) == sorted((good, bad))  # as it was
    verdict = verdict_of(store, delete=True)
    assert verdict.removed == [bad]
    assert list(store.keys()) == [good]
    assert os.path.exists(f"{store._root}/bad/{bad}.1")
    assert verdict_of(store).holds


def test_every_flipped_bit_of_a_small_file_is_noticed():
    chunk = make_chunk(tokens=1, layers=1, heads=1, key_dim=8)
    data = encode_chunk(chunk)
    assert check_bytes(chunk.key, data) == ("ok", "")
    for at in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[at] ^= bit
            assert check_bytes(chunk.key, bytes(changed))[0] in ("damaged", "unread"), at


def test_a_newer_version_is_unread_and_not_put_away(store):
    key = put(store)
    damage(store, key, lambda data: data[:8] + b"\x02\x00" + data[10:])
    verdict = verdict_of(store, delete=True)
    assert verdict.unread == [{"key": key, "reason": "version"}]
    assert not verdict.holds
    assert list(store.keys()) == [key]


def test_foreign_sealed_and_secret_keys(store):
    chunk = make_chunk(seed=1)
    plain, sealed = encode_chunk(chunk), encode_chunk(chunk, secret=SECRET, key_id=b"one")
    own = chunk_key(chunk.ids, chunk.fingerprint, secret=SECRET)
    wrong, theirs = key_for("wrong"), key_for("theirs")
    store.put(chunk.key, plain)
    store.put(own, sealed)
    store.put(wrong, plain)
    store.put(theirs, encode_chunk(make_chunk(seed=2), secret=OTHER))
    without = verdict_of(store, delete=True)
    assert (without.ok, without.foreign, without.sealed, without.damaged) == (1, [wrong], 2, [])
    assert without.holds
    given = verdict_of(store, SECRET, delete=True)
    assert (given.ok, given.foreign, given.sealed, given.damaged) == (2, [wrong], 1, [])
    assert given.entries == given.ok + len(given.foreign) + given.sealed == 4
    damage(store, own, flip(lambda data: len(data) - 20))
    assert verdict_of(store, SECRET).damaged == [{"key": own, "reason": "authentication"}]
    assert verdict_of(store).sealed == 2
    with pytest.raises(ValueError, match="16 to 64"):
        next(check_all(store, listing(store), b"short"))


def test_what_the_store_does_not_give_is_asked_for_again(store):
    keys = [put(store, seed) for seed in range(5)]
    entries, plain, failing = listing(store), store.peek, {keys[1], keys[3]}

    def bad(key, *span):
        if key in failing:
            failing.discard(key)
            store.stats.count("misses", "timeout")
            return None
        return plain(key, *span)

    store.peek = bad
    assert sorted(one.outcome for one in check_all(store, entries)) == ["ok"] * 5
    store.delete(keys[0])
    failing |= {keys[1]}
    store.peek = lambda key, *span: store.stats.count("misses", "timeout") if key == keys[2] else bad(key, *span)
    *_, verdict = judge(store, check_all(store, entries), delete=True)
    assert verdict.unread == [{"key": keys[2], "reason": "timeout"}]
    assert (verdict.ok, verdict.entries, verdict.damaged) == (3, 4, [])  # one is gone


@pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server on this machine")
def test_half_evicted_entries_of_valkey_are_damaged():
    from blendkv.stores.valkey import ValkeyStore

    with Server() as server:
        store = ValkeyStore.from_url(server.url, piece_bytes=1024)
        keys = [put(store, seed, tokens=40) for seed in range(3)]
        server.tell("DEL", next(name for name in server.tell("KEYS", f"*{keys[1]}*:2")))
        verdict = verdict_of(store, delete=True)
        assert verdict.damaged == [{"key": keys[1], "reason": "pieces"}]
        assert verdict.removed == [keys[1]]
        assert sorted(store.keys()) == sorted((keys[0], keys[2]))
        assert server.tell("KEYS", f"*{keys[1]}*") == []
        store.close()


def test_stopping_early_leaves_the_store(store):
    keys = [put(store, seed) for seed in range(20)]
    verdicts = judge(store, check_all(store, listing(store)))
    verdict = next(verdicts)
    verdicts.close()
    assert (verdict.entries, verdict.complete, verdict.holds) == (1, False, False)
    assert sorted(store.keys()) == sorted(keys)


# -- inspecting -------------------------------------------------------------------------------------------------------


def test_inspection(store):
    chunk = make_chunk(
        tokens=9, layers=3, heads=2, key_dim=16, value_dim=8, conditioning=(1, 2), namespace="n", text="words"
    )
    together = inspect_bytes(encode_chunk(chunk), chunk.key)  # keys and values of a group of tokens are one segment
    assert [(unit.keys, unit.values) for unit in together.units] == [(None, None)] * 3
    data = encode_chunk(chunk, get_codec("raw", level=0))
    found = inspect_bytes(data, chunk.key)
    assert found.sound
    assert (found.damaged, found.right_key) == ((), True)
    assert [(unit.first, unit.last, unit.keys, unit.values) for unit in found.units] == [
        (layer, layer, 9 * 2 * 16 * 4, 9 * 2 * 8 * 4) for layer in range(3)
    ]
    assert sum(unit.bytes for unit in found.units) == len(data) - payload_start(data)
    told = found.to_dict()
    assert (told["tokens"], told["conditioning"], told["namespace"], told["sealed"]) == (9, 2, "n", False)
    assert "text" not in told
    assert found.to_dict(text=True)["text"] == "words"
    assert inspect_bytes(data).right_key is None
    assert inspect_bytes(data, key_for("other")).right_key is False
    changed = bytearray(data)
    changed[-1] ^= 1
    assert inspect_bytes(bytes(changed), chunk.key).damaged == (5,)
    assert not inspect_bytes(bytes(changed), chunk.key).sound
    changed[40] ^= 1
    with pytest.raises(ChunkFileError):
        inspect_bytes(bytes(changed))


def test_inspection_of_sealed_files():
    chunk = make_chunk()
    data, own = encode_chunk(chunk, secret=SECRET), chunk_key(make_chunk().ids, chunk.fingerprint, secret=SECRET)
    for secret in (None, OTHER):
        assert (inspect_bytes(data, own, secret).damaged, inspect_bytes(data, own, secret).right_key) == (None, None)
    assert inspect_bytes(data, own, SECRET).damaged == ()
    assert inspect_bytes(data, own, SECRET).right_key is True
    assert inspect_bytes(data, key_for("x"), SECRET).right_key is False
    assert read_head(data).header.ids == ids_bytes(np.asarray(chunk.ids))


def test_bytes_that_are_no_chunk_file():
    with pytest.raises(ChunkFileError, match="not a chunk file"):
        inspect_bytes(bytes_for("x"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("~/chunks", "~/chunks"),
        ("redis://me:secret@host:7000/2?password=secret", "redis://host:7000/2"),
        ("redis://:sec/ret@host", "redis://..."),
        ("s3://bucket/a", "s3://bucket/a"),
        ("redis://[secret@host", "redis://..."),
    ],
)
def test_urls_as_they_are_shown(url, expected):
    assert shown(url) == expected


def test_upkeep_imports_no_torch():
    code = "import sys, blendkv.stores.upkeep; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
