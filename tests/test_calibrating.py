"""Profiles of models: whether gradients say what errors cost, and whether every family can be profiled."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from blendkv import _compat, calibrating, prefill
from blendkv.attaching import attach, attachment_of
from blendkv.calibrating import TARGET, calibrate
from blendkv.chunkfile import decode_chunk
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec
from blendkv.codecs.statistics import Statistics
from blendkv.families import tiny_family
from blendkv.testing import FAMILIES, tiny_model
from blendkv.texts import Passage
from blendkv.trials import Trial
from tests.helpers import tokens

CONTEXT, CONTINUATION = 48, 16
OTHERS = ("gemma2", "gemma3_text", "glm", "gpt_neox", "gpt_oss", "bloom", "llama+mqa", "qwen2+windows")
"""Windows, partial and interleaved rotation, norms on queries and keys, ALiBi, one KV head."""
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


def ids_of(seed: int, length: int = CONTEXT + CONTINUATION) -> torch.Tensor:
    return tokens(length, seed) % 384  # the vocabulary of `tiny_family`


def model_of(attached, family: str):
    if family in FAMILIES:
        return attached(family)
    eager = "eager" if family == "gemma2" else None  # older transformers leave its softcap out under sdpa
    return attach(tiny_family(family, attn_implementation=eager))


def passages_of(count: int, length: int = CONTEXT + CONTINUATION) -> list[Passage]:
    return [Passage(ids_of(seed, length).tolist(), (f"{seed:016x}",)) for seed in range(count)]


def calibrated(model, codecs=("cachegen", "klt", "klt-xl"), count: int = 9, **kwargs):
    return calibrate(model, passages_of(count), codecs, continuation=CONTINUATION, progress=False, **kwargs)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_families(attached, family):
    """Each is profiled; fine levels of all codecs cost next to nothing, and level 0 about what was aimed at."""
    model = model_of(attached, family)
    trials = [Trial.of(model, ids_of(seed), CONTEXT) for seed in (97, 98, 99)]
    for name, profile in calibrated(model).items():
        assert profile.codec == name
        assert profile.about["passages"] == 9
        assert len(profile.about["texts"]) == 9
        codecs = [get_codec(name, level=level, profile=profile) for level in (-10, 0, 8)]
        costs = [sum(trial.divergence(trial.through(codec)) for trial in trials) / 3 for codec in codecs]
        assert costs[0] < costs[1] < costs[2]
        assert TARGET / 10 < costs[1] < TARGET * 10
        assert costs[0] < 2 * TARGET  # experts that change jump


def test_the_same_each_time(attached):
    """A seed, a profile; another, another."""
    model = attached()
    first, again, other = (calibrated(model, ("klt",), seed=seed)["klt"] for seed in (0, 0, 1))
    assert first.hash == again.hash != other.hash


@pytest.mark.parametrize("scaling", [{}, {"rope_parameters": YARN}], ids=["plain", "yarn"])
def test_gradients_by_unrotated_keys(scaling):
    """The same as autograd's through a rotation that is written out; yarn multiplies keys as well as turning them."""
    model = attach(tiny_model("llama", attn_implementation="eager", **scaling))
    state, ids = attachment_of(model), ids_of(5)[None]
    states = calibrating._context(state, ids[:, :CONTEXT])
    draws = torch.Generator().manual_seed(3)
    found = list(calibrating._gradients(state, ids[:, CONTEXT:], states, 2, draws))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(CONTEXT)[None])
    keys, values = calibrating._plain(state, states)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (*keys, *values)]
    cache = DynamicCache()
    for layer in range(4):
        key = leaves[layer][None]
        turned = torch.cat([-key[..., 8:], key[..., :8]], -1)
        rotated = key * cos[:, None] + turned * sin[:, None]
        torch.testing.assert_close(rotated.detach(), states[layer][0], atol=1e-4, rtol=1e-4)
        cache.update(rotated, leaves[4 + layer][None], layer)
    positions = torch.arange(CONTEXT, CONTEXT + CONTINUATION)[None]
    keyword = {_compat.cache_keyword(model.forward): cache}
    likely = model(input_ids=ids[:, CONTEXT:], position_ids=positions, **keyword).logits[0].log_softmax(-1)
    draws = torch.Generator().manual_seed(3)
    for gradients in found:
        drawn = torch.multinomial(likely.detach().exp(), 1, generator=draws)
        wanted = torch.autograd.grad(likely.gather(1, drawn).sum(), leaves, retain_graph=True)
        got_keys, got_values = calibrating._plain_gradients(state, gradients)
        for got, exact in zip((*got_keys, *got_values), wanted, strict=True):
            assert float(exact.norm()) > 0
            assert float((got - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_metric_predicts_what_errors_cost(attached, family):
    """Half the squared error in it is the divergence: for small random errors, within a factor of two."""
    model = model_of(attached, family)
    state = attachment_of(model)
    shapes = tuple(LayerShape(*sizes) for sizes in state.facts.sizes)
    statistics, draws = Statistics(shapes, CONTEXT, CONTINUATION, protected=0), torch.Generator().manual_seed(0)
    texts = [ids_of(seed) for seed in range(12)]
    for ids in texts:
        states = calibrating._context(state, ids[None, :CONTEXT])
        for gradients in calibrating._gradients(state, ids[None, CONTEXT:], states, 8, draws):
            statistics.add_gradients(*calibrating._plain_gradients(state, gradients))
    trials = [Trial.of(model, ids, CONTEXT) for ids in texts]
    for layer, part in ((0, 0), (1, 1), (2, 0), (len(shapes) - 1, 1)):
        metric = statistics.metric(layer)[part]
        size = float((0.02 * CONTINUATION / CONTEXT / metric.trace()) ** 0.5)
        predicted = 0.5 * size**2 * float(metric.trace()) * CONTEXT / CONTINUATION
        costs = []
        for trial in trials:
            sides = [list(trial.chunk.keys), list(trial.chunk.values)]
            exact = sides[part][layer]
            for _ in range(3):
                sides[part][layer] = exact + size * torch.randn(exact.shape, generator=draws)
                costs.append(trial.divergence(type(trial.chunk)(trial.chunk.ids, *map(tuple, sides), "f")))
        assert predicted == pytest.approx(0.01)
        assert predicted / 2 < sum(costs) / len(costs) < predicted * 2, (layer, part)


def test_what_cannot_be_calibrated(attached):
    model = attached()
    with pytest.raises(ValueError, match=r"'raw' has no profile; choose from cachegen, klt, klt-xl"):
        calibrated(model, ("raw",))
    for passages in ([], passages_of(1), passages_of(1) * 3, passages_of(4, CONTINUATION + 9)):
        with pytest.raises(ValueError, match="at least two"):
            calibrate(model, passages, continuation=CONTINUATION, progress=False)
    for wrong in ({"protected": 65}, {"continuation": 0}, {"samples": 0}, {"unit_layers": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            calibrate(attached(), passages_of(3), ["klt"], **wrong)
    with torch.inference_mode(), pytest.raises(ValueError, match="outside of it"):
        calibrated(model)
    with pytest.raises(ValueError, match="eval"):
        calibrated(attach(tiny_model("llama")).train())


@pytest.mark.parametrize("divergence", [0.0, 1e9])
def test_a_model_that_no_error_changes_or_any(attached, monkeypatch, divergence):
    """Profiles stay within fp16, and code."""
    monkeypatch.setattr(Trial, "divergence", lambda *_: divergence)
    (chunk,) = prefill(attached(), [ids_of(99)], progress=False)
    for name, profile in calibrated(attached(), count=3).items():
        encode_chunk(chunk, get_codec(name, profile=profile))


def test_little_text_makes_smaller_units(attached):
    """256 channels cannot be learned from 94 tokens."""
    assert [calibrated(attached(), ["klt-xl"], n)["klt-xl"].settings["unit_layers"] for n in (3, 9, 20)] == [1, 2, 3]
    given = calibrated(attached(), ["klt-xl"], 3, unit_layers=4)["klt-xl"]
    assert given.settings["unit_layers"] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits(dtype):
    model = attach(tiny_model("llama", dtype=dtype))
    trial = Trial.of(model, ids_of(99), CONTEXT)
    assert trial.chunk.dtype == dtype
    for name, profile in calibrated(model).items():
        codec = get_codec(name, level=-8, profile=profile)
        read = decode_chunk(encode_chunk(trial.chunk, codec), profiles={profile.hash: profile})
        assert {t.dtype for t in (*read.keys, *read.values)} == {dtype}
        assert trial.divergence(read) < TARGET
