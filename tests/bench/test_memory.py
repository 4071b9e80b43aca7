"""The peak that memory is held against, beside what tensors really take."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blendkv.bench.memory import expected_peak, layer_row_bytes
from blendkv.bench.methods import Blend, Full, Reuse
from blendkv.bench.prompts import random_case
from blendkv.bench.shapes import shape_config
from blendkv.selectors import Boundary
from blendkv.testing import tiny_model

TOKENS, QUESTION = 768, 16


class CountBytes(TorchDispatchMode):
    """Most bytes of tensors made inside that were alive after an operation; what a model had before does not count."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.live = {name: kept for name, kept in self.live.items() if not kept[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def measured(case, method):
    run = method.prepare(case)
    run(1)
    chunks = [t for chunk in case.chunks for t in (chunk.ids, *chunk.keys, *chunk.values)]
    with CountBytes(*case.model.parameters(), *case.model.buffers(), *chunks) as count:
        run(1)
    return count.peak


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def case(request):
    """Proportions of Llama-3.1-8B: an MLP 3.5 times as wide, four query heads to a KV head."""
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = tiny_model("llama", dtype=request.param, vocab_size=64, **shape)
    return random_case(model, TOKENS, 128, QUESTION, batch=2)


def test_the_bound_of_full_recompute_is_what_it_takes(case):
    peak = expected_peak(
        case.model.config,
        tokens=TOKENS,
        question_tokens=QUESTION,
        ratio=0.0,
        itemsize=case.chunks[0].dtype.itemsize,
        batch=2,
        reserve=0,
    )
    assert 0.9 < measured(case, Full()) / (peak.placed + peak.full_rows) < 1.01


@pytest.mark.parametrize("method", [Blend(0.15), Reuse()], ids=["hkvd", "reuse"])
def test_a_blend_stays_below_its_bound(case, method):
    peak = expected_peak(
        case.model.config,
        tokens=TOKENS,
        question_tokens=QUESTION,
        ratio=method.kept,
        itemsize=case.chunks[0].dtype.itemsize,
        batch=2,
        full_layer=method.name == "blend",
    )
    assert 0.6 < measured(case, method) / peak.total < 1.1


def test_parts_of_an_8b():
    config = shape_config("llama-8b")
    stages = layer_row_bytes(config, 2)
    assert stages == {"norm": 48 * 1024, "attention": 52 * 1024, "mlp": 108 * 1024}
    given = {"tokens": 16384, "question_tokens": 64, "ratio": 0.15, "itemsize": 2}
    blend = expected_peak(config, **given)
    assert blend.placed == (16384 + 64 + 256) * 32 * 8 * 128 * 2 * 2
    assert blend.selected_rows == (2458 + 64) * 108 * 1024
    assert blend.full_rows == 16448 * (108 * 1024 + 8192 + 1024)
    assert blend.total == blend.placed + blend.selected_rows + blend.full_rows
    static = expected_peak(config, **given, full_layer=False)
    assert (static.placed, static.selected_rows) == (blend.placed, blend.selected_rows)
    assert static.full_rows == 16448 * (2 * 8192 + 4096 + 1024)
    twice = expected_peak(config, **given, batch=2)
    assert twice.total == 2 * blend.total


def test_experts_are_not_counted():
    with pytest.raises(ValueError, match="experts"):
        layer_row_bytes(tiny_model("mixtral").config, 2)


def test_a_static_selector_needs_no_full_layer(case):
    assert measured(case, Blend(0.15, Boundary())) < measured(case, Full())
