"""The main promises on a GPU, in bf16 and fp32: run with `pytest -m gpu` on a machine that has one."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from blendkv import _compat, attach, prefill, proof
from blendkv.attaching import attachment_of
from blendkv.cache import BlendedCache
from blendkv.selectors import HKVD
from blendkv.testing import FAMILIES, REFUSED_FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ids_of(length, seed=0):
    return torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(seed)).cuda()


def generate(model, ids, cache=None, **kwargs):
    extra = {} if cache is None else {_compat.CACHE_ARG: cache}
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **extra, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proven(family, dtype):
    model = tiny_model(family, dtype=dtype).cuda()
    attach(model)
    checks = list(proof.exactness_checks(attachment_of(model)))
    assert all(check.ok for check in checks), [c for c in checks if not c.ok]


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_refused_families_stay_refused(family):
    with pytest.raises(proof.UnsupportedModelError):
        attach(tiny_model(family, dtype=torch.bfloat16).cuda())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ratio_one_generates_what_full_prefill_does(dtype, attention):
    model = attach(tiny_model("llama", dtype=dtype, attn_implementation=attention).cuda())
    ids = ids_of(100)
    chunks = prefill(model, [ids[0, 10:40], ids[0, 40:90]], progress=False)
    assert chunks[0].keys[0].is_cuda
    plain = generate(model, ids, output_scores=True, return_dict_in_generate=True)
    cache = BlendedCache(chunks, recompute_ratio=1.0)
    ours = generate(model, ids, cache, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(plain.sequences, ours.sequences)
    error = max(proof.rms_ratio(a, b) for a, b in zip(ours.scores, plain.scores, strict=True))
    assert error <= proof.BLEND_BOUND[dtype]


def test_error_falls_with_the_ratio_and_equals_the_cpu_in_fp32():
    ids = ids_of(160, 3)
    on_gpu, on_cpu = attach(tiny_model("qwen3").cuda()), attach(tiny_model("qwen3"))
    errors = []
    for model in (on_gpu, on_cpu):
        here = ids.to(model.device)
        chunks = prefill(model, [here[0, a : a + 40] for a in (0, 40, 80)], progress=False)
        state = attachment_of(model)
        full = proof.run(state, here, torch.arange(160, device=here.device)[None], DynamicCache())
        for ratio in (0.0, 0.15, 0.5, 1.0):
            cache = BlendedCache(chunks, ratio, HKVD())
            logits = proof.run(state, here, torch.arange(160, device=here.device)[None], cache)
            errors.append((ratio, proof.rms_ratio(logits, full)))
    gpu, cpu = errors[:4], errors[4:]
    assert gpu[0][1] > gpu[2][1] > gpu[3][1]
    for (_, a), (_, b) in zip(gpu, cpu, strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-4)


def test_chunks_on_the_cpu_are_placed_on_the_gpu():
    model = attach(tiny_model("llama", dtype=torch.bfloat16).cuda())
    ids = ids_of(80)
    chunks = [c.to("cpu") for c in prefill(model, [ids[0, :40], ids[0, 40:70]], progress=False)]
    cache = BlendedCache(chunks)
    out = generate(model, ids, cache)
    assert cache.layers[0].keys.is_cuda
    assert out.shape == (1, 88)
    assert cache.report.seconds["place"] > 0
