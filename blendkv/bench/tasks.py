"""Tasks by name: a file, a Hugging Face dataset or nothing (the built-in one) in, `Example`s out.

A task is one function from a `Record` to an `Example`, named in `READERS`; `read_task` does the rest (where records
come from, which of them are wanted, errors that say where, or bad records skipped and counted).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendkv.bench import readers
from blendkv.bench.readers import MUSIQUE_PASSAGES, MUSIQUE_TOKENS, hotpot, musique
from blendkv.bench.records import BadLine, Example, Record, cut, hub_records, read_records
from blendkv.bench.synthetic import synthetic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "MUSIQUE_PASSAGES", "MUSIQUE_TOKENS", "READERS", "SYNTHETIC", "TASKS", "UNCUT", "Example", "Reading", "Record",
    "cut", "hotpot", "musique", "read_examples", "read_task", "wanted_records",
]  # fmt: skip

Reader = Callable[[Record, "PreTrainedTokenizerBase | None"], Example]
READERS: dict[str, Reader] = {
    "hotpot": hotpot,
    "musique": musique,
    "musique-original": readers.musique_original,
    "2wikimqa": readers.two_wiki,
    "longbench": readers.longbench,
    "multinews": readers.multi_news,
    "plain": readers.plain,
}
SAMSUM, SYNTHETIC = "samsum", "synthetic"
TASKS = (*READERS, SAMSUM, SYNTHETIC)
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d+))?")


@dataclass(frozen=True)
class Reading:
    """What was read of a task.

    Attributes:
        examples: in the order of the file.
        numbers: which record each was, counted from 0.
        skipped: why others were left out, one line each.
    """

    examples: list[Example]
    numbers: list[int]
    skipped: list[str] = field(default_factory=list)


class Uncut:
    """A tokenizer that takes every text for short: to check records before the model's own tokenizer is loaded."""

    is_fast = False

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """No ids."""
        return {"input_ids": []}


UNCUT: Any = Uncut()


def read_task(
    task: str,
    data: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    *,
    records: str = "all",
    skip_bad: bool = False,
) -> Reading:
    """Reads the examples of a task.

    Args:
        task: a name in `TASKS`.
        data: a JSON list, JSON Lines where the name ends in `.jsonl`, or a Hugging Face dataset (`hub_records`);
            not for the built-in task.
        tokenizer: for tasks that cut text by tokens.
        limit: number of examples, from the first that are wanted; all by default.
        records: which ones: "all", "odd" or "even" (counted from 0), or a slice such as "20:40".
        skip_bad: leave malformed records out and tell of them, instead of raising.

    Raises:
        ValueError: the task is unknown, a record malformed (names the record, the field and the line), or nothing left.
        OSError: the file cannot be read.
    """
    known = sorted({*READERS, SAMSUM, SYNTHETIC})
    if task not in known:
        raise ValueError(f"unknown task '{task}': one of {', '.join(known)}")
    if task == SYNTHETIC:
        if data is not None:
            raise ValueError("the task 'synthetic' is made by code: give no data, or the task of your data")
        count = max(limit or 0, 1) * 2 + (int(records.split(":")[0] or 0) if ":" in records else 0)
        numbers = list(islice(wanted_records(records, count), limit))
        made = synthetic(count)
        return Reading([made[i] for i in numbers], numbers)
    if data is None:
        raise ValueError(f"the task '{task}' is read from a file or a Hugging Face dataset: say which (--data)")
    path = Path(data)
    found = read_records(path) if path.exists() or not _is_hub_id(str(data)) else hub_records(str(data))
    reading = Reading([], [])
    for number, read in _jobs(task, found, tokenizer, records):
        if limit is not None and len(reading.examples) == limit:
            break
        try:
            example = read()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if not skip_bad:
                raise ValueError(_located(found[number], error)) from error
            reading.skipped.append(_located(found[number], error))
            continue
        reading.examples.append(example)
        reading.numbers.append(number)
    if not reading.examples:
        left = f"; {len(reading.skipped)} were malformed, the first: {reading.skipped[0]}" if reading.skipped else ""
        raise ValueError(
            f"{data} has {len(found)} records, and no prompt among those that are wanted ({records}){left}"
        )
    return reading


def read_examples(
    task: str, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, limit: int | None = None
) -> list[Example]:
    """Reads the examples of a task from its first records.

    Raises:
        ValueError: as `read_task`.
    """
    return read_task(task, path, tokenizer, limit).examples


def wanted_records(records: str, count: int) -> Iterator[int]:
    """Indices of the records that "all", "odd", "even" or a slice such as "20:40" or "1::2" mean.

    Raises:
        ValueError: for anything else.
    """
    chosen = {"all": "0:", "odd": "1::2", "even": "0::2"}.get(records, records)
    match = _SLICE.fullmatch(chosen)
    if match is None or match[3] == "0":
        raise ValueError(f"records {records!r}: give all, odd, even, or a slice such as 20:40")
    start, stop, step = (int(part) if part else None for part in match.groups())
    return iter(range(count)[start:stop:step])


def _jobs(
    task: str, found: Sequence[Record], tokenizer: Any, records: str
) -> Iterator[tuple[int, Callable[[], Example]]]:
    """Which records are wanted, and what reads each."""
    queries = readers.samsum_queries(found) if task == SAMSUM else range(len(found))
    for at in wanted_records(records, len(queries)):
        number = queries[at]
        yield number, lambda number=number: _read(task, found, number, tokenizer)


def _read(task: str, found: Sequence[Record], number: int, tokenizer: Any) -> Example:
    record = found[number]
    if isinstance(record.value, BadLine):
        raise ValueError(f"{record.place}: {record.value}")
    example = readers.samsum(found, number, tokenizer) if task == SAMSUM else READERS[task](record, tokenizer)
    if not example.chunks or not all(example.chunks):
        raise ValueError(f"{record.place}: {'an empty chunk' if example.chunks else 'no chunks'}")
    try:
        "".join((example.question, *example.chunks, *example.answers)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{record.place}: half of a character ({error.object[error.start]!r}), not text") from None
    return example


def _located(record: Record, error: Exception) -> str:
    """The error with the record's line, where the file is a list over many lines."""
    told = str(error) if isinstance(error, ValueError) else f"{record.place}: {type(error).__name__}: {error}"
    return told if record.line is None or ", line " in told else f"{told} (line {record.line})"


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}", name) is not None and not name.endswith((".json", ".jsonl"))
