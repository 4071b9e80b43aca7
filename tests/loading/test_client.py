"""Chunks come in real time from real stores, or are recomputed; nothing that a source does is in the way."""

import time
import uuid

import pytest
import torch

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.codecs import get_codec
from blendkv.loading.client import BASE, StreamClient, Wanted
from blendkv.loading.clocks import RealClock
from blendkv.loading.handover import Handover
from blendkv.loading.levels import write_levels
from blendkv.loading.policies import Adaptive, FixedLevel, Text
from blendkv.stores import DiskStore, RemoteStore
from tests.drawn import SMALL, chunk_of, profile_of
from tests.stores.dicts import DictStore

LOSS = {"raw": 0.0, "klt@0": 0.005, "klt@8": 0.1, "klt@4+2": 0.02, "klt@4+2" + BASE: 0.2}
COUNT, TEXT_S = 4, 0.05
LONG = 30.0
"""A stall that no test waits for."""


@pytest.fixture(scope="module")
def chunks():
    return [chunk_of(SMALL, 300 + i, seed=i) for i in range(COUNT)]


@pytest.fixture
def codecs():
    made = [get_codec("klt", level=level, profile=profile_of("klt")) for level in (0, 8)]
    return [get_codec("raw"), *made]


def wanted_of(store, chunks, codecs, text_s=TEXT_S):
    return [Wanted(c.key, tuple(write_levels(store, c, codecs)), LOSS, text_s) for c in chunks]


def recomputing(chunks, seconds=0.0):
    done = []

    def recompute(item):
        time.sleep(seconds)
        done.append(item)
        return chunks[item]

    return recompute, done


def same(a, b):
    return torch.equal(a.ids, b.ids) and all(
        torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    )


def test_a_quick_store_gives_every_chunk_and_nothing_is_recomputed(chunks, codecs, tmp_path):
    store = DiskStore(tmp_path)
    wanted = wanted_of(store, chunks, codecs, text_s=10.0)
    recompute, done = recomputing(chunks)
    client = StreamClient(store, FixedLevel("raw"))
    got = client.run(wanted, recompute, 20.0)
    assert got.chosen == ("raw",) * COUNT
    assert all(same(a, b) for a, b in zip(got.chunks, chunks, strict=True))
    assert not done
    assert got.brought == sum(each.levels[0].nbytes for each in wanted)
    assert client.prior > 0


def test_a_level_is_what_it_says(chunks, codecs):
    store = RemoteStore(f"memory://{uuid.uuid4().hex}")
    wanted = wanted_of(store, chunks, codecs, text_s=10.0)
    recompute, _ = recomputing(chunks)
    got = StreamClient(store, FixedLevel("klt@8")).run(wanted, recompute, 20.0)
    assert got.chosen == ("klt@8",) * COUNT
    assert got.loss == pytest.approx(0.1)
    for a, b in zip(got.chunks, chunks, strict=True):
        assert a.key == b.key
        assert not same(a, b)
        assert torch.allclose(a.keys[0], b.keys[0], atol=5.0)


def test_a_base_alone_and_with_its_refinement(chunks):
    codec = get_codec("klt", level=4, profile=profile_of("klt"), streams=2)
    store = DictStore()
    wanted = wanted_of(store, chunks, [codec], text_s=10.0)
    recompute, _ = recomputing(chunks)
    base = StreamClient(store, FixedLevel("klt@4+2" + BASE)).run(wanted, recompute, 20.0)
    whole = StreamClient(store, FixedLevel("klt@4+2")).run(wanted, recompute, 20.0)
    assert base.brought == sum(each.levels[0].base_bytes for each in wanted) < whole.brought
    assert not same(base.chunks[0], whole.chunks[0])
    adaptive = StreamClient(store, Adaptive(enough=0.02)).run(wanted, recompute, 20.0)
    assert set(adaptive.chosen) <= {"klt@4+2", "text"}  # bases are refined when all are there
    assert adaptive.brought <= whole.brought  # and no byte of them comes twice


@pytest.mark.parametrize(
    "fault",
    [Fault(0, "stall", LONG), Fault(1000, "stall", LONG), Fault(20_000, "stall", LONG), Fault(5000, "dead")],
    ids=str,
)
def test_a_source_that_stalls_or_dies_at_any_byte(chunks, codecs, fault):
    plain = DictStore()
    wanted = wanted_of(plain, chunks, codecs)
    store = ThrottledStore(plain, Bandwidth.constant(2e6), faults=[fault])
    recompute, done = recomputing(chunks, TEXT_S)
    begin = time.monotonic()
    got = StreamClient(store).run(wanted, recompute, COUNT * TEXT_S)
    assert time.monotonic() - begin < LONG / 3  # expected: 0.2 s
    assert done
    assert [chunk.key for chunk in got.chunks] == [chunk.key for chunk in chunks]
    assert all(same(got.chunks[i], chunks[i]) for i in done)


