"""Figures of each prompt and setting as JSON Lines, kept while they are made: what is there is not computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blendkv._paths import require_writable

KEY = (
    *("item", "digest", "chunks", "chunk_tokens", "batch"),
    *("method", "selector", "ratio", "condition", "check_layers", "corrector"),
)
"""Fields that tell figures apart."""
Figures = dict[str, Any]


class Journal:
    """A file of figures, or, without a path, only what is in memory.

    The first line holds the settings that all figures share. A last line that was cut off (the process was killed) is
    dropped.

    Args:
        path: of the file; made if it is not there.
        header: settings, plain JSON.

    Raises:
        ValueError: the file is no journal, or its settings are others; the message names them.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, json.loads(json.dumps(dict(header)))
        self._found: dict[tuple, Figures] = {}
        if path is None:
            return
        require_writable(path.absolute().parent)
        if path.exists() and path.stat().st_size:
            self._read(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"header": self.header}) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Number of figures."""
        return len(self._found)

    def get(self, key: Mapping[str, Any]) -> Figures | None:
        """The figures of a key, or None."""
        return self._found.get(_key(key))

    def add(self, key: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Keeps figures, on disk when this returns."""
        entry = {**key, **figures}
        self._found[_key(entry)] = entry
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode("utf-8").splitlines()
        entries = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
        if not entries or "header" not in entries[0]:
            raise ValueError(f"{path} is not a file of `bench quality --out`: choose another path")
        others = changed(entries[0]["header"], self.header)
        if others:
            raise ValueError(
                f"{path} was made with other settings ({'; '.join(others)}): choose another path, or the same settings"
            )
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for entry in entries[1:]:
            self._found[_key(entry)] = entry


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two headers, a line each."""
    names: Sequence[str] = [*old, *(name for name in new if name not in old)]
    return [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def _key(entry: Mapping[str, Any]) -> tuple:
    return tuple(entry.get(field) for field in KEY)


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); choose another path") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{path}, line {number}: not an object; choose another path")
    return entry
