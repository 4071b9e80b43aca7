"""An `os` that fails, and one that kills, put in the place of the one that the disk store uses."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from blendkv.stores import disk, files, hits, inventory

CALLS = (
    "open",
    "close",
    "dup",
    "pread",
    "write",
    "fsync",
    "rename",
    "unlink",
    "stat",
    "fstat",
    "mkdir",
    "scandir",
    "listdir",
    "utime",
    "getxattr",
    "setxattr",
)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EINTR)


class System:
    """Everything of `os`; calls go by `before`, which may raise, and lengths of reads and writes by `cut`."""

    def __init__(self, before: Callable[[str], None], after: Callable[[str], None], cut: Callable[[int], int]) -> None:
        self._before, self._after, self._cut = before, after, cut

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in CALLS:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "close":  # a close that fails has closed
                function(*args, **kwargs)
                self._before(name)
                return None
            self._before(name)
            if name == "pread":
                args = (args[0], self._cut(args[1]), *args[2:])
            elif name == "write":
                args = (args[0], args[1][: self._cut(len(args[1]))])
            result = function(*args, **kwargs)
            self._after(name)
            return result

        return call


@contextmanager
def system(
    before: Callable[[str], None] = lambda name: None,
    after: Callable[[str], None] = lambda name: None,
    cut: Callable[[int], int] = lambda length: length,
) -> Generator[None]:
    """The disk store uses this `os` meanwhile."""
    replacement = System(before, after, cut)
    with (
        mock.patch.object(disk, "os", replacement),
        mock.patch.object(files, "os", replacement),
        mock.patch.object(inventory, "os", replacement),
        mock.patch.object(hits, "os", replacement),
    ):
        yield


class NthFails:
    """Raises at the n-th call, and, if it is said so, at all later ones."""

    def __init__(self, number: int, code: int, for_ever: bool = False) -> None:
        self.number, self.code, self.for_ever = number, code, for_ever
        self.calls = 0

    def __call__(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.number or (self.for_ever and self.calls > self.number):
            raise OSError(self.code, f"{os.strerror(self.code)} (injected into {name}, call {self.calls})")

    @property
    def fired(self) -> bool:
        return self.calls >= self.number


class KillAt:
    """Kills the process at the n-th time that it comes to a point: `before:rename`, `after:write`, ..."""

    def __init__(self, point: str, number: int) -> None:
        self.point, self.number = point, number

    def _at(self, point: str) -> None:
        if point == self.point:
            self.number -= 1
            if self.number <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, name: str) -> None:
        self._at(f"before:{name}")

    def after(self, name: str) -> None:
        self._at(f"after:{name}")
