"""Small answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope = MutableMapping[str, Any]
Header = tuple[bytes, bytes]

CLOSE: Header = (b"connection", b"close")


class Answer(Exception):
    """Ends a request with a short answer.

    Args:
        status: of HTTP.
        said: in the body, for people.
        headers: besides type and length.
    """

    def __init__(self, status: int, said: str = "", headers: Iterable[Header] = ()) -> None:
        super().__init__(said)
        self.status, self.said, self.headers = status, said, list(headers)


async def send_bytes(
    send: Send, status: int, body: bytes, headers: Iterable[Header] = (), kind: bytes = b"text/plain; charset=utf-8"
) -> None:
    """Sends a whole answer."""
    all_headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200) -> None:
    """Sends JSON."""
    await send_bytes(send, status, json.dumps(value).encode(), [(b"cache-control", b"no-store")], b"application/json")


async def read_body(receive: Receive, most: int) -> bytes:
    """The body of a request.

    Raises:
        Answer: if it is longer, or the client went away.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Answer(400, "the client went away", [CLOSE])
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise Answer(413, f"at most {most} bytes", [CLOSE])
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
