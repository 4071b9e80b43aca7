"""Figures of prompts to rows: means with bootstrap intervals, paired; and whether the model can do the task at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blendkv.bench.intervals import Resamples
from blendkv.bench.measure import Interval
from blendkv.bench.settings import NAMES, NO_CONTEXT, Setting

MEANS = ("charged_budget", "kl", "kl_first", "same")
SCORES = ("f1", "rouge_l")
Figures = Mapping[str, Any]
LEAST = 8
"""Prompts below which nothing is said about whether a task can be done."""


def rows_of(figures: Mapping[tuple, Sequence[Figures]], reference: Setting) -> list[dict[str, Any]]:
    """One row for each setting.

    Args:
        figures: by `Setting.key`, of the same prompts in the same order.
        reference: the setting that KL is given relative to.

    Answers are scored on the prompts that say what is accepted, the same ones in all rows.
    """
    prompts = len(next(iter(figures.values())))
    draws, scored = Resamples.of(prompts), _scored(figures)
    among = Resamples.of(len(scored)) if scored else draws
    beside = [figure["kl"] for figure in figures[reference.key]]
    rows = []
    for key, own in figures.items():
        setting = Setting(*key)
        row: dict[str, Any] = {name: getattr(setting, name) for name in NAMES} | {"prompts": prompts}
        ci: dict[str, list[float] | None] = {}
        for name in MEANS:
            row[name], ci[name] = _said(draws.mean, [figure[name] for figure in own])
        for name in SCORES:
            row[name], ci[name] = _said(among.mean, [own[i][name] for i in scored or range(prompts)])
        for name in ("ttft_s", "speedup"):
            row[name], ci[name] = _said(draws.median, [figure.get(name) for figure in own])
        row["relative"], ci["relative"] = None, None
        if row["kl"] is not None:
            row["relative"], ci["relative"] = _pair(draws.ratio([figure["kl"] for figure in own], beside))
        rows.append(row | {"relative_to": list(reference.key[1:]), "ci": ci})
    return rows


def verdict_of(figures: Mapping[tuple, Sequence[Figures]], score: str) -> dict[str, Any]:
    """Whether the model can do the task: full recompute's score beside that of the question without any chunk.

    Args:
        figures: as for `rows_of`.
        score: "f1" or "rouge_l".

    Returns:
        `score`, `full`, `no_context`, `gain` with its interval `gain_ci`, `full_gets_nothing` (share of prompts that
        full recompute itself gets nothing on), `can_do` (None where that is not known), and `told`, a sentence.
    """
    told: dict[str, Any] = dict.fromkeys(("full", "no_context", "gain", "gain_ci", "full_gets_nothing", "can_do"))
    told = {"score": score} | told
    full, alone = (figures.get((method, None, None)) for method in ("full", NO_CONTEXT))
    scored = _scored(figures)
    if full is None or alone is None or not scored:
        return told | {"told": "answers were not scored, so nothing is known of whether the model can do this task"}
    own, without = ([part[i][score] for i in scored] for part in (full, alone))
    gain, ci = _pair(Resamples.of(len(own)).mean([a - b for a, b in zip(own, without, strict=True)]))
    can_do = None if len(own) < LEAST else bool(ci and ci[0] > 0)
    told |= {
        "full": sum(own) / len(own),
        "no_context": sum(without) / len(without),
        "gain": gain,
        "gain_ci": ci,
        "full_gets_nothing": sum(value == 0 for value in own) / len(own),
        "can_do": can_do,
    }
    name = {"f1": "F1", "rouge_l": "Rouge-L"}[score]
    beside = f"full recompute has {name} {told['full']:.3f}, the question without any chunk {told['no_context']:.3f}"
    if can_do is None:
        return told | {"told": f"{len(own)} prompts are too few to say whether the model can do this task: {beside}"}
    if not can_do:
        difference = "" if ci is None else f" (difference {ci[0]:+.3f} to {ci[1]:+.3f})"
        text = (
            f"this model cannot do this task on these prompts: {beside}{difference}. Scores of its answers rank nothing"
        )
        return told | {"told": f"{text}; KL still says how near a method is to full recompute"}
    return told | {"told": f"{beside}; full recompute gets nothing on {told['full_gets_nothing']:.0%} of the prompts"}


def _scored(figures: Mapping[tuple, Sequence[Figures]]) -> list[int]:
    """The prompts whose answers have a score, whoever gave them."""
    several = list(figures.values())
    return [i for i in range(len(several[0])) if all(own[i]["f1"] is not None for own in several)]


def _said(figure: Any, values: Sequence[Any]) -> tuple[float | None, list[float] | None]:
    """A figure and its interval, or nothing where a prompt has no value."""
    if any(value is None for value in values):
        return None, None
    return _pair(figure([float(value) for value in values]))


def _pair(interval: Interval) -> tuple[float | None, list[float] | None]:
    mean, low, high = interval
    return (None, None) if mean != mean else (mean, [low, high])
