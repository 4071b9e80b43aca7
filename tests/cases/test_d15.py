import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from blendkv import UnsupportedModelError, attach
from tests.cases.common import model_of, without_forward

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MAMBA = "mamba|linear_attention"  # newer configs call every kind of recurrence the latter
HYBRIDS = {
    "jamba": ({"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, MAMBA),
    "qwen3_next": ({"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32}, "linear_attention"),
    "falcon_h1": ({"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "hybrid"),
    "bamba": (
        {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8},
        MAMBA,
    ),
    "granitemoehybrid": (
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32},
        MAMBA,
    ),
    "zamba2": ({"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]}, "hybrid"),
    "mamba2": ({"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}, "Mamba2|linear_attention"),
    "lfm2": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_d15_hybrid_and_recurrent_models_are_refused_by_layer_type_before_any_forward(family):
    """Recurrent state cannot be put together from chunks and answers were silently wrong (ml-explore/mlx-lm#980)."""
    overrides, named = HYBRIDS[family]
    if family == "falcon_h1" and transformers.__version__.startswith("5.4."):
        pytest.skip("transformers 5.4 cannot make a Falcon-H1: it refuses its own default, use_cache=True")
    config = AutoConfig.for_model(family, **(TINY | overrides))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=named) as error:
        attach(without_forward(model.eval()))
    assert "full prefill" in str(error.value)
    assert "_blendkv_attachment" not in model.__dict__


def test_d15_an_unknown_layer_type_is_refused_before_any_forward():
    """No list of names can hold the recurrent models of next year: what is not plain attention is refused."""
    model = model_of()
    model.config.layer_types = ["full_attention", "retention", "full_attention", "retention"]
    with pytest.raises(UnsupportedModelError, match="retention"):
        attach(without_forward(model))


class ShiftedLayer(LlamaDecoderLayer):
    """A layer that also looks at the token before, as RWKV does, and says so nowhere."""

    def forward(self, hidden_states, *args, **kwargs):
        """Mixes half of each row's predecessor in."""
        before = torch.cat([torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]], dim=1)
        return super().forward(hidden_states + 0.5 * before, *args, **kwargs)


def shifted() -> LlamaForCausalLM:
    """A Llama whose layers, but not whose weights, config or class, are others."""
    model = model_of()
    for layer in model.model.layers:
        layer.__class__ = ShiftedLayer
    return model


def test_d15_a_recurrence_that_no_config_names_fails_the_proof(monkeypatch, tmp_path):
    """A model that folds tokens together without saying so is caught by the proof, and left as it was."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    model = shifted()
    with pytest.raises(UnsupportedModelError, match="proof"):
        attach(model)
    assert "_blendkv_attachment" not in model.__dict__
    assert not model.model.layers[0]._forward_pre_hooks


def test_d15_a_remembered_proof_is_not_anothers(monkeypatch, tmp_path):
    """A proof of the same weights in other code (a newer modeling file, a patched layer) proves nothing."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    attach(model_of())
    with pytest.raises(UnsupportedModelError, match="proof"):
        attach(shifted())
