"""Sets of bandwidths for `blendkv bench streaming`: made by code, or read from a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from blendkv.bench.bandwidth import Bandwidth

STEPS = 40
"""Of a course that is made by code; it begins anew after the last."""
SETS = ("uniform", "outages", "wireless")


def links_of(name: str, count: int, step_s: float, seed: int = 0) -> list[Bandwidth]:
    """Courses whose nominal rate is 1 byte a second.

    Args:
        name: "uniform": each step drawn from U(0.1, 10), over its mean, as CacheGen's traces (Liu et al. 2024, section
            7.1). "outages": a steady link that stands still for 4 to 20 steps, once, or for good in one of four.
            "wireless": the log of the rate is a mean-reverting walk, and now and then it falls to between a fifth and a
            hundredth for 2 to 8 steps.
        count: of courses.
        step_s: seconds of a step.
        seed: the same seed gives the same courses, whatever their number.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in SETS:
        raise ValueError(f"no set of links is called {name!r}; choose among {', '.join(SETS)}, or give a file")
    made = []
    for number in range(count):
        rng = np.random.default_rng([seed, SETS.index(name), number])
        made.append(Bandwidth(tuple(_RATES[name](rng)), step_s))
    return made


def _uniform(rng: np.random.Generator) -> list[float]:
    return (rng.uniform(0.1, 10, STEPS) / 5.05).tolist()


def _outages(rng: np.random.Generator) -> list[float]:
    rates = rng.uniform(0.9, 1.1, STEPS)
    begin = int(rng.integers(0, 8))
    lasts = STEPS if rng.uniform() < 0.25 else int(rng.integers(4, 21))
    rates[begin : begin + lasts] = 0.0
    return rates.tolist()


def _wireless(rng: np.random.Generator) -> list[float]:
    level, rates, fallen, left = 0.0, [], 1.0, 0
    for _ in range(STEPS):
        level = 0.8 * level + 0.35 * rng.standard_normal()
        if left == 0 and rng.uniform() < 0.12:
            fallen, left = float(np.exp(-rng.uniform(math.log(5), math.log(100)))), int(rng.integers(2, 9))
        rates.append(math.exp(level) * (fallen if left else 1.0))
        left = max(0, left - 1)
    return rates


_RATES = {"uniform": _uniform, "outages": _outages, "wireless": _wireless}


def read_links(path: str | Path, step_s: float) -> list[Bandwidth]:
    """Courses of a file of lines `{"bw": [0.5, 5.0, ...]}`, over the mean of each.

    Args:
        path: JSON Lines; the unit does not matter, since benchmarks scale it.
        step_s: seconds of a number.

    Raises:
        ValueError: for a line that is none, with its number.
        OSError: if it cannot be read.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); expected {_EXAMPLE}") from None
        values = record.get("bw") if isinstance(record, dict) else None
        if not isinstance(values, list) or not values or not all(_is_rate(value) for value in values):
            raise ValueError(f"{path}, line {number}: expected {_EXAMPLE}, numbers of at least 0")
        mean = sum(values) / len(values)
        if mean == 0:
            raise ValueError(f"{path}, line {number}: a link that carries nothing at all; leave it out")
        found.append(Bandwidth(tuple(value / mean for value in values), step_s))
    if not found:
        raise ValueError(f"{path}: no lines; expected {_EXAMPLE} in each")
    return found


_EXAMPLE = '{"bw": [0.5, 5.0, ...]}'


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
