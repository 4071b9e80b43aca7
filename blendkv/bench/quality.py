"""`blendkv bench quality`: methods, selectors and ratios beside full recompute on the same prompts.

Every prompt is one `Examiner.measure`; figures go into a `Journal` as they are made, rows are `summary.rows_of` them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from blendkv.attaching import attach, attachment_of
from blendkv.bench.forcing import STEPS, Agreement, Reference, agree, compare
from blendkv.bench.items import ANSWER_TOKENS, Examiner
from blendkv.bench.journal import Journal
from blendkv.bench.laying import Cell, cut_pieces, frame, lay_out
from blendkv.bench.results import model_device_name, versions
from blendkv.bench.settings import NAMES, REFERENCE, Setting, reference_of, settings_of
from blendkv.bench.summary import rows_of, verdict_of
from blendkv.bench.tasks import Example, Reading
from blendkv.selectors import Selector
from blendkv.texts import digest

__all__ = [
    "STEPS", "Agreement", "Comparison", "Reference", "agree", "compare", "lay_out", "measure_quality", "quality_rows",
]  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What `measure_quality` found.

    Attributes:
        rows: for every cell and setting, `summary.rows_of` with what they share.
        verdicts: for every cell, `summary.verdict_of`.
        computed: prompts x settings that were computed, not read from the journal.
        left_out: prompts of each cell that have fewer passages than it keeps.
    """

    rows: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]
    computed: int
    left_out: list[int] = field(default_factory=list)


def quality_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    examples: Sequence[Example],
    ratios: Sequence[float] = (0.0, 0.15),
    selectors: str | Selector | Sequence[str | Selector] = "hkvd",
    *,
    methods: Sequence[str] = ("blend",),
    answers: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """One row for each setting: means over prompts with their 95% bootstrap intervals.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        examples: questions with their chunks.
        ratios: of blends; 0 is full reuse.
        selectors: which tokens blends recompute.
        methods: names of `mapping.QUALITY_METHODS`.
        answers: whether answers are generated and scored.
        progress: whether to show a bar on stderr.
    """
    chosen = [selectors] if isinstance(selectors, str | Selector) else selectors
    settings = settings_of(methods, chosen, ratios, answers)
    reading = Reading(list(examples), list(range(len(examples))))
    return measure_quality(model, tokenizer, reading, settings, answers=answers, progress=progress).rows


def measure_quality(
    model: PreTrainedModel,
    tokenizer: Any,
    reading: Reading,
    settings: Sequence[Setting],
    *,
    cells: Sequence[Cell] = (Cell(),),
    answers: bool = True,
    max_new_tokens: int | None = None,
    reference: tuple[str, float] = REFERENCE,
    about: Mapping[str, Any] | None = None,
    out: Path | None = None,
    on_figures: Callable[[dict[tuple, list[dict[str, Any]]]], Any] = lambda figures: None,
    progress: bool = False,
) -> Comparison:
    """Measures every setting in every cell on the same prompts.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        reading: questions with their chunks.
        settings: what is compared (`settings_of`).
        cells: of a sweep; the prompts as they are by default.
        answers: whether answers are generated and scored.
        max_new_tokens: most tokens of an answer; None: by the task's style.
        reference: selector and ratio that KL is given relative to.
        about: added to every row: model, task, command, ...
        out: journal of each prompt's figures; what is there is not computed again.
        on_figures: called with the figures of each cell's prompts, by `Setting.key`.
        progress: whether to show a bar on stderr.

    Raises:
        ValueError: if there are no prompts, one is too long for the model, or the journal was made with other settings.
    """
    if not reading.examples:
        raise ValueError("there are no prompts to measure")
    _require_positions(model, tokenizer, reading, cells)
    attach(model)
    examiner = Examiner(model, tokenizer, answers, max_new_tokens)
    shared = {"dtype": str(model.dtype).removeprefix("torch."), "device": model_device_name(model)}
    header = shared | {
        "bench": "quality",
        "fingerprint": attachment_of(model).facts.fingerprint,
        "steps": STEPS,
        "answers": answers,
        "max_new_tokens": max_new_tokens or ANSWER_TOKENS,
        "versions": versions(),
    }
    journal = Journal(out, header)
    rows, verdicts, left_out, before = [], [], [], len(journal)
    total = len(cells) * len(reading.examples) * len(settings)
    with tqdm(total=total, desc="bench quality", unit="answer", disable=not progress, leave=False) as bar:
        for cell in cells:
            figures = _cell(examiner, reading, settings, cell, journal, bar.update)
            prompts = len(next(iter(figures.values())))
            left_out.append(len(reading.examples) - prompts)
            if not prompts:
                raise ValueError(f"no prompt has {cell.chunks} passages: give smaller numbers of --chunks")
            on_figures(figures)
            place = {"chunks": cell.chunks, "chunk_tokens": cell.chunk_tokens, "batch": cell.batch}
            score = "f1" if reading.examples[0].style == "qa" else "rouge_l"
            verdict = place | verdict_of(figures, score)
            verdicts.append(verdict)
            extra = {"full_gets_nothing": verdict["full_gets_nothing"], "can_do": verdict["can_do"]}
            told = {"bench": "quality", **shared, **(about or {}), **place, "steps": STEPS, **extra}
            own = rows_of(figures, reference_of(settings, *reference))
            rows += [told | row | {"versions": versions()} for row in own]
    return Comparison(rows, verdicts, len(journal) - before, left_out)


def _require_positions(model: PreTrainedModel, tokenizer: Any, reading: Reading, cells: Sequence[Cell]) -> None:
    """Refuses prompts that the model has no positions for, before the hours of work: its answers would mean nothing."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is None:
        return
    longest: dict[int, int] = {}
    for number, example in zip(reading.numbers, reading.examples, strict=True):
        around = sum(map(len, frame(tokenizer, example)))
        longest[number] = around + max(sum(map(len, cut_pieces(tokenizer, example, cell))) for cell in cells)
    over = [number for number, tokens in longest.items() if tokens + STEPS > room]
    if over:
        raise ValueError(
            f"records {', '.join(map(str, over[:5]))}{', ...' * (len(over) > 5)} (counted from 0): prompts of up to "
            f"{max(longest.values()):,} tokens, and the model has {room:,} positions: leave them out, or "
            "keep fewer passages"
        )


def _cell(
    examiner: Examiner,
    reading: Reading,
    settings: Sequence[Setting],
    cell: Cell,
    journal: Journal,
    done: Callable[[int], Any],
) -> dict[tuple, list[dict[str, Any]]]:
    """Figures by setting of the prompts that have enough passages, each from the journal or computed now."""
    found: dict[tuple, list[dict[str, Any]]] = {setting.key: [] for setting in settings}
    for number, example in zip(reading.numbers, reading.examples, strict=True):
        if cell.chunks is not None and len(example.chunks) < cell.chunks:
            done(len(settings))
            continue
        place = {
            "item": number,
            "digest": digest("\x1f".join([example.style, example.question, *example.chunks, *example.answers])),
            "chunks": cell.chunks,
            "chunk_tokens": cell.chunk_tokens,
            "batch": cell.batch,
        }
        keys = {s.key: place | {name: getattr(s, name) for name in NAMES} for s in settings}
        missing = [setting for setting in settings if journal.get(keys[setting.key]) is None]
        done(len(settings) - len(missing))
        for setting, figures in examiner.measure(example, cell, missing) if missing else ():
            journal.add(keys[setting.key], figures)
            done(1)
        for setting in settings:
            own = journal.get(keys[setting.key])
            assert own is not None
            found[setting.key].append(own)
    return found
