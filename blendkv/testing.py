"""What tests need: tiny random models of many families and a tokenizer, made on the spot; the contract of stores."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from blendkv.contract import StoreContract

__all__ = ["FAMILIES", "REFUSED_FAMILIES", "VOCABULARY", "StoreContract", "byte_tokenizer", "tiny_model"]

VOCABULARY = 512
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe", "olmo2", "granite", "smollm3")
"""Families that blendkv supports."""
REFUSED_FAMILIES = ("llama4", "gemma3n", "jamba", "qwen3_next")
"""Families that `attach` must refuse: positions taken from the cache's length, shared layers, recurrent layers."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,  # the default 0.02 makes models that repeat one token whatever they are asked
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1]},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "llama4": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0, 1, 0],
        "floor_scale": 8,
    },
    "gemma3n": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": None,
        "pad_token_id": 0,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "pad_token_id": 0,
    },
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
_MODEL_TYPE = {"llama4": "llama4_text", "gemma3n": "gemma3n_text"}


def tiny_model(
    family: str,
    *,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A random model of 4 layers and 512 tokens, always the same for the same arguments.

    Weights are large (0.25) and the weights of norms on queries and keys random, so that a mistake shows.

    Args:
        family: one of `FAMILIES` or `REFUSED_FAMILIES`, or another `model_type` that takes the usual fields.
        attn_implementation: as in `from_pretrained`.
        dtype: of the weights.
        seed: of the weights.
        **config_overrides: fields of the config.
    """
    fields = _COMMON | _SPECIAL.get(family, {}) | config_overrides
    try:
        config = AutoConfig.for_model(_MODEL_TYPE.get(family, family), **fields)
    except StrictDataclassError:  # transformers 5.4 declares this field of OLMo-2 an int
        config = AutoConfig.for_model(_MODEL_TYPE.get(family, family), **fields, tie_word_embeddings=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
        for name, module in model.named_modules():
            if name.endswith(("q_norm", "k_norm")) and isinstance(getattr(module, "weight", None), nn.Parameter):
                nn.init.uniform_(module.weight, 0.5, 1.5)
            elif name.endswith(("q_proj", "k_proj", "v_proj")) and getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.25)
    model.generation_config.eos_token_id = None  # so that a test decides how long an answer is
    return model.eval()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    *, chat: bool = False, bos: bool = False, merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    """A fast byte-level tokenizer: one token a byte, `<|im_start|>`, `<|im_end|>`, `<s>` and `<pad>`.

    Args:
        chat: give it a ChatML template.
        bos: put `<s>` in front of every text that is tokenised with special tokens (and of the template).
        merges: pairs of (printable byte-level) tokens to merge, as in a trained BPE.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|im_start|>", "<|im_end|>", "<s>", "<pad>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if bos:
        front = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=front
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos else None,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=("{{ bos_token }}" if bos else "") + CHATML if chat else None,
        clean_up_tokenization_spaces=False,
    )
