"""What a codec costs: divergence of a continuation after a context that went through it."""

import pytest
import torch

from blendkv import attach
from blendkv.codecs import get_codec
from blendkv.families import tiny_family
from blendkv.trials import Trial, log_likelihood
from tests.chunks import assert_same
from tests.helpers import full, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "glm"])
def test_a_continuation_after_an_exact_context(family):
    """Next tokens are those of one forward over the whole text."""
    eager = "eager" if family == "gemma2" else None  # older transformers leave its softcap out under sdpa
    model, ids = attach(tiny_family(family, attn_implementation=eager)), tokens(50, 1) % 384
    trial = Trial.of(model, ids, 40)
    logits, _ = full(model, ids[None])
    wanted = logits[0, 40:].float().log_softmax(-1)
    found = log_likelihood(model, ids[40:], list(zip(trial.chunk.keys, trial.chunk.values, strict=True)))
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)
    assert trial.likely.shape == (10, wanted.shape[1])
    assert float((trial.likely - wanted).abs().max()) < 0.1  # its context is in 16 bits


def test_divergence(attached):
    """Nothing for what is exact, in nats by hand for what is not."""
    model, ids = attached(), tokens(50, 1)
    trial = Trial.of(model, ids, 40)
    raw = trial.through(get_codec("raw"))
    assert_same(raw, trial.chunk)
    assert 0 <= trial.divergence(raw) < 1e-4
    other = Trial.of(model, torch.cat([tokens(40, 2), ids[40:]]), 40)
    p, q = (
        trial.likely.double(),
        log_likelihood(model, ids[40:], [*zip(other.chunk.keys, other.chunk.values, strict=True)]),
    )
    wanted = torch.nn.functional.kl_div(q.double(), p, log_target=True, reduction="sum") / 10
    assert trial.divergence(other.chunk) == pytest.approx(float(wanted), rel=1e-4)
    assert wanted > 0.1


def test_a_16_bit_model_is_compared_with_itself():
    trial = Trial.of(attach(tiny_family("llama").bfloat16()), tokens(50, 1) % 384, 40)
    assert trial.divergence(trial.through(get_codec("raw"))) == 0
