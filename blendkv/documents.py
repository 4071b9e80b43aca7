"""Documents out of files and folders: plain text, or one an item of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".md", ".jsonl")
"""What is taken out of folders; a file that is named may be called anything."""


def find_files(paths: Iterable[str | Path]) -> dict[Path, bool]:
    """Files, each once, those of a folder in order of their names, whatever is below it; and whether each was named.

    Hidden files and folders below a folder are left out.

    Raises:
        OSError: for a path that is not there.
        ValueError: for a folder with nothing in it that could be taken.
    """
    found: dict[Path, bool] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"{path} is not there: give files, or folders of {', '.join(SUFFIXES)}")
            found[path] = True
            continue
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in SUFFIXES
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not inside:
            raise ValueError(f"the folder {path} holds no {', '.join(SUFFIXES)}: name its files, or another folder")
        found |= {file: found.get(file, False) for file in inside}
    return found


def read_documents(files: Mapping[Path, bool], field: str = "text") -> Iterator[str]:
    """The documents of files, one file in memory at a time (of `.jsonl`, one line). Blank ones are left out.

    Args:
        files: of `find_files`.
        field: of items of `.json` and `.jsonl` that holds the text; items may be strings, too.

    Raises:
        ValueError: for a file that is no text, no JSON, has an item without the field, or was named and is blank.
        OSError: if one cannot be read.
    """
    for path, named in files.items():
        blank = True
        for text in _texts(path, field):
            if text.strip():
                blank = False
                yield text
        if blank and named:
            raise ValueError(f"{path} {'holds no text' if path.stat().st_size else 'is empty'}: leave it out")


def count_documents(files: Mapping[Path, bool], field: str = "text") -> int:
    """How many documents `read_documents` gives; reads all files, so that what is wrong shows before the work.

    Raises:
        ValueError: as there, or because there are none.
        OSError: if a file cannot be read.
    """
    count = sum(1 for _ in read_documents(files, field))
    if not count:
        raise ValueError("there are no documents: all files are empty")
    return count


def _texts(path: Path, field: str) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(_parsed(line, f"{path}, line {number}"), field, f"{path}, line {number}")
    elif suffix == ".json":
        data = path.read_bytes()
        items = _parsed(data, str(path)) if data.strip() else []
        for number, item in enumerate(items if isinstance(items, list) else [items], 1):
            yield _text_of(item, field, f"{path}, item {number}")
    else:
        yield _decoded(path.read_bytes(), str(path))


def _decoded(data: bytes, place: str) -> str:
    if b"\0" in data:
        raise ValueError(f"{place} is a binary file, no text: leave it out, or give its text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is no UTF-8 text (byte {error.start:,}): convert it, or leave it out") from None


def _parsed(data: bytes, place: str) -> Any:
    try:
        return json.loads(_decoded(data, place))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None


def _text_of(item: Any, field: str, place: str) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise ValueError(
            f"{place} is a {type(item).__name__}: an item is a string, or an object with a field {field!r}"
        )
    if field not in item:
        raise ValueError(f"{place} has no field {field!r}: name one of {_some(sorted(item))} with --field")
    if not isinstance(item[field], str):
        raise ValueError(f"{place}: the field {field!r} is a {type(item[field]).__name__}, not a string")
    return item[field]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "(it has none)"
