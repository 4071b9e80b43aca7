"""A link of a benchmark carries real bytes at the pace that it was given."""

import math
import threading
import time
import uuid

import numpy as np
import pytest

from blendkv.bench.bandwidth import Bandwidth, rates_of
from blendkv.bench.throttle import Fault, ThrottledStore
from blendkv.loading.clocks import VirtualClock
from blendkv.stores import RemoteStore, deadline
from blendkv.testing import StoreContract
from tests.stores.dicts import DictStore

KEY = "ab" * 32
DATA = bytes(range(256)) * 4000  # about 1 MB


def throttled(bandwidth, clock=None, **settings):
    store = DictStore()
    store.entries[KEY] = DATA
    return ThrottledStore(store, bandwidth, clock=VirtualClock() if clock is None else clock, burst_s=0.0, **settings)


class TestContract(StoreContract):
    @pytest.fixture
    def store(self):
        return ThrottledStore(RemoteStore(f"memory://{uuid.uuid4().hex}"), Bandwidth.constant(1e12))


def stepwise(bandwidth, start, nbytes, dt=1e-4):
    """When `nbytes` are through, in small steps."""
    at = start
    while nbytes > 0:
        nbytes -= bandwidth.rate(at) * dt
        at += dt
    return at


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_bandwidth_is_what_small_steps_give(seed, repeat):
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0, 10, 5) * (rng.uniform(size=5) > 0.3)
    rates[-1] = 3.0
    bandwidth = Bandwidth(tuple(rates), 0.5, repeat)
    for start, nbytes in rng.uniform(0, 6, (20, 2)):
        end = bandwidth.finish(start, nbytes)
        assert end == pytest.approx(stepwise(bandwidth, start, nbytes), abs=2e-3)
        assert bandwidth.until(end) - bandwidth.until(start) == pytest.approx(nbytes, abs=1e-9)


def test_bandwidth_that_never_comes_back():
    assert Bandwidth((5.0, 0.0), repeat=False).finish(0.0, 6) == math.inf
    assert Bandwidth((5.0, 0.0)).finish(0.0, 6) == pytest.approx(2.2)
    assert Bandwidth((0.0,)).finish(3.0, 1) == math.inf
    assert Bandwidth((0.0, 4.0)).finish(0.0, 0) == 0.0


@pytest.mark.parametrize("rates", [(), (1.0, -1.0), (math.nan,), (math.inf,)])
def test_no_bandwidth(rates):
    with pytest.raises(ValueError, match="give one or more numbers"):
        Bandwidth(rates)


def test_gbit():
    assert rates_of([0.5, 8]).rates == (62.5e6, 1e9)


def test_carries_at_the_pace_of_its_trace():
    store = throttled(Bandwidth((100_000.0, 500_000.0, 0.0, 1e6), repeat=False), latency_s=0.25)
    assert store.get(KEY, 100, 300_100) == DATA[100:300_100]
    # 0.25 s latency, 0.75 s at 100 kB/s, the rest at 500 kB/s
    assert store.clock.now() == pytest.approx(1 + (300_000 - 75_000) / 500_000)
    assert store.get(KEY, 0, 400_000) == DATA[:400_000]  # waits out the outage
    left = 400_000 - (2 - 1.45 - 0.25) * 500_000
    assert store.clock.now() == pytest.approx(3 + left / 1e6)
    assert store.carried == 700_000


def test_a_late_request_is_a_miss_at_the_deadline_and_not_after():
    store = throttled(Bandwidth((1e6, 0.0), 0.1, repeat=False))
    with store.clock.deadline(0.5):
        assert store.get(KEY, 0, 200_000) is None
    assert store.clock.now() == pytest.approx(0.5)
    assert store.stats.faults["deadline"] == 1
    with store.clock.deadline(0.5):
        assert store.get(KEY, 0, 0) == b""
    assert throttled(Bandwidth((0.0,)), timeout=2.0).get(KEY) is None


def test_a_dead_link_costs_its_timeout():
    store = throttled(Bandwidth((0.0,)), timeout=2.0)
    assert store.get(KEY) is None
    assert store.clock.now() == pytest.approx(2.0)


@pytest.mark.parametrize("at", [0, 1, 65_535, 65_536, 100_000, 299_999])
def test_a_cut_at_any_byte_fails_one_request(at):
    store = throttled(Bandwidth.constant(1e6), faults=[Fault(at, "cut")])
    assert store.get(KEY, 0, 300_000) is None
    assert store.clock.now() == pytest.approx(at / 1e6)
    assert store.stats.faults["io"] == 1
    assert store.get(KEY, at, 300_000) == DATA[at:300_000]
    assert store.clock.now() == pytest.approx(0.3)


def test_a_dead_link_stays_dead_at_once():
    store = throttled(Bandwidth.constant(1e6), faults=[Fault(1000, "dead")])
    assert store.get(KEY, 0, 2000) is None
    assert store.get(KEY, 0, 10) is None
    assert store.clock.now() == pytest.approx(0.001)
    store.restart()
    assert store.get(KEY, 0, 10) == DATA[:10]


def test_a_stall_ends_and_a_stall_without_an_end_meets_the_deadline():
    store = throttled(Bandwidth.constant(1e6), faults=[Fault(1000, "stall", 3.0), Fault(5000, "stall")])
    assert store.get(KEY, 0, 2000) == DATA[:2000]
    assert store.clock.now() == pytest.approx(3.002)
    for _ in range(2):
        with store.clock.deadline(1.0):
            assert store.get(KEY, 0, 10_000) is None
    assert store.clock.now() == pytest.approx(5.002)


def test_in_real_time_and_among_threads():
    store = ThrottledStore(throttled(Bandwidth.constant(1)).store, Bandwidth.constant(10e6), burst_s=0.0)
    begin, got = time.monotonic(), []
    threads = [threading.Thread(target=lambda: got.append(store.get(KEY) == DATA)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 3
    assert time.monotonic() - begin >= 3 * len(DATA) / 10e6  # together no faster than the link
    slow = ThrottledStore(store.store, Bandwidth.constant(100.0))
    begin = time.monotonic()
    with deadline(0.1):
        assert slow.get(KEY) is None
    assert time.monotonic() - begin < 10  # of the hours that it would take


def test_a_sleep_without_an_end_is_an_error():
    with pytest.raises(ValueError, match="without an end"):
        VirtualClock().sleep(math.inf)
