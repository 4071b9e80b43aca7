"""What a link will carry, judged by what it carried: cautious, and quick to notice that it no longer does."""

from __future__ import annotations

from collections import deque

FEWEST = 4
"""Transfers that count at least."""
ERRORS = 64
"""Transfers whose errors are remembered."""
WORST = 3.0
"""Largest discount: never less than a quarter of what was seen."""


class Throughput:
    """Bytes a second of a link, from transfers that follow one another.

    What is expected is the harmonic mean over a window, weighted by bytes. What may be counted on is that, or the last
    transfer's rate if it is lower, divided by one plus the largest error of what was expected of late (as RobustMPC
    does: Yin et al. 2015, section 5.2): an erratic link is trusted less. While a transfer is under way that should have
    ended, both fall with every second: what has not come in a second is no megabyte a second.

    Args:
        prior: bytes a second, from earlier requests; None if nothing is known.
        window_s: seconds of transfers that count; older ones say little of a link that changes.
    """

    def __init__(self, prior: float | None = None, window_s: float = 1.0) -> None:
        self._prior, self._window = prior, window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._began: tuple[float, int] | None = None
        self._best = 0.0

    def began(self, now: float, nbytes: int) -> None:
        """A transfer of so many bytes begins."""
        self._began = (now, nbytes)

    def ended(self, now: float, nbytes: int) -> None:
        """It has ended with so many bytes. A clock that stood still or went back says nothing of a link."""
        if self._began is None:
            return
        seconds, self._began = now - self._began[0], None
        if seconds > 0 and nbytes > 0:
            self._add(seconds, nbytes)

    def dropped(self, now: float) -> None:
        """It was given up: had it been quicker than so far, it would have ended."""
        if self._began is None:
            return
        seconds, nbytes = now - self._began[0], self._began[1]
        self._began, mean = None, self.mean()
        if seconds > 0 and (mean is None or nbytes / seconds < mean):
            self._add(seconds, nbytes)

    def expected(self, now: float) -> float | None:
        """Bytes a second that are likely; None if nothing is known."""
        mean = self.mean()
        return None if mean is None else min(mean, self._most(now))

    def estimate(self, now: float) -> float | None:
        """Bytes a second to be counted on; None if nothing is known."""
        mean = self.mean()
        if mean is None:
            return None
        last = self._seen[-1][1] / self._seen[-1][0] if self._seen else mean
        return min(min(mean, last) / (1 + max(self._errors, default=0.0)), self._most(now))

    def hoped(self, now: float) -> float | None:
        """The most bytes a second that were seen, if what is under way may still have as many."""
        return min(self._best, self._most(now)) if self._best else self.expected(now)

    def mean(self) -> float | None:
        """Bytes a second of the transfers that count, without caution; the prior, or None, if there were none."""
        seconds = sum(took for took, _ in self._seen)
        return sum(nbytes for _, nbytes in self._seen) / seconds if seconds > 0 else self._prior

    def _add(self, seconds: float, nbytes: int) -> None:
        mean = self.mean()
        self._errors.append(0.0 if mean is None else min(WORST, max(0.0, mean * seconds / nbytes - 1)))
        self._seen.append((seconds, nbytes))
        self._best = max(self._best, nbytes / seconds)
        while len(self._seen) > FEWEST and sum(took for took, _ in self._seen) > self._window:
            self._seen.popleft()

    def _most(self, now: float) -> float:
        """What the transfer under way can have at most."""
        if self._began is None or now <= self._began[0]:
            return float("inf")
        return self._began[1] / (now - self._began[0])
