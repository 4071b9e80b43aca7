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
