"""Puts that nobody waits for: one thread and one bounded queue for each store."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import Context
from weakref import WeakSet

from blendkv.stores.base import Store

DEFAULT_QUEUE_BYTES = 1 << 30
EXIT_SECONDS = 30.0
"""Longest that a process which ends waits for what is not written yet."""
_WRITERS: WeakSet[Writer] = WeakSet()


class Writer:
    """Writes to one store in the background, in the order in which it was asked to; a failed put is a counted one.

    Args:
        store: that is written to.
        capacity_bytes: most bytes that wait; what does not fit is dropped and counted, never waited for.

    Attributes:
        dropped: puts that did not fit into the queue.
        failed: puts that the store refused, or raised in.
        written: puts that it kept.
        error: what the store last raised.
        on_refused: called with key and bytes of what the store did not keep; it must not raise.
    """

    def __init__(self, store: Store, capacity_bytes: int = DEFAULT_QUEUE_BYTES) -> None:
        self.store, self.capacity_bytes = store, capacity_bytes
        self.dropped = self.failed = self.written = 0
        self.error: BaseException | None = None
        self.on_refused: Callable[[str, bytes], None] | None = None
        self._waiting: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._busy: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _WRITERS.add(self)

    def put(self, key: str, data: bytes, drop: bool = True) -> bool:
        """Queues a put, in place of one of the same key that waits.

        Args:
            key: of the entry.
            data: the entry.
            drop: what there is no room for is dropped and counted; False puts it at once, in the caller's thread.

        Returns:
            Whether it was queued, or kept.
        """
        if self._queue(key, data):
            return True
        if not drop:
            return self.put_now(key, data)
        with self._changed:
            self.dropped += 1
        return False

    def _queue(self, key: str, data: bytes) -> bool:
        with self._changed:
            before = len(self._waiting.get(key, b""))
            if self._bytes - before + len(data) > self.capacity_bytes:
                return False
            self._waiting[key] = data
            self._bytes += len(data) - before
            if self._thread is None or not self._thread.is_alive():  # not yet, or not in this process after a fork
                self._thread = threading.Thread(
                    target=Context().run, args=(self._work,), daemon=True, name="blendkv put"
                )
                self._thread.start()
            self._changed.notify_all()
        return True

    def put_now(self, key: str, data: bytes) -> bool:
        """Puts at once, in the caller's thread, and counts."""
        self.drop(key)
        try:
            kept = self.store.put(key, data)
        except Exception as error:  # a plug-in's, for ours never raise
            self.error, kept = error, False
        with self._changed:
            self.written += kept
            self.failed += not kept
        self._tell(key, data, kept)
        return kept

    def _tell(self, key: str, data: bytes, kept: bool) -> None:
        if not kept and self.on_refused is not None:
            self.on_refused(key, data)

    def drop(self, key: str, wait: bool = False) -> None:
        """Forgets what waits to be written under a key.

        Args:
            key: of the entry.
            wait: until it is not being written either.
        """
        with self._changed:
            self._bytes -= len(self._waiting.pop(key, b""))
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._busy != key)

    def keys(self) -> list[str]:
        """Keys of what waits."""
        with self._changed:
            return list(self._waiting)

    def get(self, key: str) -> bytes | None:
        """What waits to be written under a key."""
        with self._changed:
            return self._waiting.get(key)

    def __len__(self) -> int:
        """Puts that wait, or are under way."""
        with self._changed:
            return len(self._waiting)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything that was queued so far is written, or given up; False if that took too long."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._waiting:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _work(self) -> None:
        """The thread: it ends when there has been nothing to do for a while, and is started again when there is."""
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: self._waiting, 1.0):
                    self._thread = None
                    return
                key, data = next(iter(self._waiting.items()))
                self._busy = key
            kept = False
            try:
                kept = self.store.put(key, data)
            except Exception as error:  # a plug-in's: the thread lives on
                self.error = error
            self._tell(key, data, kept)  # before anybody takes it for written
            with self._changed:
                self._busy = None
                self.written += kept
                self.failed += not kept
                if self._waiting.get(key) is data:
                    del self._waiting[key]
                    self._bytes -= len(data)
                self._changed.notify_all()

    def forked(self) -> None:
        """In a child of this process: the parent writes what waits, and whoever held the lock is not here."""
        self._changed, self._thread = threading.Condition(), None
        self._waiting, self._bytes, self._busy = OrderedDict(), 0, None


def _forked() -> None:
    for writer in list(_WRITERS):
        writer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _drain() -> None:
    """The process ends."""
    end = time.monotonic() + EXIT_SECONDS
    for writer in list(_WRITERS):
        writer.flush(max(0.0, end - time.monotonic()))
