"""Time that passes, and time that is only counted: what waits on the road asks one of these two."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from blendkv.stores.deadline import deadline, remaining


class Clock(Protocol):
    """Seconds since some moment, and waiting."""

    def now(self) -> float:
        """Seconds; differences count."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits."""
        ...

    def deadline(self, seconds: float) -> AbstractContextManager[None]:
        """What is asked of stores within must end after so many seconds; an earlier deadline around it holds too."""
        ...

    def remaining(self, most: float) -> float:
        """Seconds that are left until the deadline, at most `most`, never below zero."""
        ...


class RealClock:
    """The machine's monotonic clock, and the deadline that every store keeps to (`blendkv.stores.deadline`)."""

    def now(self) -> float:
        """`time.monotonic`: setting the machine's time does not move it."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """`time.sleep`."""
        time.sleep(max(0.0, seconds))

    def deadline(self, seconds: float) -> AbstractContextManager[None]:
        """`stores.deadline.deadline`."""
        return deadline(seconds)

    def remaining(self, most: float) -> float:
        """`stores.deadline.remaining`."""
        return remaining(most)


class VirtualClock:
    """Counts time that nobody waits for. For one thread.

    Args:
        start: what it shows at first.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now, self._end = start, float("inf")

    def now(self) -> float:
        """What was slept so far, on top of the start."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Adds to what it shows, at once.

        Raises:
            ValueError: for a sleep without an end, where a real clock would never come back.
        """
        if seconds == float("inf"):
            raise ValueError("a sleep without an end: set a deadline, or a timeout of the store")
        self._now += max(0.0, seconds)

    @contextmanager
    def deadline(self, seconds: float) -> Generator[None]:
        """As that of a real clock, in counted seconds."""
        before = self._end
        self._end = min(before, self._now + seconds)
        try:
            yield
        finally:
            self._end = before

    def remaining(self, most: float) -> float:
        """As that of a real clock."""
        return max(0.0, min(most, self._end - self._now))
