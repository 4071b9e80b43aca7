"""A library whose store has chunks at several levels: what the controller chose is loaded, used and reported."""

import json
import math
import time
from dataclasses import replace
from unittest.mock import MagicMock as Mock

import pytest
import torch

from blendkv import BlendedCache, Pool
from blendkv.attaching import attach, attachment_of
from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.calibrating import calibrate
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.levelkeys import id_of, level_key, name_of
from blendkv.loading.controller import Controller
from blendkv.loading.costs import ComputeCosts, Costs, SourceCosts, machine
from blendkv.stores import TieredStore
from blendkv.testing import tiny_model
from blendkv.texts import Passage
from tests.cases.stored import answer, library
from tests.helpers import tokens
from tests.patience import until
from tests.stores.dicts import DictStore

LOSSES = {"klt@0": 0.01, "klt@4": 0.07, "klt@8": 0.6}
DOCUMENTS = [" ".join(f"word{n + 100 * i}" for n in range(60)) for i in range(3)]
LONG = 30.0
"""A stall that no test waits for."""
SLOWLY, AGES = 1e6, 475.0
"""FLOPs a second, and a target: a minute is left beside the blend, and every document's text would take longer."""


@pytest.fixture(scope="module")
def setting():
    """A model, codecs of its levels, and entries of the documents' chunks at all of them."""
    model = attach(tiny_model("llama", num_hidden_layers=2, max_position_embeddings=4096))
    passages = [Passage(tokens(48, seed).tolist(), ()) for seed in range(4)]
    profile = calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]
    codecs = [get_codec("klt", level=level, profile=profile) for level in (0, 4, 8)]
    store = DictStore()
    with library(model, TieredStore(Pool(), store, levels=codecs, write="through"), namespace="n") as kv:
        chunks = kv.prefill(DOCUMENTS)
        kv(DOCUMENTS, "why?")  # the template's head
    return model, codecs, dict(store.entries), {chunk.key: chunk for chunk in chunks}


def costs_of(setting, rates, compute=1e9):
    model, codecs, *_ = setting
    return Costs(
        ComputeCosts(0.0, compute, compute),
        {url: SourceCosts(0.0, rate) for url, rate in rates.items()},
        machine=machine(torch.device("cpu")),
        fingerprint=attachment_of(model).facts.fingerprint,
        losses={str(id_of(codec)): LOSSES[name_of(codec)] for codec in codecs},
    )


def store_of(setting, only=None, name="dict", **kwargs):
    """A store with the entries, or of each document's chunk those at some levels."""
    _, codecs, entries, chunks = setting
    store = DictStore(name, **kwargs)
    store.entries = dict(entries)
    if only is not None:
        for key in chunks:
            for level, codec in [("raw", None), *((f"klt@{codec.level}", codec) for codec in codecs)]:
                if level not in only:
                    del store.entries[key if codec is None else level_key(key, codec)]
    return store


def opened(setting, *stores, known=None, whole_bytes=0, **options):
    model, codecs, *_ = setting
    kv = library(
        model,
        TieredStore(Pool(), *stores, levels=codecs),
        namespace="n",
        controller=Controller(known or costs_of(setting, {store.url: 1e12 for store in stores}), **options),
        deadline_s=LONG,
    )
    kv.pipeline.whole_bytes = whole_bytes
    return kv


def ask(kv, documents=DOCUMENTS):
    inputs = kv(documents, "why?")
    got = answer(kv.model, inputs["input_ids"], inputs.cache, attention_mask=inputs["attention_mask"])
    return inputs, got[1]


def at_level(setting, key, level):
    """The chunk of a document as it is decoded at a level."""
    _, codecs, _, chunks = setting
    codec = next((codec for codec in codecs if level == f"klt@{codec.level}"), None)
    if codec is None:
        return chunks[key]
    data = encode_chunk(chunks[key], codec)
    return replace(decode_chunk(data, profiles=codec.profile), keyed=chunks[key].keyed)


def levels_used(inputs):
    return list(inputs.report.loading.levels.values())[1:]  # without the template's head


