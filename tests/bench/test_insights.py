"""CacheBlend's observations on a tiny model, beside slow twins; and their figures."""

import pytest
import torch

from blendkv.attaching import attach
from blendkv.bench.insights import ATTENTION, HELD, RANKS, held, insight_rows, kv_deviations, relative_distance
from blendkv.bench.tasks import Example
from blendkv.selectors import get_selector
from blendkv.testing import byte_tokenizer, tiny_model

EXAMPLE = Example("Who?", ["Ada: Ada wrote notes.\n\n", "Bob: Bob slept.\n\n", "Cid: Cid won.\n\n"], ["Ada"])


@pytest.fixture(scope="module")
def rows():
    with torch.random.fork_rng():
        model = attach(tiny_model("llama", attn_implementation="eager"))
    return insight_rows(model, byte_tokenizer(), [EXAMPLE, EXAMPLE], (0.0, 0.5, 1.0), get_selector("hkvd"))


def test_attention_comes_nearer_with_the_share_and_is_exact_at_1(rows):
    mean = {row["ratio"]: row["value"] for row in rows if row["figure"] == ATTENTION and row["layer"] is None}
    assert mean[0.0] > mean[0.5] > mean[1.0]
    assert mean[1.0] == pytest.approx(0, abs=1e-4)
    by_layer = [
        row["value"] for row in rows if row["figure"] == ATTENTION and row["ratio"] == 0.0 and row["layer"] is not None
    ]
    assert len(by_layer) == 4
    assert mean[0.0] == pytest.approx(sum(by_layer) / 4)


def test_ranks_are_correlated_between_neighbouring_layers_that_deviate(rows):
    ranks = {row["layer"]: row["value"] for row in rows if row["figure"] == RANKS}
    assert sorted(ranks) == [1, 2]  # layer 0 does not deviate, layer 3 has no next one
    assert all(-1 <= value <= 1 for value in ranks.values())
    shares = {row["layer"]: row["value"] for row in rows if row["figure"] == HELD}
    assert sorted(shares) == [1, 2, 3]
    assert all(0.15 < value < 1 for value in shares.values())


def test_by_hand():
    keys, other = torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3, 2)
    keys[0, :, 1:] = 1.0
    other[0, 0, 2] = 3.0
    (found,) = kv_deviations([(keys, keys)], [(other, keys)], 1, 3)
    # token 1: 4 over a mean square of 4; token 2: (1-3)^2 * 2 + 1 * 2 = 10 over 4
    assert found.tolist() == [1.0, 2.5]
    assert held(torch.tensor([1.0, 7.0, 1.0, 1.0]), 0.25) == pytest.approx(0.7)
    weights, wanted = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[[1.0, 0.0]]]])
    assert relative_distance(weights, wanted) == pytest.approx(0.5**0.5)


def test_attention_that_tells_no_weights_is_said(attached):
    with pytest.raises(ValueError, match="eager"):
        insight_rows(attached("llama"), byte_tokenizer(), [EXAMPLE], (0.0,), get_selector("hkvd"))
