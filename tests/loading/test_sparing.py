"""Tokens that will be recomputed are not loaded, nobody ever reads them, and whoever wants them gets them."""

import copy
import gc
import os
import pickle
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from blendkv import BlendedCache, Pool
from blendkv.chunkfile import ChunkFile, decode_chunk
from blendkv.loading.arriving import ArrivingChunk
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import TransferScheduler
from blendkv.loading.sparing import Sparing
from blendkv.selectors import Selector
from blendkv.stores import Budget, TieredStore
from blendkv.testing import FAMILIES
from tests.chunks import assert_same
from tests.helpers import exact_chunk, full, make_case, run, tokens, worst
from tests.loading.test_pipeline import LAYERS, RangeStore, in_time
from tests.made_up import fit_profile
from tests.patience import until

LENGTHS = (70, 40, 97)
STATIC = ("boundary", "every-3", "random-2", "boundary@per-chunk", "20%random+80%boundary", "all", "none")


@dataclass
class ByChunk(Selector):
    """Everything of the first chunk, then of the next."""

    name = "by-chunk"

    def score(self, candidates):
        return -candidates.chunk.float()


def stored(chunks, store=None, codec=None):
    store = store or RangeStore()
    TieredStore(Pool(), store, codec=codec, write="through").put_many(chunks)
    return store


def loaded(case, store, options, rest=True, budget=None, computes=True, codec=None, **kwargs):
    """(chunks on their way or None, progress, tiers) of a prompt as a library fetches it."""
    tiers = TieredStore(Pool(), store, codec=codec)
    settings = {"piece_bytes": 1, "whole_bytes": 0, "least_gap": 1, "rest": rest} | kwargs
    scheduler = settings.pop("scheduler", None) or TransferScheduler(4)
    pipeline = Pipeline(tiers, scheduler, **settings)
    pieces = {chunk.key: (chunk.ids.tolist(), chunk.conditioning) for chunk in case.caches}
    spare, progress = Sparing(case.ids[0].tolist(), pieces, options, LAYERS, computes), Progress()
    first = BlendedCache((), **options).reads_from
    got = pipeline.fetch(list(pieces), budget=budget, first=first, progress=progress, spare=spare)
    return [each.chunk for each in got], progress, tiers


