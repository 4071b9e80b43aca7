"""Which entry gives way when a store is full."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Eviction(Protocol):
    """Keeps the order in which entries would be evicted. Its owner holds the lock."""

    def put(self, key: str, size: int) -> None:
        """An entry of `size` bytes is there now, new or in place of another."""
        ...

    def used(self, key: str) -> None:
        """An entry was read."""
        ...

    def drop(self, key: str) -> None:
        """An entry is gone, evicted or deleted."""
        ...

    def victims(self) -> Iterator[str]:
        """All entries, the first to be evicted first; not to be changed while it is iterated."""
        ...


class LRU:
    """Least recently used first: the default, which counts nothing; docs/benchmarks.md has what counting gains."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def put(self, key: str, size: int) -> None:
        """Last in order."""
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, key: str) -> None:
        """Last in order."""
        self._order.move_to_end(key)

    def drop(self, key: str) -> None:
        """Forgotten."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[str]:
        """Least recently used first."""
        return iter(self._order)


class Scored:
    """Lowest score first, and each eviction raises the floor on which new scores stand.

    Greedy-Dual-Size-Frequency (Cherkasova 1998): an entry's score is the floor when it was last used plus its uses by
    its size to a power. Without the floor, what was popular once would stay for ever.

    Args:
        by_size: 0 ignores sizes (LFU with ageing), 1 prefers many small entries over few large ones.
    """

    def __init__(self, by_size: float) -> None:
        self.by_size = by_size
        self._floor = 0.0
        self._entries: dict[str, tuple[float, int, int, int]] = {}  # score, tick, uses, size
        self._heap: list[tuple[float, int, str]] = []
        self._tick = 0

    def put(self, key: str, size: int) -> None:
        """An entry keeps its uses when it is replaced."""
        self._score(key, self._entries[key][2] if key in self._entries else 0, size)

    def used(self, key: str) -> None:
        """One more use."""
        self._score(key, self._entries[key][2], self._entries[key][3])

    def drop(self, key: str) -> None:
        """Forgotten; if it was next, the floor rises to its score."""
        score, *_ = self._entries.pop(key, (0.0,))
        if all(score <= other for other, *_ in self._first()):
            self._floor = max(self._floor, score)

    def victims(self) -> Iterator[str]:
        """Lowest score first; they are sorted only if the first will not do."""
        first = [key for *_, key in self._first()]
        yield from first
        yield from (key for key in sorted(self._entries, key=lambda key: self._entries[key][:2]) if key not in first)

    def _score(self, key: str, uses: int, size: int) -> None:
        self._tick += 1
        score = self._floor + (uses + 1) / max(size, 1) ** self.by_size
        self._entries[key] = score, self._tick, uses + 1, size
        heapq.heappush(self._heap, (score, self._tick, key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(score, tick, key) for key, (score, tick, *_) in self._entries.items()]
            heapq.heapify(self._heap)

    def _first(self) -> list[tuple[float, int, str]]:
        """The lowest score that is still true, if there is one."""
        while self._heap:
            _, tick, key = self._heap[0]
            if key in self._entries and self._entries[key][1] == tick:
                return self._heap[:1]
            heapq.heappop(self._heap)
        return []


def LFU() -> Scored:
    """Least often used first, with ageing."""
    return Scored(0.0)


def GDSF() -> Scored:
    """Least often used for its size first, with ageing."""
    return Scored(1.0)


POLICIES = {"lru": LRU, "lfu": LFU, "gdsf": GDSF}


def get_eviction(policy: str | Eviction) -> Eviction:
    """The policy of that name, new, or the policy itself.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"eviction={policy!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[policy]()
