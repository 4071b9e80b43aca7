from dataclasses import replace

import pytest
import torch

from blendkv import BlendedCache, ChunkLibrary, ChunkMissError, Pool, attach, prefill
from blendkv.attaching import attachment_of
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec
from blendkv.testing import byte_tokenizer
from tests.cases.common import answer, assert_same_run, forward, ids_of, model_of
from tests.drawn import CODECS, profile_of

DOCUMENTS = [ids_of(30, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)
WRITER, READERS = torch.bfloat16, [torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", READERS)
def test_d17_chunks_of_another_dtype_are_a_counted_miss(dtype):
    """Chunks saved in one dtype made another model crash, or be promoted in silence (NVIDIA/kvpress#27)."""
    chunks = prefill(model_of(dtype=WRITER), DOCUMENTS, progress=False)
    model = attach(model_of(dtype=dtype))
    cache = BlendedCache(chunks)
    run = forward(model, PROMPT, cache)
    assert sum(cache.report.misses.values()) == 60
    assert all(layer.missed == 60 and layer.reused == 0 for layer in cache.report.layers)
    assert {t.dtype for la in cache.layers for t in (la.keys, la.values)} == {dtype}
    assert_same_run(run, forward(model, PROMPT), 1e-4 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", READERS)
def test_d17_a_shared_pool_keeps_dtypes_apart(dtype):
    """A pool that a bf16 model filled gives a reader of another dtype nothing: it computes chunks of its own."""
    pool, tokenizer = Pool(), byte_tokenizer()
    documents = ["Otters hold hands.", "Rafts of otters drift."]
    ChunkLibrary(model_of(dtype=WRITER), tokenizer, pool)(documents, "Why?")
    filled = len(pool)
    reader = ChunkLibrary(model_of(dtype=dtype), tokenizer, pool)
    inputs = reader(documents, "Why?")
    assert len(pool) == 2 * filled
    reader.model.generate(**inputs, max_new_tokens=2)
    assert not inputs.report.misses
    assert {t.dtype for la in inputs.cache.layers for t in (la.keys, la.values)} == {dtype}


def test_d17_the_cast_of_a_chunk_is_not_taken_for_the_models_own():
    """Even with the right fingerprint, keys or values of another dtype in any layer are refused by name."""
    model = attach(model_of())
    chunk, other = prefill(model, DOCUMENTS, progress=False)
    cast = replace(chunk, keys=(chunk.keys[0], chunk.keys[1].half(), *chunk.keys[2:]))
    cache = BlendedCache([cast, other])
    answer(model, PROMPT, cache, tokens=1)
    assert cache.report.misses == {"dtype": 30}
    assert {t.dtype for la in cache.layers for t in (la.keys, la.values)} == {torch.float32}
    with pytest.raises(ChunkMissError, match="dtype"):
        answer(model, PROMPT, BlendedCache([cast, other], strict=True), tokens=1)


def test_d17_a_4bit_model_computes_in_its_compute_dtype():
    """A model with 4-bit weights and fp16 arithmetic keeps chunks in fp16."""
    pytest.importorskip("bitsandbytes")
    if not torch.cuda.is_available():
        pytest.skip("4-bit weights with fp16 arithmetic need a GPU")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    small = model_of(hidden_size=128, head_dim=32)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        small.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype=torch.float16)
    chunk = prefill(model, DOCUMENTS, progress=False)[0]
    assert {t.dtype for t in (*chunk.keys, *chunk.values)} == {torch.float16}


@pytest.mark.parametrize("codec", ["raw", *CODECS])
@pytest.mark.parametrize("dtype", READERS)
def test_d17_a_file_of_another_dtype_is_a_counted_miss(codec, dtype):
    """A file comes back in the dtype that it was written in, never in the reader's."""
    writer = attach(model_of(dtype=WRITER))
    chunks, settings = prefill(writer, DOCUMENTS, progress=False), {}
    if codec != "raw":
        shapes = tuple(LayerShape(*sizes) for sizes in attachment_of(writer).facts.sizes)
        settings = {"profile": profile_of(codec, shapes), "level": 8}
    files = [encode_chunk(chunk, get_codec(codec, **settings)) for chunk in chunks]
    read = [decode_chunk(file, profiles=lambda _: settings["profile"]) for file in files]
    assert {t.dtype for chunk in read for t in (*chunk.keys, *chunk.values)} == {WRITER}
    cache = BlendedCache(read)
    forward(writer, PROMPT, cache)
    assert not cache.report.misses
    model = attach(model_of(dtype=dtype))
    cache = BlendedCache(read)
    run = forward(model, PROMPT, cache)
    assert sum(cache.report.misses.values()) == 60
    assert {t.dtype for la in cache.layers for t in (la.keys, la.values)} == {dtype}
    assert_same_run(run, forward(model, PROMPT), 1e-4 if dtype == torch.float32 else 5e-3)