def segments_of(store, key):
    """(layer, group, start, stop) of each segment of an entry of raw, level 1."""
    with ChunkFile(store.entries[key]) as file:
        header = file.header
        groups = -(-header.tokens // header.arrangement.group_tokens)
        for number in range(header.segments):
            yield (*divmod(number, groups), int(file.starts[number]), int(file.starts[number + 1]))


def read_of(store, key):
    """(layer, group) of what was read of an entry of raw, level 1, in whole."""
    ranges = [(a, b) for k, a, b in store.reads if k == key]
    return {(la, g) for la, g, a, b in segments_of(store, key) if any(x <= a and b <= y for x, y in ranges)}


def spied(model, case, cache):
    """The forward's logits, and for each layer the prompt's tokens that were computed in it."""
    from blendkv import hooks

    found, own = [], hooks.write_report

    def write_report(blend):
        everything = set(range(blend.length))
        found.extend(everything if rows is None else set(rows[0].tolist()) for rows, _ in blend.filled)
        own(blend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "write_report", write_report)
        return run(model, case.ids, cache, logits_to_keep=1).logits, found


@pytest.mark.parametrize("selector", STATIC)
@pytest.mark.parametrize("schedule", [{0: 0.5}, {0: 0.7, 2: 0.4}, {1: 0.6}, {2: 0.5, 3: 0.1}, {0: 0.15}])
def test_what_is_read_is_what_the_blend_turns_out_to_read(attached, selector, schedule):
    """The slow definition: a group is left out of a layer if each of its tokens was computed there, in every place."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    options = {"selector": selector, "check_layers": schedule}
    want, computed = spied(model, case, BlendedCache(case.caches, **options))
    store = stored(case.caches)
    chunks, progress, _ = loaded(case, store, options, rest=False)
    got = run(model, case.ids, cache := BlendedCache(chunks, **options), logits_to_keep=1).logits
    assert torch.equal(got, want)
    assert progress.asked_bytes == 0
    left_bytes = left_tokens = 0
    first = cache.reads_from
    for chunk, start in zip(case.caches, case.starts, strict=True):
        left = set()
        for layer, group, a, b in segments_of(store, chunk.key):
            mine = range(32 * group, min(len(chunk), 32 * (group + 1)))
            if layer >= first and all(start + token in computed[layer] for token in mine):
                left.add((layer, group))
                left_bytes += b - a
        left_tokens += sum(min(32, len(chunk) - 32 * group) for group in {group for _, group in left})
        wanted = {(la, g) for la, g, _, _ in segments_of(store, chunk.key) if la >= first} - left
        read = read_of(store, chunk.key)
        until(lambda read=read, wanted=wanted, key=chunk.key: read_of(store, key) >= wanted)
        assert {entry for entry in read_of(store, chunk.key) if entry[0] >= first} == wanted
    assert (progress.left_out_bytes, progress.left_out_tokens) == (left_bytes, left_tokens)
    if selector in ("all", "boundary") and schedule != {0: 0.15}:
        assert left_bytes > 0


@pytest.mark.parametrize(("family", "overrides"), [(f, {}) for f in FAMILIES] + [("mistral", {"sliding_window": 16})])
def test_answers_are_exactly_those_of_whole_chunks(attached, family, overrides):
    """What is left out is NaN in every buffer until it is computed."""
    model = attached(family, **overrides)
    case = make_case(model, LENGTHS)
    for options in ({"selector": "boundary", "recompute_ratio": 0.5}, {"selector": ByChunk(), "recompute_ratio": 0.4}):
        want = run(model, case.ids, there := BlendedCache(case.caches, **options), logits_to_keep=1).logits
        chunks, progress, _ = loaded(case, stored(case.caches), options, rest=False)
        got = run(model, case.ids, cache := BlendedCache(chunks, **options), logits_to_keep=1).logits
        assert progress.left_out_bytes > 0
        assert progress.asked_bytes == 0
        assert torch.equal(got, want)
        assert worst(cache, there) == 0
        assert cache.report.layers == there.report.layers
        parts = [chunk.states(2)[0] for chunk in chunks]
        assert any(part.isnan().any() for part in parts)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("name", ["klt", "klt-xl"])
def test_a_lossy_codec_leaves_out_whole_sections(attached, name, streams):
    from blendkv.codecs import get_codec

    model = attached("qwen2")
    case = make_case(model, (300, 280, 40), order=(0, 1, 2))
    profile = fit_profile(case.caches, name, unit_layers=2 if name == "klt-xl" else 0)
    codec = get_codec(name, profile=profile, streams=streams)
    store = stored(case.caches, codec=codec)
    whole = [decode_chunk(store.entries[chunk.key], profiles=profile) for chunk in case.caches]
    options = {"selector": "boundary", "check_layers": {1: 0.93}}
    want = run(model, case.ids, there := BlendedCache(whole, **options), logits_to_keep=1).logits
    chunks, progress, _ = loaded(case, store, options, rest=False, codec=codec)
    got = run(model, case.ids, cache := BlendedCache(chunks, **options), logits_to_keep=1).logits
    assert torch.equal(got, want)
    assert worst(cache, there) == 0
    assert progress.left_out_tokens == 256 + 256 + 40
    assert progress.asked_bytes == 0


def test_stored_scores_are_known_before_anything_is_loaded(attached):
    from dataclasses import replace

    model = attached("llama")
    case = make_case(model, LENGTHS)
    for chunk in case.caches:  # the second group of each
        scores = torch.arange(len(chunk)) // 32 == 1
        object.__setattr__(chunk, "scores", {"asked": scores.float()})
    options = {"selector": "stored-asked", "recompute_ratio": 0.4}
    want = run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits
    store = stored(case.caches)
    chunks, progress, _ = loaded(case, store, options, rest=False)
    assert torch.equal(run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1).logits, want)
    assert progress.left_out_tokens == 32 + 8 + 32
    assert progress.asked_bytes == 0
    # one of which nobody knows the scores yet: all is loaded
    gone = replace(case.caches[0])
    del store.entries[gone.key]
    chunks, progress, _ = loaded(case, store, options)
    assert progress.left_out_bytes == 0


@pytest.mark.parametrize("selector", ["hkvd", "attention", "20%boundary+attention"])
def test_selectors_that_must_see_layers_first_get_everything(attached, selector):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    chunks, progress, _ = loaded(case, stored(case.caches), {"selector": selector, "recompute_ratio": 0.6})
    assert progress.left_out_bytes == 0
    assert not any(chunk.has_gaps for chunk in chunks)


@pytest.mark.parametrize("selector", ["hkvd", "attention", "boundary"])
def test_where_nothing_is_to_be_chosen_any_selector_will_do(attached, selector):
    """Of a prompt that is computed in full nothing is loaded, of one that is reused in full everything."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    for ratio in (1.0, 0.0):
        options = {"selector": selector, "recompute_ratio": ratio}
        store = stored(case.caches)
        chunks, progress, _ = loaded(case, store, options, rest=False)
        want = run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits
        assert torch.equal(run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1).logits, want)
        assert bool(store.reads) == (ratio == 0.0)
        assert progress.asked_bytes == 0
        assert (progress.left_out_tokens == sum(LENGTHS)) == (ratio == 1.0)


