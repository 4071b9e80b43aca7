"""How often files are read: counted in memory, and now and then beside the files, as an extended attribute."""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress

ATTRIBUTE = "user.blendkv.hits"
EVERY = 64
"""Hits of a file that are written together: writing costs several microseconds, of the 40 or so of a small get."""
EXIT_SECONDS = 1.0
"""Longest that a process which ends writes what it counted."""
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

    def add(self, name: str) -> None:
        """One more hit of a file. It is on the way of every read: no lock, no system call but every 64th time."""
        new = self._new[name] = self._new.get(name, 0) + 1
        if new >= EVERY:
            self._write(name)

    def drop(self, name: str) -> None:
        """Forgets hits of a file that was replaced."""
        self._new.pop(name, None)

    def of(self, name: str) -> int | None:
        """Hits of a file since it was stored, or None where the file system cannot keep them."""
        written = self._read(name)
        return None if written is None else written + self._new.get(name, 0)

    def write(self, seconds: float = float("inf")) -> None:
        """Writes all that was counted, or what there is time for."""
        if self._pid != os.getpid():  # after a fork: the parent writes these itself
            self._new, self._pid = {}, os.getpid()
        end = time.monotonic() + seconds
        for name in list(self._new):
            self._write(name)
            if time.monotonic() > end:
                return

    def _read(self, name: str) -> int | None:
        if not hasattr(os, "getxattr"):
            return None
        try:
            value = os.getxattr(f"{self._root}/{name}", ATTRIBUTE, follow_symlinks=False)
        except OSError as error:
            return None if error.errno in _NONE else 0
        return int(value) if _COUNT.fullmatch(value) else 0

    def _write(self, name: str) -> None:
        new, written = self._new.pop(name, 0), self._read(name)
        if new and written is not None:
            with suppress(OSError):
                value = b"%d" % (written + new)
                os.setxattr(f"{self._root}/{name}", ATTRIBUTE, value, follow_symlinks=False)
