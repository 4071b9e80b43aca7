"""Figures of blendkv.bench.measure against cases worked out by hand."""

import math
import time

import pytest
import torch

from blendkv.bench.measure import (
    PeakMemory,
    exact_match,
    kl_divergence,
    median,
    normalize_answer,
    paired_bootstrap,
    time_to_first_token,
    token_f1,
)
from tests.patience import until

MIB = 1 << 20


def test_kl_of_two_coins_in_nats() -> None:
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    kl = kl_divergence(full, other + 3.0)  # logits are defined up to a constant
    assert kl.dtype == torch.float64
    assert kl.shape == (2,)
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0]
    torch.testing.assert_close(kl, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_kl_of_equal_logits_is_exactly_zero() -> None:
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert kl_divergence(logits, logits.clone()).eq(0).all()


def test_kl_with_impossible_tokens_and_unknown_rows() -> None:
    possible, masked = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, -torch.inf])
    assert kl_divergence(masked, possible).item() == pytest.approx(math.log(3 / 2))
    assert kl_divergence(masked, masked).item() == 0
    assert kl_divergence(possible, masked).item() == math.inf
    unknown = torch.tensor([0.0, 0.0, torch.nan])
    assert kl_divergence(unknown, possible).isnan()
    assert kl_divergence(masked, unknown).isnan()


def test_kl_does_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"differ in shape: \(2, 3\) and \(1, 3\)"):
        kl_divergence(torch.zeros(2, 3), torch.zeros(1, 3))


def test_bootstrap_interval() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)).double().tolist()
    interval = paired_bootstrap(values, n=2000, seed=3)
    assert interval == paired_bootstrap(values, n=2000, seed=3) != paired_bootstrap(values, n=2000, seed=4)
    assert interval.mean == pytest.approx(sum(values) / 200)
    assert interval.low < interval.mean < interval.high
    standard_error = torch.tensor(values).std().item() / math.sqrt(200)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_bootstrap_of_constant_and_of_nothing() -> None:
    assert paired_bootstrap([0.25] * 5, n=50) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="non-empty"):
        paired_bootstrap([])


def test_words_of_an_answer() -> None:
    assert normalize_answer("The  Cat, an (old) one: a U.S. theatre!") == ["cat", "old", "one", "us", "theatre"]


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], 1.0),
        ("the tower of Eiffel", ["Eiffel Tower"], 0.8),
        ("tower tower", ["tower"], 2 / 3),
        ("Paris", ["London", "paris, France"], 2 / 3),
        ("Paris", "Paris", 1.0),
        ("Paris", [], 0.0),
        ("", ["Paris"], 0.0),
        ("the", [""], 1.0),
    ],
)
def test_token_f1(prediction: str, answers: list[str], f1: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(f1)
    assert exact_match(prediction, answers) == (f1 == 1.0)


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_time_to_first_token_counts_repeats_after_warmup(monkeypatch) -> None:
    calls, now = [], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call() -> None:
        calls.append(None)
        now[0] += 100.0 if len(calls) <= 2 else 2.0**-8 * len(calls)

    assert time_to_first_token(call, repeats=3, warmup=2) == [2.0**-8 * calls for calls in (3, 4, 5)]
    assert len(calls) == 5


def test_time_to_first_token_is_of_this_machine() -> None:
    (seconds,) = time_to_first_token(lambda: time.sleep(0.01), repeats=1)
    assert seconds >= 0.01


def test_peak_memory_sees_what_was_freed_before_the_end() -> None:
    with PeakMemory() as memory:
        block = torch.ones(64 * MIB // 4)
        until(lambda: memory._peak - memory._start > 60 * MIB)
        del block
    assert 60 * MIB < memory.bytes < 96 * MIB


def test_peak_memory_ignores_what_was_held_before() -> None:
    held = torch.ones(64 * MIB // 4)
    with PeakMemory() as memory:
        time.sleep(0.01)
    assert held.numel()
    assert memory.bytes < 16 * MIB


def test_peak_memory_stops_its_thread_after_an_error() -> None:
    memory = PeakMemory()
    with pytest.raises(RuntimeError, match="inside"), memory:
        raise RuntimeError("inside")
    assert not memory._thread.is_alive()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_peak_and_time() -> None:
    with PeakMemory("cuda") as memory:
        torch.ones(64 * MIB // 4, device="cuda")
    assert memory.bytes == 64 * MIB
    square = torch.ones(4096, 4096, device="cuda")
    (seconds,) = time_to_first_token(lambda: square @ square, "cuda", repeats=1)
    assert seconds > 1e-4