def assert_answer_of(setting, kv, inputs, logits, levels):
    """Exactly that of a blend of chunks which were decoded at these levels."""
    head, *_ = inputs.cache.chunks[0]
    chunks = [at_level(setting, key, level) for key, level in zip(kv.keys(DOCUMENTS), levels, strict=True)]
    ratio = inputs.report.loading.decision.ratio
    cache = BlendedCache([head, *chunks], ratio, "hkvd")
    _, want = answer(kv.model, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
    assert (logits - want).abs().max() <= (1e-4 if "text" in levels else 0.0)


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
@pytest.mark.parametrize("rate", [1e12, 1e6, 1e5, 1e4])
def test_what_was_chosen_is_what_is_blended(setting, rate, whole_bytes):
    store = store_of(setting)
    kv = opened(setting, store, known=costs_of(setting, {store.url: rate}, 1e8), whole_bytes=whole_bytes, text=False)
    inputs, logits = ask(kv)
    decision = inputs.report.loading.decision
    used = levels_used(inputs)
    assert list(decision.levels[1:]) == used
    assert_answer_of(setting, kv, inputs, logits, used)
    said = json.loads(json.dumps(inputs.report.to_dict()))["loading"]
    assert said["levels"][1:] == said["decision"]["levels"][1:] == used
    assert said["decision"]["took_s"] > 0
    assert sum(inputs.report.loaded.values()) == sum(map(len, inputs.cache.chunks[0]))
    assert not inputs.report.misses


class Raising(Controller):
    """Has a bug."""

    def decide(self, *args, **kwargs):
        raise RuntimeError("a bug")


class Doubting(Raising):
    """Cannot even say what is good enough."""

    def may(self, offer, costs):
        raise RuntimeError("another bug")


class Unready(Raising):
    """Knows no costs."""

    def ready(self, *args):
        raise RuntimeError("a third bug")


@pytest.mark.parametrize("kind", [Raising, Doubting, Unready])
def test_where_a_controller_raises_chunks_come_as_without_one_and_no_lossier_than_it_allows(setting, kind):
    model, codecs, *_ = setting
    far = store_of(setting, name="far")
    for farther, levels in (([far], ["raw"] * 3), ([], ["text"] * 3)):
        stores = [store_of(setting, ("klt@8",), "near", local=True), *farther]
        tiers, known = TieredStore(Pool(), *stores, levels=codecs), costs_of(setting, {})
        kv = library(model, tiers, namespace="n", controller=kind(known, max_kl=0.1), deadline_s=LONG)
        inputs, logits = ask(kv)
        assert levels_used(inputs) == levels
        assert any("chose nothing" in note for note in inputs.report.notes)
        if levels == ["raw"] * 3:
            plain = library(model, TieredStore(Pool(), far), namespace="n", deadline_s=LONG)
            assert torch.equal(ask(plain)[1], logits)


@pytest.mark.parametrize("how", [{"whole_bytes": 0}, {"whole_bytes": 1 << 30}, {"target_s": LONG}])
def test_an_entry_that_another_codec_wrote_is_told_apart(setting, how):
    """A store that was filled with codec="klt", opened without: what its entries lose counts all the same."""
    model, codecs, _, chunks = setting
    store = DictStore()
    with library(model, TieredStore(Pool(), store, codec=codecs[2], write="through"), namespace="n") as kv:
        kv(DOCUMENTS, "why?")
    other = DictStore("other")
    other.entries = dict(store.entries)
    inputs, _ = ask(opened(setting, store, max_kl=0.1, **how))
    assert store.url not in inputs.report.loaded
    used = {chunk.key: chunk for chunk in inputs.cache.chunks[0]}
    assert all((used[key].keys[1] - one.keys[1]).abs().max() < 1e-4 for key, one in chunks.items())
    if "target_s" not in how:
        inputs, _ = ask(opened(setting, other, text=False, **how))
        assert levels_used(inputs) == ["klt@8"] * 3
        assert other.url in inputs.report.loaded


@pytest.mark.parametrize("target_s", [None, AGES])
@pytest.mark.parametrize("encoded", [False, True])
def test_memory_knows_what_another_codec_wrote(setting, encoded, target_s):
    """A library without codec over a far store that was filled with one; what is fetched ahead is no less lossy."""
    model, codecs, _, chunks = setting
    far, near = DictStore("far"), DictStore("near")
    with library(model, TieredStore(Pool(), far, codec=codecs[2], write="through"), namespace="n") as kv:
        kv(DOCUMENTS, "why?")
    known = costs_of(setting, {far.url: 1e12, near.url: 1e12}, SLOWLY)
    pool = Pool(codec=codecs[0]) if encoded else Pool()
    tiers = TieredStore(pool, near, far, codec="raw", levels=codecs[:2])
    controller = Controller(known, target_s=target_s, text=False)
    kv = library(model, tiers, namespace="n", controller=controller, deadline_s=LONG)
    kv(DOCUMENTS, "why?")  # the template's head
    until(lambda: set(chunks) <= set(near.keys()))  # what the farther store had is put there beside the prompt
    pool.clear()
    assert kv.prefetch(DOCUMENTS).loaded == {near.url: sum(map(len, chunks.values()))}
    assert set(kv.keys(DOCUMENTS)) <= set(pool.keys())
    inputs, logits = ask(kv)
    assert levels_used(inputs) == ["klt@8"] * 3
    assert inputs.report.loaded["memory"] == sum(map(len, chunks.values()))
    assert inputs.report.loading.decision.kl > 0.5
    assert_answer_of(setting, kv, inputs, logits, ["klt@8"] * 3)
    controller.max_kl = 0.1
    inputs, _ = ask(kv)
    assert set(levels_used(inputs)) <= {"text"}
    used = {chunk.key: chunk for chunk in inputs.cache.chunks[0]}
    assert all((used[key].keys[1] - one.keys[1]).abs().max() < 1e-4 for key, one in chunks.items())


@pytest.mark.parametrize("target_s", [None, AGES])
def test_levels_of_two_profiles_have_one_name_and_losses_of_their_own(setting, target_s):
    model, codecs, _, chunks = setting
    passages = [Passage(tokens(48, seed).tolist(), ()) for seed in range(4, 8)]
    profile = calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]
    other = get_codec("klt", level=4, profile=profile)
    both, store = [other, codecs[1]], DictStore()
    with library(model, TieredStore(Pool(), store, codec=codecs[2], levels=both, write="through"), namespace="n") as kv:
        kv(DOCUMENTS, "why?")
    for good, bad in (both, both[::-1]):
        known = costs_of(setting, {store.url: 1e12}, SLOWLY)
        known.losses = {str(id_of(good)): 0.07, str(id_of(bad)): 0.7, str(id_of(codecs[2])): 0.8}
        controller = Controller(known, target_s=target_s, text=False, max_kl=0.1)
        tiers = TieredStore(Pool(), store, codec=codecs[2], levels=both)
        inputs, _ = ask(library(model, tiers, namespace="n", controller=controller, deadline_s=LONG))
        assert levels_used(inputs) == ["klt@4"] * 3
        assert inputs.report.loading.decision.kl == pytest.approx(0.07)
        used = {chunk.key: chunk for chunk in inputs.cache.chunks[0]}
        assert {used[key].coded for key in chunks} == {id_of(good)}


