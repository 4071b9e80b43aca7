"""The page behind a socket, until somebody ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

GRACE_SECONDS = 2
"""How long open connections are waited for at the end; a page that is open holds one."""


def serve(app: Any, sock: socket.socket, ready: Callable[[], None], leaving: Callable[[], None]) -> None:
    """Serves an application until SIGINT or SIGTERM.

    Args:
        app: ASGI.
        sock: it listens on this socket.
        ready: called once it answers.
        leaving: called when it is told to end, before connections are waited for.
    """
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on")
    _Server(config, ready, leaving).run(sockets=[sock])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], leaving: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._leaving = ready, leaving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._leaving()
        await super().shutdown(sockets)
