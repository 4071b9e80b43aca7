"""Bootstrap intervals of figures that are measured on the same prompts: one set of resamples for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blendkv.bench.measure import Interval

RESAMPLES = 10_000


@dataclass(frozen=True, eq=False)
class Resamples:
    """Prompts drawn with replacement, again and again.

    Attributes:
        chosen: `[R, N]` which prompt each draw is.
    """

    chosen: np.ndarray

    @classmethod
    def of(cls, prompts: int, resamples: int = RESAMPLES, seed: int = 0) -> Resamples:
        """Draws them; the same seed and number of prompts give the same ones.

        Raises:
            ValueError: if there are no prompts.
        """
        if prompts < 1:
            raise ValueError("an interval needs at least one prompt")
        return cls(np.random.default_rng(seed).integers(prompts, size=(resamples, prompts)))

    def mean(self, values: Sequence[float]) -> Interval:
        """Mean with its 95% percentile interval, the figure of `measure.paired_bootstrap`."""
        data = np.asarray(values, dtype=np.float64)
        return Interval(float(data.mean()), *_bounds(data[self.chosen].mean(axis=1)))

    def median(self, values: Sequence[float]) -> Interval:
        """Median with its 95% percentile interval (of a fifth of the resamples)."""
        data = np.asarray(values, dtype=np.float64)
        some = self.chosen[: max(1, len(self.chosen) // 5)]
        return Interval(float(np.median(data)), *_bounds(np.median(data[some], axis=1)))

    def ratio(self, values: Sequence[float], reference: Sequence[float]) -> Interval:
        """Mean of `values` / mean of `reference` on the same prompts; NaN where the reference's mean is 0.

        Prompts stay paired: a resample takes both figures of a prompt, or neither.
        """
        data, other = np.asarray(values, dtype=np.float64), np.asarray(reference, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = data[self.chosen].mean(axis=1) / other[self.chosen].mean(axis=1)
            whole = data.mean() / other.mean()
        if not (np.isfinite(whole) and np.isfinite(found).all()):
            return Interval(float("nan"), float("nan"), float("nan"))
        return Interval(float(whole), *_bounds(found))


def _bounds(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
