import hashlib
import random

import pytest
import torch
import xxhash

from blendkv import ChunkCache, Pool, TieredStore, chunk, chunkfile, supply
from blendkv.attaching import attachment_of
from blendkv.chunk import MissingChunk, chunk_key
from blendkv.stores import DiskStore
from tests.cases.common import assert_same_answer, model_of
from tests.cases.stored import DOCUMENTS, QUESTION, ask, library, local
from tests.chunks import make_chunk
from tests.stores.dicts import DictStore

SEED = 7719792486815757662
PAIR = [
    bytes.fromhex(text) + bytes(16) for text in ("efcdab89674523011032547698badcfe", "1032547698badcfeefcdab8967452301")
]


@pytest.fixture
def eight_bits(monkeypatch):
    """An identity hash that has 256 values."""

    def short(*args, **kwargs):
        return "0" * 62 + chunk_key(*args, **kwargs)[:2]

    for module in (chunk, chunkfile, supply):
        monkeypatch.setattr(module, "chunk_key", short)


def number_of(ids) -> float:
    """A number that tells ids."""
    return int.from_bytes(hashlib.sha256(repr(tuple(ids)).encode()).digest()[:3], "little") / 2**24


def made_of(ids, facts, **fields) -> ChunkCache:
    """A chunk whose numbers tell its ids, as a model's would."""
    layers = [torch.full((heads, len(ids), dim), number_of(ids)) for heads, dim, _ in facts.sizes]
    return ChunkCache(torch.tensor(ids), tuple(layers), tuple(layers), facts.fingerprint, **fields)


@pytest.mark.parametrize(("where", "count"), [("memory", 7_000), ("store", 3_000)])
def test_d39_ten_thousand_chunks_under_256_keys(eight_bits, monkeypatch, where, count):
    """Two chunks with one key: one user got the other's KV (vllm#54727, CVE-2025-25183, CVE-2026-10813)."""
    pool, store = Pool(), DictStore(local=True)
    kv = library(model_of(num_hidden_layers=2), pool if where == "memory" else TieredStore(Pool(1), store))
    facts, tokenizer = attachment_of(kv.model).facts, kv.tokenizer_digest

    def compute(pieces, conditioning):  # the forward alone is replaced, which would take long
        return [made_of(p.ids, facts, tokenizer=tokenizer, text=p.text) for p in pieces.values()]

    monkeypatch.setattr(kv.supply, "compute", compute)
    draw, wrong, asked, own = random.Random(3), 0, 0, 0
    texts: list[str] = []
    while asked < count:
        again = texts[-1:]  # nothing was stored after it, so it is there yet
        texts = again + [f"{draw.randrange(1 << 32):x}" for _ in range(19)]
        computed: list = []
        monkeypatch.setattr(
            kv.supply, "compute", lambda pieces, c, done=computed: done.extend(pieces) or compute(pieces, c)
        )
        chunks = kv.prefill(texts)
        asked += len(texts)
        own += len(texts) - len(computed)
        wrong += len(chunks) != len(texts)
        for text, got in zip(texts, chunks, strict=True):
            ids = kv.tokenizer(text, add_special_tokens=False)["input_ids"]
            wrong += got.ids.tolist() != ids or got.text != text or got.fingerprint != facts.fingerprint
            wrong += not all(bool((t == number_of(ids)).all()) for t in (*got.keys, *got.values))
    assert wrong == 0
    assert len(store.entries if where == "store" else pool) == 256
    stats = kv.pool.stats
    hits = sum(stats.hits.values()) if where == "store" else stats.hits
    assert hits > asked // 2  # under most keys there was something: another's
    assert own >= count // 20 - 1  # and what was a chunk's own was used


def test_d39_two_chunks_of_one_key_in_one_prompt(eight_bits, monkeypatch):
    """Both are served as what they are, from the first time on."""
    monkeypatch.setattr(supply, "chunk_key", lambda *args, **kwargs: "0" * 64)
    monkeypatch.setattr(chunk, "chunk_key", lambda *args, **kwargs: "0" * 64)
    kv = library(model_of(), "memory://")
    for _ in range(2):
        inputs = kv(DOCUMENTS, QUESTION)
        pieces = [piece.ids for piece in kv.assemble(DOCUMENTS, QUESTION).pieces if piece.kind != "text"]
        assert [tuple(each.ids.tolist()) for each in inputs.cache.chunks[0]] == pieces
    recompute = library(kv.model, kv.pool, on_miss="recompute")
    inputs = recompute(DOCUMENTS, QUESTION)
    assert [tuple(each.ids.tolist()) for each in inputs.cache.chunks[0]] == pieces
    assert sum(isinstance(each, MissingChunk) for each in inputs.cache.chunks[0]) == len(pieces) - 1


def test_d39_answers_with_256_keys(eight_bits, tmp_path):
    """The model's own chunks: each answer is that of the same blend with the whole hash, and what is its own hits."""
    model = model_of()
    kv = library(model, DiskStore(tmp_path))
    texts = [f"Fact {n}: {n * n}." for n in range(150)]
    draw, own = random.Random(0), 0
    for _ in range(40):
        documents = draw.sample(texts, 8)
        got, report = ask(kv, documents, tokens=2)
        kv.pool.pool.clear()
        assert [use.hit for use in report.chunks] == [True] * 9
        own += sum(report.loaded.values())
        assert report.prefilled_tokens + sum(report.loaded.values()) >= report.chunk_tokens
        wanted = local(kv, documents, tokens=2)
        assert_same_answer(got, wanted)
    assert own > 0


def test_d39_the_known_pair_of_xxh3_has_two_entries(tmp_path):
    """Two messages of 32 bytes that XXH3-128 does not tell apart under a seed (Cyan4973/xxHash#1127)."""
    one, two = PAIR
    assert xxhash.xxh3_128_digest(one, seed=SEED) == xxhash.xxh3_128_digest(two, seed=SEED)
    ids = [torch.frombuffer(bytearray(each), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF for each in PAIR]
    chunks = [
        ChunkCache(i, (torch.full((1, 8, 4), n),), (torch.full((1, 8, 4), n),), "f") for n, i in enumerate(ids, 1)
    ]
    chunks = [ChunkCache(c.ids, *((t[0].float(),) for t in (c.keys, c.values)), "f") for c in chunks]
    assert chunks[0].key != chunks[1].key
    assert [chunk.ids_bytes(c.ids) for c in chunks] == PAIR
    for where in (Pool(), TieredStore(Pool(), DiskStore(tmp_path))):
        where.put_many(chunks)
        for cleared in (False, True):
            if cleared and isinstance(where, TieredStore):
                where.pool.clear()
            got = where.get_many([c.key for c in chunks])
            assert [float(c.keys[0][0, 0, 0]) for c in got] == [1.0, 2.0]
    assert len(list(tmp_path.glob("??/*.bkv"))) == 2


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
def test_d39_keys_are_never_cut(secret):
    """SHA-256, or keyed BLAKE2b of 256 bits, whole."""
    made = make_chunk()
    key = chunk_key(made.ids, made.fingerprint, secret=secret)
    assert len(bytes.fromhex(key)) == 32
    wrong = [key[:32], key[:62], key.upper(), key + "00"]
    store = DictStore(local=True)
    tiers = TieredStore(Pool(), store, secret=secret)
    tiers.put(ChunkCache(made.ids, made.keys, made.values, made.fingerprint, keyed="" if secret is None else key))
    assert list(store.entries) == [key]
    assert tiers.get(key) is not None
    assert tiers.get_many(wrong) == [None] * 4
