import pytest
import torch

from blendkv import BlendedCache, ChunkLibrary, ChunkMissError, MissingChunk, Pool, attach, prefill
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, assert_same_answer, ids_of, model_of

TEXTS = [ids_of(length, length)[0] for length in (30, 25, 20)]
PROMPT = torch.cat([torch.cat(TEXTS)[None], ids_of(9, 1)], dim=1)
DOCUMENTS = ["Otters hold hands.", "Rafts of otters drift.", "Kelp keeps them in place."]


class FullStore(Pool):
    """A store that takes nothing."""

    def put(self, chunk) -> bool:
        """Refuses, and counts it."""
        self.stats.rejected += 1
        return False


@pytest.fixture(scope="module")
def model():
    return attach(model_of())


@pytest.fixture(scope="module")
def foreign():
    return prefill(model_of(seed=5), TEXTS, progress=False)


def assert_adds_up(report) -> None:
    """Every token of every layer has one origin, and chunk tokens are loaded or missed."""
    for layer in report.layers:
        assert layer.reused + layer.recomputed + layer.fresh + layer.missed == report.tokens
        assert layer.reused + layer.recomputed + sum(report.misses.values()) == report.chunk_tokens
        assert layer.missed == sum(report.misses.values())


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_d27_hits_and_misses_by_reason_add_up_to_the_chunk_tokens(model, foreign, ratio):
    """Reuse that silently degraded showed in no counter (LMCache/LMCache#2442): here everything is counted."""
    own = prefill(model, TEXTS, progress=False)
    cache = BlendedCache([own[0], foreign[1], MissingChunk(TEXTS[2], "timeout")], recompute_ratio=ratio)
    answer(model, PROMPT, cache, tokens=1)
    report = cache.report
    assert report.tokens == PROMPT.shape[1]
    assert report.chunk_tokens == 75
    assert report.misses == {"fingerprint": 25, "timeout": 20}
    assert [use.hit for use in report.chunks] == [True, False, False]
    assert report.chunk_bytes == own[0].nbytes
    assert report.layers[-1].reused + report.layers[-1].recomputed == 30
    assert report.layers[-1].recomputed == (30 if ratio == 1 else round(30 * ratio))
    assert_adds_up(report)


def test_d27_nothing_reused_is_plain_to_see(model, foreign):
    """If no chunk can be used the report says so, by number and reason, and the answer is full prefill's."""
    cache = BlendedCache(foreign)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    assert cache.report.misses == {"fingerprint": 75}
    assert cache.report.reused_tokens == 0
    assert cache.report.chunk_bytes == 0
    assert "75 tokens fingerprint" in str(cache.report)
    assert "75 tokens fingerprint" in cache.report._repr_html_()
    assert_adds_up(cache.report)


def test_d27_strict_raises_for_each_kind_of_miss(model, foreign):
    """`strict=True` is an error instead of a counter."""
    own = prefill(model, TEXTS, progress=False)
    for bad, reason in ((foreign[1], "fingerprint"), (MissingChunk(TEXTS[1]), "absent")):
        with pytest.raises(ChunkMissError, match=reason):
            answer(model, PROMPT, BlendedCache([own[0], bad], strict=True))
    answer(model, PROMPT, BlendedCache(own, strict=True), tokens=1)


def test_d27_a_good_copy_beside_a_foreign_one_is_used_or_counted(model, foreign):
    """Two chunks with the same ids, one of them of another model: the tokens are reused, or counted, never both."""
    own = prefill(model, TEXTS, progress=False)
    for pair in ([own[0], foreign[0]], [foreign[0], own[0]]):
        cache = BlendedCache([*pair, own[1], own[2]])
        answer(model, PROMPT, cache, tokens=1)
        assert_adds_up(cache.report)
        assert cache.report.layers[-1].missed == 0
        assert [use.hit for use in cache.report.chunks[:2]] == [chunk is own[0] for chunk in pair]


