"""Ranges of an entry, from the first store of several that gives them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from blendkv.stores.deadline import Budget


class Ranged(Protocol):
    """What is asked of a store here."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None."""
        ...


class Absent(Exception):
    """No store gave a range: it is gone, or none answered in time.

    Args:
        key: of the entry.
        why: a store raised, which none should: what; "" if none did.
    """

    def __init__(self, key: str, why: str = "") -> None:
        super().__init__(key)
        self.why = why


class StoreSource:
    """A `blendkv.container.Source` over an entry that several stores may have.

    A store that fails in the middle is not asked again; the next one goes on where it stopped. Whether what they give
    is one file is for the checksums in its head to say, which was read first.

    Args:
        key: of the entry.
        size: bytes of it.
        stores: to be asked, in this order.
        budget: how long those that are not local may be waited for; None: whoever waits for what is read sees to that.

    Attributes:
        keeps: whether what is read is kept, for `whole`.
    """

    def __init__(self, key: str, size: int, stores: Sequence[Ranged], budget: Budget | None = None) -> None:
        self.key, self.size, self.keeps = key, size, True
        self._stores: list[Ranged] = list(stores)
        self._budget = budget
        self._read: dict[int, bytes] = {}
        self._raised = ""
        self._lock = threading.Lock()

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the entry.

        Raises:
            Absent: if no store gives them.
        """
        for store in list(self._stores):
            data = self._ask(store, start, start + length)
            if data is not None and len(data) == length:
                if self.keeps:
                    with self._lock:
                        if len(self._read.get(start, b"")) < length:
                            self._read[start] = data
                return data
            with self._lock:
                if store in self._stores:
                    self._stores.remove(store)
        raise Absent(self.key, self._raised)

    def whole(self) -> bytes | None:
        """The whole entry, if all of it has been read and kept; it is kept no longer."""
        with self._lock:
            parts, self._read = sorted(self._read.items()), {}
        joined = bytearray()
        for start, data in parts:
            if start > len(joined):
                return None
            joined += data[len(joined) - start :] if start + len(data) > len(joined) else b""
        return bytes(joined) if len(joined) == self.size else None

    def _ask(self, store: Any, start: int, stop: int) -> bytes | None:
        try:
            with nullcontext() if self._budget is None or getattr(store, "local", False) else self._budget.spend():
                return store.get(self.key, start, stop)
        except Exception as error:  # a plug-in's, for ours never raise
            self._raised = f"error ({type(error).__name__})"
            with suppress(Exception):
                store.stats.count("misses", "error")
            return None
