"""Scores of one answer or one prompt: Rouge-L, what counts of a generated answer, rank correlation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

_WORD = re.compile(r"[^\W_]+")


def rouge_l(prediction: str, references: str | Iterable[str]) -> float:
    """Rouge-L F-measure of a prediction with the reference that fits best, 0 to 1.

    Words are runs of letters and digits in lower case, without stemming (`rouge_score` with `use_stemmer=False`, and
    with letters of every script).
    """
    said = _words(prediction)
    listed = [references] if isinstance(references, str) else references
    return max((_rouge_l(said, _words(reference)) for reference in listed), default=0.0)


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for j, other in enumerate(second, 1):
            diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def first_line(text: str) -> str:
    """What counts of a generated answer: its first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, -1 to 1; NaN if one of them is constant.

    Raises:
        ValueError: for fewer than two values, or different numbers of them.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(
            f"ranks of {len(first)} and {len(second)} values cannot be correlated: give as many, at least 2"
        )
    a, b = (_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second))
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts + 1) / 2)[inverse]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _rouge_l(said: list[str], wanted: list[str]) -> float:
    common = common_subsequence(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
