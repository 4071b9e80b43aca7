"""uvicorn's HTTP with limits for those who send slowly, read slowly, or send too much before they are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blendkv.serving.limits import Limits

try:
    import fcntl
    import termios
except ImportError:  # not a Unix
    fcntl = termios = None

_INT = Struct("i")
CONNECTION = "blendkv.connection"
"""Name of the connection among a request's extensions."""
MOST_PIPELINED = 16


class GuardedProtocol(HttpToolsProtocol):
    """One connection. It is cut off in four cases.

    - if the head of a request does not come in time, or is too long;
    - if too many requests come at once;
    - if the client takes nothing of what is sent to it;
    - if it does not let go when we do.

    It is known to a request as `scope["extensions"][CONNECTION]`.
    """

    limits = Limits()
    cut: Callable[[str], None] = staticmethod(lambda why: None)
    """Told of every connection that is cut off, and why, in a word."""

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._in_head, self._head_bytes = True, 0
        super().connection_made(transport)
        self._arm("head", self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        for name in list(self._timers):
            self._disarm(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self.parser is None:
            return
        if self._in_head:
            self._arm("head", self.limits.head_seconds)
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.head_bytes:
            self._cut("head")
        elif self.transport.is_closing():
            self._arm("close", self.limits.head_seconds)

    def on_message_begin(self) -> None:  # noqa: D102
        if len(self.pipeline) >= MOST_PIPELINED:
            self._cut("pipeline")
            raise ValueError("too many requests at once")
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}

    def on_headers_complete(self) -> None:  # noqa: D102
        self._in_head = False
        self._disarm("head")
        super().on_headers_complete()

    def on_message_complete(self) -> None:  # noqa: D102
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:  # noqa: D102
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm("close", self.limits.head_seconds)

    def timeout_keep_alive_handler(self) -> None:  # noqa: D102
        super().timeout_keep_alive_handler()
        self._arm("close", self.limits.head_seconds)

    def pause_writing(self) -> None:  # noqa: D102
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:  # noqa: D102
        super().resume_writing()
        self._disarm("stall")

    @property
    def gone(self) -> bool:
        """Whether nothing that is sent will arrive."""
        return self.transport.is_closing()

    def abort(self) -> None:
        """Ends the connection at once, whatever has not been sent."""
        self.transport.abort()

    def _watch_stall(self) -> None:
        """Looks again and again whether the client takes what is sent."""
        before = self._unsent()

        def look() -> None:
            if before - self._unsent() < self.limits.stall_bytes:
                self._cut("stall")
            else:
                self._watch_stall()

        self._disarm("stall")
        self._timers["stall"] = self.loop.call_later(self.limits.stall_seconds, look)

    def _unsent(self) -> int:
        """Bytes that the client has not taken yet: ours, and the kernel's, which may be megabytes."""
        waiting = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        if fcntl is None or termios is None or sock is None:
            return waiting
        with suppress(OSError, ValueError):
            waiting += _INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT.size)))[0]
        return waiting

    def _arm(self, name: str, seconds: float) -> None:
        """Cuts the connection off in so many seconds; what is armed stays as it is."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self._cut, name)

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, why: str) -> None:
        self._timers.pop(why, None)
        self.cut(why)
        self.transport.abort()


def guarded(limits: Limits, cut: Callable[[str], None]) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits, "cut": staticmethod(cut)})
