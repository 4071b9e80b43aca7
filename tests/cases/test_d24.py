import pytest
import torch

from blendkv import BlendedCache, prefill
from tests.cases.common import answer, assert_same_answer, assert_same_run, forward, ids_of, model_of

TEXTS = {name: ids_of(length, seed)[0] for seed, (name, length) in enumerate({"A": 40, "B": 25, "C": 33}.items())}
QUESTION = ids_of(7, 9)


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def stored(model):
    return dict(zip(TEXTS, prefill(model, list(TEXTS.values()), progress=False), strict=True))


def prompt(order: str, question: bool) -> torch.Tensor:
    ids = torch.cat([TEXTS[name] for name in order])[None]
    return torch.cat([ids, QUESTION], dim=1) if question else ids


@pytest.mark.parametrize("question", [True, False])
@pytest.mark.parametrize("order", ["CAB", "AAB", "ABC", "A", "AAAA"])
class TestD24:
    def test_d24_any_order_and_repeats_equal_full_prefill_at_ratio_one(self, model, stored, order, question):
        """Prompts made of cached chunks only, in another order or repeated, crashed (LMCache/LMCache#938)."""
        ids = prompt(order, question)
        cache = BlendedCache([stored[name] for name in order], recompute_ratio=1.0)
        assert_same_run(forward(model, ids, cache), forward(model, ids))

    def test_d24_twice_in_a_row_is_the_same_twice(self, model, stored, order, question):
        """The second run of a prompt meets nothing that the first one left behind."""
        ids = prompt(order, question)
        chunks = [stored[name] for name in order]
        first, second = (answer(model, ids, BlendedCache(chunks)) for _ in range(2))
        assert first[0].tolist() == second[0].tolist()
        assert torch.equal(first[1], second[1])
        exact = [answer(model, ids, BlendedCache(chunks, recompute_ratio=1.0)) for _ in range(2)]
        for got in exact:
            assert_same_answer(got, answer(model, ids))

    @pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
    def test_d24_every_copy_is_found_and_counted(self, model, stored, order, question, ratio):
        """Each token of each copy is accounted for, whether the chunk was named once or as often as it stands there."""
        ids = prompt(order, question)
        for names in (order, "".join(sorted(set(order)))):
            cache = BlendedCache([stored[name] for name in names], recompute_ratio=ratio)
            run = forward(model, ids, cache)
            assert torch.isfinite(run.logits).all()
            assert cache.report.chunk_tokens == ids.shape[1] - (7 if question else 1)
            for layer in cache.report.layers:
                assert layer.reused + layer.recomputed == cache.report.chunk_tokens
                assert layer.fresh == ids.shape[1] - cache.report.chunk_tokens
            assert all(use.hit for use in cache.report.chunks)
