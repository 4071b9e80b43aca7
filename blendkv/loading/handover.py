"""Gateways in order of preference, of which a moving client leaves one for the next in the middle of a transfer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from blendkv.errors import ChunkFileError
from blendkv.loading.assembly import Assembly
from blendkv.loading.clocks import Clock, RealClock
from blendkv.stores.base import Store

AGAIN_S = 1.0
"""Seconds for which a source that failed is not asked, unless all did."""
PIECE = 1 << 16
PIECE_S = 0.5
"""Seconds that a piece may take before another source is asked, outside of the deadline."""
MOST_S = 30.0
"""Most seconds that a piece may take, however often none came."""
TRIES = 8
"""Times that no source gives a piece before a transfer is given up; each time they are given twice as long."""
LIES = 3
"""Pieces that may be wrong before a source is no longer asked."""


@dataclass
class Told:
    """What became of transfers.

    Attributes:
        nbytes: that came of each source, by number.
        handed_over: times that another source went on.
        failures: pieces that a source did not give, or not in time.
        lies: pieces of a source that were not what was written.
    """

    nbytes: Counter[int] = field(default_factory=Counter)
    handed_over: int = 0
    failures: Counter[int] = field(default_factory=Counter)
    lies: Counter[int] = field(default_factory=Counter)


class Handover:
    """Stores that should have the same entries, the preferred one first; one is asked until it fails, then the next.

    What a source gives is not trusted: who joins the pieces compares checksums, and says so (`blame`) if they are
    wrong. For one thread.

    Args:
        stores: sources; the first that answers is kept to.
        piece_s: most seconds for a piece before the next source is asked; twice as many after none gave it.
        again_s: seconds for which a source that failed is left alone.
        clock: as the stores'.

    Attributes:
        told: counters.
        current: number of the source that is asked first.

    Raises:
        ValueError: without stores.
    """

    def __init__(
        self, stores: Sequence[Store], *, piece_s: float = PIECE_S, again_s: float = AGAIN_S, clock: Clock | None = None
    ) -> None:
        if not stores:
            raise ValueError("no sources: give one store or more")
        self.stores, self.told, self.current = list(stores), Told(), 0
        self._piece_s, self._again_s, self._patience = piece_s, again_s, piece_s
        self._clock: Clock = RealClock() if clock is None else clock
        self._not_before = [-math.inf] * len(self.stores)

    def get(self, key: str, start: int, stop: int) -> tuple[bytes, int] | None:
        """Bytes `[start, stop)` of an entry and the number of their source, or None if no source gives them in time."""
        for source in self._turn():
            before = self._clock.now()
            seconds = self._clock.remaining(self._patience)
            if seconds <= 0:
                return None
            with self._clock.deadline(seconds):
                data = _asked(self.stores[source], key, start, stop)
            if data is not None and len(data) == stop - start:
                if source != self.current:
                    self.told.handed_over += 1
                    self.current = source
                self.told.nbytes[source] += len(data)
                self._patience = self._piece_s
                return data, source
            self.told.failures[source] += 1
            self._not_before[source] = max(before, self._clock.now()) + self._again_s
        self._patience = min(2 * self._patience, max(MOST_S, self._piece_s))
        return None

    def size(self, key: str) -> int | None:
        """Bytes of an entry at the first source that knows it."""
        for source in self._turn():
            with self._clock.deadline(self._clock.remaining(self._piece_s)):
                try:
                    size = self.stores[source].size(key)
                except Exception:  # a plug-in's, for ours never raise
                    size = None
            if size is not None:
                return size
        return None

    def blame(self, *sources: int) -> None:
        """What these gave, together if there are several, was wrong.

        One that is alone with it has lied; of several it is not known who did: another one goes on, and the next time
        it will be known.
        """
        now = self._clock.now()
        for source in sources:
            self.told.lies[source] += len(sources) == 1
            self._not_before[source] = now + self._again_s
        if self.current in sources and len(self.stores) > 1:
            self.current = (self.current + 1) % len(self.stores)
            self.told.handed_over += 1

    def _turn(self) -> list[int]:
        """Sources in the order in which they are asked; those that failed lately last, liars not at all."""
        count = len(self.stores)
        order = [(self.current + i) % count for i in range(count)]
        order = [source for source in order if self.told.lies[source] < LIES]
        now = self._clock.now()
        return sorted(order, key=lambda source: self._not_before[source] > now)


def transfer(source: Handover, key: str, assembly: Assembly, piece: int = PIECE, tries: int = TRIES) -> bool:
    """Brings what an assembly lacks, by ranges, from whatever source goes on; within the clock's deadline.

    Args:
        source: of the pieces.
        key: of the entry.
        assembly: takes them.
        piece: bytes of one.
        tries: times in a row that no source gives a piece before it is given up.

    Returns:
        Whether all of it is there. What is there is checked, whoever gave it.
    """
    failures = 0
    while not assembly.complete:
        start, stop = assembly.missing()[0]
        end = min(stop, start + piece) if assembly.header is None else _end(assembly, start, stop, piece)
        got = source.get(key, start, end)
        if got is None:
            failures += 1
            if failures == tries:
                return False
            continue
        failures = 0
        data, who = got
        try:
            if assembly.add(start, data, who):
                source.blame(*assembly.suspects)
        except ChunkFileError:
            return False
    return True


def _end(assembly: Assembly, start: int, stop: int, piece: int) -> int:
    """Where a piece ends: at the end of a segment if one is near, so that it is checked when it comes."""
    starts = assembly.starts
    ends = starts[(starts > start) & (starts <= min(stop, start + piece))]
    return int(ends[-1]) if len(ends) else min(stop, start + piece)


def _asked(store: Store, key: str, start: int, stop: int) -> bytes | None:
    try:
        return store.get(key, start, stop)
    except Exception:  # a plug-in's, for ours never raise
        return None
