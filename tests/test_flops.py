"""Counts of blendkv.flops against real forwards, brute force and the figures on record."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from blendkv.flops import (
    LayerRows,
    LayerShape,
    ModelShape,
    blend_flops,
    charged_budget,
    flop_limit,
    full_flops,
    layer_shape,
    model_shape,
)

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
)
UNEVEN = ModelShape((LayerShape(10, 30, 4), LayerShape(14, 20, 4, window=3), LayerShape(10, 90, 8)), head_flops=1000)


@pytest.fixture(scope="module")
def llama_8b() -> ModelShape:
    return model_shape(LLAMA_8B)


@pytest.fixture(scope="module")
def smollm2() -> ModelShape:
    return model_shape(SMOLLM2)


@pytest.mark.parametrize(("tokens", "on_record"), [(2048, 4.8), (4096, 5.2), (8192, 5.3), (16384, 5.5), (32768, 5.5)])
def test_limit_of_8b_shape_is_the_one_on_record(llama_8b: ModelShape, tokens: int, on_record: float) -> None:
    assert flop_limit(llama_8b, tokens, 64, 0.15) == pytest.approx(on_record, rel=0.02)


@pytest.mark.parametrize(("ratio", "on_record", "exact"), [(0.05, 10.9, 10.57), (0.15, 5.3, 5.27)])
def test_limit_of_smollm2_is_the_one_on_record(
    smollm2: ModelShape, ratio: float, on_record: float, exact: float
) -> None:
    limit = flop_limit(smollm2, 4096, 32, ratio)
    assert limit == pytest.approx(exact, abs=0.005)
    assert limit == pytest.approx(on_record, rel=0.032)  # on record: nearer to K alone at the check layer


def test_charged_budget_is_the_one_in_design(smollm2: ModelShape) -> None:
    for ratio, on_record in ((0.15, 0.18), (0.05, 0.09)):
        rows = [LayerRows(full=1000), LayerRows(probed=1000, selected=1000 * ratio)]
        rows += [LayerRows(selected=1000 * ratio)] * 28
        share = smollm2.qkv_share
        budget = charged_budget(smollm2, rows, 1000)
        assert budget == pytest.approx((1 + share + (1 - share) * ratio + 28 * ratio) / 30)
        assert round(budget, 2) == on_record


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        MistralConfig(**TINY),
        Qwen2Config(**TINY),
        Qwen3Config(**TINY),
        Phi3Config(**TINY),
        MixtralConfig(**TINY, **EXPERTS),
        Qwen3MoeConfig(**TINY, **EXPERTS),
    ],
    ids=lambda config: config.model_type,
)
def test_linear_layers_agree_with_a_counted_forward(config: LlamaConfig) -> None:
    tokens = 10
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    shape = model_shape(config)
    assert shape == model_shape(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None], logits_to_keep=1, use_cache=False)
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    linear = sum(flops for op, flops in counted.items() if "bmm" not in op)
    rotation = counted["aten.bmm"] - 3 * tokens**2 * shape.layers[0].key_flops  # angles, also a bmm
    assert linear == tokens * sum(layer.row_flops for layer in shape.layers) + shape.head_flops
    assert 0 <= rotation <= 2 * tokens * 16
    qkv = 2 * 64 * (64 + 2 * 32)
    assert shape.layers[0].qkv_flops == qkv


def test_lists_of_experts_count_the_active_ones() -> None:
    layer = torch.nn.Module()
    layer.self_attn = torch.nn.Module()
    layer.self_attn.qkv = torch.nn.Linear(8, 24)
    layer.self_attn.o_proj = torch.nn.Linear(8, 8)
    layer.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    layer.stacked = torch.nn.ParameterDict({"up": torch.zeros(4, 5, 8), "up_bias": torch.zeros(4, 5)})
    config = MixtralConfig(**TINY | {"head_dim": 2, "hidden_size": 8}, num_experts_per_tok=2)
    shape = layer_shape(layer, config)
    assert (shape.qkv_flops, shape.rest_flops) == (2 * 8 * 24, 2 * (64 + 2 * 64 + 2 * 40))


def test_window_is_read_per_layer() -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(**TINY, use_sliding_window=True, sliding_window=5, layer_types=types)
    assert [layer.window for layer in model_shape(config).layers] == [None, 5, None]
    assert {layer.window for layer in model_shape(MistralConfig(**TINY, sliding_window=7)).layers} == {7}


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 11])
@pytest.mark.parametrize("window", [None, 3])
def test_visible_keys(rows: int, window: int | None) -> None:
    assert LayerShape(1, 1, 1, window).visible(rows) == sum(min(row + 1, window or rows) for row in range(rows))


def test_blend_counts_what_brute_force_counts() -> None:
    tokens, question, selected = 9, 2, (1, 4, 7)  # evenly spread: their mean position is the context's
    rows = range(tokens + question)
    chosen = {*selected, *range(tokens, tokens + question)}  # in the window they see 2 + 3 + 3 keys of 24
    total = UNEVEN.head_flops
    for index, layer in enumerate(UNEVEN.layers):
        computed = set(rows) if index == 0 else chosen
        total += len(rows if index <= 1 else computed) * layer.qkv_flops + len(computed) * layer.rest_flops
        total += layer.key_flops * sum(min(row + 1, layer.window or row + 1) for row in computed)
    blend = blend_flops(UNEVEN, tokens, question, {1: 1 / 3})
    assert blend == pytest.approx(total)


@pytest.mark.parametrize("question", [0, 4])
def test_ratio_one_costs_full_prefill(question: int) -> None:
    assert blend_flops(UNEVEN, 20, question, {1: 1.0}) == pytest.approx(full_flops(UNEVEN, 20, question))
    assert flop_limit(UNEVEN, 20, question, 1.0) == pytest.approx(1.0)
    assert flop_limit(UNEVEN, 20, question, 1.0, static=True) == pytest.approx(1.0)


def test_limit_falls_with_ratio_and_static_is_cheaper(smollm2: ModelShape) -> None:
    limits = [flop_limit(smollm2, 1024, 32, ratio) for ratio in (0, 0.05, 0.15, 0.5, 1)]
    assert limits == sorted(limits, reverse=True)
    assert flop_limit(smollm2, 1024, 32, 0.15, static=True) > flop_limit(smollm2, 1024, 32, 0.15)
    assert flop_limit(smollm2, 1024, 32, 0.15, check_layer=2) < flop_limit(smollm2, 1024, 32, 0.15)


def test_ratio_zero_computes_question_rows_only() -> None:
    question = full_flops(UNEVEN, 0, 4) - UNEVEN.head_flops
    reused_keys = 4 * (20 * 4 + 20 * 8) + 4 * (4 * 3 - 9)  # each question row also sees the context
    expected = question + reused_keys + UNEVEN.head_flops
    assert full_flops(UNEVEN, 20, 4) / flop_limit(UNEVEN, 20, 4, 0.0) == pytest.approx(expected)


def test_gradual_filtering_probes_the_rows_that_are_left() -> None:
    once = blend_flops(UNEVEN, 30, 0, {1: 0.5})
    again = blend_flops(UNEVEN, 30, 0, {1: 0.5, 2: 0.1})
    last = UNEVEN.layers[2]
    saved = (0.5 - 0.1) * (30 * last.rest_flops + last.key_flops * last.visible(30))
    assert once - again == pytest.approx(saved)


def test_empty_prompts() -> None:
    assert flop_limit(UNEVEN, 0, 5, 0.15) == pytest.approx(1.0)
    assert charged_budget(UNEVEN, [LayerRows()] * 3, 0) == 0.0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "schedule is empty"),
        ({3: 0.1}, "check layer 3 is not one of the model's layers, 0 to 2"),
        ({1: 1.5}, "ratio 1.5 at layer 1"),
        ({1: -0.1}, "ratio -0.1 at layer 1"),
        ({1: float("nan")}, "ratio nan at layer 1"),
        ({1: 0.1, 2: 0.2}, "never grow"),
    ],
)
def test_bad_schedules_are_refused(schedule: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blend_flops(UNEVEN, 10, 2, schedule)


def test_bad_records_and_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 layer records for a model of 3 layers"):
        charged_budget(UNEVEN, [LayerRows(full=1)], 10)
    with pytest.raises(ValueError, match=r"layer 4 \(Linear\) has no attention module"):
        layer_shape(torch.nn.Linear(2, 2), LlamaConfig(**TINY), 4)
