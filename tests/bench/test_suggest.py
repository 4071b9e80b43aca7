"""What `verify --suggest` decides from figures, and that it says when it cannot."""

import pytest

from blendkv.bench.suggest import decide, own_prompts, suggest
from blendkv.bench.tasks import READERS
from blendkv.testing import byte_tokenizer

REUSE, CHEAP, DEAR, RANDOM = (
    ("reuse", None, 0.0),
    ("blend", "boundary", 0.1),
    ("blend", "hkvd", 0.3),
    ("blend", "random", 0.01),
)


def figures(**kls):
    """Of each setting the KL of its prompts."""
    budgets = {"reuse": 0.0, "cheap": 0.1, "dear": 0.35, "random": 0.01, "full": 1.0}
    keys = {"reuse": REUSE, "cheap": CHEAP, "dear": DEAR, "random": RANDOM, "full": ("full", None, None)}
    common = {"kl_first": 0.0, "same": True, "f1": None, "rouge_l": None, "ttft_s": 0.1}
    return {
        keys[name]: [common | {"charged_budget": budgets[name], "kl": kl} for kl in values]
        for name, values in kls.items()
    }


def decided(**kls):
    given = figures(full=[0.0] * len(kls["reuse"]), **kls)
    return decide(given, list(given), 0.05, "own.jsonl")


def test_the_cheapest_that_holds_on_prompts_it_was_not_chosen_on():
    found = decided(reuse=[0.3, 0.2] * 10, cheap=[0.02, 0.03] * 10, dear=[0.01, 0.01] * 10)
    assert (found.selector, found.ratio, found.certain) == ("boundary", 0.1, True)
    assert "0.0300" in found.told
    assert "holds" in found.told
    assert [row["holds"] for row in found.rows] == ["does not hold", "holds", "holds"]
    assert [row["charged_budget"] for row in found.rows] == pytest.approx([0.0, 0.1, 0.35])


def test_a_control_is_never_suggested():
    found = decided(reuse=[0.3] * 20, random=[0.0] * 20, dear=[0.01] * 20)
    assert found.selector == "hkvd"


def test_one_that_was_lucky_where_it_was_chosen_is_not_suggested():
    found = decided(reuse=[0.3] * 20, cheap=[0.01, 0.2] * 10, dear=[0.01] * 20)
    assert found.selector is None
    assert "does not hold" in found.told


def test_one_whose_interval_passes_the_bound_is_likely_and_no_more():
    noisy = [0.0, 0.0, 0.0, 0.1] * 5
    found = decided(reuse=[0.3] * 20, cheap=noisy, dear=[0.01] * 20)
    assert found.selector is None or not found.certain
    assert not found.certain
    found = decided(reuse=[0.3] * 20, cheap=[0.0, 0.0, 0.0, 0.08] * 5, dear=[0.01] * 20)
    assert (found.selector, found.certain) == ("boundary", False)
    assert "likely, not certain. About" in found.told


def test_few_prompts_suggest_nothing():
    found = decided(reuse=[0.0] * 7, cheap=[0.0] * 7)
    assert (found.selector, found.ratio) == (None, None)
    assert "7 prompts are too few" in found.told
    assert found.rows


def test_nothing_holds():
    found = decided(reuse=[0.3] * 20, dear=[0.2] * 20)
    assert found.selector is None
    assert "the nearest is hkvd at 30% with 0.2000" in found.told


def test_on_a_model(attached, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "Who?", "chunks": ["Ada was here. ", "Bob was not. "]}\n' * 8)
    assert "plain" in READERS
    found = suggest(attached("llama"), byte_tokenizer(), data=path, selectors=("hkvd",), ratios=(0.05, 1.0), bound=1e-8)
    assert (found.selector, found.ratio, found.certain) == ("hkvd", 1.0, True)
    assert found.source == "own.jsonl"
    assert found.to_dict()["rows"][0]["method"] == "reuse"


def test_the_package_has_a_few_prompts():
    prompts = own_prompts()
    assert len(prompts) == 3
    for prompt in prompts:
        assert len(set(prompt.chunks)) == 6
        assert any(prompt.answers[0].lower() in chunk.lower() for chunk in prompt.chunks)
