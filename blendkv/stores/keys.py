"""What a key may be, so that none can name a file or an object outside the store."""

from __future__ import annotations

import re

_KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".bkv"


def is_key(key: object) -> bool:
    """Whether this is a key: 64 hex digits, in lower case."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def place_of(key: str) -> tuple[str, str]:
    """Folder and file of an entry: the first two letters of its key, and its name."""
    return key[:2], key + SUFFIX


def key_of(name: str) -> str | None:
    """The key of an entry's file, or None if it is none."""
    key = name.removesuffix(SUFFIX)
    return key if key != name and is_key(key) else None