def test_what_a_lossy_library_has_in_memory_as_it_was_computed_loses_nothing(setting):
    model, codecs, *_ = setting
    store = DictStore()
    with library(model, TieredStore(Pool(), store, codec=codecs[2], write="through"), namespace="n") as kv:
        kv(DOCUMENTS, "why?")
    controller = Controller(costs_of(setting, {store.url: 1e12}), target_s=LONG, max_kl=0.1)
    kv = library(model, TieredStore(Pool(), store, codec=codecs[2]), namespace="n", controller=controller)
    assert levels_used(ask(kv)[0]) == ["text"] * 3
    for controller.target_s in (LONG, None):
        inputs, _ = ask(kv)
        assert levels_used(inputs) == ["raw"] * 3
        assert inputs.report.loading.decision.kl == 0
        assert list(inputs.report.loaded) == ["memory"]


@pytest.mark.parametrize("way", ["computed", "by another thread", "strict"])
def test_what_is_computed_and_stored_is_no_lossier_than_the_controller_allows(setting, way):
    model, codecs, _, chunks = setting
    store, known = DictStore(), costs_of(setting, {"dict://": 1e12})
    tiers, controller = TieredStore(Pool(), store, codec=codecs[2], write="through"), Controller(known, max_kl=0.1)
    other = library(model, tiers, namespace="n")
    kv = library(model, tiers, namespace="n", controller=controller, strict=way == "strict")
    if way == "strict":
        other.prefill(DOCUMENTS)
    if way == "by another thread":  # while this one waits
        kv.supply._lock = Mock(__enter__=lambda lock: other.prefill(DOCUMENTS), __exit__=lambda *exc: None)
    inputs, _ = ask(kv)
    used = {chunk.key: chunk for chunk in inputs.cache.chunks[0]}
    for key, chunk in chunks.items():
        assert used[key].coded is None
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(used[key].keys, chunk.keys, strict=True))
        assert key in store.entries
    assert {chunk.coded for chunk in other.prefill(DOCUMENTS)} == {id_of(codecs[2])}
    controller.max_kl = math.inf
    assert {chunk.coded for chunk in ask(kv)[0].cache.chunks[0]} == {id_of(codecs[2])}


