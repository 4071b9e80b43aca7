"""Correctors: what stays of chunks is changed as the oracle changes it, once, and nothing else."""

import pytest
import torch

import blendkv
from blendkv import BlendedCache, ChunkLibrary, prefill
from blendkv.correctors import Corrector, MeanShift, Temperature, corrector_names, get_corrector
from blendkv.testing import byte_tokenizer
from tests.helpers import make_case, run, tokens
from tests.loading.test_sparing import LENGTHS, loaded, stored
from tests.oracle import Placement, blend
from tests.test_blend import compare

BOTH = [(MeanShift(0.5), {"shift": 0.5}), (MeanShift(1.0), {"shift": 1.0}), (Temperature(0.8), {"temperature": 0.8})]


@pytest.mark.parametrize(("corrector", "want"), BOTH, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "smollm3"])
def test_what_stays_is_corrected_as_in_the_oracle(attached, family, ratio, corrector, want):
    model = attached(family)
    case = make_case(model)
    cache = BlendedCache(case.caches, ratio, corrector=corrector)
    compare(model, case, cache, {1: ratio} if ratio else {0: 0.0}, **want)
    assert cache.report.corrector == corrector.name
    plain = BlendedCache(case.caches, ratio)
    run(model, case.ids, plain)
    corrects = ratio < 1 and (ratio >= 0.5 or not corrector.compares)
    assert torch.equal(cache.layers[2].keys, plain.layers[2].keys) is not corrects or ratio == 0.15


@pytest.mark.parametrize(("corrector", "want"), BOTH, ids=lambda x: getattr(x, "name", ""))
def test_gradual_filtering_corrects_each_layer_once(attached, corrector, want):
    model, schedule = attached("qwen3"), {1: 0.6, 2: 0.4, 3: 0.1}
    case = make_case(model, seed=2)
    compare(model, case, BlendedCache(case.caches, check_layers=schedule, corrector=corrector), schedule, **want)


