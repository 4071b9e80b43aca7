"""Readers of evaluation data: a file in, `Example`s out.

A task is one function from a `Record` to an `Example`, named in `READERS`; `read_examples` does the rest
(JSON or JSON Lines, the number of records, errors that say where).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MUSIQUE_PASSAGES = 6
MUSIQUE_TOKENS = 500


@dataclass(frozen=True)
class Example:
    """A question, the texts to answer it from (each ends as it stands in the prompt), and accepted answers."""

    question: str
    chunks: list[str]
    answers: list[str]


@dataclass(frozen=True)
class Record:
    """One JSON value of a data file, and where it stands, so that errors can say so."""

    value: Any
    place: str

    def get(self, field: str | int, kind: type | None = None) -> Record:
        """Return the value of a field (or of a list's item), checked to be of type `kind`."""
        place = f"{self.place}[{field}]" if isinstance(field, int) else f"{self.place}, field '{field}'"
        try:
            value = self.value[field]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{place}: missing") from None
        if kind is not None and not isinstance(value, kind):
            raise ValueError(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
        return Record(value, place)

    def text(self, field: str | int) -> str:
        """Return a field that is a string."""
        return str(self.get(field, str).value)

    def items(self, field: str | int) -> list[Record]:
        """Return the items of a field that is a list."""
        items = self.get(field, list)
        return [Record(value, f"{items.place}[{index}]") for index, value in enumerate(items.value)]

    def texts(self, field: str | int) -> list[str]:
        """Return a field that is a list of strings."""
        whole = self.get(field, list)
        return [whole.text(index) for index in range(len(whole.value))]


def hotpot(record: Record, tokenizer: PreTrainedTokenizerBase | None = None) -> Example:
    """HotpotQA, distractor setting: every passage is a chunk, `title: ` + sentences + blank line.

    Sentences are joined as they are: in this data each one after the first brings its own leading space.
    """
    chunks = [f"{passage.text(0)}: {''.join(passage.texts(1))}\n\n" for passage in record.items("context")]
    return Example(record.text("question"), chunks, [record.text("answer")])


def musique(record: Record, tokenizer: PreTrainedTokenizerBase | None = None) -> Example:
    """MuSiQue as CacheBlend sampled it: the first 6 passages, each cut at 500 tokens, + blank line."""
    if tokenizer is None:
        raise ValueError("musique cuts passages by tokens: give a tokenizer")
    passages = [passage.text("text") for passage in record.items("ctxs")[:MUSIQUE_PASSAGES]]
    chunks = [cut(passage, MUSIQUE_TOKENS, tokenizer) + "\n\n" for passage in passages]
    return Example(record.text("question"), chunks, record.texts("answers"))


Reader = Callable[[Record, "PreTrainedTokenizerBase | None"], Example]
READERS: dict[str, Reader] = {"hotpot": hotpot, "musique": musique}


def read_examples(
    task: str, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, limit: int | None = None
) -> list[Example]:
    """Read the examples of a task.

    Args:
        task: A name in `READERS`.
        path: A JSON list, or JSON Lines where the name ends in `.jsonl`.
        tokenizer: For tasks that cut text by tokens.
        limit: Number of records to read, from the first; all by default.

    Raises:
        ValueError: The task is unknown, or the file malformed; names the record and the field.
    """
    if task not in READERS:
        raise ValueError(f"unknown task '{task}': one of {', '.join(sorted(READERS))}")
    return [READERS[task](record, tokenizer) for record in islice(_records(Path(path)), limit)]


def cut(text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Cut `text` after `tokens` tokens; byte-exact where the tokenizer knows offsets."""
    fast = bool(tokenizer.is_fast)
    encoded = tokenizer(text, add_special_tokens=False, truncation=True, max_length=tokens, return_offsets_mapping=fast)
    ids = encoded["input_ids"]
    if len(ids) < tokens:
        return text
    if fast:
        return text[: encoded["offset_mapping"][-1][1]]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _records(path: Path) -> list[Record]:
    """All records of a file, with their places."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = [(f"{path.name}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
        return [Record(_parse(line, place), place) for place, line in lines if line.strip()]
    values = _parse(text, path.name)
    if not isinstance(values, list):
        raise ValueError(f"{path.name}: expected a list of records, found {type(values).__name__}")
    return [Record(value, f"{path.name}, record {index}") for index, value in enumerate(values)]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error})") from error
