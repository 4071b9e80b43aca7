"""How long a prompt may wait for its chunks, in all."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_END: ContextVar[float | None] = ContextVar("blendkv_deadline", default=None)


@contextmanager
def deadline(seconds: float | None) -> Generator[None]:
    """Whatever stores do within must end after `seconds`; an earlier deadline around it holds too. None sets none."""
    before = _END.get()
    if seconds is not None:
        end = time.monotonic() + seconds
        token = _END.set(end if before is None else min(before, end))
        try:
            yield
        finally:
            _END.reset(token)
    else:
        yield


def remaining(most: float) -> float:
    """Seconds that are left, at most `most`, never below zero."""
    end = _END.get()
    return most if end is None else max(0.0, min(most, end - time.monotonic()))


class Budget:
    """Seconds that one prompt may wait for stores in all, however often it asks them.

    Args:
        seconds: in all; None sets no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.left = seconds

    @contextmanager
    def spend(self) -> Generator[None]:
        """What stores do within must end before the rest of the budget is used up, and takes from it."""
        if self.left is None:
            yield
            return
        begin = time.monotonic()
        try:
            with deadline(max(0.0, self.left)):
                yield
        finally:
            self.left -= time.monotonic() - begin
