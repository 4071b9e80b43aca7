"""Any decoder family of the installed transformers, made tiny from its config class alone, with random weights."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_PARAMETERS = 20_000_000
"""A config that leaves more was not made small."""


class NotBuiltError(Exception):
    """A family that cannot be made tiny."""


def _fields(size: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


_TINY: dict[str, Any] = {
    **_fields(384, "vocab_size vocab_size_per_layer_input unpadded_vocab_size output_vocab_size"),
    **_fields(64, "hidden_size d_model n_embd emb_dim embedding_dim attention_hidden_size embedding_size"),
    **_fields(64, "word_embed_proj_dim input_embedding_size output_embedding_size lru_width"),
    **_fields(
        96, "intermediate_size ffn_hidden_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff"
    ),
    **_fields(96, "dense_intermediate_size prefix_dense_intermediate_size intermediate_size_mlp feed_forward_size"),
    **_fields(4, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks"),
    **_fields(4, "num_decoder_layers num_encoder_layers"),
    **_fields(4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    **_fields(4, "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads"),
    **_fields(4, "num_encoder_attention_heads"),
    **_fields(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads"),
    **_fields(16, "head_dim dim_head d_head swa_head_dim kv_channels attention_head_dim query_pre_attn_scalar"),
    **_fields(512, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
    # Windows are smaller than the prompt, or they would not matter.
    **_fields(12, "sliding_window attention_window_size sliding_window_size attention_chunk_size window_size"),
    **_fields(12, "local_attention"),
    **_fields(2, "sliding_window_pattern num_experts_per_tok moe_topk moe_k top_k_experts index_n_heads"),
    **_fields(4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_fields(48, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    **_fields(48, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_fields(1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    **_fields(1, "first_k_dense_replace num_dense_layers moe_layer_start_index mamba_n_groups n_groups"),
    **_fields(16, "kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim index_topk"),
    **_fields(8, "qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank patch_size"),
    **_fields(8, "mamba_d_state mamba_dt_rank mamba_n_heads mamba_num_heads ssm_state_size state_size time_step_rank"),
    **_fields(16, "mamba_d_head mamba_head_dim mamba_chunk_size chunk_size linear_head_dim linear_key_head_dim"),
    **{"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_d_ssm": 128},
    **{"embed_dim": 64, "depth": 2, "q_lora_rank": 24, "global_head_dim": 32, "image_size": 32},
    **{"initializer_range": 0.25, "init_std": 0.25, "is_decoder": True, "use_mamba_kernels": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Fields of config classes, under all the names that they have."""

_ROPE = {"rope_theta": 10_000.0}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _MIXED,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", **_ROPE}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, **_ROPE},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 4},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MIXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _MIXED,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "ministral3": {  # queries are scaled from a position on that the proof looks at
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 480,
            **_ROPE,
        }
    },
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], **_ROPE}},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID | {"attention_hidden_size": None, "attention_head_dim": None},
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names of fields do not tell."""

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon+alibi": {"alibi": True},
    "gemma4_text+plain": {"hidden_size_per_layer_input": 0},
    "gemma4_text+shared": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama+biases": {"attention_bias": True, "mlp_bias": True},
    "llama+dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE}},
    "llama+linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **_ROPE}},
    "llama+llama3": {"rope_parameters": {"rope_type": "llama3", **_LLAMA3, **_ROPE}},
    "llama+mqa": {"num_key_value_heads": 1},
    "llama+yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_ROPE}},
    "mistral+unwindowed": {"sliding_window": None},
    "phi3+longrope": {"rope_parameters": {"rope_type": "longrope", **_LONG, **_ROPE}},
    "qwen2+windows": {"use_sliding_window": True, "max_window_layers": 2},
}
"""`family+what`: fields that change how a family attends or where its tokens are."""

WITH_IMAGES = ("llava", "qwen2_vl", "qwen3_vl")
"""Vision-language models beside the causal ones."""


def families() -> list[str]:
    """Every `model_type` of the installed transformers with a causal language model, variants, and `WITH_IMAGES`."""
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WITH_IMAGES}
    return sorted(known & set(CONFIG_MAPPING)) + [v for v in VARIANTS if v.partition("+")[0] in known]


def tiny_family(family: str, *, attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A random model of a few layers, always the same for the same arguments.

    Args:
        family: one of `families()`.
        attn_implementation: as in `from_config`; the family's own choice by default.
        seed: of the weights.

    Raises:
        NotBuiltError: if the config stays large; whatever transformers raises if it cannot make one.
    """
    model_type = family.partition("+")[0]
    config = _tiny_config(CONFIG_MAPPING[model_type], VARIANTS.get(family, {}))
    auto = AutoModelForImageTextToText if model_type in WITH_IMAGES else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotBuiltError(f"its config cannot be made small by the names of its fields: {size:,} parameters are left")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        _make_uneven(model)
    model.generation_config.eos_token_id = None
    return model.eval()


def _tiny_config(kind: Any, fields: dict[str, Any]) -> Any:
    known = inspect.signature(kind.__init__).parameters
    tiny = {name: size for name, size in _TINY.items() if name in known}
    if "kv_lora_rank" in known:  # every head has keys of its own
        tiny |= {"num_key_value_heads": tiny["num_attention_heads"], "head_dim": tiny["qk_rope_head_dim"]}
    for name in getattr(kind, "sub_configs", {}):
        with suppress(Exception):  # absent by default, or not to be had
            tiny[name] = _tiny_config(type(getattr(kind(), name)), {})
    if kind.model_type in CONFIG_MAPPING and CONFIG_MAPPING[kind.model_type] is kind:
        tiny |= _SPECIAL.get(kind.model_type, {})
    config = _valid(kind, tiny | fields)
    if set(getattr(config, "layer_types", None) or ()) == {"sliding_attention"}:
        with suppress(Exception):
            return _valid(kind, tiny | {"layer_types": ["sliding_attention", "full_attention"] * 2} | fields)
    return config


def _valid(kind: Any, fields: dict[str, Any]) -> Any:
    """A config; transformers 5.4 declares some flags ints, and a current hub then refuses their own defaults."""
    while True:
        try:
            return kind(**fields)
        except StrictDataclassError as error:
            flag = re.search(r"for field '(\w+)'.*got bool \(value: (True|False)\)", str(error), re.DOTALL)
            if flag is None or type(fields.get(flag[1], True)) is not bool:
                raise
            fields = fields | {flag[1]: int(flag[2] == "True")}


@torch.no_grad()
def _make_uneven(model: nn.Module) -> None:
    """Changes weights that begin all alike (norms, biases, sinks) or tiny, so that a mistake in them shows."""
    for parameter in model.parameters():
        spread = float(parameter.std()) if parameter.numel() > 1 else 1.0
        if spread == 0.0:
            parameter.add_(torch.randn_like(parameter), alpha=0.25)
        elif parameter.ndim > 1 and spread < 0.05:
            parameter.mul_(0.25 / spread)
