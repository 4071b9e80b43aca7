"""A pool that keeps the bytes of chunk files: what comes out, what it counts, and what damage does."""

import dataclasses
import random
import threading

import pytest
import torch

from blendkv import ChunkLibrary, Pool, kernels
from blendkv.calibrating import calibrate
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import get_codec
from blendkv.stores.pool import Encoded
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.texts import Passage
from tests.chunks import assert_same, make_chunk
from tests.helpers import tokens
from tests.made_up import make_codec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNKS = [make_chunk(100, 2, 2, 32, dtype=torch.float16, seed=seed) for seed in range(12)]
CODEC = make_codec(CHUNKS[0])


def through(chunk, codec=CODEC):
    return decode_chunk(encode_chunk(chunk, codec), profiles={codec.profile_hash: codec.profile})


def test_what_was_encoded_comes_out():
    pool, chunk = Pool(codec=CODEC), CHUNKS[0]
    assert pool.get(chunk.key) is None
    assert pool.put(chunk)
    assert pool.put(chunk)
    assert_same(pool.get(chunk.key), through(chunk))
    assert pool.get(chunk.key) is not pool.get(chunk.key)
    stats = pool.stats
    size = len(encode_chunk(chunk, CODEC))
    assert (stats.hits, stats.misses, stats.puts, stats.bytes, stats.uncoded) == (3, 1, 1, size, 0)
    pool.delete(chunk.key)
    assert stats.bytes == 0


def test_many_at_once():
    pool = Pool(codec=CODEC)
    for (made, kept), chunk in zip(pool.put_many(CHUNKS[:3]), CHUNKS, strict=False):
        assert kept
        assert_same(made, through(chunk))
    got = pool.get_many([CHUNKS[2].key, "nosuch", CHUNKS[0].key, CHUNKS[2].key])
    assert got[1] is None
    for chunk, want in zip((got[0], got[2], got[3]), (CHUNKS[2], CHUNKS[0], CHUNKS[2]), strict=True):
        assert_same(chunk, through(want))
    assert (pool.stats.hits, pool.stats.misses) == (3, 1)
    assert pool.keys() == [CHUNKS[1].key, CHUNKS[2].key, CHUNKS[0].key]
    assert pool.get_many([]) == []


def test_four_times_as_many_fit():
    """Of numbers that are at least as hard to code as a model's, at a coarse level."""
    capacity, counts = 2 * CHUNKS[0].nbytes, []
    for codec in (None, type(CODEC)(8, CODEC.profile)):
        pool = Pool(capacity, codec=codec)
        for chunk in CHUNKS:
            assert pool.put(chunk)
        assert pool.stats.bytes <= capacity
        counts.append(len(pool))
        assert pool.stats.evictions == len(CHUNKS) - len(pool)
        assert pool.keys() == [chunk.key for chunk in CHUNKS[-len(pool) :]]
    assert counts[1] >= 4 * counts[0]


def test_pins_hold_bytes():
    size = len(encode_chunk(CHUNKS[0], CODEC))
    pool = Pool(int(1.5 * size), codec=CODEC)
    pool.put(CHUNKS[0])
    with pool.pin(CHUNKS[0].key):
        ((made, kept),) = pool.put_many(CHUNKS[1:2])
        assert not kept
        assert_same(made, through(CHUNKS[1]))  # what a larger pool would give
        assert pool.stats.rejected == 1
    assert pool.put(CHUNKS[1])
    assert CHUNKS[0].key not in pool


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
def test_what_cannot_be_encoded_is_kept_as_it_is(bad):
    chunk = make_chunk(8, 2, 2, 32, seed=50)
    chunk.values[1][0, 3, 5] = bad
    other = make_chunk(8, 1, 1, 8, seed=51)  # of another model
    pool = Pool(codec=CODEC)
    assert [made is chunk for chunk, (made, _) in zip((chunk, other), pool.put_many([chunk, other]), strict=True)]
    assert pool.get(chunk.key) is chunk
    assert pool.get(other.key) is other
    assert (pool.stats.uncoded, pool.stats.bytes, pool.stats.hits) == (2, chunk.nbytes + other.nbytes, 2)


def damage(pool, key, at=-40):
    entry = pool._entries[key]
    assert isinstance(entry, Encoded)
    entry.file.tensor[at] ^= 255


@pytest.mark.parametrize("interpreted", [False, True])
def test_damage_is_a_counted_miss(monkeypatch, interpreted):
    """D33."""
    if interpreted:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("triton interprets nothing beside a GPU")
        monkeypatch.setattr(kernels, "unusable", lambda *args: None)
    chunks = [make_chunk(3, 2, 2, 32, seed=seed) for seed in range(3)]
    pool = Pool(codec=CODEC)
    pool.put_many(chunks)
    damage(pool, chunks[1].key)
    got = pool.get_many([chunk.key for chunk in chunks])
    assert [chunk is None for chunk in got] == [False, True, False]
    stats = pool.stats
    assert (stats.hits, stats.misses, stats.damaged, len(pool)) == (2, 1, 1, 2)
    assert stats.bytes == sum(entry.nbytes for entry in pool._entries.values())
    assert pool.put(chunks[1])
    assert pool.get(chunks[1].key) is not None


def test_codecs_by_name():
    assert Pool(codec="raw").codec is None
    with pytest.raises(ValueError, match="needs a profile"):
        Pool(codec="klt")
    for wrong in (CODEC.profile, type(CODEC)):
        with pytest.raises(ValueError, match="not a codec"):
            Pool(codec=wrong)
    pool = Pool(codec="raw")
    pool.put(CHUNKS[0])
    assert pool.get(CHUNKS[0].key) is CHUNKS[0]


