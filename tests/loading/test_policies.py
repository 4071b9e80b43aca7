"""Which level, or text: rules in counted time, on links that hold, change, collapse and die."""

import math

import numpy as np
import pytest

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.oracle import best
from blendkv.bench.simulation import simulate
from blendkv.loading.policies import LATEST, Adaptive, FixedLevel, InOrder, Text
from blendkv.loading.streaming import Item, Rung, Stream
from blendkv.loading.throughput import Throughput

COUNT, TEXT_S, RAW = 10, 0.5, 4_000_000
ALL_TEXT = COUNT * TEXT_S
RUNGS = (
    Rung("raw", RAW, 0.0, 0.01),
    Rung("fine", RAW // 5, 0.002, 0.02),
    Rung("good", RAW // 8, 0.005, 0.02),
    Rung("fair", RAW // 12, 0.02, 0.02),
    Rung("poor", RAW // 20, 0.1, 0.02),
)
ITEMS = [Item(RUNGS, TEXT_S)] * COUNT


def steady(seconds):
    """A link that brings everything raw in so many seconds."""
    return Bandwidth.constant(COUNT * RAW / seconds)


def run(policy, link, target=ALL_TEXT, items=ITEMS, **settings):
    return simulate(items, policy, link, target, horizon_s=1000.0, **settings)


def test_fixed_levels_take_what_their_bytes_take():
    for rung in RUNGS:
        out = run(FixedLevel(rung.name), steady(10.0))
        assert out.chosen == (rung.name,) * COUNT
        assert out.ttft_s == pytest.approx(10.0 * rung.nbytes / RAW + rung.decode_s, rel=1e-3)
        assert out.brought == COUNT * rung.nbytes
    assert run(Text(), steady(10.0)).ttft_s == pytest.approx(ALL_TEXT)
    assert run(Text(), steady(10.0), after_s=0.5).ttft_s == pytest.approx(ALL_TEXT + 0.5)
    assert run(FixedLevel("raw"), Bandwidth((0.0,))).ttft_s == math.inf


def test_a_level_that_is_not_there_is_text():
    items = [*ITEMS[:3], Item(RUNGS[1:], TEXT_S), Item((), TEXT_S)]
    out = run(FixedLevel("raw"), steady(1.0), items=items)
    assert out.chosen == ("raw", "raw", "raw", "text", "text")
    assert set(run(Adaptive(), steady(1000.0), items=items).chosen[4:]) == {"text"}


def test_a_quick_link_gives_the_best_and_a_dead_one_text():
    assert run(Adaptive(), steady(0.5)).loss <= Adaptive().enough
    out = run(Adaptive(), Bandwidth((0.0,)))
    assert out.chosen == ("text",) * COUNT
    assert out.ttft_s == pytest.approx(ALL_TEXT)


def test_adaptive_never_needs_more_than_it_would_without_a_link():
    """Never later than recomputing everything and a tenth, and than the target where text alone would keep it."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        rates = np.exp(rng.uniform(-4, 3, 30)) * (rng.uniform(size=30) > 0.3)
        link = Bandwidth(tuple(rates * COUNT * RAW / 5), 0.25, repeat=bool(rng.integers(2)))
        for slo in (0.5, 1.0, 2.0):
            out = run(Adaptive(), link, slo * ALL_TEXT, latency_s=0.005)
            assert out.ttft_s <= LATEST * ALL_TEXT * (1 + 1e-9)
            if slo >= 1:
                assert out.ttft_s <= slo * ALL_TEXT * (1 + 1e-9)
            assert all(out.chosen)
            assert out.loss == pytest.approx(
                np.mean([{r.name: r.loss for r in RUNGS}.get(name, 0.0) for name in out.chosen])
            )


@pytest.mark.parametrize("at", [0.0, 0.3, 1.0, 2.0])
def test_an_outage_is_survived_wherever_it_begins(at):
    rate = COUNT * RAW / 4.0
    link = Bandwidth((*[rate] * round(at / 0.1), 0.0), 0.1, repeat=False)
    out = run(Adaptive(), link, 0.5 * ALL_TEXT)
    assert out.ttft_s <= LATEST * ALL_TEXT
    fixed = run(FixedLevel("poor"), link, 0.5 * ALL_TEXT)
    assert fixed.ttft_s == math.inf or fixed.ttft_s < 2.0


def test_a_link_that_collapses_makes_it_take_less():
    rate = COUNT * RAW / 2.0
    steady_link, falls = Bandwidth.constant(rate), Bandwidth((rate, rate / 100), 0.4, repeat=False)
    before, after = (run(Adaptive(enough=0.002), link, 0.4 * ALL_TEXT) for link in (steady_link, falls))
    assert after.loss > before.loss or after.text_s > before.text_s
    assert after.ttft_s <= LATEST * ALL_TEXT
    assert before.ttft_s <= 0.4 * ALL_TEXT


def test_the_level_follows_a_fall_within_two_chunks():
    rate = COUNT * RAW / 2.0

    class Watching(Adaptive):
        def load(self, stream, now):
            load = super().load(stream, now)
            if load is not None:
                asked.append((now, load.item, load.rung.name))
            return load

    asked = []
    link = Bandwidth((rate, rate / 100), 0.5, repeat=False)
    run(Watching(enough=0.0), link, 0.5 * ALL_TEXT)
    items = sorted({item for now, item, _ in asked if now > 0.5})
    later = [name for now, item, name in asked if now > 0.5 and item in items[2:]]
    assert all(name == "poor" for name in later)


def test_left_over_time_makes_levels_better_and_no_later():
    out = run(Adaptive(), steady(5.0), ALL_TEXT)
    first = run(Adaptive(enough=1.0), steady(5.0), ALL_TEXT)  # is content with anything
    assert out.loss < first.loss
    assert out.ttft_s <= ALL_TEXT


def test_a_floor_is_kept_whatever_the_link():
    for seconds in (1.0, 20.0, 500.0):
        out = run(Adaptive(floor=0.02), steady(seconds), 0.5 * ALL_TEXT)
        assert "poor" not in out.chosen
        assert all(out.chosen)


def test_refinements_are_brought_on_top_of_their_base():
    rungs = (Rung("base", 100_000, 0.1, 0.01), Rung("both", 300_000, 0.001, 0.01, builds_on="base"))
    items = [Item(rungs, TEXT_S)] * COUNT
    out = run(Adaptive(), Bandwidth.constant(2_000_000), ALL_TEXT, items=items)
    names = [name for name in out.chosen if name != "text"]
    assert "both" in names
    assert out.brought <= 300_000 * COUNT


def test_the_rule_of_the_paper_takes_a_medium_level_first_and_then_what_fits():
    out = run(InOrder(), steady(1.0), ALL_TEXT)
    assert out.chosen[0] == "good"
    assert set(out.chosen[1:]) == {"raw"}
    slow = run(InOrder(), steady(2000.0), ALL_TEXT)
    assert slow.chosen.count("text") > 0


def test_policies_know_nothing_of_the_future():
    """Links that agree until a moment are met alike until then."""
    rate = COUNT * RAW / 6.0
    for policy in (Adaptive(), InOrder(), FixedLevel("good")):
        asked = []

        class Watching(type(policy)):
            def load(self, stream, now, asked=asked):
                load = super().load(stream, now)
                asked[-1].append((now, load))
                return load

        for after in (rate, 0.0, 50 * rate):
            asked.append([])
            watching = Watching(**vars(policy))
            run(watching, Bandwidth((rate, after), 1.0, repeat=False), 0.5 * ALL_TEXT)
        early = [[each for each in one if each[0] < 0.9] for one in asked]
        assert early[0] == early[1] == early[2]
        assert early[0]


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_no_target(target):
    with pytest.raises(ValueError, match="positive number of seconds"):
        Stream(ITEMS, Text(), target)


# -- throughput --


def test_throughput_is_cautious_and_falls_while_nothing_comes():
    link = Throughput(window_s=10.0)
    assert link.estimate(0.0) is None
    assert Throughput(prior=5.0).estimate(0.0) == 5.0
    for i in range(5):
        link.began(i, 100)
        link.ended(i + 1, 100)
    assert link.estimate(5.0) == link.expected(5.0) == pytest.approx(100.0)
    link.began(5.0, 100)
    assert link.estimate(25.0) == pytest.approx(5.0)
    link.ended(25.0, 100)
    assert link.estimate(25.0) < 5.0 < link.expected(25.0)  # an error of 20 times was made
    for i in range(20):
        link.began(30 + i, 1000)
        link.ended(31 + i, 1000)
    assert link.expected(50.0) == pytest.approx(1000.0)
    assert link.estimate(50.0) < 1000.0


def test_clocks_that_stand_still_or_go_back_say_nothing():
    link = Throughput(window_s=1.0)
    link.began(5.0, 100)
    link.ended(5.0, 100)
    link.began(5.0, 100)
    link.ended(-1000.0, 100)
    link.ended(7.0, 100)  # nothing was under way
    assert link.estimate(0.0) is None
    link.began(5.0, 100)
    assert link.estimate(1.0) is None
    link.dropped(4.0)
    assert link.estimate(1.0) is None


# -- the oracle --


def test_the_oracle_is_what_trying_everything_finds():
    import itertools

    items = [Item(RUNGS[1:4], 0.3 + 0.1 * i) for i in range(4)]
    for seconds, target in ((3.0, 1.0), (8.0, 1.0), (8.0, 0.5), (30.0, 1.2), (1000.0, 0.5)):
        link = steady(seconds)
        found = math.inf
        for names in itertools.product(["text", "fine", "good", "fair"], repeat=4):
            rungs = [next((r for r in item.rungs if r.name == n), None) for item, n in zip(items, names, strict=True)]
            nbytes = sum(r.nbytes for r in rungs if r)
            work = sum(r.decode_s if r else item.text_s for r, item in zip(rungs, items, strict=True))
            if link.finish(0.0, nbytes) + (0.02 if nbytes else 0.0) <= target and work <= target:
                found = min(found, sum(r.loss if r else 0.0 for r in rungs) / 4)
        got = best(items, link, target)
        assert got.loss <= found + 1e-12  # generous
        slower = best(items, link.scaled(0.95), target * 0.98)
        assert slower.loss >= found - 1e-12  # but not by more than its grid


def test_no_policy_beats_the_oracle():
    rng = np.random.default_rng(0)
    for _ in range(15):
        link = Bandwidth(tuple(rng.uniform(0.1, 10, 10) * COUNT * RAW / 5 / rng.choice([5, 25, 100])), 0.5)
        for slo in (0.5, 1.0):
            ideal = best(ITEMS, link, slo * ALL_TEXT)
            for policy in (Adaptive(), InOrder(), FixedLevel("poor"), FixedLevel("raw")):
                out = run(policy, link, slo * ALL_TEXT)
                if out.ttft_s <= slo * ALL_TEXT:
                    assert out.loss >= ideal.loss - 1e-12
