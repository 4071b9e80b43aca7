"""What the fingerprint of an attached model sees: each of these changes answers, and once went unseen."""

import pytest
import torch
from torch import nn
from transformers import masking_utils as masks

from blendkv import BlendedCache, _compat, attach, prefill
from blendkv.attaching import attachment_of
from blendkv.testing import tiny_model
from blendkv.weights import WeightsWatch
from tests.helpers import tokens


def hits(model, chunks, ids):
    cache = BlendedCache(chunks, 0.0)
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=True, **{_compat.CACHE_ARG: cache})
    return [use.hit for use in cache.report.chunks]


def seen(model, change):
    ids = tokens(50)
    attach(model)
    chunks = prefill(model, [ids[:20], ids[20:40]], progress=False)
    assert hits(model, chunks, ids) == [True, True]
    change()
    return hits(model, chunks, ids) == [False, False]


@pytest.mark.parametrize("kind", ["IA3Config", "OFTConfig", "VeraConfig", "LNTuningConfig"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_any_method_that_are_switched_off(kind):
    peft = pytest.importorskip("peft")
    options = {
        "IA3Config": {"init_ia3_weights": False, "target_modules": ["v_proj"], "feedforward_modules": []},
        "OFTConfig": {"target_modules": ["v_proj"], "oft_block_size": 4, "init_weights": False},
        "VeraConfig": {"target_modules": ["v_proj"], "r": 4, "init_weights": False},
        "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    }[kind]
    model = peft.get_peft_model(tiny_model("llama"), getattr(peft, kind)(**options)).eval()
    ids = tokens(50)
    attach(model)
    chunks = prefill(model, [ids[:20], ids[20:40]], progress=False)
    assert hits(model, chunks, ids) == [True, True]
    with model.disable_adapter():
        assert hits(model, chunks, ids) == [False, False]
    assert hits(model, chunks, ids) == [True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer(fused):
    model = tiny_model("llama")

    def step():
        ids = tokens(12)[None]
        with torch.enable_grad():
            model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused).step()

    assert seen(model, step)


def test_writes_to_inference_tensors():
    with torch.inference_mode():
        model = tiny_model("llama")

    def write():
        with torch.inference_mode():
            model.model.layers[1].self_attn.v_proj.weight.mul_(2)

    assert seen(model, write)


def test_a_setting_of_the_config():
    model = tiny_model("mistral", sliding_window=16)
    assert seen(model, lambda: setattr(model.config, "sliding_window", 3))


def test_a_module_without_weights():
    model = tiny_model("llama")

    def replace():
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.ReLU()

    assert seen(model, replace)


def test_tensors_of_a_watched_model_can_be_swapped():
    model = tiny_model("llama")
    watch = WeightsWatch(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))
    assert not watch.unchanged()


def test_graphs_go_with_the_fingerprint():
    model = attach(tiny_model("llama"))
    state = attachment_of(model)
    before = state.facts.fingerprint
    state.graphs = object()
    model.config.rms_norm_eps = 0.5
    assert state.facts.fingerprint != before
    assert state.graphs is None


class TestMasksThatKernelsKnow:
    def test_causal_and_windows(self):
        assert _compat.causal_window(masks.causal_mask_function) == (None,)
        assert _compat.causal_window(masks.sliding_window_causal_mask_function(7)) == (7,)

    @pytest.mark.parametrize(
        "mask",
        [
            masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: (b == 0) | (k != 3)),
            masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k == q + 2),
            masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: ~((q >= 40) & (k >= 10) & (k < 20))),
            masks.and_masks(masks.sliding_window_overlay(5), masks.sliding_window_overlay(7)),
            masks.and_masks(masks.sliding_window_overlay(5), masks.causal_mask_function, masks.causal_mask_function),
            masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
            lambda b, h, q, k: k <= q,
        ],
        ids=["one row", "one ahead", "a hole", "two windows", "three", "chunked", "not transformers' own"],
    )
    def test_everything_else_is_left_to_sdpa(self, mask):
        assert _compat.causal_window(mask) is None
