"""Calls that may take for ever, waited for only so long."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

LINGER_SECONDS = 1.0
"""A thread without work waits so long for more: a new one for each call slows a model that computes meanwhile."""
_ALL: WeakSet[Patience] = WeakSet()


class Patience:
    """Runs calls in threads of its own and gives up on late ones, whose answers are dropped.

    Args:
        calls: how many may be under way; late ones count until they end.
    """

    def __init__(self, calls: int = 16) -> None:
        self._calls = calls
        self._begin()
        _ALL.add(self)

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What the function gives, within so many seconds.

        Raises:
            TimeoutError: if it does not, or if too many others are under way.
            RuntimeError: if this process can have no more threads.
            Exception: what the function raises.
        """
        end = time.monotonic() + seconds
        if seconds <= 0 or not self._slots.acquire(timeout=seconds):
            raise TimeoutError(f"too many calls are under way to begin another within {seconds:.3g} s")
        answer: Future[Any] = Future()
        try:
            self._hand_over((function, answer))
        except RuntimeError:
            self._slots.release()
            raise
        try:
            return answer.result(timeout=max(0.0, end - time.monotonic()))
        finally:
            del answer  # else what is raised would hold this frame, and this frame what is raised

    def forked(self) -> None:
        """In a child of this process: its threads are not here, nor is who held a lock."""
        self._begin()

    def _begin(self) -> None:
        self._slots = threading.BoundedSemaphore(self._calls)
        self._work = threading.Condition()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._free = 0

    def _hand_over(self, call: tuple[Callable[[], Any], Future[Any]]) -> None:
        """To a thread that is free, or to a new one."""
        with self._work:
            if len(self._waiting) >= self._free:
                # a daemon: a process may end while a server still stalls
                threading.Thread(target=self._run, name="blendkv-store", daemon=True).start()
                self._free += 1
            self._waiting.append(call)
            self._work.notify()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            function, answer = call
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            with self._work:  # before anybody is told: whose next call comes at once finds this thread
                self._free += 1
            self._slots.release()
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
            del call, function, answer, result, error  # a thread that waits keeps nothing alive

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        """What this thread runs from now on, or None if it should end."""
        with self._work:
            while not self._waiting:
                if not self._work.wait(LINGER_SECONDS) and not self._waiting:
                    self._free -= 1
                    return None
            self._free -= 1
            return self._waiting.popleft()


def _forked() -> None:
    for patience in list(_ALL):
        patience.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
