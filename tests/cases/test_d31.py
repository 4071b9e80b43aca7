import warnings

import pytest
import torch

from blendkv import BlendedCache, attach, prefill
from tests.cases.common import answer, assert_same_answer, ids_of, model_of

peft = pytest.importorskip("peft")

DOCUMENTS = [ids_of(15, seed)[0] for seed in (1, 2)]
PROMPT = torch.cat([torch.cat(DOCUMENTS)[None], ids_of(8, 3)], dim=1)
ADAPTERS = ("A", "B", "none", "A at another scale")


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    """A PEFT model with adapters A and B that change what it says."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model_of(attn_implementation=request.param), config, adapter_name="A")
        wrapped.add_adapter("B", config)
    return attach(wrapped.eval())


class Chosen:
    """An adapter in use, as long as the block lasts."""

    def __init__(self, model, which: str) -> None:
        self.model, self.which = model, which
        self.off = model.disable_adapter() if which == "none" else None

    def scale(self, by: float) -> None:
        """The scale of adapter A in every layer."""
        for module in self.model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("A", by)

    def __enter__(self) -> None:
        self.model.set_adapter("B" if self.which == "B" else "A")
        if self.off is not None:
            self.off.__enter__()
        if self.which == ADAPTERS[3]:
            self.scale(0.5)

    def __exit__(self, *error) -> None:
        if self.off is not None:
            self.off.__exit__(*error)
        if self.which == ADAPTERS[3]:
            self.scale(1.0)


def test_d31_each_adapter_and_scale_has_keys_of_its_own(model):
    """Adapter B was served what was computed under A (vllm-project/vllm#44250)."""
    keys = {}
    for which in ADAPTERS:
        with Chosen(model, which):
            keys[which] = frozenset(chunk.key for chunk in prefill(model, DOCUMENTS, progress=False))
    assert len(set.union(*map(set, keys.values()))) == len(DOCUMENTS) * len(ADAPTERS)
    with Chosen(model, "A"):  # and the same again when it comes back
        assert {chunk.key for chunk in prefill(model, DOCUMENTS, progress=False)} == keys["A"]


def test_d31_switching_gives_each_adapters_own_answer(model):
    """With every adapter's chunks at hand, each call uses those of the adapter that is on, and counts the others."""
    stored = {}
    for which in ADAPTERS:
        with Chosen(model, which):
            stored[which] = prefill(model, DOCUMENTS, progress=False)
    answers = {}
    for which in (*ADAPTERS, *reversed(ADAPTERS)):
        with Chosen(model, which):
            cache = BlendedCache(stored[which], recompute_ratio=1.0)
            got = answer(model, PROMPT, cache)
            assert_same_answer(got, answer(model, PROMPT))
            assert not cache.report.misses
            for other in set(ADAPTERS) - {which}:
                cache = BlendedCache(stored[other], recompute_ratio=0.0)
                assert_same_answer(answer(model, PROMPT, cache), got)
                assert cache.report.misses == {"fingerprint": 30}
            answers[which] = got[1]
    for i, one in enumerate(ADAPTERS):
        for other in ADAPTERS[i + 1 :]:
            assert float((answers[one] - answers[other]).abs().max()) > 0.1  # the adapters do something


def test_d31_merging_changes_the_fingerprint(model):
    """A merged into the base is another model: neither the base's chunks nor A's are its own."""
    with Chosen(model, "none"):
        bare = prefill(model, DOCUMENTS, progress=False)
    with Chosen(model, "A"):
        adapted = prefill(model, DOCUMENTS, progress=False)
    model.set_adapter("A")
    model.merge_adapter(["A"])
    merged = prefill(model, DOCUMENTS, progress=False)
    assert len({chunk.fingerprint for chunk in (bare[0], adapted[0], merged[0])}) == 3
    cache = BlendedCache(merged, recompute_ratio=1.0)
    assert_same_answer(answer(model, PROMPT, cache), answer(model, PROMPT))
    model.unmerge_adapter()
    base = attach(model.merge_and_unload(adapter_names=["A"]))
    assert prefill(base, DOCUMENTS, progress=False)[0].fingerprint not in {bare[0].fingerprint, adapted[0].fingerprint}
