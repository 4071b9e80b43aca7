"""`bench eviction`: its replay is a pool, its bounds are bounds, on traces small enough to try everything."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from blendkv.bench.eviction import belady, bound, eviction_rows, replay
from blendkv.bench.results import read_rows, write_rows
from blendkv.bench.table import markdown
from blendkv.bench.traces import LONGEST, SHORTEST, Trace, next_requests, zipf_trace
from blendkv.stores import Pool
from blendkv.stores.eviction import POLICIES
from tests.chunks import make_chunk

SETTINGS = [(s, drift) for s in (0.7, 1.1) for drift in (False, True)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("s", "drift"), SETTINGS)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_the_replay_is_a_pool(policy, s, drift, share):
    """Tiny chunks of differing sizes, put where they are missed; 1% of room holds not even each of them."""
    rng = np.random.default_rng(1)
    chunks = [make_chunk(int(rng.integers(1, 30)), layers=1, heads=1, key_dim=2, seed=i) for i in range(60)]
    sizes = np.array([chunk.nbytes for chunk in chunks])
    requests = zipf_trace(s, drift, len(chunks), 1500, seed=3).requests
    capacity = int(share * sizes.sum())
    pool, seen = Pool(capacity, eviction=policy), []
    for number in requests:
        seen.append(pool.get(chunks[number].key) is not None)
        if not seen[-1]:
            pool.put(chunks[number])
    hits = replay(policy, Trace(requests, sizes), capacity)
    assert hits.tolist() == seen
    assert (pool.stats.hits, pool.stats.misses) == (hits.sum(), (~hits).sum())
    assert pool.stats.evictions > 0
    assert (pool.stats.rejected > 0) == bool((sizes[requests] > capacity).any())


def best(trace, capacity):
    """The most hits, and the most bytes hit, of any choice of what to keep, by trying all."""
    requests, sizes = trace.requests.tolist(), trace.sizes.tolist()

    @cache
    def most(at, held, by_bytes):
        if at == len(requests):
            return 0
        number = requests[at]
        gain = (sizes[number] if by_bytes else 1) if number in held else 0
        there = held | {number}
        kept = (
            frozenset(some)
            for count in range(len(there) + 1)
            for some in combinations(sorted(there), count)
            if sum(sizes[one] for one in some) <= capacity
        )
        return gain + max(most(at + 1, keep, by_bytes) for keep in kept)

    return most(0, frozenset(), False), most(0, frozenset(), True)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_exceeds_the_bound_and_belady_is_near_the_best(seed):
    rng = np.random.default_rng(seed)
    trace = Trace(rng.integers(0, 5, 14), rng.integers(1, 6, 5))
    for capacity in (1, 3, 6, 9):
        hits, hit_bytes = best(trace, capacity)
        most, most_bytes = bound(trace, capacity)
        asked = trace.sizes[trace.requests].sum()
        assert hits <= most * 14 + 1e-9
        assert hit_bytes <= most_bytes * asked + 1e-9
        for found in (belady(trace, capacity), *(replay(name, trace, capacity) for name in POLICIES)):
            assert found.sum() <= hits
            assert trace.sizes[trace.requests][found].sum() <= hit_bytes


def slow_belady(trace, capacity):
    """The rule as it is said: what is wanted again latest, times its size, goes first."""
    requests, sizes, held, hits = trace.requests.tolist(), trace.sizes.tolist(), [], []
    for at, number in enumerate(requests):
        hits.append(number in held)
        if not hits[-1]:
            held.append(number)
        while sum(sizes[one] for one in held) > capacity:
            waits = {one: (requests[at + 1 :].index(one) + 1) if one in requests[at + 1 :] else np.inf for one in held}
            held.remove(max(sorted(held), key=lambda one: waits[one] * sizes[one]))
    return hits


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_its_rule_and_beats_who_knows_less(seed):
    trace = zipf_trace(0.9, bool(seed % 2), 40, 400, seed)
    for share in (0.02, 0.1, 0.3):
        capacity = int(share * trace.sizes.sum())
        hits = belady(trace, capacity)
        assert hits.tolist() == slow_belady(trace, capacity)
        assert hits.sum() >= max(replay(name, trace, capacity).sum() for name in POLICIES)


def test_the_bound_by_hand():
    trace = Trace(np.array([0, 1, 0, 1]), np.array([3, 3]))
    assert bound(trace, 3) == (1.5 / 4, 1.5 / 4)  # room for 3 x 3, and a hit takes 3 x 2
    assert bound(trace, 2) == (0, 0)  # fits nobody
    trace = Trace(np.array([0, 1, 1, 0]), np.array([4, 1]))
    assert bound(trace, 4) == (1 / 4 + 11 / 12 / 4, (1 + 4 * 11 / 12) / 10)  # 1 x 1 of 4 x 3, then 11 of 4 x 3


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_best_where_all_are_of_one_size(seed):
    trace = Trace(np.random.default_rng(seed).integers(0, 5, 14), np.full(5, 2))
    for capacity in (1, 2, 4, 7):
        assert belady(trace, capacity).sum() == best(trace, capacity)[0]


def test_with_room_for_all_only_first_requests_are_missed():
    trace = zipf_trace(0.9, True, 50, 400, seed=0)
    first = np.array([number not in trace.requests[:at] for at, number in enumerate(trace.requests)])
    capacity = int(trace.sizes.sum())
    for hits in (belady(trace, capacity), *(replay(name, trace, capacity) for name in POLICIES)):
        assert (hits == ~first).all()
    share = trace.sizes[trace.requests][~first].sum() / trace.sizes[trace.requests].sum()
    assert bound(trace, capacity) == (pytest.approx((~first).mean()), pytest.approx(share))


def test_a_trace_is_what_it_says():
    steady, drifting = zipf_trace(0.9, False, 500, 40_000, 5), zipf_trace(0.9, True, 500, 40_000, 5)
    tokens = steady.sizes // 131072
    assert (steady.sizes == tokens * 131072).all()
    assert (tokens.min(), tokens.max()) == (SHORTEST, LONGEST)
    assert 350 < np.median(tokens) < 450
    assert (steady.requests[:20_000] == drifting.requests[:20_000]).all()
    for trace, same in ((steady, True), (drifting, False)):
        tops = [np.bincount(half, minlength=500).argsort()[::-1][:20] for half in np.split(trace.requests, 2)]
        assert (len(set(tops[0]) & set(tops[1])) > 12) is same
    counts = np.sort(np.bincount(steady.requests, minlength=500))[::-1]
    share = np.arange(1, 501) ** -0.9
    assert counts[0] / 40_000 == pytest.approx(share[0] / share.sum(), rel=0.1)
    assert counts[9] / counts[0] == pytest.approx(10**-0.9, rel=0.15)
    assert zipf_trace(0.9, True, 500, 40_000, 6).requests.tolist() != drifting.requests.tolist()


def test_when_each_is_asked_for_again():
    requests = np.array([3, 1, 3, 3, 2, 1])
    slow = [next((j for j in range(i + 1, 6) if requests[j] == requests[i]), 6) for i in range(6)]
    assert next_requests(requests).tolist() == slow == [2, 5, 3, 6, 6, 6]


def test_rows_are_the_same_each_time_and_go_into_a_table(tmp_path):
    settings = {"zipf": (0.9,), "capacities": (0.1, 0.25), "documents": 100, "requests": 800, "seeds": 4}
    rows = eviction_rows(**settings)
    assert rows == eviction_rows(**settings)
    assert len(rows) == 2 * 2 * 5
    for row in rows:
        assert 0 < row["hit_rate_low"] <= row["hit_rate"] <= row["hit_rate_high"] < 1
        assert 0 < row["byte_hit_rate_low"] <= row["byte_hit_rate"] <= row["byte_hit_rate_high"] < 1
    of = {(row["policy"], row["drift"], row["capacity"]): row for row in rows}
    lru, gdsf = of["lru", False, 0.1], of["gdsf", False, 0.1]
    assert "hit_rate_minus_lru" not in lru
    assert gdsf["hit_rate_minus_lru"] == pytest.approx(gdsf["hit_rate"] - lru["hit_rate"])
    assert gdsf["hit_rate_minus_lru_low"] > 0
    traces = [zipf_trace(0.9, False, 100, 800, seed) for seed in range(4)]
    rates = [replay("lru", trace, int(0.1 * trace.sizes.sum())).mean() for trace in traces]
    assert lru["hit_rate"] == pytest.approx(np.mean(rates))
    write_rows(tmp_path / "r.json", rows)
    text = markdown(read_rows(tmp_path / "r.json"))
    assert "| popularity | room | lru | lfu | gdsf | belady | bound |" in text
    half = (lru["hit_rate_high"] - lru["hit_rate_low"]) / 2
    assert f"| Zipf 0.9, steady | 10% | {100 * lru['hit_rate']:.1f} ±{100 * half:.1f} |" in text
    assert text.count("| Zipf 0.9, shifts | 25% |") == 2
