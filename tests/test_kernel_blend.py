"""A whole blend by Triton kernels equals the torch path. On the CPU the kernels are interpreted."""

import functools

import pytest
import torch

from blendkv import BlendedCache, attach, kernels, prefill
from blendkv.chunk import MissingChunk
from blendkv.selectors import HKVD, Attention, Boundary, get_selector
from blendkv.testing import tiny_model
from tests.helpers import full, make_case, run, tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the card: tests/test_gpu.py")
attention = pytest.importorskip("blendkv.kernels.attention")

LENGTHS, QUESTION = (13, 9, 17), 4
SLIDING_FIRST, FULL_FIRST = (
    {"sliding_window": 12, "layer_types": types}
    for types in (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"])
)
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma2": {"attn_implementation": "eager", "attn_logit_softcapping": 2.0, **SLIDING_FIRST},
    "gemma3_text": FULL_FIRST,
    "gpt_oss": {"attn_implementation": "eager", "num_local_experts": 4, **SLIDING_FIRST},
}


@functools.cache
def _model(family, layers, dtype):
    model = tiny_model(family, num_hidden_layers=layers, dtype=dtype, **FAMILIES[family])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return attach(model)


@pytest.fixture
def model():
    """`model(family)`: two layers; shared by the tests here."""
    return lambda family="llama", layers=2, dtype=torch.float32: _model(family, layers, dtype)


@pytest.fixture
def compare(monkeypatch):
    """`compare(model, ids, make_cache)`: both paths; logits, keys, values and rows must agree. Returns the cache."""

    def check(model, ids, make_cache, notes=(), **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "unusable", lambda *args: "for comparison")
            by_torch = make_cache()
            want = run(model, ids, by_torch, **kwargs).logits
            patch.setattr(kernels, "unusable", lambda *args: None)
            by_kernels = make_cache()
            got = run(model, ids, by_kernels, **kwargs).logits
        assert by_torch.report.kernels == "torch and SDPA (for comparison)"
        assert by_kernels.report.kernels == "Triton"
        assert by_kernels.report.notes == list(notes)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert not got[:, -1].isnan().any()
        real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()  # padding sees nothing: anything may be there
        for ours, theirs in zip(by_kernels.layers, by_torch.layers, strict=True):
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert a.isfinite().all()
                torch.testing.assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real], atol=1e-4, rtol=1e-4)
        assert by_kernels.report.layers == by_torch.report.layers
        assert any(layer.reused for layer in by_kernels.report.layers)
        return by_kernels

    return check


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(model, compare, family, ratio):
    model = model(family)
    case = make_case(model, LENGTHS, question=QUESTION)
    compare(model, case.ids, lambda: BlendedCache(case.caches, ratio), logits_to_keep=1)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_keys_in_parts(model, compare, monkeypatch, family):
    """As where a card has more processors than a layer has rows: parts of the keys apart, then joined."""
    model, joined = model(family), []
    case = make_case(model, LENGTHS, question=QUESTION)
    choose = attention.choose_tiling
    monkeypatch.setattr(attention, "_card", lambda device: (8, 2**16))
    monkeypatch.setattr(attention, "choose_tiling", lambda *args: joined.append(choose(*args)) or joined[-1])
    compare(model, case.ids, lambda: BlendedCache(case.caches, 0.3), logits_to_keep=1)
    assert max(tiling.splits for tiling in joined) > 1


@pytest.mark.parametrize(
    ("family", "selector"),
    [("mistral", HKVD("k")), ("qwen3", HKVD("v")), ("qwen3", HKVD("kv")), ("llama", Boundary())],
)
def test_gradual_schedule(model, compare, family, selector):
    model = model(family, layers=3)
    case = make_case(model, LENGTHS, question=QUESTION, seed=2)
    cache = compare(
        model, case.ids, lambda: BlendedCache(case.caches, selector=selector, check_layers={1: 0.6, 2: 0.3})
    )
    assert [layer.recomputed for layer in cache.report.layers] == [39, 23, 12]


@pytest.mark.parametrize("family", FAMILIES)
def test_question_pass(model, monkeypatch, family):
    """What the question attends to is the same by kernels and by torch, and so are the rows chosen."""
    model, found = model(family), {}
    cases = [make_case(model, LENGTHS, question=QUESTION)]
    if family in ("llama", "gemma2"):  # two rows: the interpreter takes its time for each
        cases.append(make_case(model, (8, 15, 16), (1, 0, 2), seed=3, question=QUESTION))
    for how, reason in (("torch", "for comparison"), ("kernels", None)):

        class Spy(Attention):
            def score(self, candidates, how=how):
                found.setdefault(how, []).append(candidates)
                return super().score(candidates)

        monkeypatch.setattr(kernels, "unusable", lambda *args, reason=reason: reason)
        cache = BlendedCache([case.caches for case in cases], 0.3, Spy())
        run(model, torch.cat([case.ids for case in cases]), cache)
        assert cache.report.kernels == ("Triton" if reason is None else "torch and SDPA (for comparison)")
    for ours, theirs in zip(found["kernels"], found["torch"], strict=True):
        for layer, attention in theirs.attention.items():
            torch.testing.assert_close(ours.attention[layer], attention, atol=1e-4, rtol=1e-4)