def test_rows_of_a_batch_are_corrected_by_their_own_errors(attached):
    model = attached("qwen2")
    cases = [make_case(model), make_case(model, (9, 17, 13), (0, 1, 2), seed=3)]
    other = make_case(model, (20, 3), (1, 0), seed=4, question=23)  # fewer chunk tokens: rows are ragged
    cases.append(other)
    ids = torch.cat([case.ids for case in cases])
    cache = BlendedCache([case.caches for case in cases], 0.3, corrector="mean-shift-0.7")
    got = run(model, ids, cache)
    for b, case in enumerate(cases):
        placements = [Placement(c, s) for c, s in zip(case.caches, case.starts, strict=True)]
        want = blend(model, case.ids[0], placements, {1: 0.3}, shift=0.7)
        torch.testing.assert_close(got.logits[b, -1].double(), want.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("corrector", ["mean-shift", "temperature"])
def test_the_question_pass_sees_what_was_stored_and_corrects_nothing_twice(attached, corrector):
    """The rows chosen are those without a corrector; then every layer is corrected as the oracle does it."""
    model = attached("llama")
    case = make_case(model)
    plain = BlendedCache(case.caches, 0.3, "attention")
    run(model, case.ids, plain, logits_to_keep=1)
    cache = BlendedCache(case.caches, 0.3, "attention", corrector=corrector)
    got = run(model, case.ids, cache, logits_to_keep=1)
    assert torch.equal(cache.recomputed[0], plain.recomputed[0])
    at = torch.cat([torch.arange(s, s + len(c)) for s, c in zip(case.starts, case.chunks, strict=True)]).sort().values
    placements = [Placement(c, s) for c, s in zip(case.caches, case.starts, strict=True)]
    scores = torch.isin(at, cache.recomputed[0]).float()
    how = {"shift": 1.0} if corrector == "mean-shift" else {"temperature": 0.95}
    want = blend(model, case.ids[0], placements, {0: 0.3}, scores, **how)
    torch.testing.assert_close(got.logits[0, -1].double(), want.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("corrector", ["mean-shift-1", "temperature-0.5"])
def test_exact_states_are_left_alone(attached, corrector):
    """The first chunk stands where it was computed, so it is what the model computes; the other is corrected."""
    model = attached("llama")
    a, b = prefill(model, [tokens(15, 1), tokens(15, 2)], progress=False)
    ids = torch.cat([a.ids, tokens(3, 3), b.ids, tokens(5, 4)])[None]
    cache, plain = BlendedCache([a, b], 0.3, corrector=corrector), BlendedCache([a, b], 0.3)
    for each in (cache, plain):
        run(model, ids, each, logits_to_keep=1)
    for layer, own in list(zip(cache.layers, plain.layers, strict=True))[1:]:
        assert torch.equal(layer.keys[..., :15, :], own.keys[..., :15, :])
        assert not torch.equal(layer.keys[..., 18:33, :], own.keys[..., 18:33, :])


@pytest.mark.parametrize("corrector", [None, "temperature-0.9", "mean-shift"])
def test_a_corrector_that_compares_loads_what_a_static_selector_would_leave_out(attached, corrector):
    model = attached("llama")
    case = make_case(model, LENGTHS)
    options = {"selector": "boundary", "recompute_ratio": 0.5, "corrector": corrector}
    chunks, progress, _ = loaded(case, stored(case.caches), options, rest=False)
    got = run(model, case.ids, BlendedCache(chunks, **options), logits_to_keep=1).logits
    assert torch.equal(got, run(model, case.ids, BlendedCache(case.caches, **options), logits_to_keep=1).logits)
    assert (progress.left_out_bytes == 0) is (corrector == "mean-shift")


def test_gaps_of_a_forecast_without_the_corrector_are_asked_for(attached):
    """Chunks with gaps, used by a prompt whose corrector compares: never NaN."""
    model = attached("llama")
    case = make_case(model, LENGTHS)
    options = {"selector": "boundary", "recompute_ratio": 0.5}
    chunks, progress, _ = loaded(case, stored(case.caches), options)
    assert progress.left_out_bytes > 0
    corrected = options | {"corrector": "mean-shift"}
    got = run(model, case.ids, BlendedCache(chunks, **corrected), logits_to_keep=1).logits
    assert torch.equal(got, run(model, case.ids, BlendedCache(case.caches, **corrected), logits_to_keep=1).logits)


def test_a_fork_and_a_library_keep_it(attached, tmp_path):
    model, tokenizer = attached("llama"), byte_tokenizer()
    case = make_case(model)
    assert BlendedCache(case.caches, corrector="mean-shift-2").fork().corrector == MeanShift(2.0)
    kv = ChunkLibrary(model, tokenizer, corrector="temperature-0.9")
    documents = ["one document of some length", "and another one"]
    inputs = kv(documents, "what?")
    assert inputs.cache.corrector == Temperature(0.9)
    assert kv(documents, "what?", corrector=None).cache.corrector is None
    kv.save_pretrained(tmp_path, documents)
    again = ChunkLibrary.from_pretrained(tmp_path, model, tokenizer)
    assert again(documents, "what?").cache.corrector == Temperature(0.9)


class Louder(Corrector):
    """A plug-in."""

    name = "louder"

    def correct(self, kept):
        return kept.keys, 2 * kept.values


def test_names():
    assert corrector_names() == ["mean-shift", "temperature"]
    assert get_corrector(None) is None
    assert get_corrector("mean-shift") == MeanShift(1.0)
    assert get_corrector("temperature-0.9") == Temperature(0.9)
    for corrector in (MeanShift(), MeanShift(0.25), Temperature(1.25)):
        assert get_corrector(corrector.name) == corrector
    own = Louder()
    assert get_corrector(own) is own


@pytest.mark.parametrize(
    "name",
    [
        "shift",
        "mean-shift-x",
        "mean-shift-0",
        "mean-shift--1",
        "mean-shift-nan",
        "temperature-0",
        "temperature-inf",
        0.5,
    ],
)
def test_what_is_none_is_refused_before_anything_is_computed(name):
    with pytest.raises(ValueError, match=r"corrector|mean-shift|temperature"):
        BlendedCache((), corrector=name)


def test_a_plug_in_is_found_by_its_family(monkeypatch):
    class Entry:
        name = "very-loud"

        def load(self):
            return Louder

    monkeypatch.setattr("blendkv.correctors.plugins", {"blendkv.correctors": {"very-loud": Entry()}}.get)
    assert isinstance(get_corrector("very-loud"), Louder)
    assert corrector_names() == ["mean-shift", "temperature", "very-loud"]
    with pytest.raises(ValueError, match="no argument"):
        get_corrector("very-loud-2")


def test_it_is_public():
    assert blendkv.correctors.get_corrector is get_corrector
