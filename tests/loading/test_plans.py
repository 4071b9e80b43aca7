"""Which tier and level each chunk is loaded from: against searches of everything, on costs that are drawn."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest

from blendkv import flops
from blendkv.cache import make_schedule
from blendkv.loading.controller import LEARNS_BYTES, MARGIN, Controller, Offer
from blendkv.loading.costs import ComputeCosts, Costs, SourceCosts
from blendkv.loading.plans import WORTH, Load, best_plan, order_of
from blendkv.selectors import get_selector

SHAPE = flops.ModelShape((flops.LayerShape(4_000, 20_000, 100),) * 8, 50_000)
COMPUTE = ComputeCosts(0.01, 3e9, 1.5e9)
HKVD = get_selector("hkvd")
LOSSES = {"klt@0": 0.01, "klt@4": 0.07, "klt@8": 0.6}
SHARES = {"raw": 1.0, "klt@0": 0.17, "klt@4": 0.12, "klt@8": 0.08}
FAR, NEAR = "far://", "near://"


def schedule(ratio):
    return make_schedule(HKVD, ratio, None)


def offers_of(key, tokens=256, urls=(FAR,), levels=tuple(SHARES), nbytes=1 << 20):
    return [
        Offer(
            key,
            tokens,
            int(nbytes * SHARES[level] * tokens / 256),
            2 * nbytes,
            url,
            level.partition("@")[0],
            level,
            int(level.partition("@")[2] or 0),
            level != "raw",
        )
        for url in urls
        for level in levels
    ]


def prompt(count=6, **kwargs):
    return [offer for i in range(count) for offer in offers_of(f"{i:064x}", **kwargs)]


def costs(far=1e8, near=None, **kwargs):
    sources = {FAR: SourceCosts(0.001, far)} | ({} if near is None else {NEAR: SourceCosts(0.001, near)})
    return Costs(COMPUTE, sources, machine="m", fingerprint="f", losses=dict(LOSSES), **kwargs)


def decide(known, those=None, **kwargs):
    return Controller(known, **kwargs).decide(SHAPE, prompt() if those is None else those, 40, schedule, True)


def computing(those, from_text=0, ratio=0.15, total=None):
    total = sum({offer.key: offer.tokens for offer in those}.values()) if total is None else total
    return COMPUTE.seconds(SHAPE, total - from_text, 40 + from_text, schedule(ratio), True)


def test_a_fast_link_gives_what_loses_nothing_and_a_slower_one_the_finest_level_that_hides():
    hidden = computing(prompt())
    seen = []
    for factor in (0.5, 2, 6.5, 9, 40, 200):
        decision = decide(costs(6 * 2**20 / (hidden * factor)), text=False)
        seen.append(max(decision.levels, key=lambda name: LOSSES.get(name, 0.0)))
        assert decision.load_s <= decision.ttft_s
        if decision.load_s <= hidden:
            assert decision.ttft_s <= hidden / WORTH
    assert seen == sorted(seen, key=lambda name: LOSSES.get(name, 0.0))
    assert {"raw", "klt@0", "klt@4", "klt@8"} == set(seen)
    assert decide(costs(1e12)).levels == ("raw",) * 6


def test_time_that_is_left_over_makes_single_chunks_better():
    hidden = computing(prompt())
    decision = decide(costs(6 * 2**20 / (hidden * 2)), text=False)
    assert set(decision.levels) == {"raw", "klt@0"}
    assert decision.levels == tuple(sorted(decision.levels, reverse=True))  # from the first one on
    raw = decision.levels.count("raw")
    assert decision.kl == pytest.approx(0.01 * (6 - raw) / 6)
    more = (raw + 1 + 0.17 * (5 - raw)) * 2**20 / (6 * 2**20 / (hidden * 2))
    assert more > hidden  # one more would not hide


def test_a_level_that_only_memory_has_is_put_beside_its_neighbours():
    """Nobody knows its bytes there, but a finer level is not taken for the coarsest."""
    there = [*offers_of("k", levels=("klt@0", "klt@8")), Offer("k", 256, 0, 1 << 21, "", "klt", "klt@4", 4, True)]
    loss = order_of(there, {})
    assert sorted({each.level for each in there}, key=lambda name: loss(next(o for o in there if o.level == name))) == [
        "klt@0",
        "klt@4",
        "klt@8",
    ]
    known = costs(1e12)
    known.losses.clear()
    fine, coarse = (Offer("k", 256, 0, 1 << 21, "", "klt", f"klt@{n}", n, True) for n in (4, 8))
    for mine, far, taken in ((fine, "klt@8", "klt@4"), (coarse, "klt@4", "klt@4")):
        assert decide(known, [mine, *offers_of("k", levels=(far,))], text=False).levels == (taken,)
    both = order_of([coarse, fine], {})
    assert both(fine) < both(coarse)


def test_quality_has_a_floor():
    slow = costs(1e4)

    def coarsest(**kwargs):
        return max(decide(slow, text=False, **kwargs).levels, key=lambda name: LOSSES.get(name, 0.0))

    assert coarsest() == "klt@8"
    assert coarsest(max_kl=0.1) == "klt@4"
    assert coarsest(coarsest=0) == "klt@0"
    assert set(decide(slow, text=False, max_kl=0.0).levels) == {"raw"}
    lossy = prompt(levels=("klt@4", "klt@8"))
    nothing = decide(costs(1e12), lossy, text=False, max_kl=0.05)  # whatever is said of text: nothing may be used
    assert nothing.levels == ("text",) * 6
    assert len(nothing.text) == 6
    unknown = costs(1e4)
    unknown.losses = {"klt@0": 0.01}
    assert set(decide(unknown, text=False, max_kl=0.1).levels) == {"klt@0"}  # what was not measured is not trusted
    for wrong in ({"max_kl": -1.0}, {"max_kl": math.nan}, {"target_s": 0.0}, {"target_s": math.inf}):
        with pytest.raises(ValueError, match=r"give nats|give a positive"):
            Controller(**wrong)


def test_levels_that_were_not_measured_are_in_the_order_of_their_bytes():
    unknown = costs(1e4)
    unknown.losses = {}
    decision = decide(unknown, text=False)
    assert (decision.levels[-1], decision.kl) == ("klt@8", None)
    loss = order_of(prompt(), {"klt@0": 5.0})
    assert [loss(offer) for offer in prompt(1)] == [0, 1, 2, 3]
    assert decide(costs(1e12)).kl == 0.0


def test_the_tier_that_gives_it_sooner_is_taken():
    both = prompt(urls=(NEAR, FAR))
    for near, far, want in ((1e6, 1e12, FAR), (1e12, 1e6, NEAR)):
        decision = decide(costs(far, near), both)
        assert {offer.url for offer in decision.chosen.values()} == {want}
        assert set(decision.levels) == {"raw"}


def test_memory_is_left_for_something_better_only_if_that_hides():
    memory = [Offer(f"{i:064x}", 256, 0, 2 << 20, "", "klt", "klt@4", 4, True) for i in range(6)]
    both = [offer for pair in zip(memory, prompt(levels=("raw",)), strict=True) for offer in pair]
    assert decide(costs(1e12), both).levels == ("raw",) * 6
    slow = decide(costs(1e4), both)
    assert (slow.levels, slow.text, slow.load_s) == (("klt@4",) * 6, frozenset(), 0.0)


def test_what_is_tried_again_is_large_enough_to_tell():
    slow = costs(10.0)
    slow._made = -1e9
    decision = decide(slow)
    assert len(decision.text) == 5
    (offer,) = decision.chosen.values()
    assert offer.nbytes == min(each.nbytes for each in prompt(1) if each.nbytes >= LEARNS_BYTES)
    assert decision.load_s == pytest.approx(0.002 + offer.nbytes / 10)


@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 20, 1 << 24])
def test_what_comes_first_hides_nothing(nbytes):
    """Files that are read before anything is computed: their time is added, and no more is recomputed for it."""
    beside = prompt(levels=("raw",), nbytes=nbytes)
    first = [replace(offer, first=True) for offer in beside]
    slow = costs(6 * nbytes / (4 * computing(beside)))
    assert decide(slow, beside, text=False).ratio > 0.3
    decision = decide(slow, first, text=False)
    assert decision.ratio == 0.15
    assert decision.ttft_s == pytest.approx(decision.load_s + decision.compute_s)
    assert "of it before anything is computed" in decision.why
    assert "before anything" not in decide(slow, beside, text=False).why
    both = [*first[:3], *beside[3:]]
    mixed = decide(slow, both, text=False)
    half = decision.load_s / 2
    assert mixed.ttft_s == pytest.approx(half + max(half, mixed.compute_s), abs=0.0021)  # a latency for each half


def test_what_comes_first_is_computed_from_text_sooner():
    """Loading a little more than computing everything would take: beside it half is loaded, before it nothing."""
    beside = prompt(levels=("raw",))
    known = costs(6 * 2**20 / (1.2 * computing(beside, 6 * 256)))
    assert 0 < len(decide(known, beside).text) < 5
    assert len(decide(known, [replace(offer, first=True) for offer in beside]).text) == 6


def test_nothing_that_comes_first_is_thought_to_be_left_out():
    those = [replace(offer, first=True) for offer in prompt(levels=("raw",))]
    given = SHAPE, those, 40, schedule, True, None
    assert Controller(costs()).decide(*given, lambda offer, ratio: 0.1).load_s == decide(costs(), those).load_s


def test_a_store_that_was_never_seen_gives_a_medium_level():
    known = costs()
    known.sources.clear()
    decision = decide(known)
    assert decision.levels == ("klt@4",) * 6
    assert decide(known, prompt(levels=("raw",))).levels == ("raw",) * 6
    assert decide(known, max_kl=0.01).levels == ("klt@0",) * 6


def drawn(seed):
    """A prompt of up to four chunks of which two stores have some levels, and what loading and computing cost.

    In some the nearer store's files are read before anything is computed.
    """
    draw = random.Random(seed)
    those = []
    for i in range(draw.randint(1, 4)):
        levels = [name for name in SHARES if draw.random() < 0.7] or ["klt@4"]
        urls = draw.choice([(FAR,), (NEAR,), (NEAR, FAR)])
        those += offers_of(f"{i:064x}", draw.choice([64, 256, 700]), urls, levels)
    rate = 2 ** draw.uniform(18, 32)
    known = costs(rate, rate * 2 ** draw.uniform(-3, 3))
    if draw.random() < 0.5:
        known.decoding = {"klt": 2 ** draw.uniform(22, 32)}
    first = draw.random() < 0.3
    return [replace(offer, first=first and offer.url == NEAR) for offer in those], known


def choices_of(those):
    choices = {}
    for offer in those:
        choices.setdefault(offer.key, []).append(offer)
    return choices


def parts_of(known, loads):
    """Seconds of loading before anything is computed, store after store, and of loading beside that, store by store."""
    before, beside = 0.0, 0.0
    for url in {offer.url for offer in loads}:
        for first in (True, False):
            took = 0.0
            for codec in {offer.codec for offer in loads}:
                own = [o for o in loads if (o.url, o.codec, o.first) == (url, codec, first)]
                sums = len(own), sum(o.nbytes for o in own), sum(o.decoded for o in own)
                took += known.load_seconds(url, *sums, codec) if own else 0.0
            before, beside = (before + took, beside) if first else (before, max(beside, took))
    return before, beside


def until(parts, compute):
    return parts[0] + max(parts[1], compute)


@pytest.mark.parametrize("text", [True, False])
def test_the_rule_is_what_a_search_of_bounds_counts_and_ratios_finds(text):
    """The same rule, written as loops over every bound, count of texts and ratio."""
    for seed in range(150):
        those, known = drawn(seed)
        choices = choices_of(those)
        loss = order_of(those, known.losses)
        plans = []
        beside = {key: [offer for offer in each if not offer.first] or each for key, each in choices.items()}
        for bound, some in itertools.product({loss(offer) for offer in those}, (choices, beside)):
            for count in range(len(choices) + 1 if text else 1):
                keys = list(choices)[: len(choices) - count]
                loads = []
                for key in keys:
                    fine = [offer for offer in some[key] if loss(offer) <= bound]
                    fine = fine or [o for o in some[key] if loss(o) == min(map(loss, some[key]))]
                    loads.append(min(fine, key=lambda offer: (sum(parts_of(known, [offer])), loss(offer))))
                given = sum(choices[key][0].tokens for key in list(choices)[len(keys) :])
                plans.append((bound, count, until(parts_of(known, loads), computing(those, given)), given))
        goal = min(plan[2] for plan in plans) / WORTH
        good = [plan for plan in plans if plan[2] <= goal]
        good = [plan for plan in good if plan[1] == 0] or good
        bound, count, seconds, given = min(good, key=lambda plan: (plan[0], plan[2]))
        plan = best_plan(partial(Load, known), choices, loss, lambda n: computing(those, n), text, {})  # noqa: B023
        assert len(plan.text) == count
        parts = parts_of(known, plan.loads.values())
        assert plan.seconds == pytest.approx(until(parts, computing(those, given)))
        assert plan.seconds <= max(goal, seconds) + 1e-12
        assert all(loss(o) <= max(bound, min(map(loss, choices[key]))) for key, o in plan.loads.items())
        decision = decide(known, those, text=text)
        hidden = [r / 1000 for r in range(150, 1001) if computing(those, given, r / 1000) <= MARGIN * parts[1]]
        if decision.chosen == plan.loads:  # not tried again
            assert decision.load_s == pytest.approx(sum(parts))
            assert decision.ttft_s == pytest.approx(until(parts, decision.compute_s))
            assert max(hidden, default=0.15) - 0.015 <= decision.ratio <= max(hidden, default=0.15) + 1e-9


def test_no_choice_of_a_tier_and_level_for_each_chunk_is_much_better():
    """Against all there are, chunk by chunk: nothing is much quicker, or loses much less and is as quick."""
    lost = best_lost = slower = 0.0
    for seed in range(150):
        those, known = drawn(seed)
        choices = choices_of(those)
        loss = order_of(those, known.losses)
        total, outcomes = sum(each[0].tokens for each in choices.values()), []
        for count in range(len(choices) + 1):
            keys = list(choices)[: len(choices) - count]
            given = sum(choices[key][0].tokens for key in list(choices)[len(keys) :])
            for loads in itertools.product(*(choices[key] for key in keys)):
                seconds = until(parts_of(known, loads), computing(those, given))
                outcomes.append((seconds, count, sum(loss(offer) * offer.tokens for offer in loads) / total))
        plan = best_plan(partial(Load, known), choices, loss, lambda n: computing(those, n), True, {})  # noqa: B023
        mine = sum(loss(offer) * offer.tokens for offer in plan.loads.values()) / total
        alike = [
            lost for seconds, count, lost in outcomes if seconds <= plan.seconds + 1e-12 and count <= len(plan.text)
        ]
        slower = max(slower, plan.seconds / min(seconds for seconds, *_ in outcomes))
        lost, best_lost = lost + mine, best_lost + min(alike)
    assert slower <= 1.2  # two stores at once are not balanced
    assert lost <= 1.02 * best_lost
