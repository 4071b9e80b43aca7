"""Who may stop what: one run a visitor, so that nobody stops what another one asked."""

from __future__ import annotations

import threading
from itertools import count


class Visitors:
    """The newest run of each visitor, with the event that ends it. Safe to share among threads."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[int, threading.Event]] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    def begin(self, visitor: str) -> int:
        """Number of a new run; one of the same visitor that waits or is under way ends."""
        with self._lock:
            self._stop(visitor)
            number = next(self._numbers)
            self._runs[visitor] = number, threading.Event()
            return number

    def event(self, visitor: str, number: int) -> threading.Event:
        """Set once the run has to end; at once if it is not the visitor's newest, or the visitor is gone."""
        with self._lock:
            newest, event = self._runs.get(visitor, (None, None))
        if event is not None and newest == number:
            return event
        over = threading.Event()
        over.set()
        return over

    def stop(self, visitor: str) -> None:
        """The visitor's run, if there is one, ends at its next token, or when its turn comes."""
        with self._lock:
            self._stop(visitor)

    def end(self, visitor: str, number: int) -> None:
        """The run is over."""
        with self._lock:
            if self._runs.get(visitor, (None, None))[0] == number:
                del self._runs[visitor]

    def leave(self, visitor: str) -> None:
        """The visitor is gone, and so is what was asked."""
        with self._lock:
            self._stop(visitor)
            self._runs.pop(visitor, None)

    def stop_all(self) -> None:
        """The program ends."""
        with self._lock:
            for visitor in self._runs:
                self._stop(visitor)

    def _stop(self, visitor: str) -> None:
        if visitor in self._runs:
            self._runs[visitor][1].set()
