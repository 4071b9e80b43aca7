import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import answer, ids_of, model_of

DOCUMENTS = [ids_of(30, seed)[0] for seed in (1, 2, 3)]
PROMPT = torch.cat([ids_of(4, 7), torch.cat(DOCUMENTS)[None], ids_of(10, 8)], dim=1)


def mlp_rows(model) -> list[int]:
    """Counts, while hooks live, the tokens that go through each layer's MLP."""
    rows = [0] * model.config.num_hidden_layers
    for i, layer in enumerate(model.model.layers):

        def count(module, args, i=i):
            rows[i] += args[0].shape[0] * args[0].shape[1]

        layer.mlp.register_forward_pre_hook(count)
    return rows


def test_d03_the_cache_is_empty_until_the_first_forward_and_full_after_it():
    """A built cache said length 0 and was thrown away (MemTensor/MemOS#2313): lengths are true at each step."""
    model = model_of()
    cache = BlendedCache(prefill(model, DOCUMENTS, progress=False))
    assert cache.chunk_tokens == 90
    assert cache.get_seq_length() == 0
    assert not cache.is_filled
    answer(model, PROMPT, cache, tokens=1)
    assert cache.is_filled
    assert len(cache.layers) == model.config.num_hidden_layers
    for i, layer in enumerate(cache.layers):
        assert cache.get_seq_length(i) == layer.get_seq_length() == PROMPT.shape[1]
        assert layer.is_initialized
        assert layer.keys.shape[-2] == layer.values.shape[-2] == PROMPT.shape[1]


@pytest.mark.parametrize("options", [{"recompute_ratio": r} for r in (0.0, 0.15, 1.0)] + [
    {"check_layers": {1: 0.5, 2: 0.2}},
    {"selector": "boundary", "recompute_ratio": 0.3},
])  # fmt: skip
def test_d03_the_tokens_each_mlp_sees_are_those_of_the_report(options):
    """Reuse that silently does not happen must fail here: rows through every MLP are counted, not believed."""
    model = attach(model_of())
    cache = BlendedCache(prefill(model, DOCUMENTS, progress=False), **options)
    rows = mlp_rows(model)
    answer(model, PROMPT, cache, tokens=1)
    layers, total = cache.report.layers, cache.report.tokens
    assert rows == [layer.through for layer in layers]
    assert all(layer.reused + layer.through == total for layer in layers[:-1])
    # in the last layer generate reads one row: keys and values of the others are computed, the MLP is not run
    assert layers[-1].through in (1, total - layers[-1].reused)
    if options.get("recompute_ratio") != 1.0:
        assert rows[-2] < PROMPT.shape[1] / 2
