"""The gateway as an ASGI application: who asks, what is asked, and a line in the log."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from blendkv.serving.answers import CLOSE, Answer, Receive, Scope, Send, send_bytes
from blendkv.serving.chunks import PATH, Chunks
from blendkv.serving.logs import Log
from blendkv.serving.metrics import CONTENT_TYPE, Metrics
from blendkv.serving.names import Names
from blendkv.serving.tokens import Caller, Tokens

MARK = (b"blendkv-gateway", b"1")
"""By this header of the answer to OPTIONS a client knows that it may put."""
SMALL_BODY = 64 << 10
"""Bytes of a body that is read to its end before a connection is used again, though it is not wanted."""
_METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "POST")
_ROUTES = ("chunks", "names", "metrics", "healthz")
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gateway:
    """Everything behind one port. Without a token nothing is told, not even what there is.

    Args:
        chunks: entries.
        tokens: of who may ask.
        metrics: what is counted.
        log: where events go.
        names: of documents, if there is a catalog.
        deletes: whether entries may be deleted.
    """

    def __init__(
        self,
        chunks: Chunks,
        tokens: Tokens,
        metrics: Metrics,
        log: Log,
        names: Names | None = None,
        deletes: bool = False,
    ) -> None:
        self._chunks, self._tokens, self._metrics, self._log, self._names = chunks, tokens, metrics, log, names
        self._deletes = deletes
        metrics.gauge("slots_taken", "Pieces being sent.", lambda: chunks.slots.taken)
        metrics.gauge("slots_waiting", "Pieces that wait for a slot.", lambda: chunks.slots.waiting)
        if names is not None:
            region = names.region
            metrics.gauge("names_lag_seconds", "How far announcements are behind.", lambda: region.state.lag)
            metrics.gauge("names_known", "Names remembered.", lambda: region.state.entries)
        # An instance with __call__ is an ASGI application to Starlette, and no function of a request.
        routes = [
            Route("/healthz", _Endpoint(_healthy)),
            Route("/metrics", _Endpoint(self._show_metrics)),
            Route("/chunks", _Endpoint(self._on_chunks)),
            Route("/chunks/{path:path}", _Endpoint(self._on_chunk)),
            Route("/names", _Endpoint(self._on_names)),
            Route("/names/{path:path}", _Endpoint(self._on_name)),
            Route("/{path:path}", _Endpoint(_nowhere)),
        ]
        self._app = Starlette(routes=routes, exception_handlers={Answer: _answered}, lifespan=self._life)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, told = time.perf_counter(), _Told(send)
        headers = dict(scope["headers"])
        caller = self._tokens.find(headers.get(b"authorization"))
        first = scope["path"].split("/", 2)[1] if scope["path"].startswith("/") else ""
        known = caller is not None or scope["path"] == "/healthz"
        route = (first if first in _ROUTES else "unknown") if known else "refused"
        try:
            if caller is None and not known:
                await _refuse(headers, told)
            else:
                caller = caller or Caller("", writes=False)
                address = (scope.get("client") or ("", 0))[0]
                scope["state"] = {"client": (caller.name, address), "writes": caller.writes}
                await self._app(scope, receive, told)
        finally:
            seconds = time.perf_counter() - begin
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(route, method, told.status).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            about = {"key": found[2][:8]} if known and (found := PATH.fullmatch(scope["path"])) else {}
            self._log.write(
                "debug" if route == "healthz" else "info",
                "request",
                route=route,
                method=method,
                status=told.status,
                bytes=told.bytes,
                seconds=round(seconds, 6),
                client=caller.name if caller else "",
                **about,
            )

    async def _on_chunk(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._allow(scope, "GET", "HEAD", "PUT", *(["DELETE"] if self._deletes else []))
        if scope["method"] in ("GET", "HEAD"):
            await self._chunks.get(scope, send)
        elif scope["method"] == "PUT":
            await self._chunks.put(scope, receive, send)
        else:
            await self._chunks.delete(scope, send)

    async def _on_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What may be done here, and a list of what there is, one JSON array a line."""
        methods = ["GET", "HEAD", "OPTIONS"] + ["PUT"] * scope["state"]["writes"]
        methods += ["DELETE"] * (scope["state"]["writes"] and self._deletes)
        if scope["method"] == "OPTIONS":
            await send_bytes(send, 200, b"", [(b"allow", ", ".join(methods).encode()), MARK])
            return
        self._allow(scope, "GET", "HEAD", "OPTIONS")
        rows = await self._chunks.entries() if scope["method"] == "GET" else []
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(rows), 1000):
            lines = "".join(json.dumps(row) + "\n" for row in rows[start : start + 1000])
            await send({"type": "http.response.body", "body": lines.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _on_name(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = self._catalog()
        self._allow(scope, "GET", "PUT")
        if scope["method"] == "GET":
            await names.get(scope, send)
        else:
            await names.put(scope, receive, send)

    async def _on_names(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = self._catalog()
        self._allow(scope, "GET")
        await names.follow(scope, send)

    async def _show_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._allow(scope, "GET")
        await send_bytes(send, 200, self._metrics.text(), kind=CONTENT_TYPE.encode())

    def _catalog(self) -> Names:
        if self._names is None:
            raise Answer(501, "this gateway has no catalog of names: start it with --catalog")
        return self._names

    def _allow(self, scope: Scope, *methods: str) -> None:
        if scope["method"] not in methods:
            raise Answer(405, "", [(b"allow", ", ".join(methods).encode()), CLOSE])
        if scope["method"] in ("PUT", "DELETE") and not scope["state"]["writes"]:
            raise Answer(403, "this token may only read", _closing(dict(scope["headers"])))

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncGenerator[None]:
        yield
        self._chunks.close()
        if self._names is not None:
            self._names.close()


class _Endpoint:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


class _Told:
    """What was told to a client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = self.bytes = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.bytes += len(message.get("body", b""))
        await self._send(message)


async def _healthy(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise Answer(405, "", [(b"allow", b"GET, HEAD"), CLOSE])
    await send_bytes(send, 200, b"ok\n")


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise Answer(404, "", _closing(dict(scope["headers"])))


async def _answered(request: Request, error: Exception) -> Response:
    """An `Answer`, as Starlette sends it."""
    assert isinstance(error, Answer)
    response = Response((error.said + "\n" * bool(error.said)).encode(), error.status, media_type="text/plain")
    response.raw_headers.extend(error.headers)
    return response


async def _refuse(headers: dict[bytes, bytes], send: Send) -> None:
    """The one answer to whoever has no token, whatever was asked."""
    known = [(b"www-authenticate", b"Bearer"), *_closing(headers)]
    await send_bytes(send, 401, b"give a token: Authorization: Bearer ...\n", known)


def _closing(headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Ends the connection if there is a body on its way that nobody wants, unless it is a small one."""
    length = headers.get(b"content-length", b"0")
    small = b"transfer-encoding" not in headers and length.isdigit() and int(length) <= SMALL_BODY
    return [] if small else [CLOSE]
