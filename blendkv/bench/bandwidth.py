"""How fast a link is over time: what a throttled source follows, and what only an oracle may look into."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second over time, constant within each step.

    Attributes:
        rates: of each step, in bytes a second; 0 is an outage.
        step_s: seconds of a step.
        repeat: whether it begins anew after the last step; else the last rate holds for ever.

    Raises:
        ValueError: for no rates, or one that is negative or no number.
    """

    rates: tuple[float, ...]
    step_s: float = 1.0
    repeat: bool = True

    def __post_init__(self) -> None:
        """Refuses what is no bandwidth."""
        if not self.rates or not all(math.isfinite(rate) and rate >= 0 for rate in self.rates):
            raise ValueError(f"bandwidths {self.rates!r}: give one or more numbers of at least 0, in bytes a second")
        if not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ValueError(f"a step of {self.step_s!r} s: give a positive number")

    @classmethod
    def constant(cls, bytes_per_s: float) -> Bandwidth:
        """The same at all times."""
        return cls((float(bytes_per_s),))

    @cached_property
    def _sums(self) -> list[float]:
        """Bytes until the beginning of each step, and until the end of the last."""
        return list(accumulate((rate * self.step_s for rate in self.rates), initial=0.0))

    @property
    def mean(self) -> float:
        """Bytes a second, over all steps."""
        return self._sums[-1] / (len(self.rates) * self.step_s)

    def scaled(self, factor: float) -> Bandwidth:
        """The same course, faster or slower."""
        return Bandwidth(tuple(rate * factor for rate in self.rates), self.step_s, self.repeat)

    def rate(self, at: float) -> float:
        """Bytes a second at a moment; before 0 as at 0."""
        step = int(max(0.0, at) / self.step_s)
        return self.rates[step % len(self.rates) if self.repeat else min(step, len(self.rates) - 1)]

    def until(self, at: float) -> float:
        """Bytes that fit through from 0 until a moment; negative before 0."""
        if at <= 0:
            return at * self.rates[0]
        whole, sums = len(self.rates) * self.step_s, self._sums
        cycles, within = divmod(at, whole) if self.repeat else (0.0, at)
        if within >= whole:
            return sums[-1] + (within - whole) * self.rates[-1]
        step = min(int(within / self.step_s), len(self.rates) - 1)
        return cycles * sums[-1] + sums[step] + (within - step * self.step_s) * self.rates[step]

    def finish(self, start: float, nbytes: float) -> float:
        """When the last of `nbytes` is through that begin at `start`; infinity if never."""
        if nbytes <= 0:
            return start
        goal, sums, whole = self.until(start) + nbytes, self._sums, len(self.rates) * self.step_s
        if goal <= 0:
            return goal / self.rates[0]
        cycles = 0
        if self.repeat:
            if sums[-1] == 0:
                return math.inf
            cycles = max(0, math.ceil(goal / sums[-1]) - 1)
            goal -= cycles * sums[-1]
        if goal > sums[-1]:
            if self.repeat:  # rounding
                return max(start, (cycles + 1) * whole)
            return whole + (goal - sums[-1]) / self.rates[-1] if self.rates[-1] else math.inf
        step = max(bisect_left(sums, goal) - 1, 0)  # the first moment at which so much is through
        return max(start, cycles * whole + step * self.step_s + (goal - sums[step]) / self.rates[step])


def rates_of(values: Sequence[float], unit: float = BYTES_PER_GBIT, step_s: float = 1.0) -> Bandwidth:
    """A bandwidth of numbers in another unit, Gbit/s by default."""
    return Bandwidth(tuple(float(value) * unit for value in values), step_s)