@pytest.mark.parametrize("rest", [True, False])
def test_only_whole_chunks_are_kept(attached, rest):
    """Memory and nearer stores get them once the rest has come, bit by bit, or not at all."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    far, near = stored(case.caches), RangeStore("near", local=True)
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    gate, wanted = threading.Event(), set(far.entries)
    starts = {(key, a) for key in wanted for _, group, a, _ in segments_of(far, key) if group == 0}
    far.gate = lambda key, start, data: data if (key, start) not in starts or gate.wait(60) else None
    tiers = TieredStore(Pool(), near, far)
    pipeline = Pipeline(tiers, TransferScheduler(8), piece_bytes=1, whole_bytes=0, least_gap=1, rest=rest)
    pieces = {chunk.key: (chunk.ids.tolist(), ()) for chunk in case.caches}
    progress = Progress()
    spare = Sparing(case.ids[0].tolist(), pieces, options, LAYERS)
    got = [each.chunk for each in pipeline.fetch(list(pieces), progress=progress, spare=spare)]
    logits = in_time(lambda: run(model, case.ids, BlendedCache(got, **options), logits_to_keep=1).logits)
    assert torch.equal(logits, run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits)
    assert not any(key in tiers.pool or key in near.entries for key in wanted)  # nothing of what was left out is there
    gate.set()
    if rest:
        for one in case.caches:
            until(lambda key=one.key: key in tiers.pool and key in near.entries)
            assert_same(tiers.pool.get(one.key), one)
        assert near.entries == far.entries
    until(lambda: pipeline._scheduler.state.running == pipeline._scheduler.state.waiting == 0)
    assert all(key in tiers.pool for key in wanted) == rest
    assert bool(near.entries) == rest
    assert all(breaker.state == "closed" for breaker in pipeline.breakers)
    assert progress.loaded_s is not None


@pytest.mark.parametrize("rest", [True, False])
def test_whoever_else_asks_gets_whole_chunks(attached, rest):
    """Copies, another selector, another prompt, a fork: what was left out is fetched when it is wanted."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    other = torch.cat([tokens(3, 7), case.chunks[2], tokens(4, 8)])[None]
    users = {
        "copy": lambda chunks: [assert_same(copy.deepcopy(c), one) for c, one in zip(chunks, case.caches, strict=True)],
        "pickle": lambda chunks: assert_same(pickle.loads(pickle.dumps(chunks[0])), case.caches[0]),
        "to": lambda chunks: assert_same(chunks[0].to("cpu"), case.caches[0]),
    }
    for use in users.values():
        chunks, progress, _ = loaded(case, stored(case.caches), options, rest)
        in_time(lambda use=use, chunks=chunks: use(chunks) or True)
        assert progress.left_out_bytes >= 0
    for ids, settings in (
        (case.ids, {"selector": "hkvd", "recompute_ratio": 0.3}),
        (case.ids, {"selector": "attention", "recompute_ratio": 0.3}),
        (case.ids, {"selector": "none"}),
        (case.ids, {"selector": "boundary", "check_layers": {0: 0.5, 2: 0.1}}),
        (other, {"selector": "random", "recompute_ratio": 0.2}),
    ):
        chunks, progress, _ = loaded(case, stored(case.caches), options, rest)
        want = run(model, ids, BlendedCache(case.caches, **settings), logits_to_keep=1).logits
        cache = BlendedCache(chunks, **settings)
        assert torch.equal(in_time(lambda i=ids, c=cache: run(model, i, c, logits_to_keep=1)).logits, want)
        if not rest:
            assert progress.asked_bytes > 0
        fork = cache.fork()
        again = in_time(lambda i=ids, c=fork: run(model, i, c, logits_to_keep=1)).logits
        assert torch.equal(again, want)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_when_a_loss_changes_the_choice_what_was_left_out_is_fetched_or_given_up_too(attached, layer, rest, gone):
    model = attached("llama")
    ids = tokens(220, 4)[None]
    exact = [exact_chunk(model, ids, a, b) for a, b in ((5, 70), (75, 140), (144, 210))]
    logits, reference = full(model, ids)
    case = type("Case", (), {"ids": ids, "caches": exact})
    options = {"selector": ByChunk(), "check_layers": {0: 0.7, 2: 0.35}}
    store = stored(exact)
    lost, first = exact[2].key, exact[0].key
    at = {key: {a: (la, g) for la, g, a, _ in segments_of(store, key)} for key in store.entries}
    rests = []

    def gate(key, start, data):
        here, group = at[key][start]
        if key == lost and here >= layer:
            return None
        if key == first and group == 0 and here >= layer:
            rests.append(here)
            return None if gone else data
        return data

    store.gate = gate
    chunks, progress, _ = loaded(case, store, options, rest, scheduler=TransferScheduler(1))
    cache = BlendedCache(chunks, **options)
    got = in_time(lambda: run(model, ids, cache, logits_to_keep=1)).logits
    assert (got - logits[:, -1:]).abs().max() <= 1e-4
    assert worst(cache, reference) <= 1e-4
    assert cache.report.misses == {"late": 66 + 65 if gone and layer <= 2 else 66}  # in layer 2 fewer are chosen now
    assert (progress.asked_bytes > 0) == (layer <= 2) or rest
    for rows in cache.report.layers:
        assert rows.reused + rows.recomputed + rows.fresh + rows.missed == 220


