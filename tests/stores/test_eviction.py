"""Which entries give way: fast policies against their definitions, and what each keeps of a Zipf trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.stores import Pool
from blendkv.stores.eviction import GDSF, LFU, LRU, POLICIES, Eviction, get_eviction
from tests.chunks import make_chunk


class Slow:
    """The definitions, with a scan for every victim."""

    def __init__(self, kind):
        self.kind, self.entries, self.floor, self.tick = kind, {}, 0.0, 0

    def touch(self, key, size=None):
        self.tick += 1
        uses, old = (self.entries[key][1:3]) if key in self.entries else (0, size)
        size = old if size is None else size
        score = {"lru": 0.0, "lfu": self.floor + uses + 1, "gdsf": self.floor + (uses + 1) / size}[self.kind]
        self.entries[key] = (score, uses + 1, size, self.tick)

    def drop(self, key):
        if key in self.entries:
            if key == self.victim():
                self.floor = max(self.floor, self.entries[key][0])
            del self.entries[key]

    def victim(self):
        return min(self.entries, key=lambda key: (self.entries[key][0], self.entries[key][3]))


@pytest.mark.parametrize("kind", POLICIES)
@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 5)), max_size=120))
def test_like_its_definition(kind, steps):
    policy, slow = get_eviction(kind), Slow(kind)
    for what, number, size in steps:
        key = str(number)
        if what == 0:
            policy.put(key, size)
            slow.touch(key, size)
        elif what == 1 and key in slow.entries:
            policy.used(key)
            slow.touch(key)
        elif what == 2 and slow.entries:
            victim = slow.victim()
            assert next(policy.victims()) == victim
            policy.drop(victim)
            slow.drop(victim)
        assert set(policy.victims()) == set(slow.entries)
        assert len(list(policy.victims())) == len(slow.entries)


def test_lru():
    policy = LRU()
    for key in "abc":
        policy.put(key, 1)
    policy.used("a")
    assert list(policy.victims()) == ["b", "c", "a"]


def test_lfu_ages():
    policy = LFU()
    policy.put("once popular", 1)
    for _ in range(5):
        policy.used("once popular")
    for key in map(str, range(20)):  # each evicts the one before, until the floor reaches the old favourite
        policy.put(key, 1)
        if len(list(policy.victims())) > 2:
            policy.drop(next(policy.victims()))
    assert "once popular" not in list(policy.victims())


def test_gdsf_prefers_small():
    policy = GDSF()
    policy.put("small", 1)
    policy.put("large", 100)
    assert list(policy.victims()) == ["large", "small"]


def test_unknown():
    with pytest.raises(ValueError, match="lru, lfu, gdsf"):
        get_eviction("fifo")
    policy = LRU()
    assert get_eviction(policy) is policy
    assert isinstance(policy, Eviction)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_zipf_trace(kind):
    """Better than random, which keeps what it has room for."""
    rng = np.random.default_rng(0)
    share, sizes = np.arange(1, 1001) ** -1.0, rng.integers(1, 8, 1000)
    trace = rng.choice(1000, 20000, p=share / share.sum())
    policy, held, room, hits = get_eviction(kind), {}, 400, 0
    for key in map(str, trace):
        if key in held:
            hits += 1
            policy.used(key)
            continue
        size = int(sizes[int(key)])
        while sum(held.values()) + size > room:
            victim = next(policy.victims())
            policy.drop(victim)
            del held[victim]
        held[key] = size
        policy.put(key, size)
    assert hits / len(trace) > {"lru": 0.45, "lfu": 0.5, "gdsf": 0.55}[kind]


@pytest.mark.parametrize(("kind", "stays"), [("lru", False), ("lfu", True), ("gdsf", True)])
def test_a_pool_evicts_as_it_is_told(kind, stays):
    popular, *others = (make_chunk(4, seed=seed) for seed in range(5))
    pool = Pool(2 * popular.nbytes, eviction=kind)
    pool.put(popular)
    for _ in range(5):
        assert pool.get(popular.key) is popular
    for chunk in others[:3]:
        assert pool.put(chunk)
    assert (popular.key in pool) is stays
    assert len(pool) == 2
    with pytest.raises(ValueError, match="lru, lfu, gdsf"):
        Pool(eviction="fifo")
