"""Slots for whoever sends: the queues of `blendkv.loading`, for coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Self

from blendkv.loading.queues import DEFAULT_POLICY, Piece, PieceQueue, get_queue


class Full(Exception):
    """A client has too much waiting."""


class Slots:
    """A bounded number of slots, given to clients in the order of a policy. Of one event loop.

    Args:
        slots: that there are.
        policy: who is next.
        waiting: most pieces of one client that wait.
        waited: called with the seconds that a piece waited.
    """

    def __init__(
        self,
        slots: int,
        policy: str | PieceQueue = DEFAULT_POLICY,
        waiting: int = 256,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._queue, self._free, self._most, self._waited = get_queue(policy), slots, waiting, waited
        self._slots = slots
        self._of: Counter[Hashable] = Counter()

    @property
    def taken(self) -> int:
        """Slots in use."""
        return self._slots - self._free

    @property
    def waiting(self) -> int:
        """Pieces that wait."""
        return len(self._queue)

    async def take(self, client: Hashable, cost_bytes: int, most_seconds: float = float("inf")) -> Slot:
        """A slot, when it is this client's turn.

        Args:
            client: who wants it.
            cost_bytes: that will be sent.
            most_seconds: after which the slot is given back, used or not.

        Raises:
            Full: if too much of this client waits already.
        """
        loop = asyncio.get_running_loop()
        if self._free and not len(self._queue):
            self._free -= 1
            self._waited(0.0)
            return Slot(self, loop, most_seconds)
        if self._of[client] >= self._most:
            raise Full
        begin, turn = loop.time(), loop.create_future()
        piece = Piece(client, cost_bytes, turn)
        self._queue.push(piece)
        self._of[client] += 1
        try:
            await turn
        except BaseException:
            if not self._queue.remove(piece):
                self._give()  # it was its turn already
            raise
        finally:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]
        self._waited(loop.time() - begin)
        return Slot(self, loop, most_seconds)

    def _give(self) -> None:
        """A slot is free: for the next one who still wants it."""
        while len(self._queue):
            turn = self._queue.pop().item
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Slot:
    """A slot in use; given back at the end of a `with` block, or when its time is up."""

    def __init__(self, slots: Slots, loop: asyncio.AbstractEventLoop, most_seconds: float) -> None:
        self._slots: Slots | None = slots
        self._timer = loop.call_later(most_seconds, self.release) if most_seconds < float("inf") else None

    def release(self) -> None:
        """Gives it back; once more is fine."""
        slots, self._slots = self._slots, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if slots is not None:
            slots._give()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