def test_selector_that_asks_and_compares(model, compare):
    model = model("mistral", layers=3)
    case = make_case(model, LENGTHS, question=QUESTION, seed=2)
    selector = get_selector("attention*hkvd-v^0.5")
    compare(model, case.ids, lambda: BlendedCache(case.caches, selector=selector, check_layers={1: 0.6, 2: 0.3}))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_two_prompts_of_different_length(model, compare, family, ratio):
    """The shorter one is padded on the left; its hidden keys are seen by nobody."""
    model = model(family)
    long, short = make_case(model, LENGTHS, question=QUESTION), make_case(model, (8, 15), (1, 0), seed=3, question=2)
    gap = long.ids.shape[1] - short.ids.shape[1]
    ids = torch.cat([long.ids, torch.nn.functional.pad(short.ids, (gap, 0))])
    mask = torch.ones_like(ids)
    mask[1, :gap] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    chunks = [long.caches, short.caches]
    cache = compare(
        model,
        ids,
        lambda: BlendedCache(chunks, ratio),
        attention_mask=mask,
        position_ids=positions,
        logits_to_keep=1,
    )
    assert cache.report.tokens == int(mask.sum())


def test_padding_hides_nothing_of_the_prompt(model, monkeypatch):
    """A padded prompt gives the logits that it gives alone."""
    monkeypatch.setattr(kernels, "unusable", lambda *args: None)
    model = model("llama")
    case = make_case(model, LENGTHS, question=QUESTION)
    alone = run(model, case.ids, BlendedCache(case.caches, 0.3), logits_to_keep=1).logits
    ids = torch.nn.functional.pad(case.ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(case.ids), (5, 0))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = run(
        model,
        ids,
        BlendedCache(case.caches, 0.3),
        attention_mask=mask,
        position_ids=positions,
        logits_to_keep=1,
    ).logits
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_gaps_a_repeat_and_a_missing_chunk(model, compare, ratio):
    """A chunk of which three tokens were changed, one that stands twice, one that nobody has."""
    model = model("llama")
    a, b, c = tokens(24, 1), tokens(9, 2), tokens(11, 3)
    chunk_a, chunk_b = prefill(model, [a, b], progress=False)
    changed = a.clone()
    changed[20:] = tokens(4, 9)
    ids = torch.cat([tokens(2, 4), b, changed, c, b, tokens(3, 5)])[None]
    cache = compare(model, ids, lambda: BlendedCache([chunk_b, chunk_a, MissingChunk(c)], ratio), logits_to_keep=1)
    assert [(use.found, use.reason) for use in cache.report.chunks] == [(18, ""), (20, "partial"), (11, "absent")]


@pytest.mark.parametrize("keep", [3, 0])
def test_a_chunk_cut_by_the_rows_whose_logits_are_wanted(model, compare, keep):
    """The prompt ends within a chunk, whose last rows are fresh then; `keep=0` wants all logits."""
    model = model("qwen3")
    a, b = tokens(20, 1), tokens(18, 2)
    chunks = prefill(model, [a, b], progress=False)
    ids = torch.cat([a, tokens(2, 3), b])[None]
    cache = compare(model, ids, lambda: BlendedCache(chunks, 0.0), logits_to_keep=keep)
    assert cache.report.layers[0].reused == 38 - max(keep, 1)


def test_exact_chunks_stay_exact(model, monkeypatch):
    """Against the model itself, not against our own torch path: the first chunk of a prompt is exact where it is."""
    model = model("mistral")  # proven before kernels are used
    monkeypatch.setattr(kernels, "unusable", lambda *args: None)
    ids = tokens(40, 6)[None]
    (chunk,) = prefill(model, [ids[0, :30]], progress=False)
    want, _ = full(model, ids)
    for ratio in (0.0, 0.5):
        got = run(model, ids, BlendedCache([chunk], ratio), logits_to_keep=2).logits
        torch.testing.assert_close(got[:, -2:], want[:, -2:], atol=1e-4, rtol=1e-4)


def test_half_precision(model, monkeypatch):
    model = model("llama", dtype=torch.float16)
    case = make_case(model, LENGTHS, question=QUESTION)
    by_kernels = BlendedCache(case.caches, 0.0)
    by_torch = BlendedCache(case.caches, 0.0)
    with monkeypatch.context() as patch:
        want = run(model, case.ids, by_torch, logits_to_keep=1).logits[:, -1].float()
        patch.setattr(kernels, "unusable", lambda *args: None)
        got = run(model, case.ids, by_kernels, logits_to_keep=1).logits[:, -1].float()
    assert (got - want).square().mean().sqrt() <= 5e-3 * want.square().mean().sqrt()


def test_a_mask_that_kernels_do_not_know_goes_through_sdpa(model, compare, monkeypatch):
    monkeypatch.setattr("blendkv.attention.LazyMask.band", lambda self: None)
    model = model("llama")
    case = make_case(model, LENGTHS, question=QUESTION)
    note = "an attention mask that the kernels do not know: SDPA for its layers"
    compare(model, case.ids, lambda: BlendedCache(case.caches, 0.3), notes=[note])


def test_hidden_states_of_all_layers(model, compare):
    """Those come from SDPA: somebody may want attentions, too."""
    model = model("llama")
    case = make_case(model, LENGTHS, question=QUESTION)
    compare(model, case.ids, lambda: BlendedCache(case.caches, 0.3), output_hidden_states=True)
