"""A library over a folder of lossy chunk files: what one process computed, the next one uses as the first did."""

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from blendkv import ChunkLibrary, Pool
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import get_codec
from blendkv.levelkeys import id_in, id_of
from blendkv.stores import DiskStore, TieredStore
from blendkv.testing import byte_tokenizer
from tests.chunks import make_chunk
from tests.made_up import make_codec
from tests.stores.dicts import DictStore
from tests.stores.test_encoded_pool import DEVICE, DOCUMENTS, logits, setting  # noqa: F401  (a fixture)

GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]


def library(setting, folder, level=16, secret=None, **pool):  # noqa: F811
    model, profile = setting
    codec = get_codec("klt", profile=profile, level=level)
    kept = {"codec": codec, **pool} if pool.pop("encoded", False) else pool
    store = TieredStore(Pool(**kept), DiskStore(folder), codec=codec, secret=secret)
    return ChunkLibrary(model, byte_tokenizer(), store)


def options(*more):
    return [{}, {"encoded": True}, *(pytest.param(o, marks=GPU) for o in more)]


@pytest.mark.parametrize("secret", [None, bytes(16)], ids=["", "sealed"])
@pytest.mark.parametrize(
    "pool", options({"encoded": True, "pin_memory": True}, {"encoded": True, "device": "cuda"}), ids=str
)
def test_the_next_process_answers_as_the_first(setting, tmp_path, pool, secret):  # noqa: F811
    first, report = logits(library(setting, tmp_path, secret=secret, **pool))
    assert report.prefilled_tokens > 0
    kv = library(setting, tmp_path, secret=secret, **pool)
    again, report = logits(kv)
    assert report.prefilled_tokens == 0
    assert list(report.loaded) == [kv.pool.stores[0].url]
    memory, report = logits(kv)
    assert list(report.loaded) == ["memory"]
    assert torch.equal(first, again)
    assert torch.equal(first, memory)
    (chunk,) = kv.prefill(DOCUMENTS[:1])
    assert {t.device.type for t in (*chunk.keys, *chunk.values)} == {DEVICE}
    exact, _ = logits(ChunkLibrary(setting[0], byte_tokenizer()))
    assert not torch.equal(first, exact)  # level 16 loses a lot


@pytest.mark.parametrize("pool", options({"encoded": True, "device": "cuda"}), ids=str)
def test_damage_in_the_folder_is_computed_again(setting, tmp_path, pool):  # noqa: F811
    first, _ = logits(library(setting, tmp_path, **pool))
    for path in tmp_path.rglob("*.bkv"):
        data = bytearray(path.read_bytes())
        data[-30] ^= 1
        path.write_bytes(data)
    kv = library(setting, tmp_path, **pool)
    again, report = logits(kv)
    assert report.prefilled_tokens > 0
    assert sum(kv.pool.stats.damaged.values()) == 3
    assert torch.equal(first, again)
    assert logits(library(setting, tmp_path, **pool))[1].prefilled_tokens == 0


def test_levels_of_one_folder_are_all_read(setting, tmp_path):  # noqa: F811
    coarse, _ = logits(library(setting, tmp_path, level=16))
    got, report = logits(library(setting, tmp_path, level=0))
    assert report.prefilled_tokens == 0
    assert torch.equal(got, coarse)


@pytest.mark.parametrize("write", ["through", "back"])
def test_what_was_read_at_a_level_is_never_stored_as_something_better(write):
    chunk = make_chunk(40, 3, 2, 16)
    fine = make_codec(chunk)
    coarse = get_codec("klt", level=8, profile=fine.profile)
    lossy = TieredStore(Pool(), DictStore(), codec=coarse).put_many([chunk])[0][0]
    assert lossy.coded == id_of(coarse)
    for copy in (lossy, lossy.to("cpu"), replace(lossy, text="t"), deepcopy(lossy), pickle.loads(pickle.dumps(lossy))):
        for codec, levels in ((None, ()), (None, [fine]), (fine, ["raw"])):
            store = DictStore()
            tiers = TieredStore(Pool(), store, codec=codec, levels=levels, write=write)
            assert not tiers.put(copy)
            tiers.flush()
            assert not store.entries
            assert "klt@8" in tiers.notes[-1]
            got = tiers.fetch([chunk.key])[0]
            assert (got.chunk.coded, got.level) == (id_of(coarse), "klt@8")
    store = DictStore()
    assert TieredStore(Pool(), store, codec=coarse, write="through").put(lossy)
    assert id_in(ChunkFile(store.entries[chunk.key], profiles=fine.profile).header) == id_of(coarse)