def test_what_a_target_has_computed_is_no_hit_and_is_in_memory_once(setting):
    _, codecs, *_ = setting
    store = store_of(setting, ("klt@8",))
    kv = opened(setting, store, text=False)
    inputs, _ = ask(kv)
    assert levels_used(inputs) == ["klt@8"] * 3
    until(lambda: len(kv.pool.pool) == 4)  # memory is given what has come after the prompt was
    kv.controller.max_kl, kv.controller.target_s = 0.0, LONG
    kv.pool.stats.hits.clear()
    inputs, _ = ask(kv)
    assert levels_used(inputs) == ["text"] * 3
    assert kv.pool.stats.hits == {"memory": 1}  # the template's head
    for key in kv.keys(DOCUMENTS):
        assert key in kv.pool.pool
        assert not any(level_key(key, codec) in kv.pool.pool for codec in codecs)


def test_a_slower_link_gives_coarser_levels(setting):
    seen = []
    for rate in (1e12, 1e6, 1e5, 1e4):
        store = store_of(setting)
        kv = opened(setting, store, known=costs_of(setting, {store.url: rate}, 1e8), text=False)
        seen.append(max(LOSSES.get(level, 0.0) for level in levels_used(ask(kv)[0])))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 0.6)
    store = store_of(setting)
    bounded = opened(setting, store, known=costs_of(setting, {store.url: 1e4}, 1e8), text=False, max_kl=0.1)
    assert max(LOSSES.get(level, 0.0) for level in levels_used(ask(bounded)[0])) == 0.07
    text = opened(setting, store, known=costs_of(setting, {store.url: 10.0}, 1e12))
    inputs, _ = ask(text)
    assert set(inputs.report.loading.decision.levels[2:]) == {"text"}
    assert inputs.report.misses["text"] > 0


def test_without_a_controller_levels_are_not_looked_at_where_chunks_are(setting):
    model, codecs, *_ = setting
    store = store_of(setting)
    kv = library(model, TieredStore(Pool(), store, levels=codecs), namespace="n")
    kv.pipeline.whole_bytes = 0
    asked, get = [], store.get
    store.get = lambda key, start=0, stop=None: asked.append(key) or get(key, start, stop)
    inputs = kv(DOCUMENTS, "why?")
    answer(model, inputs["input_ids"], inputs.cache, attention_mask=inputs["attention_mask"])
    assert set(kv.keys(DOCUMENTS)) <= set(asked)
    assert not set(asked) & {level_key(key, codec) for key in kv.keys(DOCUMENTS) for codec in codecs}
    alone = library(model, TieredStore(Pool(), store_of(setting, only=("klt@8",)), levels=codecs), namespace="n")
    alone.pipeline.whole_bytes = 0
    inputs = alone(DOCUMENTS, "why?")
    assert levels_used(inputs) == ["klt@8"] * 3
    assert not inputs.report.prefilled_tokens


def test_a_level_that_is_gone_when_it_is_asked_for(setting):
    """Its size was told, and then it was evicted: another one is used in the same prompt."""
    store = store_of(setting)
    get, gone = store.get, set(setting[3])
    store.get = lambda key, start=0, stop=None: None if key in gone else get(key, start, stop)
    kv = opened(setting, store)
    inputs, logits = ask(kv)
    assert inputs.report.loading.decision.levels[1:] == ("raw",) * 3
    assert levels_used(inputs) == ["klt@0"] * 3
    assert_answer_of(setting, kv, inputs, logits, ["klt@0"] * 3)


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
def test_a_damaged_level_is_put_away_and_another_used(setting, whole_bytes):
    store = store_of(setting)
    (key, *_), codec = setting[3], setting[1][0]
    for entry in (key, level_key(key, codec)):
        data = bytearray(store.entries[entry])
        data[40] ^= 1  # in the head
        store.entries[entry] = bytes(data)
    kv = opened(setting, store, whole_bytes=whole_bytes)
    inputs, logits = ask(kv)
    assert levels_used(inputs) == ["klt@4", "raw", "raw"]
    assert_answer_of(setting, kv, inputs, logits, ["klt@4", "raw", "raw"])
    assert kv.pool.stats.damaged == {store.url: 2}
    assert not {key, level_key(key, codec)} & set(store.entries)
    assert "damaged" in " ".join(inputs.report.notes)


