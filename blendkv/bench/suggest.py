"""`blendkv verify --suggest`: the cheapest selector and ratio that keep a model's answers near full recompute's.

Chosen on one half of the prompts and checked on the other, so that picking the best of many does not flatter it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from blendkv.bench.intervals import Resamples
from blendkv.bench.quality import measure_quality
from blendkv.bench.records import Example
from blendkv.bench.settings import CONTROLS, Setting, settings_of
from blendkv.bench.summary import rows_of
from blendkv.bench.tasks import SYNTHETIC, Reading, read_task
from blendkv.passages import read_passages
from blendkv.selectors import Selector

BOUND = 0.05
"""Nats per answer token that a suggestion keeps KL under."""
RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
LEAST = 8
"""Prompts below which nothing is suggested."""
LIMIT = 40
"""Most prompts of the user's own that are measured."""


@dataclass(frozen=True)
class Suggestion:
    """What was found.

    Attributes:
        selector, ratio: suggested; None where none holds, or the prompts are too few to say.
        certain: whether it holds on prompts that it was not chosen on, with its whole interval.
        told: the same in a sentence, with its figures.
        bound: on KL, nats per answer token.
        prompts: measured.
        source: where they are from.
        rows: what was tried, cheapest first; `holds` says how it did.
    """

    selector: str | None
    ratio: float | None
    certain: bool
    told: str
    bound: float
    prompts: int
    source: str
    rows: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)


def suggest(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    task: str = "plain",
    data: str | Path | None = None,
    selectors: Sequence[str | Selector] = ("hkvd", "boundary"),
    ratios: Sequence[float] = RATIOS,
    bound: float = BOUND,
    progress: bool = False,
) -> Suggestion:
    """Measures selectors and ratios on prompts and suggests one.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        task: how `data` is read.
        data: prompts of one's own; without it the passages that come with the package, which are few and not one's own.
        selectors: to choose among.
        ratios: likewise.
        bound: on mean KL.
        progress: whether to show a bar on stderr.
    """
    if data is None and task != SYNTHETIC:
        reading, source = Reading(packaged := own_prompts(), list(range(len(packaged)))), "the package, not your own"
    else:
        reading = read_task(task, data, tokenizer, LIMIT)
        source = Path(data).name if data is not None else "the synthetic task, not your own"
    settings = settings_of(("reuse", "blend"), selectors, ratios, answers=False)
    figures: dict[tuple, list[dict[str, Any]]] = {}
    measure_quality(model, tokenizer, reading, settings, answers=False, progress=progress, on_figures=figures.update)
    return decide(figures, [s.key for s in settings], bound, source)


def decide(
    figures: Mapping[tuple, Sequence[Mapping[str, Any]]], keys: Sequence[tuple], bound: float, source: str
) -> Suggestion:
    """The suggestion that figures of prompts give.

    Args:
        figures: by (method, selector, ratio), of the same prompts in the same order.
        keys: of the settings, full recompute among them.
        bound: on mean KL.
        source: where the prompts are from.
    """
    prompts = len(figures[keys[0]])
    tried = [key for key in keys if key[0] in ("reuse", "blend") and key[1] not in CONTROLS]
    budgets = {key: sum(f["charged_budget"] for f in figures[key]) / prompts for key in tried}
    tried.sort(key=lambda key: budgets[key])
    rows = rows_of({key: figures[key] for key in tried}, Setting(*tried[0]))
    for row in rows:
        row["holds"] = _holds(row["ci"]["kl"], bound)
    told = {"bound": bound, "prompts": prompts, "source": source, "rows": rows}
    if prompts < LEAST:
        return Suggestion(None, None, False, _too_few(prompts), **told)
    chosen = next((key for key in tried if _mean(figures[key][::2]) <= bound), None)
    if chosen is None:
        best = min(tried, key=lambda key: _mean(figures[key]))
        text = (
            f"Nothing that was tried keeps KL under {bound:g}: the nearest is {_name(best)} with "
            f"{_mean(figures[best]):.4f}. Recompute in full, or try other selectors and larger ratios."
        )
        return Suggestion(None, None, False, text, **told)
    other = [figure["kl"] for figure in figures[chosen][1::2]]
    mean, low, high = Resamples.of(len(other)).mean(other)
    kept = (
        f"{_name(chosen)} (charged budget {budgets[chosen]:.3f}) is the cheapest that kept KL under {bound:g} on "
        f"{prompts - len(other)} of the prompts; on the {len(other)} others it has {mean:.4f} ({low:.4f} to {high:.4f})"
    )
    if high <= bound:
        text, certain = f"{kept}, which holds.", True
    elif mean <= bound:
        text, certain = f"{kept}: likely, not certain. About {_needed(other, bound)} prompts would tell.", False
    else:
        text = f"{kept}, which does not hold: take the next one in the table, and measure more prompts."
        return Suggestion(None, None, False, text, **told)
    return Suggestion(chosen[1] or chosen[0], chosen[2], certain, text, **told)


def own_prompts() -> list[Example]:
    """The questions that come with the package, each over six of its passages."""
    passages, questions = read_passages()
    prompts = []
    for i, question in enumerate(questions):
        needed = [p for p in passages if question.answer.lower() in p.text.lower()]
        others = [p for p in passages if p not in needed]
        chosen = [*others[i : i + 6 - len(needed)], *needed]
        chunks = [f"{p.title}: {p.text}\n\n" for p in chosen]
        prompts.append(Example(question.question, chunks, [question.answer]))
    return prompts


def _holds(interval: Sequence[float] | None, bound: float) -> str:
    if interval is None:
        return ""
    return "holds" if interval[1] <= bound else "does not hold" if interval[0] > bound else "cannot tell"


def _needed(values: Sequence[float], bound: float) -> int:
    """Prompts for an interval of this spread to fit under the bound, twice: half of them are for choosing."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
    return 2 * math.ceil((1.96 * spread / max(bound - mean, 1e-9)) ** 2)


def _too_few(prompts: int) -> str:
    return (
        f"{prompts} prompts are too few to suggest anything (at least {LEAST}; 40 are better): give a file of your own "
        'with --data, JSON Lines of {"question": ..., "chunks": [...]}.'
    )


def _mean(figures: Sequence[Mapping[str, Any]]) -> float:
    return sum(figure["kl"] for figure in figures) / len(figures)


def _name(key: tuple) -> str:
    return "full reuse" if key[0] == "reuse" else f"{key[1]} at {100 * key[2]:g}%"
