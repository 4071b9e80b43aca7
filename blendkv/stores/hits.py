"""How often files are read: counted in memory, and now and then beside the files, as an extended attribute."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress

ATTRIBUTE = "user.blendkv.hits"
EVERY = 16
"""Hits of a file that are written together: writing one costs several microseconds, about as much as opening a file."""
MOST = 4096
"""Files whose hits are in memory only."""
_COUNT = re.compile(rb"\d{1,18}")
_NONE = {errno.ENOTSUP, errno.EOPNOTSUPP}


class Hits:
    """Best effort: counts of processes that are killed, or write at the same moment, are lost. Nothing here raises.

    Args:
        root: folder that names are relative to.
    """

    def __init__(self, root: str) -> None:
        self._root, self._pid = root, os.getpid()
        self._new: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        """One more hit of a file."""
        with self._lock:
            self._disown()
            new = self._new[name] = self._new.get(name, 0) + 1
            if new >= EVERY:
                self._write(name)
            elif len(self._new) > MOST:
                self._write(next(iter(self._new)))

    def drop(self, name: str) -> None:
        """Forgets hits of a file that was replaced."""
        with self._lock:
            self._new.pop(name, None)

    def of(self, name: str) -> int | None:
        """Hits of a file since it was stored, or None where the file system cannot keep them."""
        written = self._read(name)
        return None if written is None else written + self._new.get(name, 0)

    def write(self) -> None:
        """Writes all that was counted."""
        with self._lock:
            self._disown()
            for name in list(self._new):
                self._write(name)

    def _disown(self) -> None:
        """Forgets, after a fork, what the parent counted, and will write itself."""
        if self._pid != os.getpid():
            self._new, self._pid = {}, os.getpid()

    def _read(self, name: str) -> int | None:
        if not hasattr(os, "getxattr"):
            return None
        try:
            value = os.getxattr(f"{self._root}/{name}", ATTRIBUTE, follow_symlinks=False)
        except OSError as error:
            return None if error.errno in _NONE else 0
        return int(value) if _COUNT.fullmatch(value) else 0

    def _write(self, name: str) -> None:
        new, written = self._new.pop(name), self._read(name)
        if written is not None:
            with suppress(OSError):
                value = b"%d" % (written + new)
                os.setxattr(f"{self._root}/{name}", ATTRIBUTE, value, follow_symlinks=False)