def test_d27_a_store_that_rejects_every_put_is_counted(model):
    """Each chunk that could not be kept is one failure in the report, and the answer is right all the same."""
    tokenizer = byte_tokenizer()
    kv = ChunkLibrary(model, tokenizer, FullStore(), recompute_ratio=1.0)
    for _ in range(2):
        inputs = kv(DOCUMENTS, "Why?")
        pieces = [p for p in kv.assemble(DOCUMENTS, "Why?").pieces if p.kind != "text"]
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert out.tolist() == model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).tolist()
        assert inputs.report.put_failures == len(pieces)
        assert f"{len(pieces)} chunks" in str(inputs.report)
        assert inputs.report.to_dict()["put_failures"] == len(pieces)
        assert_adds_up(inputs.report)


def test_d27_strict_raises_where_nothing_can_be_stored(model):
    """With `strict=True` a store that takes nothing is an error that says what to do."""
    with pytest.raises(ChunkMissError, match=r"could not be stored.*strict=False"):
        ChunkLibrary(model, byte_tokenizer(), FullStore(), strict=True)(DOCUMENTS, "Why?")
    with pytest.raises(ChunkMissError, match="could not be stored"):
        ChunkLibrary(model, byte_tokenizer(), capacity_bytes=1, strict=True)(DOCUMENTS, "Why?")


def test_d27_prefill_counts_or_raises_too(model):
    """Filling a store ahead of time must not lose chunks without a word either."""
    kv = ChunkLibrary(model, byte_tokenizer(), FullStore(), strict=True)
    with pytest.raises(ChunkMissError, match="could not be stored"):
        kv.prefill(DOCUMENTS)
    kv = ChunkLibrary(model, byte_tokenizer(), FullStore())
    assert len(kv.prefill(DOCUMENTS)) == 3
    assert kv.pool.stats.rejected == 3


def test_d27_absent_chunks_left_to_the_prompt_are_counted(model):
    """A library that does not prefill says how many tokens were absent, and answers as full prefill does."""
    kv = ChunkLibrary(model, byte_tokenizer(), on_miss="recompute")
    inputs = kv(DOCUMENTS, "Why?")
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert out.tolist() == model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False).tolist()
    assert set(inputs.report.misses) == {"absent"}
    assert inputs.report.misses["absent"] == inputs.report.chunk_tokens > 0
    assert_adds_up(inputs.report)
    with pytest.raises(ChunkMissError, match="absent"):
        model.generate(**kv(DOCUMENTS, "Why?", strict=True), max_new_tokens=1)


def test_d27_the_pool_counts_what_it_did(model):
    """Hits, misses, puts and bytes of a pool, and a report with the same hits."""
    kv = ChunkLibrary(model, byte_tokenizer())
    first = kv(DOCUMENTS, "Why?")
    count = len(first.cache.chunks[0])
    assert (kv.pool.stats.hits, kv.pool.stats.misses, kv.pool.stats.puts) == (0, count, count)
    assert kv.pool.stats.bytes == sum(chunk.nbytes for chunk in first.cache.chunks[0])
    second = kv(DOCUMENTS[::-1], "How?")
    assert (kv.pool.stats.hits, kv.pool.stats.misses, kv.pool.stats.puts) == (count, count, count)
    model.generate(**second, max_new_tokens=1)
    assert sum(use.hit for use in second.report.chunks) == count
    assert not second.report.misses


def test_d27_chunks_computed_because_the_store_had_lost_them_are_counted(model):
    """A store that takes every chunk and keeps none is no reuse: the report must not look like that of a warm store."""
    tokenizer = byte_tokenizer()
    one = ChunkLibrary(model, tokenizer).prefill(DOCUMENTS)
    kv = ChunkLibrary(model, tokenizer, capacity_bytes=max(chunk.nbytes for chunk in one))
    for _ in range(2):
        inputs = kv(DOCUMENTS, "Why?")
        model.generate(**inputs, max_new_tokens=1)
        assert inputs.report.put_failures == 0
        assert inputs.report.prefilled_tokens >= sum(map(len, one[:-1]))
    warm = ChunkLibrary(model, tokenizer)
    warm(DOCUMENTS, "Why?")
    assert warm(DOCUMENTS, "How?").report.prefilled_tokens == 0
