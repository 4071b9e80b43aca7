"""What the transfer scheduler promises, in figures: waits of light clients, shares of equal ones."""

import numpy as np
import pytest

from blendkv.bench.fairness import backlogged, fairness_rows, flood_and_light, in_threads, jain, simulate
from blendkv.loading.queues import DEFAULT_POLICY, FifoQueue, get_queue
from blendkv.loading.scheduler import SLOTS

MIB = 1 << 20


def test_the_clock_of_the_simulation():
    """By hand: two slots, pieces of 1, 2 and 1 seconds at once, one that comes later."""
    arrivals = [(0.0, "a", MIB), (0.0, "b", 2 * MIB), (0.0, "c", MIB), (2.5, "d", MIB)]
    found = simulate(FifoQueue(), 2, arrivals, 10)
    assert found.waits == {"a": [0.0], "b": [0.0], "c": [1.0], "d": [0.0]}
    assert found.served == {"a": MIB, "b": 2 * MIB, "c": MIB, "d": MIB}
    cut = simulate(FifoQueue(), 1, arrivals, 2.0)  # what waits still, waits at least so long
    assert cut.waits == {"a": [0.0], "b": [1.0], "c": [2.0]}
    assert cut.served == {"a": MIB}


def light_p99(policy, slots, load, service, seeds=3):
    waits = []
    for seed in range(seeds):
        run = simulate(get_queue(policy), slots, flood_and_light(slots, load, service, 300, seed), 300)
        waits += [wait for client, each in run.waits.items() if client != "flood" for wait in each]
    return np.percentile(waits, 99)


@pytest.mark.parametrize("service", ["equal", "exponential"])
@pytest.mark.parametrize("load", [0.1, 0.3, 0.5])
def test_light_clients_beside_a_flood(load, service):
    assert light_p99(DEFAULT_POLICY, SLOTS, load, service) <= 2.0


def test_first_come_would_not_do():
    assert light_p99("fifo", SLOTS, 0.1, "equal") > 50


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_equal_clients_get_equal_bytes(slots):
    for clients in ((MIB,) * 10, (MIB,) * 5 + (4 * MIB,) * 5):
        seconds = 100.0 * len(clients) / slots
        run = simulate(get_queue(), slots, backlogged(clients, seconds, slots, 0), seconds)
        assert jain([run.served[f"client {number}"] for number in range(len(clients))]) >= 0.98
    softmax = simulate(get_queue("softmax"), slots, backlogged(clients, seconds, slots, 0), seconds)
    assert jain([softmax.served[f"client {number}"] for number in range(len(clients))]) < 0.9  # it counts pieces


def test_jain():
    assert jain([1, 1, 1, 1]) == 1
    assert jain([1, 0, 0, 0]) == 0.25


def test_in_threads():
    """By a real clock, so with room: first come makes light clients wait for half of the flood."""
    run = in_threads(get_queue(), 8, 0.3, 0)
    waits = [wait for client, each in run.waits.items() if client != "flood" for wait in each]
    fifo = in_threads(FifoQueue(), 8, 0.3, 0)
    late = [wait for client, each in fifo.waits.items() if client != "flood" for wait in each]
    assert np.median(waits) < 3
    assert np.median(waits) < np.median(late) / 2


def test_rows():
    rows = fairness_rows((2,), (0.3,), seconds=50, seeds=1, threads=False)
    assert {row["kind"] for row in rows} == {"flood", "shares"}
    assert len(rows) == 4 * 3
    assert all(np.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


def test_a_run_too_short_for_light_clients_says_so():
    with pytest.raises(ValueError, match="give more seconds"):
        fairness_rows(slots=(1,), loads=(0.1,), seconds=1.0, seeds=1, threads=False)
