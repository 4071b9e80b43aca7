"""What every row of the fault plan gives, and how rows are found."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Result:
    """What came of a row.

    Attributes:
        row: its name in the plan.
        tried: faults injected.
        wrong: what should not have been: wrong bytes, lost entries, files left over.
        exceptions: what a store raised, which none should.
        max_added_s: the longest that a call took.
        found: right answers, so that a row does not pass by doing nothing.
        why: the first few wrongs.
        figures: whatever else was measured.
    """

    row: str
    tried: int = 0
    wrong: int = 0
    exceptions: int = 0
    max_added_s: float = 0.0
    found: int = 0
    why: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.exceptions and self.tried > 0 and self.found > 0

    def expect(self, right: bool, what: str) -> None:
        """Counts a wrong."""
        if not right:
            self.wrong += 1
            self.why = [*self.why, what][:5]

    def call(self, function: Callable, *args: object):
        """A call of a store: timed, and an exception counted."""
        start = time.monotonic()
        try:
            return function(*args)
        except Exception as error:
            self.exceptions += 1
            self.why = [*self.why, repr(error)][:5]
        finally:
            self.max_added_s = max(self.max_added_s, round(time.monotonic() - start, 3))

    def line(self) -> str:
        return json.dumps({**vars(self), "ok": self.ok})


ROWS: dict[str, Callable[[bool], Result]] = {}


def row(function: Callable[[bool], Result]) -> Callable[[bool], Result]:
    """Registers a row: a function `f01(full) -> Result`, where `full` asks for the plan's counts, not CI's."""
    ROWS[function.__name__.upper()] = function
    return function
