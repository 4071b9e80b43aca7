import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from blendkv.attaching import attachment_of
from blendkv.buffers import Buffers
from blendkv.cache import BlendedLayer
from blendkv.plan import plan_row
from blendkv.report import Clock
from tests.cases.common import answer, assert_same_answer, ids_of, model_of

DOCUMENTS = [ids_of(40, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(9, 3)], dim=1)


@pytest.mark.parametrize("homes", ["cpu cpu meta meta", "meta meta cpu cpu", "meta cpu meta cpu"])
def test_d18_each_layer_is_placed_and_written_on_its_own_device(homes):
    """Chunks of a store lie in host memory; torch's `meta` is a second device that any machine has."""
    model = attach(model_of())
    chunks, facts = prefill(model, DOCUMENTS, progress=False), attachment_of(model).facts
    plan = plan_row(0, PROMPT[0].numpy(), chunks, facts.mismatch, PROMPT.shape[1] - 1)
    layers = [BlendedLayer() for _ in range(4)]
    positions = torch.arange(PROMPT.shape[1])[None]
    buffers = Buffers(layers, facts.rotations, facts.rotary, positions, [plan], Clock())
    rows = torch.tensor([[3, 50, 85]])
    for i, home in enumerate(homes.split()):
        fresh = torch.randn(1, 2, 3, 16, device=home)
        buffers.write(i, rows, fresh, fresh)
        assert buffers.distance(i, rows, fresh, "v").device.type == home
        keys, values = layers[i].resize(PROMPT.shape[1])
        assert keys.device.type == values.device.type == layers[i].device.type == home
        if home == "cpu":
            assert torch.equal(values[:, :, rows[0]], fresh)
            assert torch.equal(values[0, :, :3], chunks[0].values[i][:, :3])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("first", [0, 1], ids=["layer 0 first", "layer 0 on the last device"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_d18_layers_on_two_devices_answer_as_on_one(first, attn, tmp_path):
    """Each layer's keys and values lie where the layer is (huggingface/transformers#33147), with no user action."""
    from transformers import AutoModelForCausalLM

    single, other = model_of(attn_implementation=attn), 1 - first
    single.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": other, "lm_head": other}
    device_map |= {f"model.layers.{i}": first if i < 2 else other for i in range(4)}
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, dtype=torch.float32, attn_implementation=attn
    ).eval()
    split.generation_config.eos_token_id = None
    prompt, answers = PROMPT.to(f"cuda:{first}"), []
    for model in (attach(single.to(f"cuda:{first}")), attach(split)):
        chunks = [chunk.to("cpu") for chunk in prefill(model, DOCUMENTS, progress=False)]
        cache = BlendedCache(chunks, 0.2)
        answers.append(tuple(t.cpu() for t in answer(model, prompt, cache)))
    assert [layer.keys.device.index for layer in cache.layers] == [first, first, other, other]
    assert_same_answer(answers[1], answers[0], 1e-3)
