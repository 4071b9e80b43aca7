"""Calls that may take for ever, waited for only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Patience:
    """Runs calls in threads of their own and gives up on late ones, whose answers are dropped.

    Args:
        calls: how many may be under way; late ones count until they end.
    """

    def __init__(self, calls: int = 16) -> None:
        self._slots = threading.BoundedSemaphore(calls)

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What the function gives, within so many seconds.

        Raises:
            TimeoutError: if it does not, or if too many others are under way.
            Exception: what the function raises.
        """
        end = time.monotonic() + seconds
        if seconds <= 0 or not self._slots.acquire(timeout=seconds):
            raise TimeoutError(f"too many calls are under way to begin another within {seconds:.3g} s")
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._slots.release()

        # a daemon: a process may end while a server still stalls
        threading.Thread(target=run, name="blendkv-store", daemon=True).start()
        return answer.result(timeout=max(0.0, end - time.monotonic()))
