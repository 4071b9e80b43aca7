"""The online guard: what is checked, when it gives blends up, and when it blends again."""

import math
import random
import threading

import pytest
import torch

from blendkv import ChunkLibrary, Guard
from blendkv._compat import CACHE_ARG
from blendkv.cache import BlendedCache
from blendkv.divergence import kl_divergence
from blendkv.guard import compare
from blendkv.prefilling import prefill
from blendkv.testing import byte_tokenizer
from tests.helpers import full, generate, make_case

DOCUMENTS = ["Ada wrote notes on an engine.", "Bob slept all day, every day.", "Cid won a race in the rain."]


def ask(library, guard=None, **options):
    """One request, and its check."""
    inputs = library(DOCUMENTS, "Who wrote?", **options)
    output = library.model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return inputs, (guard or library.guard).check(library.model, inputs, output)


@pytest.fixture
def library(attached):
    def make(guard, **options):
        return ChunkLibrary(attached("llama"), byte_tokenizer(chat=True), guard=guard, **options)

    return make


def test_a_check_is_what_two_generates_would_tell(attached):
    model = attached("llama")
    case = make_case(model)
    answer = generate(model, case.ids, BlendedCache(case.caches, 0.2), max_new_tokens=5)[:, case.ids.shape[1] :]
    kl, agreement = compare(model, case.ids, answer, BlendedCache(case.caches, 0.2))
    whole = torch.cat([case.ids, answer], dim=1)
    logits = full(model, whole)[0][0, case.ids.shape[1] - 1 : -1]
    cache = BlendedCache(case.caches, 0.2)
    output = model.generate(
        case.ids, attention_mask=torch.ones_like(case.ids), max_new_tokens=5, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **{CACHE_ARG: cache},
    )  # fmt: skip
    blended = torch.cat(output.logits)
    assert kl == pytest.approx(float(kl_divergence(logits, blended).mean()), rel=1e-3)
    assert agreement == pytest.approx(float((logits.argmax(-1) == blended.argmax(-1)).float().mean()))
    exact = compare(model, case.ids, answer, BlendedCache(case.caches, 1.0))
    assert exact == pytest.approx((0, 1), abs=1e-6)


def test_a_bound_that_is_passed_gives_blends_up_and_good_checks_take_them_back(library):
    guard = Guard(1.0, kl=1e-4, agreement=0.0, least=2, window=4, recover=2)
    wrong = library(guard, recompute_ratio=0.0)
    first, check = ask(wrong)
    assert not check.ok
    assert not check.fallen_back
    second, check = ask(wrong)
    assert check.fallen_back
    assert guard.fallbacks == 1
    assert first.report.layers[-1].recomputed == second.report.layers[-1].recomputed == 0
    third, check = ask(wrong)
    assert third.report.layers[-1].reused == 0  # full recompute
    assert "the guard has fallen back: full recompute" in third.report.notes
    assert not check.ok
    assert check.kl > 1e-4
    right = library(guard, recompute_ratio=1.0)  # the same guard, a blend that is exact
    _, check = ask(right)
    assert check.ok
    assert check.fallen_back
    _, check = ask(wrong)  # a bad one in between: counted anew
    assert check.fallen_back
    assert [ask(right)[1].fallen_back for _ in range(2)] == [True, False]
    assert guard.report()["window"] == 1
    assert not guard.fallen_back
    assert ask(wrong)[0].report.layers[-1].reused > 0


def test_the_sample_is_a_share_and_what_is_not_in_it_costs_nothing(library, monkeypatch):
    guard = Guard(0.3, seed=5)
    asked = []
    monkeypatch.setattr("blendkv.guard.compare", lambda *args: asked.append(1) or (0.0, 1.0))
    made = library(guard)
    checks = [ask(made)[1] for _ in range(12)]
    rng = random.Random(5)
    assert [check is not None for check in checks] == [rng.random() < 0.3 for _ in range(12)]
    assert 0 < len(asked) < 12
    assert (guard.requests, guard.checks) == (12, len(asked))


def test_an_answer_is_checked_once_and_other_caches_never(library):
    guard = Guard(1.0)
    made = library(guard)
    inputs = made(DOCUMENTS, "Who?")
    output = made.model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert guard.check(made.model, inputs, output) is not None
    assert guard.check(made.model, inputs, output) is None
    assert guard.check(made.model, {"input_ids": inputs["input_ids"]}, output) is None


def test_a_check_that_fails_is_counted_and_warned_of(library, monkeypatch):
    def broken(*args):
        raise MemoryError("no room")

    monkeypatch.setattr("blendkv.guard.compare", broken)
    made = library(Guard(1.0))
    with pytest.warns(UserWarning, match=r"MemoryError: no room"):
        assert ask(made)[1] is None
    assert made.guard.failures == 1
    assert made.guard.checks == 0


def test_no_number_gives_blends_up_at_once(library, monkeypatch):
    monkeypatch.setattr("blendkv.guard.compare", lambda *args: (math.nan, 1.0))
    made = library(Guard(1.0, least=5))
    assert ask(made)[1].fallen_back


def test_threads_count_every_request(attached):
    model = attached("llama")
    chunks = prefill(model, [[1, 2, 3]], progress=False)
    guard = Guard(0.5)
    threads = [
        threading.Thread(target=lambda: [guard.cache(chunks, {"recompute_ratio": 0.1}) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guard.requests == 200


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0},
        {"share": 1.1},
        {"kl": 0},
        {"agreement": 2},
        {"least": 5, "window": 4},
        {"recover": 0},
        {"tokens": 0},
    ],
)
def test_bounds_that_cannot_be(options):
    with pytest.raises(ValueError, match=r"give|at least"):
        Guard(**options)
