"""A store that stalls holds up nobody who wants something of another one, and nobody longer than the deadline."""

import threading
import time

import pytest

from blendkv import BlendedCache, MissingChunk, Pool
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import SLOTS, TransferScheduler, shared_scheduler
from blendkv.loading.timely import _InTurn
from blendkv.stores import Budget, TieredStore
from blendkv.stores.deadline import deadline
from tests.helpers import exact_chunk, full, run, tokens
from tests.stores.dicts import DictStore

LONG_S = 20


class Stalling(DictStore):
    """Gives heads at once, and what is behind them when `free` is set."""

    def __init__(self, name):
        super().__init__(name)
        self.free = threading.Event()
        self.under_way = 0

    def get(self, key, start=0, stop=None):
        if start:
            self.under_way += 1
            self.free.wait(LONG_S)
        return super().get(key, start, stop)


@pytest.fixture
def far():
    store = Stalling("far")
    yield store
    store.free.set()


@pytest.fixture
def case(attached):
    model = attached("llama")
    ids = tokens(70, 4)[None]
    return model, ids, [exact_chunk(model, ids, *span) for span in ((5, 30), (30, 41), (44, 66))]


def keep(store, chunks):
    TieredStore(Pool(), store, write="through").put_many(chunks)
    return store


def blended(case, pipeline, budget):
    """Which chunks a prompt had, and how long it took."""
    model, ids, chunks = case
    want = full(model, ids)[0][:, -1]
    begin = time.monotonic()
    found = pipeline.fetch([chunk.key for chunk in chunks], budget=Budget(budget))
    here = [got.chunk or MissingChunk(chunk.ids) for got, chunk in zip(found, chunks, strict=True)]
    got = run(model, ids, cache := BlendedCache(here, 0.3, "random")).logits[:, -1]
    assert (got - want).abs().max() <= 1e-4
    return [use.hit for use in cache.report.chunks], time.monotonic() - begin


def pipeline_of(*stores, scheduler=None, **settings):
    return Pipeline(TieredStore(Pool(), *stores), scheduler, piece_bytes=1, whole_bytes=0, **settings)


@pytest.mark.parametrize("ahead", [1, 4])
def test_pieces_of_a_local_store_come_while_another_store_of_the_prompt_stalls(case, far, ahead):
    _, _, (first, *others) = case
    near = keep(DictStore("near", local=True), [first])
    pipeline = pipeline_of(near, keep(far, others), scheduler=TransferScheduler(16), ahead=ahead)
    hits, took = blended(case, pipeline, budget=2.0)  # a busy machine brings what is near by then
    assert hits == [True, False, False]
    assert took < LONG_S / 2
    assert far.under_way == min(ahead, 8)


@pytest.mark.parametrize("local", [True, False])
def test_slots_that_a_stalling_store_has_taken_are_no_other_stores(case, far, local):
    hits, _ = blended(case, pipeline_of(keep(far, case[2]), ahead=SLOTS), budget=0.5)
    assert hits == [False] * 3
    assert shared_scheduler(far.url).state.running == SLOTS
    hits, took = blended(case, pipeline_of(keep(DictStore("other", local), case[2])), budget=LONG_S)
    assert hits == [True] * 3
    assert took < LONG_S / 2
    assert shared_scheduler(far.url).state.running == SLOTS


def test_local_stores_share_their_slots_and_others_have_their_own():
    stores = DictStore("a", local=True), DictStore("b", local=True), DictStore("c"), DictStore("d")
    lanes = pipeline_of(*stores).lanes()
    assert [lanes(tier)._scheduler for tier in range(4)] == [shared_scheduler(url) for url in ("", "", "c://", "d://")]
    assert lanes(2) is lanes(2)
    mine = TransferScheduler(1)
    lanes = pipeline_of(*stores, scheduler=mine).lanes()
    assert {lanes(tier) for tier in range(4)} == {lanes(0)}
    assert lanes(0)._scheduler is mine


def test_a_prompt_of_two_stores_is_loaded_once_both_have_given_all(case, far):
    _, _, (first, *others) = case
    near = keep(DictStore("near", local=True), [first])
    pipeline, loaded, progress = pipeline_of(near, keep(far, others)), threading.Event(), Progress()
    progress.on_loaded = lambda _: loaded.set()
    chunks = pipeline.fetch([chunk.key for chunk in case[2]], progress=progress)
    assert chunks[0].chunk.states(3)
    assert not loaded.is_set()
    far.free.set()
    assert loaded.wait(LONG_S)
    assert set(progress.nbytes) == {near.url, far.url}


def test_who_waits_for_a_turn_waits_no_longer_than_the_deadline():
    store, free = DictStore(), threading.Event()
    store.entries["k"] = b"bytes"
    with TransferScheduler(1) as scheduler:
        stuck = scheduler.submit("another", free.wait, LONG_S)
        source, begin = _InTurn(store, scheduler.lane()), time.monotonic()
        with deadline(0.05):
            assert source.get("k", 0, 5) is None
        assert time.monotonic() - begin < LONG_S / 2
        assert scheduler.state.waiting == 0
        free.set()
        assert stuck.result(LONG_S)
        with deadline(LONG_S):
            assert source.get("k", 0, 5) == b"bytes"
        assert source.get("k", 1, 3) == b"yt"
