"""What lies in a store's folder. Files are the truth; this looks again wherever a directory has changed."""

from __future__ import annotations

import heapq
import os
import time
from contextlib import suppress

from blendkv.stores.files import folder, sweep
from blendkv.stores.keys import key_of

BAD = "bad"
"""The folder of entries that were found wanting."""
FOLDERS = frozenset((*(f"{number:02x}" for number in range(256)), BAD))
_RACY_NS = 50_000_000
"""A directory that changed so recently may change again without a new time."""
_TRUST_S, _TRUST_BYTES = 0.25, 4 << 30
"""Others do not write so many bytes in so short a time."""


class Inventory:
    """Sizes and last uses of files, by name below the root. Not safe to share among threads.

    Args:
        root: the store's folder.

    Attributes:
        files: `folder/name` -> bytes, time of the last use in ns.
        bytes: of all files.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.files: dict[str, tuple[int, int]] = {}
        self.bytes = 0
        self._names: dict[str, set[str]] = {name: set() for name in FOLDERS}
        self._seen = dict.fromkeys(FOLDERS, -1)
        self._heap: list[tuple[int, str]] = []
        self._looked, self._opening = -_TRUST_S, True

    def look(self, room: int | None = None) -> None:
        """Notices what others did; not at once again where `room` bytes of room are plenty."""
        now = time.monotonic()
        if room is not None and room > _TRUST_BYTES and now - self._looked < _TRUST_S:
            return
        self._looked = now
        try:
            there = FOLDERS.intersection(os.listdir(self._root))
        except FileNotFoundError:
            there = frozenset()
        except OSError:
            return  # what was known is the best guess
        for name in sorted(there | {name for name, names in self._names.items() if names}):
            try:
                changed = os.stat(f"{self._root}/{name}", follow_symlinks=False).st_mtime_ns
            except OSError:
                changed = -1
            if changed == -1 or changed != self._seen[name]:
                self._list(name)
        self._opening = False

    def add(self, name: str, size: int, used: int) -> None:
        """Notes a file, or what became of it."""
        self.drop(name)
        self.files[name] = size, used
        self._names[name.partition("/")[0]].add(name)
        self.bytes += size
        self._push(used, name)

    def touch(self, name: str, used: int) -> None:
        """Notes a use."""
        if name in self.files:
            self.files[name] = self.files[name][0], used
            self._push(used, name)

    def drop(self, name: str) -> None:
        """Forgets a file; an unknown one is fine."""
        if name in self.files:
            self.bytes -= self.files.pop(name)[0]
            self._names[name.partition("/")[0]].discard(name)

    def oldest(self) -> tuple[str, int] | None:
        """The file that was not used for longest, and when it was, as far as is known."""
        while self._heap:
            used, name = self._heap[0]
            if name in self.files and self.files[name][1] == used:
                return name, used
            heapq.heappop(self._heap)
        return None

    def bad(self) -> list[str]:
        """Files in the folder of bad entries, oldest first."""
        return sorted(self._names[BAD], key=lambda name: self.files[name][1])

    def _push(self, used: int, name: str) -> None:
        heapq.heappush(self._heap, (used, name))
        if len(self._heap) > 64 + 4 * len(self.files):  # mostly uses that were followed by others
            self._heap = [(used, name) for name, (_, used) in self.files.items()]
            heapq.heapify(self._heap)

    def _list(self, name: str) -> None:
        self._seen[name] = -1
        try:
            found = self._found(name)
        except FileNotFoundError:
            found = {}
        except OSError:
            return  # what was known is the best guess
        for gone in self._names[name] - found.keys():
            self.drop(gone)
        for there, (size, used) in found.items():
            if self.files.get(there) != (size, used):
                self.add(there, size, used)

    def _found(self, name: str) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        with folder(f"{self._root}/{name}") as at:
            changed = os.fstat(at).st_mtime_ns
            with os.scandir(at) as entries:
                for entry in entries:
                    if entry.name.endswith(".tmp"):
                        sweep(entry.name, at, locks=self._opening)
                    elif name == BAD or key_of(entry.name):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            found[f"{name}/{entry.name}"] = status.st_size, status.st_mtime_ns
            if abs(time.time_ns() - changed) > _RACY_NS:
                self._seen[name] = changed
        return found
