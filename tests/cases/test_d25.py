import pytest
import torch

from blendkv import BlendedCache, attach, prefill, proof
from blendkv.attaching import attachment_of
from tests.cases.common import assert_same_run, forward, ids_of, model_of

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
RATIOS = [0.0, 0.1, 0.2, 0.4, 0.7, 1.0]


def prompts(count: int):
    """Prompts of four chunks of 20 to 35 tokens and a question."""
    for seed in range(count):
        chunks = [ids_of(20 + (seed * 7 + i * 5) % 16, 1000 + 10 * seed + i)[0] for i in range(4)]
        yield chunks, torch.cat([torch.cat(chunks)[None], ids_of(8, 5000 + seed)], dim=1)


def mlp_rows(model, ids, cache) -> list[int]:
    """Tokens that went through each layer's MLP."""
    rows: list[int] = []
    handles = [la.mlp.register_forward_pre_hook(lambda m, a: rows.append(a[0].shape[1])) for la in model.model.layers]
    forward(model, ids, cache)
    for handle in handles:
        handle.remove()
    return rows


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return attach(model_of(request.param))


def test_d25_ratio_one_is_full_prefill_and_ratio_zero_computes_no_chunk_token(model):
    """Raising the ratio made answers worse and 0 still recomputed (LMCache/LMCache#305): both ends are exact."""
    for texts, ids in prompts(20):
        chunks = prefill(model, texts, progress=False)
        assert_same_run(forward(model, ids, BlendedCache(chunks, recompute_ratio=1.0)), forward(model, ids))
        cache = BlendedCache(chunks, recompute_ratio=0.0)
        assert mlp_rows(model, ids, cache) == [8] * len(model.model.layers)
        assert all(layer.recomputed == 0 and layer.probed == 0 for layer in cache.report.layers)
        assert cache.report.charged_budget == 0


def test_d25_the_error_falls_as_the_ratio_grows(model):
    """More recomputing is never worse on average: a row that got another token's values would show here."""
    errors = torch.zeros(len(RATIOS))
    for texts, ids in prompts(20):
        chunks, full = prefill(model, texts, progress=False), forward(model, ids).logits
        for i, ratio in enumerate(RATIOS):
            run = forward(model, ids, BlendedCache(chunks, recompute_ratio=ratio))
            errors[i] += (run.logits - full).abs().mean() / 20
    for more, less in zip(errors[1:], errors[:-1], strict=True):
        assert more <= 1.05 * less, errors
    assert errors[-1] < 1e-4 < errors[0]


def test_d25_the_gate_is_part_of_the_package(model):
    """The checks behind `blendkv verify` pass on every one of these models, each with its figure and bound."""
    checks = list(proof.exactness_checks(attachment_of(model)))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    assert len({check.name for check in checks}) == len(checks) >= len(model.model.layers) + 8


def test_d25_the_gate_fails_when_rows_get_another_tokens_values(model, monkeypatch):
    """Control: rows scattered one place off, the bug of the report, must not pass."""
    from blendkv import buffers

    scatter = buffers._scatter
    off = lambda buffer, rows, states: scatter(buffer, rows, states.roll(1, dims=2))  # noqa: E731
    monkeypatch.setattr(buffers, "_scatter", off)
    checks = list(proof.exactness_checks(attachment_of(model)))
    assert any(not check.ok for check in checks)
