"""Texts out of files: what profiles are calibrated on, and what codecs are measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash


@dataclass(frozen=True)
class Passage:
    """Token ids of one text or of several short ones, and what these were.

    Attributes:
        ids: token ids.
        digests: of the texts (`digest`).
    """

    ids: list[int]
    digests: tuple[str, ...]


def digest(text: str) -> str:
    """16 hex digits that tell a text from others."""
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_texts(path: str | Path) -> list[str]:
    """The texts in a file: of each record of `.json` or `.jsonl` all strings, else the file as it is.

    Raises:
        ValueError: if it holds none.
        OSError: if it cannot be read.
    """
    path = Path(path)
    if path.suffix not in (".json", ".jsonl"):
        texts = [path.read_text(encoding="utf-8", errors="replace")]
    else:
        content = path.read_text(encoding="utf-8")
        try:
            if path.suffix == ".jsonl":
                records = [json.loads(line) for line in content.splitlines() if line.strip()]
            else:
                records = json.loads(content)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not what its name says: {error}") from error
        texts = ["\n".join(_strings(record)) for record in (records if isinstance(records, list) else [records])]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"{path} holds no text")
    return texts


def _strings(value: Any) -> Iterator[str]:
    """All strings in a record; a list of strings that begin with spaces is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        if value and all(isinstance(item, str) for item in value) and any(item[:1] == " " for item in value[1:]):
            yield "".join(value)
        else:
            for inner in value:
                yield from _strings(inner)


def passages(
    paths: Sequence[str | Path], tokenizer: Any, tokens: int, count: int, without: Iterable[str] = ()
) -> list[Passage]:
    """Passages of exactly `tokens` tokens, taken from the files in turn.

    Short texts are joined with those after them in the file; of a long text only the beginning is used. No text is used
    twice.

    Args:
        paths: files (`read_texts`); one that is named several times gives as many passages a turn.
        tokenizer: of the model.
        tokens: of each passage.
        count: how many; fewer if there are no more.
        without: digests of texts that must not be used.

    Raises:
        ValueError: if there is not one.
    """
    used = set(without)
    sources = {path: _passages(read_texts(path), tokenizer, tokens, used) for path in paths}
    found: list[Passage] = []
    turns = list(paths)
    while turns and len(found) < count:
        for path in list(turns):
            passage = next(sources[path], None)
            if passage is None:
                turns.remove(path)
            elif len(found) < count:
                found.append(passage)
    if not found:
        raise ValueError(
            f"no {tokens} tokens of text that may be used in {', '.join(map(str, paths))}: give more files"
        )
    return found


def count_known(paths: Sequence[str | Path], digests: Iterable[str]) -> int:
    """How many texts of the files have one of these digests."""
    known = set(digests)
    return sum(digest(text) in known for path in dict.fromkeys(paths) for text in read_texts(path))


def _passages(texts: Sequence[str], tokenizer: Any, tokens: int, used: set[str]) -> Iterator[Passage]:
    """Passages of one file; `used` are digests that are left out, and gets those that were taken."""
    ids: list[int] = []
    digests: list[str] = []
    for text in texts:
        if (own := digest(text)) in used:
            continue
        used.add(own)
        digests.append(own)
        ids += tokenizer(text[: 16 * tokens] + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= tokens:
            yield Passage(ids[:tokens], tuple(digests))
            ids, digests = [], []
