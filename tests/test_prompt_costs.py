"""What a prompt does once, and not once a chunk: work between a question and its first token."""

import pytest

from blendkv import ChunkLibrary, Pool
from blendkv.loading.controller import Controller
from blendkv.stores import DiskStore, TieredStore
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.weights import WeightsWatch


@pytest.mark.parametrize(("disk", "controller"), [(False, False), (True, False), (True, True)])
def test_weights_are_looked_at_a_few_times_however_many_chunks_there_are(tmp_path, monkeypatch, disk, controller):
    looks, own = [], WeightsWatch.unchanged
    monkeypatch.setattr(WeightsWatch, "unchanged", lambda watch: looks.append(0) or own(watch))
    model = tiny_model("llama")
    counts = []
    for number, documents in enumerate((2, 12)):
        store = TieredStore(Pool(), DiskStore(tmp_path / str(number))) if disk else Pool()
        settings = {"controller": Controller()} if controller else {}
        kv = ChunkLibrary(model, byte_tokenizer(), store=store, recompute_ratio=0.3, **settings)
        texts = [f"document {n}: " + "abcdefg" * n for n in range(documents)]
        kv.prefill(texts)
        if disk:
            store.clear()
        looks.clear()
        model.generate(**kv(texts, "why?"), max_new_tokens=1, pad_token_id=0)
        counts.append(len(looks))
    assert counts[0] == counts[1] <= 12