def test_what_is_asked_for_after_all_and_fails_is_a_miss(attached):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    store = stored(case.caches)
    starts = {(key, a) for key in store.entries for _, group, a, _ in segments_of(store, key) if group == 0}
    store.gate = lambda key, start, data: None if (key, start) in starts else data
    chunks, _, _ = loaded(case, store, {"selector": "boundary", "recompute_ratio": 0.5}, rest=False)
    got = in_time(lambda: run(model, case.ids, cache := BlendedCache(chunks, 0.0, "none")) and cache)
    assert got.report.misses == {"late": sum(LENGTHS)}
    reference = full(model, case.ids)[1]
    assert worst(got, reference) <= 1e-4


def test_a_closed_scheduler_and_a_budget_end_the_wait(attached):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    reference = full(model, case.ids)[1]
    store, scheduler = stored(case.caches), TransferScheduler(4)
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    chunks, _, _ = loaded(case, store, options, rest=False, scheduler=scheduler)
    for chunk in chunks:
        for layer in range(LAYERS):
            chunk.states(layer)
    scheduler.close()
    cache = BlendedCache(chunks, 0.0, "none")
    in_time(lambda: run(model, case.ids, cache))
    assert cache.report.misses == {"cancelled": sum(LENGTHS)}
    assert worst(cache, reference) <= 1e-4

    free = threading.Event()
    starts = {(key, a) for key in store.entries for _, group, a, _ in segments_of(store, key) if group == 0}
    store.gate = lambda key, start, data: data if (key, start) not in starts or free.wait(60) else None
    chunks, _, _ = loaded(case, store, options, rest=False, budget=Budget(2.0))
    cache = BlendedCache(chunks, 0.0, "none")
    in_time(lambda: run(model, case.ids, cache), 30)
    assert cache.report.misses == {"late": sum(LENGTHS)}
    assert worst(cache, reference) <= 1e-4
    free.set()


def test_damage_in_what_was_left_out_is_found_when_it_comes(attached):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    store, key = stored(case.caches), case.caches[0].key
    data = bytearray(store.entries[key])
    data[next(a for la, g, a, _ in segments_of(store, key) if (la, g) == (2, 0))] ^= 1
    store.entries[key] = bytes(data)
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    chunks, _, tiers = loaded(case, store, options)
    want = run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits
    assert torch.equal(run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1).logits, want)
    until(lambda: key not in store.entries)
    assert tiers.stats.reasons == {"checksum": 1}
    assert key not in tiers.pool


