"""A store behind a slow link: real bytes, at the pace of a bandwidth that changes, with stalls and cut-offs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blendkv.bench.bandwidth import Bandwidth
from blendkv.loading.clocks import Clock, RealClock
from blendkv.stores import Entry, Store
from blendkv.stores.base import StoreStats

PIECE_S = 0.002
PIECE = 1 << 16
"""A request gets through in pieces of so many seconds, at least so many bytes, so that several share the link."""


@dataclass(frozen=True)
class Fault:
    """What happens when a byte is due.

    Attributes:
        at: bytes that the link has carried before.
        kind: "stall": nothing moves for `seconds`; "cut": this request fails, others go on; "dead": this request fails,
            and all later ones.
        seconds: of a stall.
    """

    at: int
    kind: Literal["stall", "cut", "dead"]
    seconds: float = math.inf


class ThrottledStore:
    """Another store's entries, at the pace of a link. Puts, listings and deletions are not slowed.

    A token bucket: what the link could have carried in the last `burst_s` seconds without being used goes through at
    once, so that sleeps that last too long cost nothing. Requests of several threads share the link piece by piece.
    As every store, it answers late requests with None, counted as "deadline", and broken ones counted as "io".

    Args:
        store: has the entries.
        bandwidth: of the link; it begins when the throttled store is made (see `restart`).
        latency_s: from a request until its first byte is due.
        faults: of the link, by the bytes that it carried.
        clock: a `VirtualClock` for simulations, in one thread.
        burst_s: depth of the bucket, in seconds of the link.
        timeout: most seconds for a request, outside of any deadline.

    Attributes:
        url: the store's, with `throttled+` in front.
        carried: bytes that came through.
        local: False, so that deadlines count.
    """

    local = False

    def __init__(
        self,
        store: Store,
        bandwidth: Bandwidth,
        *,
        latency_s: float = 0.0,
        faults: Sequence[Fault] = (),
        clock: Clock | None = None,
        burst_s: float = 0.005,
        timeout: float = 60.0,
    ) -> None:
        self.store, self.url, self.stats = store, f"throttled+{store.url}", StoreStats()
        self.clock: Clock = RealClock() if clock is None else clock
        self.bandwidth, self.latency_s, self._burst, self._timeout = bandwidth, latency_s, burst_s, timeout
        self._lock = threading.Lock()
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self.restart()

    def restart(self) -> None:
        """Begins the bandwidth anew, with an idle link; faults that happened do not happen again."""
        with self._lock:
            self._epoch, self._busy, self.carried, self._dead = self.clock.now(), -math.inf, 0, False

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry when the link has carried them, or None."""
        end = self.clock.now() + self.clock.remaining(self._timeout)
        if (fault := self._wait(self.clock.now() + self.latency_s, end)) is not None:
            return self._missed(fault)
        data = self.store.get(key, start, stop)
        if data is None:
            return self._missed("")
        return self._missed(fault) if (fault := self._carry(len(data), end)) is not None else self._found(data)

    peek = get

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, one after another, in one round trip."""
        end = self.clock.now() + self.clock.remaining(self._timeout)
        keys = list(dict.fromkeys(keys))
        fault = self._wait(self.clock.now() + self.latency_s, end)
        found: dict[str, bytes] = {}
        for key in keys:
            data = self.store.get(key) if fault is None else None
            if data is not None:
                fault = self._carry(len(data), end)
            if data is None or fault is not None:
                self._missed(fault or "")
            else:
                found[key] = self._found(data)
        return found

    def size(self, key: str) -> int | None:
        """Bytes of an entry after one latency, or None."""
        now = self.clock.now()
        late = self._wait(now + self.latency_s, now + self.clock.remaining(self._timeout))
        return None if late is not None else self.store.size(key)

    def put(self, key: str, data: bytes) -> bool:
        """The store's."""
        kept = self.store.put(key, data)
        self.stats.count("puts" if kept else "put_failures")
        return kept

    def delete(self, key: str) -> None:
        """The store's."""
        self.store.delete(key)

    def quarantine(self, key: str) -> None:
        """The store's, or deletes the entry."""
        getattr(self.store, "quarantine", self.store.delete)(key)

    def keys(self) -> Iterator[str]:
        """The store's."""
        return self.store.keys()

    def entries(self) -> Iterator[Entry]:
        """The store's."""
        return self.store.entries()

    def close(self) -> None:
        """Closes the store."""
        self.store.close()

    def _carry(self, nbytes: int, end: float) -> str | None:
        """Waits until the link has carried so many bytes, or until `end`; a fault if it did not."""
        while nbytes:
            piece, due, fault = self._take(nbytes, end)
            self.clock.sleep(due - self.clock.now())
            if fault is not None:
                return fault
            nbytes -= piece
        return None

    def _take(self, most: int, end: float) -> tuple[int, float, str | None]:
        """A turn of the link: how many bytes it carries next, until when, and what goes wrong then."""
        with self._lock:
            now = self.clock.now()
            if self._dead:
                return 0, now, "io"
            begin = max(self._busy, now - self._epoch - self._burst)
            piece = min(most, max(PIECE, int(self.bandwidth.rate(min(begin, 1e12)) * PIECE_S)))
            fault = None
            if self._faults and self._faults[0].at < self.carried + piece:
                fault = self._faults[0]
                piece = max(0, fault.at - self.carried)
            done = self.bandwidth.finish(begin, piece) if begin < math.inf else math.inf
            if fault is not None and fault.kind == "stall":
                done += fault.seconds
            if self._epoch + done > end:  # what came until then is lost with the request
                if fault is None or fault.kind != "stall":
                    self._busy = max(self._busy, end - self._epoch)
                else:
                    self._faults.pop(0)
                    self._busy = done
                return piece, end, "deadline"
            self._busy = done
            self.carried += piece
            if fault is None:
                return piece, self._epoch + done, None
            self._faults.pop(0)
            self._dead = fault.kind == "dead"
            return piece, self._epoch + done, None if fault.kind == "stall" else "io"

    def _wait(self, until: float, end: float) -> str | None:
        self.clock.sleep(min(until, end) - self.clock.now())
        return "deadline" if until > end or end <= self.clock.now() else None

    def _found(self, data: bytes) -> bytes:
        self.stats.count("hits")
        return data

    def _missed(self, fault: str) -> None:
        self.stats.count("misses", fault)