def test_unreachable_and_empty_stores_are_recomputed_at_once(chunks, codecs):
    broken = DictStore()
    wanted = wanted_of(broken, chunks, codecs, text_s=0.001)
    broken.raises = OSError("unreachable")
    recompute, done = recomputing(chunks)
    got = StreamClient(broken).run(wanted, recompute, LONG)
    assert got.chosen == ("text",) * COUNT
    assert sorted(done) == list(range(COUNT))
    assert got.faults["absent"] >= 1
    got = StreamClient(DictStore(), FixedLevel("klt@0")).run(wanted, recompute, LONG)
    assert got.chosen == ("text",) * COUNT
    assert got.seconds < LONG / 3


def test_a_lying_source_is_noticed_whatever_it_lies_about(chunks, codecs):
    recompute, _ = recomputing(chunks)
    good = DictStore()
    wanted = wanted_of(good, chunks, codecs, text_s=10.0)
    for at in (0, 40, -100):
        lies = DictStore()
        for key, data in good.entries.items():
            wrong = bytearray(data)
            wrong[at] ^= 1
            lies.entries[key] = bytes(wrong)
        got = StreamClient(lies, FixedLevel("raw")).run(wanted, recompute, LONG)
        assert all(same(a, b) for a, b in zip(got.chunks, chunks, strict=True))
        assert got.chosen == ("text",) * COUNT
        two = Handover([lies, good], again_s=0.0)
        got = StreamClient(two, FixedLevel("raw")).run(wanted, recompute, LONG)
        assert all(same(a, b) for a, b in zip(got.chunks, chunks, strict=True))
        assert got.told.lies[1] == 0


def test_entries_of_other_chunks_are_noticed(chunks, codecs):
    store = DictStore()
    wanted = wanted_of(store, chunks, codecs, text_s=10.0)
    keys = [each.levels[0].key for each in wanted]
    store.entries[keys[0]] = store.entries[keys[1]].ljust(len(store.entries[keys[0]]), b"\0")
    same_size = chunk_of(SMALL, 300, seed=77, fingerprint="e" * 32)
    other = write_levels(DictStore(), same_size, codecs[:1])[0]
    swapped = DictStore()
    swapped.entries |= store.entries
    data = wanted_of(swapped, [same_size], codecs[:1])[0]
    swapped.entries[keys[0]] = swapped.entries[data.levels[0].key]
    assert other.nbytes == wanted[0].levels[0].nbytes
    recompute, done = recomputing(chunks)
    for source in (store, swapped):
        done.clear()
        got = StreamClient(source, FixedLevel("raw")).run(wanted, recompute, LONG)
        assert done == [0]
        assert all(same(a, b) for a, b in zip(got.chunks, chunks, strict=True))
    assert got.faults == {"key": 1}


class Jumpy(RealClock):
    """Jumps by so many seconds at every look, back and forth."""

    def __init__(self, by):
        self.by, self.looks = by, 0

    def now(self):
        self.looks += 1
        return super().now() + (self.by if self.looks % 2 else 0.0)


@pytest.mark.parametrize("by", [-1000.0, 1000.0])
def test_clocks_that_jump(chunks, codecs, by):
    store = DictStore()
    wanted = wanted_of(store, chunks, codecs, text_s=0.001)
    recompute, _ = recomputing(chunks)
    begin = time.monotonic()
    got = StreamClient(Handover([store]), clock=Jumpy(by)).run(wanted, recompute, 1.0)
    assert time.monotonic() - begin < LONG / 3
    assert [chunk.key for chunk in got.chunks] == [chunk.key for chunk in chunks]


def test_text_alone_and_nothing_at_all(chunks, codecs):
    wanted = wanted_of(DictStore(), chunks, codecs)
    recompute, done = recomputing(chunks)
    assert StreamClient(DictStore(), Text()).run(wanted, recompute, 1.0).brought == 0
    assert done == list(range(COUNT))
    assert StreamClient(DictStore()).run([], recompute, 1.0).chunks == ()
    with pytest.raises(ValueError, match="a target of 0"):
        StreamClient(DictStore()).run(wanted, recompute, 0)


def test_what_recompute_raises_is_raised_and_nothing_runs_on(chunks, codecs):
    import threading

    store = DictStore()
    wanted = wanted_of(store, chunks, codecs)

    def fails(item):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        StreamClient(store, Text()).run(wanted, fails, 1.0)
    for _ in range(200):
        if not any(thread.name == "blendkv-stream" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a thread was left behind")
