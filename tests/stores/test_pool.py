"""The memory pool: LRU by bytes, pins, counters, threads."""

import random
import threading

import pytest
import torch

from blendkv import ChunkCache, Pool, StoreError
from blendkv.stores import open_chunks


def chunk(name: int, tokens: int = 4) -> ChunkCache:
    """64 bytes a token."""
    states = torch.zeros(1, tokens, 8)
    return ChunkCache(torch.full((tokens,), name), (states,), (states.clone(),), "f")


def test_get_put_and_counters():
    pool, a = Pool(), chunk(1)
    assert pool.get(a.key) is None
    assert pool.put(a)
    assert pool.put(a)  # again: kept once
    assert pool.get(a.key) is a
    assert a.key in pool
    assert len(pool) == 1
    s = pool.stats
    assert (s.hits, s.misses, s.puts, s.rejected, s.evictions, s.bytes) == (1, 1, 1, 0, 0, a.nbytes)
    pool.delete(a.key)
    pool.delete(a.key)
    assert s.bytes == 0
    assert len(pool) == 0


def test_least_recently_used_goes_first():
    a, b, c = chunk(1), chunk(2), chunk(3)
    pool = Pool(2 * a.nbytes)
    pool.put(a)
    pool.put(b)
    pool.get(a.key)
    pool.put(c)
    assert pool.keys() == [a.key, c.key]
    pool.put(a)  # a put is a use too
    pool.put(b)
    assert pool.keys() == [a.key, b.key]
    assert pool.stats.evictions == 2


def test_bytes_are_the_limit_not_entries():
    pool = Pool(chunk(0, 10).nbytes)
    for i in range(5):
        assert pool.put(chunk(i, 2))
    assert len(pool) == 5
    assert pool.put(chunk(9, 9))
    assert len(pool) == 1
    assert not pool.put(chunk(10, 11))
    assert pool.stats.rejected == 1
    assert len(pool) == 1  # nothing was thrown away for what does not fit anyway
    assert pool.stats.bytes == chunk(9, 9).nbytes


def test_pins():
    a, b, c = chunk(1), chunk(2), chunk(3)
    pool = Pool(2 * a.nbytes)
    pool.put(a)
    pool.put(b)
    with pool.pin(a.key, b.key):
        assert not pool.put(c)
        assert pool.stats.rejected == 1
        with pool.pin(a.key):  # pins nest
            pass
        assert not pool.put(c)
        pool.clear()
        assert len(pool) == 2
    assert pool.put(c)
    assert a.key not in pool
    with pytest.raises(RuntimeError, match="x"), pool.pin(c.key):
        raise RuntimeError("x")
    assert pool.put(a)
    assert pool.put(b)
    assert c.key not in pool


def test_pinned_oldest_is_passed_over():
    a, b, c = chunk(1), chunk(2), chunk(3)
    pool = Pool(2 * a.nbytes)
    pool.put(a)
    pool.put(b)
    with pool.pin(a.key):
        assert pool.put(c)
        assert pool.keys() == [a.key, c.key]


def test_deleting_what_is_pinned_leaves_no_pin():
    a, b = chunk(1), chunk(2)
    pool = Pool(a.nbytes)
    pool.put(a)
    with pool.pin(a.key):
        pool.delete(a.key)
        assert pool.put(b)
    assert pool.put(a)
    assert a.key in pool


def test_a_pin_on_an_absent_key_holds_when_it_comes():
    a, b = chunk(1), chunk(2)
    pool = Pool(a.nbytes)
    with pool.pin(a.key):
        pool.put(a)
        assert not pool.put(b)


def test_bad_capacity_and_url():
    for bad in (0, -1):
        with pytest.raises(ValueError, match="capacity_bytes"):
            Pool(bad)
    with pytest.raises(StoreError, match="unknown scheme"):
        open_chunks("nowhere://bucket")
    with pytest.raises(ValueError, match="is no store: it has no fetch, put_many"):
        open_chunks({})
    with pytest.raises(ValueError, match="capacity_bytes with store="):
        open_chunks(Pool(), 77)
    pool = Pool()
    assert open_chunks(pool) is pool
    assert open_chunks("memory://", 77).capacity_bytes == 77


def test_threads_keep_the_books():
    chunks = [chunk(i, 1 + i % 3) for i in range(30)]
    pool = Pool(sum(c.nbytes for c in chunks) // 3)
    failures: list = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                c = rng.choice(chunks)
                with pool.pin(c.key):
                    got = pool.get(c.key)
                    if got is None:
                        pool.put(c)
                    elif got is not c:
                        failures.append("another chunk")
                if rng.random() < 0.05:
                    pool.delete(c.key)
        except Exception as error:  # a thread's exception would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.stats.hits + pool.stats.misses == 8 * 300
    assert pool.stats.bytes == sum(c.nbytes for c in chunks if c.key in pool) <= pool.capacity_bytes
    assert not pool._pins
