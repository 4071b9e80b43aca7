"""Where the integers of `data/rans.json` come from: `python -m blendkv.codecs.classes` writes them again."""

from __future__ import annotations

import json
from math import erfc, exp, sqrt
from pathlib import Path

FILE = Path(__file__).parent.parent / "data" / "rans.json"
BITS = 12
"""Frequencies of a row add up to 2 to this power."""
UNITS = 16
"""Scales are kept as integers, log2 in units of 1/16 octave."""
FIRST, SPACING, COUNT = -52, 4, 35
"""Log2 of the smallest class's scale in steps, from class to class, both in units; the largest is 38 steps."""
LARGEST = 127
"""Symbols beyond it are escaped."""
DROPPED = 0.4
"""Symbols whose share of the slots is below this get none, and are escaped."""
REACH = 3
"""Base symbols are told apart up to here when a refinement is coded."""


def tail(x: float, scale: float) -> float:
    """Probability of more than `x` > 0 where 70% is Gaussian and 30% Laplacian, both of standard deviation `scale`."""
    return 0.35 * erfc(x / scale / sqrt(2)) + 0.15 * exp(-x * sqrt(2) / scale)


def probability(symbol: int, scale: float) -> float:
    """Probability that a number of that scale (in steps) rounds to a symbol."""
    if symbol == 0:
        return 1 - 2 * tail(0.5, scale)
    return tail(abs(symbol) - 0.5, scale) - tail(abs(symbol) + 0.5, scale)


def symbol_row(scale: float) -> list[int]:
    """Frequencies of symbols 0, 1, 2, ..., those of -1, -2, ... being the same; what is left is the escape's."""
    slots = 2**BITS
    kept = [k for k in range(LARGEST + 1) if k == 0 or slots * probability(k, scale) >= DROPPED]
    row = [max(1, round(slots * probability(k, scale))) for k in kept]
    escape = max(1, round(slots * 2 * tail(len(row) - 0.5, scale)))
    row[0] = slots - escape - 2 * sum(row[1:])
    return row


def refinement_row(scale: float, base: int) -> list[int]:
    """Frequencies of -1, 0, 1, which 3 x base is off the symbol; the last base stands for all beyond it too."""
    bases = [base] if base < REACH else range(base, LARGEST // 3)
    chances = [sum(probability(3 * b + r, scale) for b in bases) for r in (-1, 0, 1)]
    row = [max(1, round(2**BITS * chance / sum(chances))) for chance in chances]
    row[row.index(max(row))] += 2**BITS - sum(row)
    return row


def generate() -> dict[str, list]:
    """Returns `{"symbols": [class][symbol], "refinements": [class][base 0..3][-1, 0, 1]}`."""
    scales = [2 ** ((FIRST + SPACING * i) / UNITS) for i in range(COUNT)]
    return {
        "symbols": [symbol_row(scale) for scale in scales],
        "refinements": [[refinement_row(scale, base) for base in range(REACH + 1)] for scale in scales],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(generate()).replace("], [", "],\n[") + "\n")