def test_threads_keep_the_books():
    chunks = [make_chunk(4 + seed, 2, 2, 32, seed=seed) for seed in range(8)]
    want = {chunk.key: through(chunk) for chunk in chunks}
    pool = Pool(sum(len(encode_chunk(chunk, CODEC)) for chunk in chunks) // 2, codec=CODEC)
    failures: list = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(40):
                some = rng.sample(chunks, 3)
                for chunk, got in zip(some, pool.get_many([chunk.key for chunk in some]), strict=True):
                    if got is None:
                        pool.put(chunk)
                    else:
                        assert_same(got, want[chunk.key])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.stats.hits + pool.stats.misses == 4 * 40 * 3
    assert pool.stats.bytes == sum(entry.nbytes for entry in pool._entries.values()) <= pool.capacity_bytes


# -- in a library -----------------------------------------------------------------------------------------------------

DOCUMENTS = ["Otters hold hands while they sleep.", "Rafts of otters drift.", "Kelp keeps them in place."]


@pytest.fixture(scope="module")
def setting():
    """A model and a profile of it."""
    model = tiny_model("llama", num_hidden_layers=2).to(DEVICE)
    passages = [Passage(tuple(tokens(48, seed).tolist()), ()) for seed in range(4)]
    return model, calibrate(model, passages, ["klt"], continuation=16, progress=False)["klt"]


def library(setting, level=0, **options):
    model, profile = setting
    return ChunkLibrary(model, byte_tokenizer(), Pool(codec=get_codec("klt", profile=profile, level=level), **options))


def logits(kv, documents=DOCUMENTS):
    inputs = kv(documents, "Why?")
    with torch.no_grad():
        return kv.model(**inputs, logits_to_keep=1).logits[:, -1], inputs.report


def test_a_report_says_that_chunks_are_lossy_or_refused(setting):
    kv = library(setting)
    kv.prefill(DOCUMENTS)
    _, report = logits(kv)
    (note,) = report.notes
    assert "codec 'klt', level 0, which is lossy" in note
    assert note in str(report)
    other = tiny_model("llama", num_hidden_layers=3).to(DEVICE)
    kv = ChunkLibrary(other, byte_tokenizer(), Pool(codec=get_codec("klt", profile=setting[1])))
    kv.prefill(DOCUMENTS)
    _, report = logits(kv)
    assert report.prefilled_tokens == 0
    assert "refused 3 chunks" in report.notes[1]
    assert "a model with 2 layers" in report.notes[1]
    assert logits(ChunkLibrary(other, byte_tokenizer()))[1].notes == []


def test_a_report_says_that_a_profile_is_of_other_weights(setting):
    """Of the same shapes, so that nothing is refused; answers may be anything."""
    other = tiny_model("llama", num_hidden_layers=2).to(DEVICE)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(2)
    kv = ChunkLibrary(other, byte_tokenizer(), Pool(codec=get_codec("klt", profile=setting[1])))
    kv.prefill(DOCUMENTS)
    _, report = logits(kv)
    assert kv.pool.stats.uncoded == 0
    assert "3 chunks are of another model than the profile" in report.notes[1]


def test_the_first_use_answers_as_later_ones(setting):
    kv = library(setting, level=16)
    first, _ = logits(kv)
    again, report = logits(kv)
    assert report.prefilled_tokens == 0
    assert torch.equal(first, again)
    exact, _ = logits(ChunkLibrary(setting[0], byte_tokenizer()))
    assert not torch.equal(first, exact)  # level 16 loses a lot
    (chunk,) = kv.prefill(["Something else."])
    (later,) = kv.prefill(["Something else."])
    assert_same(chunk, later)


def test_the_first_use_answers_as_later_ones_in_a_pool_that_is_too_small(setting):
    kv = library(setting, level=16, capacity_bytes=3000)
    answers = [logits(kv)[0] for _ in range(3)]
    assert kv.pool.stats.evictions or kv.pool.stats.rejected
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_damage_is_computed_again(setting):
    kv = library(setting)
    want, _ = logits(kv)
    for key in kv.pool.keys()[:2]:
        damage(kv.pool, key)
    got, report = logits(kv)
    assert kv.pool.stats.damaged == 2
    assert report.prefilled_tokens > 0
    assert torch.equal(got, want)
    assert logits(kv)[1].prefilled_tokens == 0


GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]


@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=GPU) for o in ({}, {"pin_memory": True}, {"device": "cuda"})], ids=str
)
def test_on_a_gpu(setting, options):
    """Bytes in each kind of memory; chunks come out on the GPU, where the model is."""
    kv = library(setting, **options)
    first, _ = logits(kv)
    again, report = logits(kv)
    assert torch.equal(first, again)
    assert report.prefilled_tokens == 0
    (chunk,) = kv.prefill(DOCUMENTS[:1])
    assert {t.device.type for t in (*chunk.keys, *chunk.values)} == {"cuda"}
    (entry, *_) = kv.pool._entries.values()
    assert entry.file.tensor.device.type == options.get("device", "cpu")
    assert entry.file.tensor.is_pinned() == options.get("pin_memory", False)
    twin = dataclasses.replace(entry, homes=(torch.device("cpu"),) * len(entry.homes))
    assert twin.nbytes == entry.nbytes
