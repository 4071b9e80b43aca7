"""When to stop asking a server that does not answer, and when to try again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Closed while all is well; open after failures in a row; half-open while one attempt finds out. Thread-safe.

    Args:
        failures: how many in a row open it.
        pause: least seconds between attempts once it is open.
        clock: seconds, monotonic.
    """

    def __init__(self, failures: int = 5, pause: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._pause, self._clock = failures, pause, clock
        self._failed, self._state, self._last = 0, "closed", clock()
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        return self._state

    def allows(self) -> bool:
        """Whether to try now. If it is not closed, True means: this caller is the attempt, the only one for a while."""
        with self._lock:
            if self._state == "closed":
                return True
            if self._clock() - self._last < self._pause:
                return False
            self._state, self._last = "half-open", self._clock()
            return True

    def succeeded(self, fully: bool = True) -> None:
        """An attempt went well.

        Args:
            fully: False for one that only shows that somebody is there: it closes what was open, but the next failure
                opens it again, and failures so far still count.
        """
        with self._lock:
            if fully:
                self._failed = 0
            elif self._state != "closed":
                self._failed = self._most - 1
            self._state = "closed"

    def failed(self) -> None:
        """An attempt did not."""
        with self._lock:
            self._failed += 1
            if self._state == "half-open" or self._failed >= self._most:
                if self._state == "closed":
                    self._last = self._clock()
                self._state = "open"
