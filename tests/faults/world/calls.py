"""What stands in for `os` and `fcntl` in the modules of the disk store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.faults.world.disks import Disk, Node
from tests.faults.world.scheduler import Killed, Scheduler
from tests.faults.world.standins import EPOCH

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EINTR", "EMFILE", "ESTALE")
TICK_NS = 4_000_000
"""How coarse the kernel's times of files are."""


def fail(name: str) -> OSError:
    code = getattr(errno, name)
    return OSError(code, os.strerror(code))


class Open:
    """What descriptors stand for; `dup` shares it."""

    def __init__(self, node: Node) -> None:
        self.node, self.count = node, 1


class Path:
    """`os.path`, where nothing is a link."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.realpath = self.expanduser = os.fspath
        self.dirname = os.path.dirname

    def isdir(self, path: str) -> bool:
        node = self._calls.disk.find(path)
        return node is not None and node.kind == "dir"


class Calls:
    """The module `os`, as far as the disk store uses it; which process calls is told by whose turn it is.

    Args:
        scheduler: whose tasks call.
        faults: `before(call)` may raise or take time; `cut(length)`; `flip(data)`.
        gone: called with the host, a name and its node when a file is taken out of its folder by a process.
        called: told of every call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        faults: Any,
        gone: Callable[[Any, str, Node], None],
        called: Callable[[Any, str], None],
    ) -> None:
        self._scheduler, self._faults, self._gone, self._note = scheduler, faults, gone, called
        self.path = Path(self)
        for name in ("O_RDONLY", "O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
            setattr(self, name, getattr(os, name))
        self.O_DIRECTORY, self.PathLike, self.fspath = os.O_DIRECTORY, os.PathLike, os.fspath
        self.stat_result = os.stat_result

    @property
    def _process(self) -> Any:
        assert self._scheduler.current is not None
        return self._scheduler.current.process

    @property
    def disk(self) -> Disk:
        return self._process.host.disk

    def _called(self, name: str) -> None:
        """Before every call: the process may be dead, or die now, or wait, or be refused."""
        process = self._process
        if process.dead:
            raise Killed
        self._scheduler.now += 2e-6
        self._note(process, name)
        if process.kill_at:
            process.kill_at -= 1
            if not process.kill_at:
                process.host.kill(process, f"at {name}")
                raise Killed
        if self._faults.on:
            self._faults.before(name)
        self._scheduler.pause()

    def _now(self) -> int:
        return (int((EPOCH + self._scheduler.now + self._process.host.jumped) * 1e9)) // TICK_NS * TICK_NS

    def _node(self, path: str, at: int | None, missing: bool = False) -> Node | None:
        node = self.disk.find(path, None if at is None else self._open(at).node)
        if node is None and not missing:
            raise fail("ENOENT")
        return node

    def _parent(self, path: str, at: int | None) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        parent = self._node(folder, at) if folder else self._open(at).node if at is not None else self.disk.root
        assert parent is not None
        if parent.kind != "dir":
            raise fail("ENOTDIR")
        return parent, name

    def _open(self, fd: int) -> Open:
        if fd not in self._process.descriptors:
            raise fail("EBADF")
        return self._process.descriptors[fd]

    # -- the calls --------------------------------------------------------------------------------------------------

    def getpid(self) -> int:
        return self._process.pid

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._called("open")
        node = self._node(path, dir_fd, missing=bool(flags & os.O_CREAT))
        if node is None:
            parent, name = self._parent(path, dir_fd)
            node = parent.names[name] = Node("file", self._now())
            parent.mtime_ns = self._now()
        elif flags & os.O_EXCL:
            raise fail("EEXIST")
        if node.kind == "link":
            raise fail("ELOOP")
        if flags & os.O_DIRECTORY and node.kind != "dir":
            raise fail("ENOTDIR")
        return self._descriptor(Open(node))

    def _descriptor(self, opened: Open) -> int:
        process = self._process
        process.next_descriptor += 1
        process.descriptors[process.next_descriptor] = opened
        return process.next_descriptor

    def dup(self, fd: int) -> int:
        self._called("dup")
        opened = self._open(fd)
        opened.count += 1
        return self._descriptor(opened)

    def close(self, fd: int) -> None:
        process = self._process
        if process.dead:
            raise Killed
        opened = self._open(fd)
        del process.descriptors[fd]
        opened.count -= 1
        if not opened.count and opened.node.lock is opened:
            opened.node.lock = None
        self._called("close")

    def pread(self, fd: int, length: int, start: int) -> bytes:
        self._called("pread")
        node = self._open(fd).node
        if node.kind == "dir":
            raise fail("EISDIR")
        return self._faults.flip(node.data[start : start + self._faults.cut(length)])

    def write(self, fd: int, data: memoryview) -> int:
        self._called("write")
        node = self._open(fd).node
        written = bytes(data[: self._faults.cut(len(data))])
        if self.disk.limited and self.disk.used() + len(written) > self.disk.capacity_bytes:
            raise fail("ENOSPC")
        node.data += written
        node.mtime_ns = self._now()
        return len(written)

    def fsync(self, fd: int) -> None:
        self._called("fsync")
        self._open(fd).node.sync()

    def rename(self, old: str, new: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self._called("rename")
        source, name = self._parent(old, src_dir_fd)
        target, renamed = self._parent(new, dst_dir_fd)
        if name not in source.names:
            raise fail("ENOENT")
        if renamed in target.names and target.names[renamed].kind == "dir":
            raise fail("EISDIR")
        node = source.names.pop(name)
        target.names[renamed] = node
        source.mtime_ns = target.mtime_ns = self._now()
        if source is not target:
            self._gone(self._process.host, name, node)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._called("unlink")
        parent, name = self._parent(path, dir_fd)
        if name not in parent.names:
            raise fail("ENOENT")
        if parent.names[name].kind == "dir":
            raise fail("EISDIR")
        node = parent.names.pop(name)
        parent.mtime_ns = self._now()
        self._gone(self._process.host, name, node)

    def stat(self, path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> SimpleNamespace:
        self._called("stat")
        node = self._node(path, dir_fd)
        assert node is not None
        return node.status()

    def fstat(self, fd: int) -> SimpleNamespace:
        self._called("fstat")
        return self._open(fd).node.status()

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._called("mkdir")
        parent, name = self._parent(path, None)
        if name in parent.names:
            raise fail("EEXIST")
        parent.names[name] = Node("dir", self._now())
        parent.mtime_ns = self._now()

    def listdir(self, path: str) -> list[str]:
        self._called("listdir")
        node = self._node(path, None)
        assert node is not None
        if node.kind != "dir":
            raise fail("ENOTDIR")
        return list(node.names)

    @contextmanager
    def scandir(self, fd: int) -> Any:
        self._called("scandir")
        parent = self._open(fd).node

        def entry(name: str, node: Node) -> SimpleNamespace:
            def status(follow_symlinks: bool = True) -> SimpleNamespace:
                self._called("stat")
                if parent.names.get(name) is not node:
                    raise fail("ENOENT")
                return node.status()

            return SimpleNamespace(name=name, stat=status)

        yield [entry(name, node) for name, node in parent.names.items()]

    def utime(self, fd: int, *, ns: tuple[int, int]) -> None:
        self._called("utime")
        self._open(fd).node.mtime_ns = ns[1]

    # -- and their relatives ----------------------------------------------------------------------------------------

    def flock(self, fd: int, how: int) -> None:
        self._called("flock")
        opened = self._open(fd)
        if opened.node.lock not in (None, opened):
            raise fail("EAGAIN")
        opened.node.lock = opened
