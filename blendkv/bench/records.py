"""Records of evaluation data: JSON, JSON Lines or a Hugging Face dataset in, values that know where they stand out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Style = Literal["qa", "summary", "dialogue"]
"""How the prompt asks (`laying.STYLES`)."""


@dataclass(frozen=True)
class Example:
    """A question, the texts to answer it from (each ends as it stands in the prompt), and accepted answers.

    Attributes:
        question: or the text to summarise, for few-shot dialogues.
        chunks: in prompt order.
        answers: accepted ones, or reference summaries; may be empty where only KL is wanted.
        style: how the prompt asks.
        support: indices of chunks that the answer needs, where the data says so.
    """

    question: str
    chunks: list[str]
    answers: list[str]
    style: Style = "qa"
    support: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """One JSON value of a data file, and where it stands, so that errors can say so."""

    value: Any
    place: str
    line: int | None = None

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

    def has(self, field: str) -> bool:
        """Whether it is an object with that field, and not null."""
        return isinstance(self.value, dict) and self.value.get(field) is not None

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


def read_records(path: Path) -> list[Record]:
    """All records of a JSON list, or of JSON Lines where the name ends in `.jsonl`; a bad line is a record too.

    Raises:
        ValueError: if it is a folder or not UTF-8, or a `.json` file is not JSON, or no list.
        OSError: if it cannot be read.
    """
    if path.is_dir():
        raise ValueError(f"{path.name} is a folder: give one of its files")
    text = _decoded(path)
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [Record(_parse(line), f"{path.name}, line {number}", number) for number, line in lines]
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(values, list):
        raise ValueError(f"{path.name}: expected a list of records, found {type(values).__name__}")
    lines_of = _first_lines(text, len(values))
    return [Record(value, f"{path.name}, record {i}", lines_of[i]) for i, value in enumerate(values)]


def hub_records(name: str) -> list[Record]:
    """The records of a Hugging Face dataset.

    Args:
        name: `owner/dataset`, `owner/dataset:config`, or `owner/dataset:config:split`; the split `validation`, or
            `test` where there is none.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        OSError: the hub cannot be reached, or does not have it.
        ValueError: it has no such split.
    """
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ModuleNotFoundError(
            f"{name!r} is no file here, and to read it as a Hugging Face dataset the package datasets is needed: "
            "pip install datasets, or give the path of a file"
        ) from None
    where, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        found = datasets.load_dataset(where, config or None)
    except Exception as error:  # datasets raises a dozen kinds, of its own and of others
        told = " ".join(str(error).split()).rstrip(".")
        raise OSError(
            f"cannot read the Hugging Face dataset {where!r}: {told}. Check its name and the network (HF_HUB_OFFLINE, "
            "HF_ENDPOINT), or fetch its file elsewhere and give the path of that"
        ) from error
    names = [split] if split else ["validation", "test"]
    chosen = next((part for part in names if part in found), None)
    if chosen is None:
        raise ValueError(
            f"{where} has no split {' or '.join(names)}: choose one of {', '.join(found)}, as {where}::NAME"
        )
    return [Record(dict(value), f"{where}[{chosen}], record {i}") for i, value in enumerate(found[chosen])]


def _decoded(path: Path) -> str:
    """The file's text, without the byte order mark that some editors put in front."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path.name}, line {line}: not UTF-8 text ({error.reason})") from None


class BadLine(str):
    """Why a line is not JSON, in place of its value."""


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return BadLine(f"not JSON ({error})")


def _first_lines(text: str, count: int) -> Sequence[int | None]:
    """On which line of a JSON list each of its items begins."""
    decoder, lines, line = json.JSONDecoder(), [], 1
    at, counted = text.index("[") + 1, 0
    for _ in range(count):
        while text[at] in " \t\r\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        lines.append(line)
        at = decoder.raw_decode(text, at)[1]
    return lines
