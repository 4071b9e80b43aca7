"""Weights quantised in place by torchao: int8, on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from blendkv import BlendedCache, attach, model_fingerprint, prefill, proof
from blendkv.attaching import attachment_of
from blendkv.testing import tiny_model
from tests.helpers import tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao warns on import


@pytest.fixture
def int8(monkeypatch):
    """`int8(seed)`: a tiny model with int8 weights."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "apart")  # `make venv`; or it is installed as usual
    quantization = pytest.importorskip("torchao.quantization")

    def make(seed=0):
        model = tiny_model("llama", seed=seed)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    return make


def test_it_is_proven(int8):
    checks = list(proof.exactness_checks(attachment_of(attach(int8()))))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]


def test_its_fingerprint_is_its_own(int8):
    plain, quantised = tiny_model("llama"), int8()
    assert model_fingerprint(quantised) == model_fingerprint(int8())
    assert len({model_fingerprint(m) for m in (plain, quantised, int8(1))}) == 3


def test_chunks_of_the_unquantised_model_are_missed(int8):
    ids = tokens(60)
    chunks = prefill(attach(tiny_model("llama")), [ids[:20], ids[20:50]], progress=False)
    cache = BlendedCache(chunks)
    with torch.no_grad():
        attach(int8())(input_ids=ids[None], use_cache=True, past_key_values=cache)
    assert cache.report.misses == {"fingerprint": 50}


def test_a_change_of_one_quantised_number_is_noticed(int8):
    model = attach(int8())
    before = attachment_of(model).facts.fingerprint
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.qdata[3, 5] += 1
    assert attachment_of(model).facts.fingerprint == model_fingerprint(model) != before
