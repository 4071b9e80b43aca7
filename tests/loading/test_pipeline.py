"""Layers that come while others compute: the same answers as from chunks that are there, right ones when none come."""

import copy
import gc
import threading
import time
from dataclasses import replace

import pytest
import torch

from blendkv import BlendedCache, ChunkMissError, MissingChunk, Pool, attach, prefill
from blendkv.codecs import get_codec
from blendkv.loading.arriving import ArrivingChunk
from blendkv.loading.pipeline import Pipeline, at_once
from blendkv.loading.progress import Progress
from blendkv.loading.queues import FifoQueue
from blendkv.loading.scheduler import TransferScheduler
from blendkv.loading.survey import Place
from blendkv.stores import Budget, TieredStore
from blendkv.stores.breaker import Breaker
from blendkv.stores.deadline import remaining
from blendkv.stores.filing import Form
from blendkv.testing import FAMILIES, tiny_model
from tests.chunks import assert_same, make_chunk
from tests.helpers import exact_chunk, full, make_case, run, tokens, worst
from tests.made_up import make_codec
from tests.patience import until
from tests.stores.dicts import DictStore

LAYERS = 4


class RangeStore(DictStore):
    """A store that fails, waits or lies from some layer on.

    Attributes:
        gate: what happens in front of a ranged read that is not the head; gets its start.
        reads: (key, start, stop) of all such reads.
    """

    def __init__(self, name="ranged", local=False):
        super().__init__(name, local)
        self.gate, self.reads = None, []

    def get(self, key, start=0, stop=None):
        data = super().get(key, start, stop)
        if start:
            self.reads.append((key, start, stop))
            if self.gate is not None:
                data = self.gate(key, start, data)
        return data


def starts(store, key):
    """Where the layers of an entry begin."""
    from blendkv.chunkfile import ChunkFile

    with ChunkFile(store.entries[key]) as file:
        return [int(file.starts[file.header.segments_of(unit, 0).start]) for unit in range(file.header.units)]


def failing_from(store, layer, gone=("all",), how=lambda data: None):
    """A gate that fails reads of a layer and those behind it."""
    at = {key: starts(store, key)[layer] for key in store.entries if "all" in gone or key in gone}
    return lambda key, start, data: how(data) if start >= at.get(key, 1 << 60) else data


def damage(store, key, layer):
    """Turns a bit of what is stored for a layer."""
    data = bytearray(store.entries[key])
    data[starts(store, key)[layer]] ^= 1
    store.entries[key] = bytes(data)


def stored(chunks, store=None, **kwargs):
    """A fresh store with chunks in it, behind tiers with empty memory, and a pipeline of one layer a piece."""
    store = store or RangeStore()
    TieredStore(Pool(), store, write="through").put_many(chunks)
    tiers = TieredStore(Pool(), store, **kwargs)
    return store, tiers, Pipeline(tiers, TransferScheduler(4), piece_bytes=1, whole_bytes=0)


def fetched(pipeline, chunks, first=0, budget=None):
    got = pipeline.fetch([chunk.key for chunk in chunks], budget=budget, first=first)
    assert all(isinstance(each.chunk, ArrivingChunk) for each in got)
    return [each.chunk for each in got]


def exact_case(model, seed=4):
    ids = tokens(70, seed)[None]
    return ids, [exact_chunk(model, ids, a, b) for a, b in ((5, 30), (30, 41), (44, 66))]


@pytest.mark.parametrize("selector", ["hkvd", "boundary", "attention", "20%boundary+attention*hkvd"])
@pytest.mark.parametrize("first", [0, 1])
def test_answers_are_those_of_chunks_that_are_there(attached, selector, first):
    model = attached("llama")
    case = make_case(model)
    want = run(model, case.ids, there := BlendedCache(case.caches, 0.3, selector)).logits
    _, tiers, pipeline = stored(case.caches)
    chunks = fetched(pipeline, case.caches, first if selector == "hkvd" else 0)
    got = run(model, case.ids, cache := BlendedCache(chunks, 0.3, selector)).logits
    assert torch.equal(got[:, -1], want[:, -1])
    assert cache.report.layers == there.report.layers
    assert worst(cache, there) == 0
    for chunk, one in zip(chunks, case.caches, strict=True):
        assert_same(chunk, one)  # waits for what is behind the first layer wanted
        until(lambda chunk=chunk: chunk.key in tiers.pool)
        assert_same(tiers.pool.get(chunk.key), one)