def test_damage_that_nobody_reads_waits_for_what_is_wanted(attached):
    """It is found while the last layer is under way: the file is put out of use only then, and nothing is missed."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    store, key = stored(case.caches), case.caches[0].key
    at = {(la, g): a for la, g, a, _ in segments_of(store, key)}
    data = bytearray(store.entries[key])
    data[at[2, 0]] ^= 1
    store.entries[key] = bytes(data)
    last, found = {a for (la, g), a in at.items() if la == LAYERS - 1 and g}, threading.Event()

    def gate(key_, start, data):
        if key_ == key and start == at[2, 0]:
            found.set()
        if key_ == key and start in last:
            assert found.wait(30)
            time.sleep(0.2)
        return data if key_ in store.entries else None

    store.gate = gate
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    chunks, _, tiers = loaded(case, store, options)
    want = run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits
    cache = BlendedCache(chunks, **options)
    assert torch.equal(run(model, case.ids, cache, logits_to_keep=1).logits, want)
    assert not cache.report.misses
    until(lambda: key not in store.entries)
    assert tiers.stats.reasons == {"checksum": 1}


def test_a_prompt_that_is_given_up_leaves_what_was_left_out_where_it_is(attached):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    store, scheduler = stored(case.caches), TransferScheduler(1, linger=0.01)
    free = threading.Event()
    store.gate = lambda key, start, data: data if free.wait(60) else None
    chunks, _, tiers = loaded(
        case, store, {"selector": "boundary", "recompute_ratio": 0.5}, scheduler=scheduler, ahead=1
    )
    until(lambda: scheduler.state.running == 1)
    del chunks
    gc.collect()
    free.set()
    until(lambda: scheduler.state.threads == 0)
    assert len(store.reads) == 1
    assert not list(tiers.pool.keys())


@pytest.mark.parametrize("end", ["dies", "stalls"])
def test_what_nobody_reads_may_die_or_stall(attached, end):
    """A short chunk is computed in full, and its gap is too small to be left out: nobody waits for it, or misses it."""
    model = attached("llama")
    case = make_case(model, (20, 140, 97))
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    store, free, short = stored(case.caches), threading.Event(), case.caches[0].key
    store.gate = lambda key, start, data: data if key != short or (end == "stalls" and free.wait(60)) else None
    settings = {"rest": False, "least_gap": 6000, "budget": Budget(60), "ahead": 8, "scheduler": TransferScheduler(8)}
    chunks, progress, _ = loaded(case, store, options, **settings)
    want = run(model, case.ids, there := BlendedCache(case.caches, **options), logits_to_keep=1).logits
    cache = BlendedCache(chunks, **options)
    got = in_time(lambda: run(model, case.ids, cache, logits_to_keep=1).logits)
    free.set()
    assert progress.left_out_tokens == 32 + 32
    assert torch.equal(got, want)
    assert worst(cache, there) == 0
    assert not cache.report.misses


def test_at_a_higher_ratio_than_foreseen_a_dead_store_breaks_nothing(attached):
    model = attached("llama")
    ids = tokens(220, 4)[None]
    exact = [exact_chunk(model, ids, a, b) for a, b in ((5, 70), (75, 140), (144, 210))]
    case = type("Case", (), {"ids": ids, "caches": exact})
    store = stored(exact)
    store.gate = lambda key, start, data: None if key == exact[1].key else data
    chunks, _, _ = loaded(case, store, {"selector": "boundary", "recompute_ratio": 0.55}, rest=False)
    logits, reference = full(model, ids)
    for ratio in (0.97, 0.6, 0.1):
        cache = BlendedCache(chunks, ratio, "boundary")
        got = in_time(lambda cache=cache: run(model, ids, cache, logits_to_keep=1).logits)
        assert (got - logits[:, -1:]).abs().max() <= 1e-4
        assert worst(cache, reference) <= 1e-4


@pytest.mark.parametrize("first", [1, 2])
def test_layers_before_the_first_come_if_somebody_wants_them(attached, first):
    """Where chunks with gaps are not kept, nobody else sends for them: without that the next prompt waits for ever."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    options = {"selector": "boundary", "check_layers": {first: 0.5}}
    store = stored(case.caches)
    chunks, progress, _ = loaded(case, store, options, rest=False)
    run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1)
    for chunk in case.caches:
        assert min(layer for layer, _ in read_of(store, chunk.key)) == first
    left = progress.left_out_bytes
    want = run(model, case.ids, BlendedCache(case.caches, 0.0, "none"), logits_to_keep=1).logits
    got = in_time(lambda: run(model, case.ids, BlendedCache(chunks, 0.0, "none"), logits_to_keep=1).logits)
    assert torch.equal(got, want)
    assert progress.left_out_bytes == 0
    before = sum(first * (chunk.nbytes // LAYERS) for chunk in case.caches)
    assert progress.asked_bytes >= left + before


# -- a library, and what else goes wrong ------------------------------------------------------------------------------


def test_a_library_does_not_wait_for_what_boundary_recomputes(attached):
    """512-token chunks at 15%: two groups of 32 of the first 77 tokens, an eighth of the bytes."""
    from tests.cases.stored import answer, library

    model = attached("llama")
    documents = [" ".join(f"{seed}{n}" for n in range(200))[:512] for seed in "ab"]
    store = RangeStore(local=True)
    options = {"recompute_ratio": 0.15, "selector": "boundary", "chunk_tokens": 512}
    with library(model, TieredStore(Pool(), store), **options) as kv:
        kv(documents, "why?")
    kv = library(model, TieredStore(Pool(), store), **options)
    kv.pipeline.whole_bytes, kv.pipeline.least_gap = 0, 1
    inputs = kv(documents, "why?")
    chunks = [chunk for chunk in inputs.cache.chunks[0] if len(chunk) == 512]
    assert len(chunks) == 2
    assert all(isinstance(chunk, ArrivingChunk) for chunk in chunks)
    got = answer(model, inputs["input_ids"], inputs.cache, attention_mask=inputs["attention_mask"])
    plain = library(model, TieredStore(Pool(), store), **options, pipeline=False)(documents, "why?")
    want = answer(model, plain["input_ids"], plain.cache, attention_mask=plain["attention_mask"])
    assert torch.equal(got[1], want[1])
    loading = inputs.report.loading
    assert loading.asked_bytes == 0
    assert (loading.left_out_tokens, loading.left_out_bytes) == (2 * 64, sum(chunk.nbytes for chunk in chunks) // 8)
    said = inputs.report.to_dict()["loading"]
    assert said["left_out_bytes"] == loading.left_out_bytes
    assert "recomputed left out" in str(inputs.report)
    for chunk in chunks:  # and all of it comes in the end
        until(lambda key=chunk.key: key in kv.pool.pool)


def test_a_selector_that_fails_leaves_nothing_out_and_says_so(attached):
    from tests.cases.stored import library

    class Broken(Selector):
        name = "broken"

        def score(self, candidates):
            raise RuntimeError("a bug")

    model, store = attached("llama"), RangeStore(local=True)
    documents = [" ".join(f"word{n}" for n in range(60))]
    with library(model, TieredStore(Pool(), store)) as kv:
        kv(documents, "why?")
    kv = library(model, TieredStore(Pool(), store), recompute_ratio=0.5)
    kv.pipeline.whole_bytes = 0
    inputs = kv(documents, "why?", selector=Broken())
    assert inputs.report.loading.left_out_bytes == 0
    assert any("could not be foreseen" in note for note in inputs.report.notes)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_sees_chunks_that_were_on_their_way_as_missing(attached):
    model = attached("llama")
    case = make_case(model)
    want, _ = full(model, case.ids, logits_to_keep=1)
    store = stored(case.caches)
    free = threading.Event()
    store.gate = lambda key, start, data: data if free.wait(60) else None
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    chunks, _, _ = loaded(case, store, options)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # nothing of pytest may run here
        try:
            cache = BlendedCache(chunks, **options)
            got = run(model, case.ids, cache, logits_to_keep=1).logits
            good = bool((got - want).abs().max() <= 1e-4) and set(cache.report.misses) == {"forked"}
            del chunks, cache
            gc.collect()
            os.write(write, b"good" if good else b"wrong")
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert in_time(lambda: os.read(read, 16), 60) == b"good"
    finally:
        os.close(read)
        free.set()
        os.waitpid(pid, 0)
    got = run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1).logits  # they come all the same
    assert torch.equal(got, run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits)
