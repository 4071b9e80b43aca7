"""Models of known shapes with random weights: speed depends on the shape alone, so nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

GAIN = 1.28
"""Of a linear layer with as many inputs as the model is wide: 0.02, the usual `initializer_range`, at 4,096.

A fixed 0.02 would make narrow models say one token whatever they are asked, and hide every mistake."""


def _llama3(factor: float) -> dict[str, Any]:
    """RoPE of Llama 3.1 and later."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama-3.1-8B
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_parameters": _llama3(8.0),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "llama-1b": {  # Llama-3.2-1B
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rope_parameters": _llama3(32.0),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": _plain(1_000_000.0),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": _plain(1_000_000.0),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "mistral-7b": {  # Mistral-7B-v0.3: no sliding window
        "model_type": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_parameters": _plain(1_000_000.0),
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gemma3-4b": {  # the text model: five layers with a window of 1,024, then one without
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": _plain(10_000.0),
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "tiny": {  # for tests
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rope_parameters": _plain(10_000.0),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


def shape_config(name: str) -> PretrainedConfig:
    """The configuration of a shape.

    Raises:
        ValueError: for a name that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}")
    fields = dict(SHAPES[name])
    without_ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # an answer is as long as asked
    spread = GAIN / fields["hidden_size"] ** 0.5
    return AutoConfig.for_model(fields.pop("model_type"), **fields, **without_ends, initializer_range=spread)


def shape_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """A model of a shape, with random weights made where they will lie (an 8B never passes through host memory).

    Args:
        name: one of `SHAPES`.
        dtype: of the weights.
        device: of the weights; "auto" spreads the layers evenly over all CUDA devices, as `device_map` does.
        attn_implementation: as in `from_pretrained`.
        seed: of the weights; they are the same each time on the same kind of device.

    Raises:
        ValueError: for an unknown name, or "auto" without CUDA devices.
    """
    if device == "auto":
        return _spread(
            shape_model(name, dtype=dtype, device="cuda:0", attn_implementation=attn_implementation, seed=seed)
        )
    config, device = shape_config(name), torch.device(device)
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = build(config, attn_implementation=attn_implementation, dtype=dtype)
        for module_name, module in model.named_modules():  # ones would hide a norm that is left out
            if module_name.endswith(("q_norm", "k_norm")) and isinstance(module.weight, nn.Parameter):
                nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval().requires_grad_(False)


def _spread(model: Any) -> PreTrainedModel:
    """Layers in equal shares on every CUDA device; embeddings with the first, the head with the last."""
    from accelerate import dispatch_model

    count, layers = torch.cuda.device_count(), model.config.num_hidden_layers
    places = {f"model.layers.{i}": i * count // layers for i in range(layers)}
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": count - 1, "lm_head": count - 1}
    return dispatch_model(model, places | ends)