def test_damage_behind_the_head_is_computed_and_put_away_and_the_next_prompt_uses_another_level(setting):
    store = store_of(setting)
    key = next(iter(setting[3]))
    data = bytearray(store.entries[key])
    data[-20] ^= 1
    store.entries[key] = bytes(data)
    kv = opened(setting, store)
    inputs, _ = ask(kv)
    assert levels_used(inputs) == ["text", "raw", "raw"]
    assert inputs.report.misses == {"checksum": len(setting[3][key])}
    end = time.monotonic() + 20
    while key in store.entries:
        assert time.monotonic() < end
        time.sleep(0.01)
    kv.pool.pool.clear()
    again, logits = ask(kv)
    assert levels_used(again) == ["klt@0", "raw", "raw"]
    assert_answer_of(setting, kv, again, logits, ["klt@0", "raw", "raw"])


def test_a_farther_store_is_used_for_what_it_has_and_if_it_is_known_to_be_faster(setting):
    near = store_of(setting, only=("klt@8",), name="near", local=True)
    far = store_of(setting, name="far")
    kv = opened(setting, near, far)
    inputs, _ = ask(kv)
    assert levels_used(inputs) == ["raw"] * 3
    until(lambda: set(setting[3]) <= set(near.entries))  # and the nearer one has it from then on

    for rate, url in ((1e13, "far://"), (1e3, "near://")):
        near, far = store_of(setting, name="near", local=True), store_of(setting, name="far")
        kv = opened(setting, near, far, known=costs_of(setting, {"near://": 1e6, "far://": rate}, 1e8))
        inputs, _ = ask(kv)
        assert max(inputs.report.loaded, key=inputs.report.loaded.get) == url


def test_memory_keeps_the_level_and_is_improved_when_that_costs_nothing(setting):
    store = store_of(setting)
    known = costs_of(setting, {store.url: 1e4}, 1e8)
    kv = opened(setting, store, known=known, text=False)
    inputs, _ = ask(kv)
    assert "klt@8" in levels_used(inputs)
    until(lambda: len(kv.pool.pool) == 4)
    known.sources[store.url] = SourceCosts(0.0, 1e4)
    inputs, _ = ask(kv)
    assert set(inputs.report.loaded) <= {"memory", store.url}
    assert "memory" in inputs.report.loaded
    known.sources[store.url] = SourceCosts(0.0, 1e12)
    inputs, _ = ask(kv)
    assert levels_used(inputs) == ["raw"] * 3
    until(lambda: all(key in kv.pool.pool for key in setting[3]))
    inputs, _ = ask(kv)
    assert list(inputs.report.loaded) == ["memory"]


# -- by a target ------------------------------------------------------------------------------------------------------


def timely(setting, store, rate, target_s, compute=1e8, **options):
    """A library with a target; predicted seconds of computing are what `compute` FLOPs a second say."""
    known = costs_of(setting, {store.url: rate} if rate else {}, compute)
    return opened(setting, store, known=known, target_s=target_s, **options)


def raw_bytes(setting):
    return sum(len(setting[2][key]) for key in setting[3])


def test_with_time_enough_everything_comes_as_it_was(setting):
    store = store_of(setting)
    kv = timely(setting, store, 1e9, AGES, SLOWLY)
    inputs, logits = ask(kv)
    assert levels_used(inputs) == ["raw"] * 3
    assert_answer_of(setting, kv, inputs, logits, ["raw"] * 3)
    assert inputs.report.loading.nbytes[store.url] >= raw_bytes(setting)
    assert kv.controller.costs.sources[store.url].bytes_per_s > 0
    assert not inputs.report.prefilled_tokens