def test_layers_compute_while_others_are_on_their_way(attached):
    """Each layer's bytes are released by the layer before it: whoever waits for all of them waits for ever."""
    model = attached("llama")
    case = make_case(model)
    want = run(model, case.ids, BlendedCache(case.caches, 0.3)).logits
    store, _, pipeline = stored(case.caches)
    done = [threading.Event() for _ in range(LAYERS)]
    at = {key: starts(store, key) for key in store.entries}

    def gate(key, start, data):
        layer = max(i for i, begin in enumerate(at[key]) if begin <= start)
        assert layer < 2 or done[layer - 1].wait(30)
        return data

    store.gate = gate
    handles = [
        layer.register_forward_hook(lambda *args, event=event: event.set())
        for layer, event in zip(model.model.layers, done, strict=True)
    ]
    try:
        got = run(model, case.ids, BlendedCache(fetched(pipeline, case.caches, first=1), 0.3)).logits
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(got[:, -1], want[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_exact_chunks_that_stop_coming_leave_an_exact_answer(attached, family, layer):
    """Rows that were computed meanwhile, reused ones and those that catch up: all must fit together."""
    model = attached(family)
    ids, exact = exact_case(model)
    logits, reference = full(model, ids)
    for selector, ratio in (("random", 0.3), ("hkvd", 0.0), ("attention", 0.3)):
        store, _, pipeline = stored(exact)
        store.gate = failing_from(store, layer, gone=[exact[1].key, exact[2].key])
        cache = BlendedCache(fetched(pipeline, exact), ratio, selector)
        got = run(model, ids, cache).logits[:, -1]
        assert (got - logits[:, -1]).abs().max() <= 1e-4
        assert worst(cache, reference) <= 1e-4
        report, (used, *lost) = cache.report, cache.report.chunks
        assert used.hit
        assert not any(use.hit for use in lost)
        assert report.misses == {"late": 11 + 22}
        for rows in report.layers:
            assert rows.reused + rows.recomputed + rows.fresh + rows.missed == 70
            assert rows.missed == 33
            assert rows.reused + rows.recomputed == 25
        assert "did not come" in " ".join(report.notes)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_when_no_chunk_comes_the_answer_is_that_of_full_prefill(attached, layer):
    """From the layer of the check on, what other rows read of lost chunks before was stored: so near, not equal."""
    model = attached("llama")
    case = make_case(model)
    logits, reference = full(model, case.ids)
    store, _, pipeline = stored(case.caches)
    store.gate = failing_from(store, layer)
    cache = BlendedCache(fetched(pipeline, case.caches), 0.3)
    got = run(model, case.ids, cache).logits[:, -1]
    assert all(rows.missed == sum(map(len, case.chunks)) for rows in cache.report.layers)
    assert not torch.isnan(got).any()
    if layer <= 1:  # nothing had been narrowed yet
        assert (got - logits[:, -1]).abs().max() <= 1e-4
        assert worst(cache, reference) <= 1e-4
    else:
        assert (got - logits[:, -1]).norm() < (
            run(model, case.ids, BlendedCache(case.caches, 0.0)).logits[:, -1] - logits[:, -1]
        ).norm()


def test_a_batch_of_which_one_row_loses_a_chunk(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    other, more = exact_case(model, seed=5)
    both = torch.cat([ids, other])
    logits, reference = full(model, both)
    store, _, pipeline = stored(exact + more)
    store.gate = failing_from(store, 2, gone=[exact[1].key])
    chunks = fetched(pipeline, exact + more)
    cache = BlendedCache([chunks[:3], chunks[3:]], 0.3, "random")
    assert (run(model, both, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4
    assert cache.report.misses == {"late": 11}


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_logits_that_are_wanted_are_there_for_rows_of_a_batch_that_lose_nothing(attached, layer):
    model = attached("llama")
    ids, exact = exact_case(model)
    other, more = exact_case(model, seed=5)
    both = torch.cat([ids, other])
    logits, _ = full(model, both)
    store, _, pipeline = stored(exact + more)
    store.gate = failing_from(store, layer, gone=[chunk.key for chunk in exact])
    chunks = fetched(pipeline, exact + more)
    cache = BlendedCache([chunks[:3], chunks[3:]], 0.3, "random")
    got = run(model, both, cache, logits_to_keep=4).logits
    assert (got[:, -4:] - logits[:, -4:]).abs().max() <= 1e-4


def test_gradual_filtering_goes_on_after_a_loss(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, reference = full(model, ids)
    store, _, pipeline = stored(exact)
    store.gate = failing_from(store, 2, gone=[exact[0].key])
    cache = BlendedCache(fetched(pipeline, exact), selector="random", check_layers={1: 0.6, 3: 0.2})
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4
    assert cache.report.layers[3].recomputed == round(0.2 * 33)


def test_damage_in_the_middle_is_a_miss_and_put_out_of_use(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, tiers, pipeline = stored(exact)
    damage(store, exact[1].key, 2)
    cache = BlendedCache(fetched(pipeline, exact), 0.3, "random")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert cache.report.misses == {"checksum": 11}
    until(lambda: exact[1].key not in store.entries)
    assert tiers.stats.damaged == {store.url: 1}
    assert exact[1].key not in tiers.pool


@pytest.mark.parametrize("at_once", [True, False])
def test_an_entry_that_is_written_anew_between_two_reads_stays(attached, at_once):
    """Two who compute a chunk do not get the same numbers: what was read of both is wrong, and each of them good."""
    model = attached("llama")
    _, exact = exact_case(model)
    twins = [replace(one, text="of another length" * at_once) for one in prefill(model, [one.ids for one in exact])]
    store, anew = stored(exact)[0], stored(twins)[0].entries
    tiers = TieredStore(Pool(), store)
    pipeline = Pipeline(tiers, TransferScheduler(2), piece_bytes=1, whole_bytes=0)
    size = store.size

    def written_anew(key, start=0, data=b""):
        store.entries[key] = anew[key]
        return anew[key][start : start + len(data)]

    if at_once:  # before anything was read
        store.size = lambda key: (size(key), written_anew(key))[0]
        got = [each.chunk for each in pipeline.fetch([chunk.key for chunk in exact])]
        for chunk, one in zip(got, twins, strict=True):
            assert_same(chunk, one)
    else:
        store.gate = written_anew
        cache = BlendedCache(fetched(pipeline, exact), 0.3)
        run(model, exact_case(model)[0], cache)
        assert cache.report.misses == {"checksum": 58}
    until(lambda: pipeline._scheduler.state.running == 0)
    assert not tiers.stats.damaged
    assert store.entries == anew


def test_another_store_goes_on_where_the_first_stopped(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    near, far = RangeStore("near"), RangeStore("far")
    for store in (near, far):
        stored(exact, store)
    near.gate = failing_from(near, 2)
    tiers = TieredStore(Pool(), near, far)
    pipeline = Pipeline(tiers, TransferScheduler(1), piece_bytes=1, whole_bytes=0)  # one slot: pieces keep their order
    cache = BlendedCache(fetched(pipeline, exact), 0.3, "random")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert not cache.report.misses
    assert {start >= starts(far, key)[2] for key, start, _ in far.reads} == {True}
    until(lambda: all(key in tiers.pool for key in far.entries))


def test_nearer_stores_get_what_came_from_far(attached):
    model = attached("llama")
    _, exact = exact_case(model)
    near, far = RangeStore("near"), RangeStore("far")
    stored(exact, far)
    tiers = TieredStore(Pool(), near, far)
    chunks = fetched(Pipeline(tiers, TransferScheduler(4), whole_bytes=0), exact)
    for chunk, one in zip(chunks, exact, strict=True):
        assert_same(chunk, one)
        until(lambda key=one.key: key in near.entries)
    assert near.entries == far.entries
    assert tiers.stats.promoted == 3


def test_strict_raises_and_loses_nothing(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    store, _, pipeline = stored(exact)
    store.gate = failing_from(store, 2)
    cache = BlendedCache(fetched(pipeline, exact), 0.3, strict=True)
    with pytest.raises(ChunkMissError, match="did not come"):
        run(model, ids, cache)
    logits, _ = full(model, ids)
    got = run(model, ids, BlendedCache(exact, 1.0)).logits
    assert (got - logits).abs().max() <= 1e-4


def test_a_stalled_store_is_waited_for_as_long_as_the_budget_allows(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, _, pipeline = stored(exact)
    free = threading.Event()
    store.gate = failing_from(store, 2, how=lambda data: data if free.wait(60) else None)
    budget = Budget(0.2)
    begin = time.monotonic()
    cache = BlendedCache(fetched(pipeline, exact, budget=budget), 0.3, "random")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert time.monotonic() - begin < 30
    assert budget.left <= 0
    assert cache.report.misses == {"late": 58}
    assert (pipeline.tiers.stats.misses, sum(pipeline.tiers.stats.hits.values())) == (3, 0)
    assert store.stats.faults == {"deadline": 3}
    free.set()
    until(lambda: pipeline._scheduler.state.running == 0)
    assert (pipeline.tiers.stats.misses, sum(pipeline.tiers.stats.hits.values())) == (3, 0)


def test_a_local_store_is_waited_for_whatever_the_budget_and_one_behind_it_is_not(attached):
    model = attached("llama")
    ids, exact = exact_case(model)
    store, _, _ = stored(exact, RangeStore(local=True))
    store.gate = lambda key, start, data: time.sleep(0.01) or data
    pipeline = Pipeline(TieredStore(Pool(), store), TransferScheduler(2), piece_bytes=1, whole_bytes=0)
    cache = BlendedCache(fetched(pipeline, exact, budget=Budget(0.0)), 0.3)
    run(model, ids, cache)
    assert not cache.report.misses

    far, left = RangeStore("far"), []
    far.gate = lambda key, start, data: left.append(remaining(99.0)) or data
    stored(exact, far)
    store.gate = failing_from(store, 2)
    tiers = TieredStore(Pool(), store, far)
    pipeline = Pipeline(tiers, TransferScheduler(2), piece_bytes=1, whole_bytes=0)
    run(model, ids, BlendedCache(fetched(pipeline, exact, budget=Budget(30.0)), 0.3))
    assert left
    assert max(left) <= 30.0


def test_a_prompt_that_nobody_wants_any_more_leaves_nothing_behind(attached):
    model = attached("llama")
    _, exact = exact_case(model)
    store, _, _ = stored(exact)
    free = threading.Event()
    store.gate = lambda key, start, data: data if free.wait(60) else None
    scheduler = TransferScheduler(2, linger=0.01)
    pipeline = Pipeline(TieredStore(Pool(), store), scheduler, piece_bytes=1, ahead=3, whole_bytes=0)
    chunks = fetched(pipeline, exact)
    until(lambda: len(store.reads) == 2)
    assert (scheduler.state.running, scheduler.state.waiting) == (2, 1)
    del chunks
    gc.collect()
    assert scheduler.state.waiting == 0
    free.set()
    until(lambda: scheduler.state.threads == 0)
    assert len(store.reads) == 2


def in_time(what, seconds=20):
    """What a call gives, which must not hang."""
    given = []
    thread = threading.Thread(target=lambda: given.append(what()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert given, "it hangs, or raised"
    return given[0]


def test_the_garbage_collector_finds_chunks_while_the_scheduler_is_in_the_middle_of_a_change(attached):
    """Chunks in a cycle are given up in whatever thread, between any two steps of it: that must wait for no lock."""
    _, exact = exact_case(attached("llama"))
    store, _, _ = stored(exact)
    free = threading.Event()
    store.gate = lambda key, start, data: data if free.wait(60) else None

    class Collecting(FifoQueue):
        collects = False

        def push(self, piece):
            if self.collects:
                gc.collect()
            super().push(piece)

    queue = Collecting()
    scheduler = TransferScheduler(1, queue, linger=0.01)
    pipeline = Pipeline(TieredStore(Pool(), store), scheduler, piece_bytes=1, whole_bytes=0)
    cycle = {"chunks": fetched(pipeline, exact)}
    cycle["me"] = cycle
    until(lambda: scheduler.state.running == 1)
    gc.disable()
    try:
        del cycle
        queue.collects = True
        future = in_time(lambda: scheduler.submit("other", lambda: 5))
    finally:
        gc.enable()
    free.set()
    assert future.result(20) == 5
    until(lambda: scheduler.state.threads == 0)
    assert len(store.reads) == 1  # what waited for a slot found out that nobody wants it


@pytest.mark.parametrize("chooses", [False, True])
def test_a_scheduler_that_is_closed_while_stores_are_asked(chooses):
    """Nobody waits for what was taken back, not even where there is no deadline; who asks for more then is told."""
    exact, free = [make_chunk(20 + i, layers=2, seed=i) for i in range(3)], threading.Event()

    class Waits(DictStore):
        def size(self, key):
            assert free.wait(60)
            return super().size(key)

    store, tiers, _ = stored(exact, Waits())
    scheduler = TransferScheduler(1)

    def close():
        until(lambda: (scheduler.state.running, scheduler.state.waiting) == (1, 2))
        scheduler.close(0)
        free.set()

    closing = threading.Thread(target=close)
    closing.start()
    pipeline = Pipeline(tiers, scheduler, piece_bytes=1, whole_bytes=0)

    def fetch():
        try:
            return pipeline.fetch([chunk.key for chunk in exact], choose=Everything() if chooses else None)
        except RuntimeError as error:
            return str(error)

    found = in_time(fetch)
    closing.join()
    assert store.stats.faults == {"error": 2}
    if chooses:  # sizes were asked for, and heads would be now
        assert found == "this scheduler is closed; make another one"
    else:
        assert [one.chunk is None for one in found] == [False, True, True]


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_a_scheduler_that_is_closed_leaves_no_chunk_waiting(attached, ahead):
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, _, _ = stored(exact)
    free = threading.Event()
    store.gate = lambda key, start, data: data if free.wait(60) else None
    scheduler = TransferScheduler(1)
    tiers = TieredStore(Pool(), store)
    chunks = fetched(Pipeline(tiers, scheduler, piece_bytes=1, ahead=ahead, whole_bytes=0), exact)
    until(lambda: scheduler.state.running == 1)
    scheduler.close(0)
    free.set()
    cache = BlendedCache(chunks, 0.3, "random")
    got = in_time(lambda: run(model, ids, cache)).logits[:, -1]
    assert (got - logits[:, -1]).abs().max() <= 1e-4
    assert cache.report.misses == {"cancelled": 58}
    assert (tiers.stats.misses, sum(tiers.stats.hits.values())) == (3, 0)


def test_only_a_few_pieces_are_under_way(attached):
    model = attached("llama")
    _, exact = exact_case(model)
    store, _, _ = stored(exact)
    under_way, most, lock = [0], [0], threading.Lock()

    def gate(key, start, data):
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.01)
        with lock:
            under_way[0] -= 1
        return data

    store.gate = gate
    pipeline = Pipeline(TieredStore(Pool(), store), TransferScheduler(16), piece_bytes=1, ahead=3, whole_bytes=0)
    for chunk, one in zip(fetched(pipeline, exact), exact, strict=True):
        assert_same(chunk, one)
    assert most[0] == 3


@pytest.mark.parametrize("secret", [None, bytes(range(32))])
def test_heads_are_checked_before_anything_is_computed(attached, secret):
    from blendkv.chunk import chunk_key

    model = attached("llama")
    _, exact = exact_case(model)
    if secret is not None:
        exact = [
            replace(c, keyed=chunk_key(c.ids, c.fingerprint, c.conditioning, c.tokenizer, c.namespace, secret))
            for c in exact
        ]
    store = RangeStore()
    TieredStore(Pool(), store, write="through", secret=secret).put_many(exact)
    a, b, c = (chunk.key for chunk in exact)
    store.entries[a], store.entries[b] = store.entries[b], store.entries[a]
    tiers = TieredStore(Pool(), store, secret=secret)
    got = Pipeline(tiers, TransferScheduler(2), whole_bytes=0).fetch([a, b, c])
    assert [each.chunk is None for each in got] == [True, True, False]
    assert got[2].chunk.key == c
    assert_same(got[2].chunk, exact[2])
    assert tiers.stats.reasons == {"key": 2}
    assert (tiers.stats.misses, tiers.stats.hits) == (2, {store.url: 1})


def test_a_copy_of_an_arriving_chunk_is_whole(attached):
    import copy
    import pickle

    model = attached("llama")
    _, exact = exact_case(model)
    _, _, pipeline = stored(exact)
    chunk = fetched(pipeline, exact)[0]
    for twin in (copy.deepcopy(chunk), pickle.loads(pickle.dumps(chunk)), chunk.to("cpu")):
        assert_same(twin, exact[0])
        assert twin.lacks(0) is None
        assert twin.nbytes == exact[0].nbytes
        assert twin.dtype == exact[0].dtype
    assert "ArrivingChunk(25 tokens" in repr(chunk)


def test_models_with_masks_of_their_own_and_strict_prompts_load_first(monkeypatch):
    from blendkv import ChunkLibrary
    from tests.cases.stored import library

    model = attach(tiny_model("llama"))
    store = RangeStore(local=True)
    kv = library(model, TieredStore(Pool(), store))
    assert isinstance(kv, ChunkLibrary)
    documents = [" ".join(f"word{n}" for n in range(30))]
    kv(documents, "why?")
    kv.pool.pool.clear()
    asked = []
    monkeypatch.setattr(kv.pipeline, "fetch", lambda *args, **kwargs: asked.append(args) or kv.pool.fetch(*args))
    kv(documents, "why?", strict=True)
    assert not asked
    kv(documents, "why?")
    assert len(asked) == 1


def test_small_files_are_read_whole_before_anything_is_computed(attached):
    model = attached("llama")
    _, exact = exact_case(model)
    store, tiers, _ = stored(exact)
    store.entries[exact[0].key] = store.entries[exact[0].key][:-1]
    got = Pipeline(tiers, TransferScheduler(2)).fetch([chunk.key for chunk in exact])
    assert [type(each.chunk).__name__ for each in got] == ["NoneType", "ChunkCache", "ChunkCache"]
    assert tiers.stats.damaged == {store.url: 1}
    assert (tiers.stats.misses, tiers.stats.hits) == (1, {store.url: 2})
    assert not store.reads


def test_what_is_lost_on_the_way_is_no_hit_and_is_written_anew_next_time(attached):
    from tests.cases.stored import answer, library

    model = attached("llama")
    document = [" ".join(f"word{n}" for n in range(40))]
    store = RangeStore(local=True)
    with library(model, TieredStore(Pool(), store)) as kv:
        kv(document, "why?")
    right = dict(store.entries)
    (key,) = kv.keys(document)
    damage(store, key, 2)
    kv = library(model, TieredStore(Pool(), store))
    kv.pipeline.whole_bytes, kv.pipeline.piece_bytes = 0, 1
    inputs = kv(document, "why?")
    answer(model, inputs["input_ids"], inputs.cache, attention_mask=inputs["attention_mask"])
    assert inputs.report.misses == {"checksum": len(inputs.cache.chunks[0][1])}
    until(lambda: key not in store.entries)
    assert sum(inputs.report.loaded.values()) == inputs.report.reused_tokens
    stats = kv.pool.stats
    assert (stats.misses, stats.damaged) == (1, {store.url: 1})
    again = kv(document, "why?").report
    assert again.prefilled_tokens == len(inputs.cache.chunks[0][1])
    assert store.entries == right


def test_a_store_that_prompts_go_on_without_is_left_alone_for_a_while(attached):
    """It answers when it is asked for heads, and never sends the rest: after five prompts no other one waits for it."""
    model = attached("llama")
    ids, exact = exact_case(model)
    store, tiers, _ = stored(exact)
    free, now = threading.Event(), [0.0]
    pipeline = Pipeline(tiers, TransferScheduler(64), piece_bytes=1, whole_bytes=0)
    pipeline.breakers = [Breaker(clock=lambda: now[0])]

    def hits():
        chunks = [
            got.chunk or MissingChunk(chunk.ids)
            for got, chunk in zip(pipeline.fetch([c.key for c in exact], budget=Budget(0.05)), exact, strict=True)
        ]
        run(model, ids, cache := BlendedCache(chunks, 0.3, "random"))
        return sum(use.hit for use in cache.report.chunks)

    store.gate = failing_from(store, 2, how=lambda data: data if free.wait(60) else None)
    assert [hits() for _ in range(5)] == [0] * 5
    assert pipeline.breakers[0].state == "open"
    calls = len(store.calls)
    assert hits() == 0
    assert len(store.calls) == calls  # nobody asked
    assert store.stats.faults["breaker"] == 3
    now[0] += 2
    assert hits() == 0  # one finds out that it is no better
    assert pipeline.breakers[0].state == "open"
    free.set()
    store.gate, now[0] = None, now[0] + 2
    tiers.pool.clear()
    for chunk in fetched(pipeline, exact, budget=Budget(30.0)):
        assert chunk.lacks(LAYERS - 1) is None
    until(lambda: pipeline.breakers[0].state == "closed")


@pytest.mark.parametrize("what", ["get", "size"])
def test_a_store_that_does_not_even_say_what_it_has_is_left_alone_too(attached, what):
    _, exact = exact_case(attached("llama"))
    store, _, pipeline = stored(exact)
    pipeline._scheduler, free = TransferScheduler(64), threading.Event()
    chooses = Everything() if what == "size" else None
    own = getattr(store, what)
    setattr(store, what, lambda *args: own(*args) if free.wait(60) else None)
    keys = [chunk.key for chunk in exact]
    for state in ["closed"] * 4 + ["open"]:
        assert not any(got.chunk for got in pipeline.fetch(keys, budget=Budget(0.02), choose=chooses))
        assert pipeline.breakers[0].state == state
    begin = time.monotonic()
    assert not any(got.chunk for got in pipeline.fetch(keys, budget=Budget(30.0), choose=chooses))
    assert time.monotonic() - begin < 10
    free.set()


@pytest.mark.parametrize("how", ["absent", "checksum"])
def test_layers_that_a_prompt_does_not_want_may_fail_without_a_miss(attached, how):
    """They come last, for the next prompt: the report says what this one was made of. One that wants them misses."""
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, tiers, pipeline = stored(exact)
    wanted_now, last = {chunk.key: starts(store, chunk.key)[1] for chunk in exact}, threading.Event()

    def gate(key, start, data):
        if start >= wanted_now[key]:
            last.wait(60)
            return data
        last.set()  # what is wanted is still under way
        return None if how == "absent" else bytes(len(data))

    store.gate, pipeline._scheduler, pipeline.ahead, progress = gate, TransferScheduler(16), 16, Progress()
    chunks = [got.chunk for got in pipeline.fetch([c.key for c in exact], first=1, progress=progress)]
    for selector, ratio in (("hkvd", 0.3), ("none", 0.0)):
        cache = BlendedCache(chunks, ratio, selector)
        got = in_time(lambda cache=cache: run(model, ids, cache, logits_to_keep=1).logits)
        assert (got - logits[:, -1:]).abs().max() <= 1e-4
        if selector == "hkvd":
            until(lambda: pipeline._scheduler.state.running == pipeline._scheduler.state.waiting == 0)
            assert not cache.report.misses
            assert set(progress.levels.values()) == {"raw"}
            assert (tiers.stats.hits, tiers.stats.misses) == ({store.url: 3}, 0)
    why = "late" if how == "absent" else "checksum"
    assert cache.report.misses == {why: sum(map(len, exact))}
    assert not any(chunk.key in tiers.pool for chunk in exact)


class Everything:
    """Chooses whatever is anywhere."""

    def prefers(self, farther, nearer):
        return False

    def accepts(self, header):
        return True

    def choose(self, there):
        return there


@pytest.mark.parametrize("waits", [False, True], ids=["given up before", "given up meanwhile"])
def test_keys_that_outlive_their_chunk_come_all_the_same(attached, waits):
    """Nobody would wake who waits for a layer while the chunk is given up elsewhere and nothing of it is under way."""
    _, exact = exact_case(attached("llama"))
    store, _, pipeline = stored(exact)
    scheduler, busy, free = TransferScheduler(1, FifoQueue()), threading.Event(), threading.Event()
    pipeline._scheduler, pipeline.ahead = scheduler, 1

    def gate(key, start, data):
        if not busy.is_set():  # the first layer: another's work takes the slot before the second one
            busy.set()
            scheduler.submit("other", lambda: free.wait(60))
        return data

    store.gate = gate
    chunks = fetched(pipeline, exact)
    states, arrival, given = chunks[0].values, chunks[0].keys._arrival, []
    until(lambda: scheduler.state.running == scheduler.state.waiting == 1)
    thread = threading.Thread(target=lambda states: given.append(states[LAYERS - 1]), args=[states], daemon=True)
    if waits:
        thread.start()
        until(lambda: arrival._changed._waiters)
    del states, chunks
    gc.collect()
    if not waits:
        thread.start()
    free.set()
    thread.join(20)
    assert not thread.is_alive()
    assert torch.equal(given[0], exact[0].values[LAYERS - 1])


def test_layers_are_no_longer_sent_for_once_nobody_has_chunk_keys_or_values(attached):
    _, exact = exact_case(attached("llama"))
    store, _, pipeline = stored(exact)
    scheduler, free = TransferScheduler(1), threading.Event()
    pipeline._scheduler, pipeline.ahead = scheduler, 1
    store.gate = lambda key, start, data: data if free.wait(60) else None
    chunks = fetched(pipeline, exact)
    parts = [chunk.keys for chunk in chunks[1:]] + [chunk.values for chunk in chunks[:2]]
    arrival = parts[0]._arrival
    until(lambda: scheduler.state.running == 1)
    gc.disable()  # it is not waited for
    try:
        del chunks[0], chunks[:], parts[1:]
        assert not arrival.failed
        del parts
        assert arrival.failed
    finally:
        gc.enable()
        free.set()
    until(lambda: scheduler.state.running == scheduler.state.waiting == 0)
    assert len(store.reads) == 1


def test_copies_of_chunks_on_their_way_can_be_shown(attached):
    _, exact = exact_case(attached("llama"))
    _, _, pipeline = stored(exact)
    chunk = fetched(pipeline, exact)[0]
    assert "dict" in repr(chunk) or "ranged" in repr(chunk)
    for copied in (copy.deepcopy(chunk), replace(chunk, text="of")):
        assert f"{len(chunk)} tokens" in repr(copied)


@pytest.mark.parametrize("how", ["checksum", "absent", "raises"])
def test_after_a_piece_fails_no_more_of_its_file_is_fetched(attached, how):
    """One slot: pieces come in order, and those of the other files go on."""
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, tiers, _ = stored(exact)
    key, at = exact[1].key, starts(store, exact[1].key)

    def gate(key, start, data):
        if (key, start) == (exact[1].key, at[1]):
            if how == "raises":
                raise RuntimeError("the disk is on fire")
            return None if how == "absent" else bytes([data[0] ^ 1]) + data[1:]
        return data

    store.gate = gate
    pipeline = Pipeline(tiers, TransferScheduler(1), piece_bytes=1, whole_bytes=0)
    cache = BlendedCache(fetched(pipeline, exact), 0.3, "random")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    until(lambda: pipeline._scheduler.state.running == pipeline._scheduler.state.waiting == 0)
    assert [start for k, start, _ in store.reads if k == key] == [at[0], at[1]]
    assert all(len([1 for k, _, _ in store.reads if k == one.key]) == LAYERS for one in (exact[0], exact[2]))
    assert sum(pipeline.tiers.stats.hits.values()) == 2


def test_a_store_that_raises_in_the_middle_is_named_and_counted(attached):
    """None should: a plug-in may."""
    model = attached("llama")
    ids, exact = exact_case(model)
    logits, _ = full(model, ids)
    store, _, pipeline = stored(exact)

    def gate(key, start, data):
        if key == exact[2].key and start >= starts(store, key)[1]:
            raise ConnectionResetError("gone")
        return data

    store.gate = gate
    cache = BlendedCache(fetched(pipeline, exact), 0.3, "random")
    assert (run(model, ids, cache).logits[:, -1] - logits[:, -1]).abs().max() <= 1e-4
    assert cache.report.misses == {"error (ConnectionResetError)": 22}
    assert cache.report.store_faults == {store.url: {"error": 1}}
    assert store.stats.faults["error"] >= 1
    assert "error (ConnectionResetError)" in " ".join(cache.report.notes)
    # where another store has it, only the fault is left
    far = RangeStore("far")
    stored(exact, far)
    pipeline = Pipeline(TieredStore(Pool(), store, far), TransferScheduler(4), piece_bytes=1, whole_bytes=0)
    before = store.stats.faults["error"]
    run(model, ids, cache := BlendedCache(fetched(pipeline, exact), 0.3, "random"))
    assert not cache.report.misses
    assert store.stats.faults["error"] > before


CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("local", "homes", "whole"),
    [
        (True, (CARD, torch.device("cuda", 1)), True),
        (True, (CPU,), False),
        (True, (CARD, CPU), False),
        (False, (CARD,), False),
        (None, (CARD,), False),  # a plug-in's, that does not say
    ],
)
def test_files_of_a_local_store_are_read_whole_for_a_gpu(local, homes, whole):
    store = RangeStore(local=bool(local))
    if local is None:
        del store.local
    assert at_once(store, homes) is whole
    forms = [Form("a" * 64, codec, True) for codec in (get_codec("raw"), make_codec(make_chunk()))]
    on_card = all(home.type == "cuda" for home in homes)
    pipeline = Pipeline(TieredStore(Pool(), store))
    first = [pipeline.comes_first(Place(form, 0, store.url), homes) for form in forms]
    assert first == [whole, on_card]  # `klt` is decoded by kernels, many files at once


def test_what_is_read_whole_is_told_of(attached, monkeypatch):
    """A controller learns from it, and reports count its bytes; its time is part of that until the last piece came."""
    model = attached("llama")
    _, exact = exact_case(model)
    store, tiers, pipeline = stored(exact)
    sizes, own = {chunk.key: store.size(chunk.key) for chunk in exact}, tiers.take
    monkeypatch.setattr(tiers, "take", lambda *args: time.sleep(0.02) or own(*args))
    for whole in (max(sizes.values()), sorted(sizes.values())[1]):
        pipeline.whole_bytes, progress, heard = whole, Progress(), []
        progress.on_loaded = heard.append
        got = pipeline.fetch([chunk.key for chunk in exact], progress=progress)
        for each in got:
            each.chunk.states(LAYERS - 1)
        until(lambda heard=heard: heard)
        until(lambda progress=progress: sum(progress.nbytes.values()) >= 0.9 * sum(sizes.values()))
        assert progress.loaded_s > 0.02
        assert progress.to_dict(1.0)["bytes"] == dict(progress.nbytes)
        if whole == max(sizes.values()):
            assert progress.nbytes == {store.url: sum(sizes.values())}
            assert [each.nbytes for each in got] == [sizes[chunk.key] for chunk in exact]
            assert len(heard) == 1
        tiers.pool.clear()


@pytest.mark.parametrize("waits", [False, True], ids=["written", "about to be written"])
@pytest.mark.parametrize("local", [True, False])
def test_the_pipeline_streams_to_a_gpu_only_what_comes_from_afar(attached, monkeypatch, local, waits):
    """Without a GPU: the tiers give chunks on the CPU, and no piece is sent for."""
    _, exact = exact_case(attached("llama"))
    store, tiers, pipeline = stored(exact, RangeStore(local=local))
    told, own, keys = [], tiers.take, [chunk.key for chunk in exact]
    monkeypatch.setattr(tiers, "take", lambda level, forms, homes, *_: told.append(homes) or own(level, forms))
    monkeypatch.setattr("blendkv.loading.transfer.Transfer.begin", lambda transfer: None)
    if waits:
        data = dict(store.entries)
        monkeypatch.setattr(tiers, "waiting", lambda level, key: data[key])
    got = pipeline.fetch(keys, homes := (CARD,) * LAYERS)
    assert [isinstance(each.chunk, ArrivingChunk) for each in got] == [not local] * len(keys)
    assert told == ([homes] if local else [])
    assert [each.tier for each in got] == [store.url] * len(keys)
    assert tiers.stats.hits == {store.url: len(keys)}
    if local:
        for each, one in zip(got, exact, strict=True):
            assert_same(each.chunk, one)
