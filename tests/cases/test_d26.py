from dataclasses import replace

import pytest
import torch

from blendkv import BlendedCache, UnsupportedModelError, attach, prefill
from blendkv.testing import tiny_model
from tests.cases.common import cut_exactly, forward, ids_of, rows_cache, worst

ROWS, LAST = (3, 17, 30), 39
PROMPT = ids_of(40, 1)
CHANGED = PROMPT.clone()
CHANGED[0, 31] = (CHANGED[0, 31] + 1) % 256
IMPLEMENTATIONS = ["eager", "sdpa"]
WINDOWS = {"full": ("llama", {}), "sliding": ("mistral", {"sliding_window": 12})}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture(scope="module", params=WINDOWS)
def model(request, implementation):
    family, overrides = WINDOWS[request.param]
    return attach(tiny_model(family, attn_implementation=implementation, **overrides))


def attention_outputs(model, ids, cache=None) -> list[torch.Tensor]:
    """What each layer's attention returned, `[S, D]`."""
    outputs: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda module, args, out: outputs.append(out[0][0].clone()))
        for layer in model.model.layers
    ]
    forward(model, ids, cache)
    for handle in handles:
        handle.remove()
    return outputs


def blended(model, ids, chunks) -> list[torch.Tensor]:
    return attention_outputs(model, ids, rows_cache(chunks, ROWS))


def test_d26_scattered_rows_see_what_they_see_in_full_prefill(model):
    """Kernels take scattered queries for the last or the first rows (huggingface/transformers#35168)."""
    rows = [*ROWS, LAST]
    full = attention_outputs(model, PROMPT)
    for layer, (some, every) in enumerate(
        zip(blended(model, PROMPT, cut_exactly(model, PROMPT, (0, 39))), full, strict=True)
    ):
        assert some.shape[0] == len(rows)
        assert worst(some, every[rows]) < 1e-4, f"layer {layer}"


def test_d26_a_later_token_changes_no_bit_of_earlier_rows(model):
    """Another token at 31 leaves rows 3, 17 and 30 as they are, bit for bit, and does change the last row."""
    one = cut_exactly(model, PROMPT, (0, 39))
    other = cut_exactly(model, CHANGED, (0, 39))
    # before token 31 the two full prefills agree only as far as their kernels do: give both the same stored states
    other = [replace(other[0], keys=mixed(one[0].keys, other[0].keys), values=mixed(one[0].values, other[0].values))]
    for a, b in zip(blended(model, PROMPT, one), blended(model, CHANGED, other), strict=True):
        assert torch.equal(a[:3], b[:3])
    assert not torch.equal(a[3], b[3])


def mixed(early, late):
    """States of `early` before token 31, of `late` from there on."""
    return tuple(torch.cat([a[:, :31], b[:, 31:]], dim=1) for a, b in zip(early, late, strict=True))


def test_d26_one_row_at_a_time(model):
    """Each chunk row on its own, the first and the last among them, is the row of full prefill."""
    full, chunks = attention_outputs(model, PROMPT), cut_exactly(model, PROMPT, (0, 39))
    for row in (0, 1, 12, 31, 38):
        outputs = attention_outputs(model, PROMPT, rows_cache(chunks, (row,)))
        for some, every in zip(outputs, full, strict=True):
            assert worst(some, every[[row, LAST]]) < 1e-4


def test_d26_padded_rows_see_no_padding(model):
    """In a batch with padding on the left, scattered rows are those of the prompt alone."""
    chunks = cut_exactly(model, PROMPT, (0, 39))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(45)[None] >= 5).long()
    positions = (torch.arange(45)[None] - 5).clamp_min(0)
    alone = forward(model, PROMPT, rows_cache(chunks, ROWS))
    cache = rows_cache(chunks, tuple(row + 5 for row in ROWS))
    run = forward(model, padded, cache, attention_mask=mask, position_ids=positions)
    assert cache.report.tokens == 40
    assert worst(run.logits, alone.logits) < 1e-4


@pytest.mark.gpu
def test_d26_flash_attention_is_right_or_refused():
    """flash_attention_2 cannot express the mask: scattered rows take another road, or attach says no."""
    pytest.importorskip("flash_attn")
    if not torch.cuda.is_available():
        pytest.skip("flash_attention_2 needs a GPU")
    model = tiny_model("llama", attn_implementation="flash_attention_2", dtype=torch.bfloat16).cuda()
    try:
        attach(model)
    except UnsupportedModelError:
        return
    ids = PROMPT.cuda()
    chunks = prefill(model, [PROMPT[0, :20], PROMPT[0, 20:32]], progress=False)
    run = forward(model, ids, BlendedCache(chunks, recompute_ratio=1.0))
    assert worst(run.logits, forward(model, ids).logits) < 3e-2