def test_a_slow_link_brings_what_it_can_by_the_target(setting):
    """Raw chunks would take six times the target, the smallest level a third of it."""
    plain = store_of(setting)
    target = 1.5
    rate = raw_bytes(setting) / (6 * target)
    store = ThrottledStore(plain, Bandwidth.constant(rate))
    kv = timely(setting, store, rate, target)
    inputs, logits = ask(kv)
    used = levels_used(inputs)
    assert "raw" not in used
    assert set(used) & set(LOSSES)
    assert_answer_of(setting, kv, inputs, logits, used)
    decision = inputs.report.loading.decision
    assert decision.target_s == target
    assert list(decision.levels[1:]) == used
    sizes = dict(zip(inputs.report.loading.levels, map(len, inputs.cache.chunks[0]), strict=True))
    lost = sum(LOSSES.get(level, 0.0) * sizes[key] for key, level in inputs.report.loading.levels.items())
    assert decision.kl == pytest.approx(lost / sum(sizes.values()))
    text = sum(len(setting[3][k]) for n, k in zip(used, kv.keys(DOCUMENTS), strict=True) if n == "text")
    assert inputs.report.loaded == {store.url: sum(map(len, inputs.cache.chunks[0])) - text}


@pytest.mark.parametrize("at", [0, 50_000])
def test_a_link_that_stalls_is_not_waited_for_and_the_rest_comes_from_text(setting, at):
    store = ThrottledStore(store_of(setting), Bandwidth.constant(1e6), faults=[Fault(at, "stall", LONG)])
    kv = timely(setting, store, 1e6, 0.5, compute=1e9)
    begin = time.monotonic()
    inputs, _ = ask(kv)
    assert time.monotonic() - begin < LONG / 2
    used = levels_used(inputs)
    assert "text" in used
    texts = [key for key, level in zip(kv.keys(DOCUMENTS), used, strict=True) if level == "text"]
    assert inputs.report.prefilled_tokens >= sum(len(setting[3][key]) for key in texts) > 0
    assert not inputs.report.misses
    for key in texts:
        assert torch.equal(kv.pool.pool.get(key).keys[0], setting[3][key].keys[0])


def test_a_damaged_level_is_put_away_and_the_target_is_met_with_others(setting):
    store = store_of(setting, only=("klt@0", "klt@8"))
    key, codec = next(iter(setting[3])), setting[1][0]
    entry = level_key(key, codec)
    data = bytearray(store.entries[entry])
    data[-20] ^= 1
    store.entries[entry] = bytes(data)
    kv = timely(setting, store, 1e9, AGES, SLOWLY)
    inputs, logits = ask(kv)
    assert levels_used(inputs) == ["klt@8", "klt@0", "klt@0"]
    assert_answer_of(setting, kv, inputs, logits, ["klt@8", "klt@0", "klt@0"])
    end = time.monotonic() + 20
    while entry in store.entries:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert kv.pool.stats.damaged == {store.url: 1}


def test_a_bound_on_loss_holds_by_a_target_too(setting):
    store = store_of(setting, only=("klt@4", "klt@8"))
    kv = timely(setting, store, 1e9, AGES, SLOWLY, max_kl=0.1)
    assert set(levels_used(ask(kv)[0])) == {"klt@4"}
    strict = timely(setting, store_of(setting, only=("klt@8",)), 1e9, 5.0, max_kl=0.1)
    inputs, _ = ask(strict)
    assert set(levels_used(inputs)) == {"text"}
    assert inputs.report.prefilled_tokens >= sum(map(len, setting[3].values()))


def test_what_nobody_has_is_computed_and_stored(setting):
    store = DictStore()
    kv = timely(setting, store, 1e6, 5.0)
    inputs, _ = ask(kv)
    assert inputs.report.prefilled_tokens == sum(map(len, inputs.cache.chunks[0]))
    kv.flush(10)
    assert set(setting[2]) <= set(store.entries)
    assert math.isfinite(inputs.report.loading.decision.compute_s)


def test_a_store_that_does_not_answer_costs_no_chunk(setting):
    store = store_of(setting)
    store.raises = OSError("unreachable")
    kv = timely(setting, store, 1e6, 1.0, compute=1e9)
    begin = time.monotonic()
    inputs, logits = ask(kv)
    assert time.monotonic() - begin < LONG / 2
    assert set(levels_used(inputs)) == {"text"}
    assert_answer_of(setting, kv, inputs, logits, ["text"] * 3)
