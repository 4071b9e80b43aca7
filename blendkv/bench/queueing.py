"""One worker that serves requests in the order in which they come: when each is answered, and how many it bears."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def poisson_arrivals(count: int, rate: float, seed: int) -> np.ndarray:
    """`[N]` seconds at which requests arrive, `rate` of them a second on average, whatever happened before.

    The same seed gives the same arrivals at another rate, only closer together or further apart.

    Raises:
        ValueError: for a rate that is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate={rate}: give requests a second, above 0")
    return np.cumsum(np.random.default_rng(seed).exponential(size=count)) / rate


def fifo(arrivals: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """`[N]` when the one worker begins with each request: when it has arrived, and the one before is done.

    Args:
        arrivals: `[N]` ascending.
        seconds: `[N]` that each keeps the worker.
    """
    starts, free = np.empty(len(arrivals)), -np.inf
    for i, (arrival, needed) in enumerate(zip(arrivals.tolist(), seconds.tolist(), strict=True)):
        starts[i] = max(arrival, free)
        free = starts[i] + needed
    return starts


def sustained_rate(p95: Callable[[float], float], alone: float, target: float) -> float:
    """The largest rate whose p95 is at most `target`, within a thousandth; 0 if none is.

    Args:
        p95: seconds at a rate; must not fall as the rate grows.
        alone: of a request that waits for nobody, a hint where to search.
        target: seconds.
    """
    low, high = 0.0, 1 / max(alone, 1e-9)
    if p95(high * 1e-6) > target:
        return 0.0
    while p95(high) <= target:  # a short queue may bear more than the worker does in the long run
        low, high = high, 2 * high
        if high * alone > 1e6:
            return float("inf")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if p95(middle) <= target else (low, middle)
    return low
