"""Names of documents: which chunks a name stands for today.

Entries of a store are named by what is in them, so they never go stale. Names do. One centre decides what a name means
and counts its versions; regions remember what they were told, hear of every update, and know up to when they have heard
everything. What they cannot vouch for is asked again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Named:
    """What a name stands for.

    Attributes:
        name: of the document.
        keys: of its chunks, in order; none once the name is forgotten.
        version: 1, 2, 3, ... of this name.
        when: seconds since 1970, by the centre's clock.
    """

    name: str
    keys: tuple[str, ...]
    version: int
    when: float


class Following(Protocol):
    """Somebody who is told of updates.

    Attributes:
        since: from when on, without a gap, by `time.monotonic`; infinite while disconnected.
        as_of: everything that was announced before has been heard.
    """

    @property
    def since(self) -> float: ...  # noqa: D102

    @property
    def as_of(self) -> float: ...  # noqa: D102

    def close(self) -> None:
        """Stops."""
        ...


class Centre(Protocol):
    """Who decides. `MemoryCentre` does within a process, `blendkv.stores.valkey_centre.ValkeyCentre` for many."""

    def read(self, name: str) -> Named | None:
        """What a name stands for now. `OSError` if that cannot be found out."""
        ...

    def write(self, name: str, keys: Iterable[str]) -> Named:
        """Gives a name its next version and announces it. `OSError` if that could not be done."""
        ...

    def follow(self, heard: Callable[[Named], None]) -> Following:
        """Calls a function for every update from now on, in order."""
        ...


class MemoryCentre:
    """A centre for one process."""

    def __init__(self) -> None:
        self._names: dict[str, Named] = {}
        self._heard: list[Callable[[Named], None]] = []
        self._lock = threading.RLock()

    def read(self, name: str) -> Named | None:
        """What a name stands for now."""
        return self._names.get(name)

    def write(self, name: str, keys: Iterable[str]) -> Named:
        """Gives a name its next version; followers have heard of it when this returns."""
        with self._lock:
            before = self._names.get(name)
            named = Named(name, tuple(keys), before.version + 1 if before else 1, time.time())
            self._names[name] = named
            for heard in list(self._heard):
                heard(named)
        return named

    def follow(self, heard: Callable[[Named], None]) -> Following:
        """Calls a function for every update from now on."""
        self._heard.append(heard)
        return _Always(lambda: self._heard.remove(heard))


class _Always:
    """One who hears everything at once."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.since, self._stop = time.monotonic(), stop

    @property
    def as_of(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._stop()


class _Known(NamedTuple):
    named: Named
    as_of: float
    learned: float
    heard: bool = False


@dataclass(frozen=True)
class RegionState:
    """How well a region knows what the centre knows.

    Attributes:
        connected: whether it hears of updates.
        lag: seconds since everything was known to be heard; infinite while disconnected.
        announced: when the last update that it heard of was made, by the centre's clock; None before the first.
        entries: names that it remembers.
        served: answers from memory.
        asked: answers by the centre.
        stale_avoided: times that what it remembered was found to be outdated.
        unreachable: questions that the centre did not answer; None was given.
    """

    connected: bool
    lag: float
    announced: float | None
    entries: int
    served: int
    asked: int
    stale_avoided: int
    unreachable: int


class Region:
    """A catalog that remembers. Safe to share among threads.

    An answer from memory was true at some moment of the last `delay` seconds: either the centre was asked then, or the
    region has heard of all updates up to then. When announcements stop, answers come from the centre again.

    Args:
        centre: who decides.
        delay: most seconds that an answer may be behind.
        max_age: most seconds that an answer is remembered, whatever is announced.
        max_entries: most names remembered; those not used for longest go first.
    """

    def __init__(
        self, centre: Centre, *, delay: float = 1.0, max_age: float = 3600.0, max_entries: int = 100_000
    ) -> None:
        if delay < 0 or max_age < 0 or max_entries < 1:
            raise ValueError(f"delay={delay}, max_age={max_age}, max_entries={max_entries}: must be positive")
        self.delay, self._max_age, self._max_entries = delay, max_age, max_entries
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._served = self._asked = self._avoided = self._unreachable = 0
        self._announced: float | None = None
        self._centre = centre
        self._following: Following | None = None
        self._following = centre.follow(self._heard)

    def get(self, name: str, force_latest: bool = False) -> Named | None:
        """What a name stands for, or None if it is unknown or cannot be found out.

        Args:
            name: of the document.
            force_latest: ask the centre, whatever is remembered.
        """
        with self._lock:
            known = None if force_latest else self._fresh(name)
            if known is not None:
                self._served += 1
        if known is None:
            asked = time.monotonic()
            try:
                named = self._centre.read(name)
            except OSError:
                with self._lock:
                    self._unreachable += 1
                return None
            known = self._keep(named or Named(name, (), 0, 0.0), asked)
        return known if known.keys else None

    def put(self, name: str, keys: Iterable[str]) -> Named:
        """Says what a name stands for from now on, everywhere.

        Raises:
            OSError: if the centre cannot be asked; the name may stand for the new or the old then.
        """
        asked = time.monotonic()
        return self._keep(self._centre.write(name, keys), asked, mine=True)

    def forget(self, name: str) -> None:
        """A name that stands for nothing. Its versions go on counting.

        Raises:
            OSError: if the centre cannot be asked.
        """
        self.put(name, ())

    @property
    def state(self) -> RegionState:
        """How well this region knows what the centre knows."""
        following, now = self._following, time.monotonic()
        connected = following is not None and following.since <= now
        lag = max(0.0, now - following.as_of) if following is not None and connected else float("inf")
        with self._lock:
            counts = (self._served, self._asked, self._avoided, self._unreachable)
            return RegionState(connected, lag, self._announced, len(self._known), *counts)

    def close(self) -> None:
        """Stops listening."""
        if self._following is not None:
            self._following.close()

    def _fresh(self, name: str) -> Named | None:
        if name not in self._known:
            return None
        named, as_of, *_ = self._known[name]
        now = time.monotonic()
        if now - as_of > self._max_age:
            return None
        if self._following is not None and as_of >= self._following.since:
            as_of = max(as_of, self._following.as_of)
        if now - as_of > self.delay:
            return None
        self._known.move_to_end(name)
        return named

    def _heard(self, named: Named) -> None:
        # It was true when it was announced, and what was announced since may still be on its way.
        following = self._following
        as_of, since = (following.as_of, following.since) if following is not None else (float("-inf"), 0.0)
        with self._lock:
            self._announced = named.when
            self._remember(named, as_of, since, heard=True)

    def _keep(self, named: Named, asked: float, mine: bool = False) -> Named:
        with self._lock:
            self._asked += not mine
            return self._remember(named, asked, asked, mine)

    def _remember(self, named: Named, as_of: float, began: float, mine: bool = False, heard: bool = False) -> Named:
        """Keeps the newer one. Of two that are told one after the other, the later one is, whatever its version.

        Of two questions at the same time the higher version is kept; but who asked second is not told what was read
        before, for the centre may have lost its names in between.
        """
        old = self._known.get(named.name)
        if old is not None:
            if old.named.version > named.version and old.learned >= began:
                return old.named if old.heard or old.as_of >= began else named
            self._avoided += old.named.version != named.version and not mine
            if old.named == named:
                as_of = max(as_of, old.as_of)
        self._known[named.name] = _Known(named, as_of, time.monotonic(), heard)
        self._known.move_to_end(named.name)
        if len(self._known) > self._max_entries:
            self._known.popitem(last=False)
        return named
