"""FlashAttention as the base: dense rows and decoding go through it, recomputed rows do not (it has no mask for them).

The packages need a GPU (`tests/cases/test_d26.py`). Here slow functions stand for theirs, beneath transformers' own
integration, which looks them up by the name of the implementation.
"""

import pytest
import torch
from transformers import modeling_flash_attention_utils as integration

from blendkv import BlendedCache, _compat, attach, prefill, proof
from blendkv.attaching import attachment_of
from blendkv.testing import tiny_model
from tests.helpers import tokens


def attend(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """`[B, S, Q, D]` and `[B, T, H, D]`: causal from the bottom right."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    rows, count = q.shape[2], k.shape[2]
    scores = q @ k.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    row, key = torch.arange(rows)[:, None] + count - rows, torch.arange(count)
    seen = key <= row if causal else torch.ones(rows, count, dtype=torch.bool)
    if window_size[0] >= 0:
        seen = seen & (key >= row - window_size[0])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def calls(monkeypatch):
    """Rows and keys of every call; `flash_attention_2` is there, as far as transformers can tell."""
    seen = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        seen.append((q.shape[1], k.shape[1]))
        return attend(q, k, v, softmax_scale, causal, window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        parts = zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False)
        outs = [
            attend(q[None, a:b], k[None, c:d], v[None, c:d], softmax_scale, causal, window_size) for a, b, c, d in parts
        ]
        return torch.cat(outs, dim=1)[0]

    def lazy_imports(implementation, *args, **kwargs):
        if implementation != "flash_attention_2":
            raise ValueError(f"Could not find the currently requested flash attention implementation {implementation}")
        pads = integration._pad_input, integration._unpad_input
        return flash_attn_func, flash_attn_varlen_func, None, *pads

    monkeypatch.setattr(integration, "_lazy_imports", lazy_imports)
    monkeypatch.setattr(integration, "_loaded_implementation", None)
    yield seen
    integration._loaded_implementation = None


def flash_model(family, **more):
    model = tiny_model(family, **more)
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


FAMILIES = [("llama", {}), ("mistral", {"sliding_window": 16}), ("qwen3", {})]


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_it_is_proven(calls, family, more):
    checks = list(proof.exactness_checks(attachment_of(attach(flash_model(family, **more)))))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    assert calls


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_answers_are_those_of_sdpa(calls, family, more):
    """The same blend, ratio by ratio, dense rows and a decoded token through FlashAttention."""
    ids = tokens(70)[None]
    outputs = []
    for model in (attach(flash_model(family, **more)), attach(tiny_model(family, **more))):
        chunks = prefill(model, [ids[0, 5:30], ids[0, 30:62]], progress=False)
        for ratio in (0.0, 0.3, 1.0):
            calls.clear()
            given = {_compat.CACHE_ARG: BlendedCache(chunks, ratio)}
            with torch.no_grad():
                first = model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits
                step = first[:, -1].argmax(-1)[None]
                outputs.append((first, model(input_ids=step, use_cache=True, logits_to_keep=1, **given).logits))
            if len(outputs) <= 3:
                full = {0.0: 0, 0.3: 1, 1.0: 4}[ratio]
                assert calls == [(70, 70)] * full + [(1, 71)] * 4  # recomputed rows never reach it
    for (a, b), (c, d) in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(a, c, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b, d, atol=1e-4, rtol=1e-4)


def test_padded_rows_are_those_of_the_prompt_alone(calls):
    model = attach(flash_model("llama"))
    long, short = tokens(60), tokens(45, seed=1)
    chunks = [prefill(model, [row[3:40]], progress=False) for row in (long, short)]
    ids = torch.stack([long, torch.cat([torch.zeros(15, dtype=torch.long), short])])
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    kw = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    kw["return_dict_in_generate"] = True
    for ratio in (1.0, 0.3):
        both = model.generate(ids, attention_mask=mask, **kw, **{_compat.CACHE_ARG: BlendedCache(chunks, ratio)})
        for b, row in enumerate((long, short)):
            given = {} if ratio == 1.0 else {_compat.CACHE_ARG: BlendedCache(chunks[b], ratio)}
            alone = model.generate(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long), **kw, **given)
            torch.testing.assert_close(both.logits[0][b], alone.logits[0][0], atol=1e-4, rtol=1e-4)
            assert both.sequences[b, 60:].tolist() == alone.sequences[0, len(row) :].tolist()


def test_ordinary_use_is_untouched(calls):
    ids = tokens(40)[None]
    plain, attached = flash_model("llama"), attach(flash_model("llama"))
    with torch.no_grad():
        a, b = (model(input_ids=ids, use_cache=True).logits for model in (plain, attached))
    assert torch.equal(a, b)
