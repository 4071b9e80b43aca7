"""Entries over HTTP: `/chunks/ab/ab12....bkv`, as a folder of a `DiskStore` would be served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from blendkv.loading.queues import DEFAULT_POLICY
from blendkv.serving.answers import CLOSE, Answer, Header, Receive, Scope, Send, send_bytes
from blendkv.serving.central import Central
from blendkv.serving.entries import BytesEntry, OpenEntry, look_at, open_entry
from blendkv.serving.limits import Limits
from blendkv.serving.metrics import Metrics
from blendkv.serving.protocol import CONNECTION
from blendkv.serving.ranges import Wanted, wanted
from blendkv.serving.slots import Full, Slot, Slots
from blendkv.stores.base import Store
from blendkv.stores.checking import check_bytes

PATH = re.compile(r"/chunks/([0-9a-f]{2})/(\1[0-9a-f]{62})\.bkv")
CHECKS = 2
"""Bodies that are checked at a time: nobody's reads wait for that."""
_KIND: Header = (b"content-type", b"application/octet-stream")
_RANGES: Header = (b"accept-ranges", b"bytes")
_BUSY = (b"retry-after", b"1")
T = TypeVar("T")


class Request(NamedTuple):
    """A request for an entry, whose sender is known.

    Attributes:
        client: who takes turns with others.
        key: of the entry.
        headers: by name, in lower case.
        connection: that it came by; None under another server than ours.
    """

    client: tuple[str, str]
    key: str
    headers: dict[bytes, bytes]
    connection: Any

    @property
    def gone(self) -> bool:
        """Whether nothing that is sent will arrive."""
        return self.connection is not None and self.connection.gone

    async def cut(self) -> None:
        """What has begun cannot be finished: the client must see that, and not take it for all."""
        if self.connection is None:
            raise ConnectionError("the entry could not be read to its end")
        self.connection.abort()
        await asyncio.sleep(0)


class Chunks:
    """Entries of a store, read and written by clients who take turns.

    Args:
        store: that has them.
        limits: of what clients may do.
        metrics: of the gateway.
        policy: who is next.
        central: asked for what the store does not have.
        verify: whether what is put must be a chunk file under its own key.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits,
        metrics: Metrics,
        policy: str = DEFAULT_POLICY,
        central: Central | None = None,
        verify: bool = True,
    ) -> None:
        self._store, self._limits, self._metrics, self._central = store, limits, metrics, central
        self._verify, self._uploading = verify, 0
        self.slots = Slots(limits.slots, policy, limits.waiting, metrics.waited.observe)
        self._threads = ThreadPoolExecutor(limits.slots + 4, thread_name_prefix="blendkv-gateway")
        self._checks = ThreadPoolExecutor(CHECKS, thread_name_prefix="blendkv-check")

    async def get(self, scope: Scope, send: Send) -> None:
        """Answers GET and HEAD."""
        request = request_of(scope)
        if scope["method"] == "HEAD":
            await self._head(request, send)
            return
        slot = await self._slot(request, self._cost(request.headers))
        entry = None
        try:
            if request.gone:
                return
            found = await self._in_thread(self._first, request)
            if found is None and self._central is not None:
                slot.release()
                data = await self._central.fetch(request.client, request.key)
                if data is not None:
                    slot = await self._slot(request, self._cost(request.headers))
                    found = self._first_of(BytesEntry(data), request)
            if found is None:
                raise Answer(404)
            entry, want, data = found
            await _begin(send, entry, want)
            at = want.start + len(data)
            await self._send(request, data, send, last=at >= want.stop)
            slot.release()
            while at < want.stop and not request.gone:
                stop = min(want.stop, at + self._limits.piece_bytes)
                slot = await self._slot(request, stop - at)
                data = entry.read_at_once(at, stop) or await self._in_thread(entry.read, at, stop)
                if data is None:
                    await request.cut()
                    return
                at = stop
                await self._send(request, data, send, last=at >= want.stop)
                slot.release()
        finally:
            slot.release()
            if entry is not None:
                entry.close()  # quick: nothing was written

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers PUT."""
        request = request_of(scope)
        data = await self._receive(request, receive)
        self._metrics.received.inc(len(data))
        if self._verify:
            loop = asyncio.get_running_loop()
            outcome, reason = await loop.run_in_executor(self._checks, check_bytes, request.key, data)
            if outcome not in ("ok", "sealed"):
                self._metrics.refused.labels(reason or outcome).inc()
                why = "its contents have another key" if outcome == "foreign" else f"no sound chunk file: {reason}"
                raise Answer(422, why)
        with await self._slot(request, len(data)):
            kept = await self._in_thread(self._store.put, request.key, data)
        headers = []
        if self._central is not None:
            told = await self._central.put(request.client, request.key, data)
            self._metrics.central.labels(f"put {told}").inc()
            headers.append((b"blendkv-central", told.encode()))
        if not kept:
            raise Answer(507, "the store could not keep it", headers)
        await send_bytes(send, 201, b"", headers)

    async def delete(self, scope: Scope, send: Send) -> None:
        """Answers DELETE."""
        request = request_of(scope)
        await self._in_thread(self._store.delete, request.key)
        await send_bytes(send, 200, b"")

    async def entries(self) -> list[tuple[str, int, float | None]]:
        """Key, size and time of the last use of every entry of the store here."""
        return await self._in_thread(lambda: [(e.key, e.size, e.last_used) for e in self._store.entries()])

    def close(self) -> None:
        """Lets go of threads."""
        for threads in (self._threads, self._checks):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _head(self, request: Request, send: Send) -> None:
        entry = await self._in_thread(look_at, self._store, request.key)
        if entry is None and self._central is not None:
            entry = await self._central.look_at(request.client, request.key)
        if entry is None:
            raise Answer(404)
        headers = {name: value for name, value in request.headers.items() if name != b"range"}
        await _begin(send, entry, wanted(headers, entry.size, entry.etag))
        await send({"type": "http.response.body", "body": b""})

    def _cost(self, headers: dict[bytes, bytes]) -> int:
        """Bytes of the first piece, as far as can be known before the entry was seen."""
        want = wanted({b"range": headers.get(b"range", b"")}, 1 << 62, None)
        return min(want.stop - want.start, self._limits.piece_bytes)

    def _first(self, request: Request) -> tuple[OpenEntry, Wanted, bytes] | None:
        first = 0 if b"range" in request.headers else self._limits.piece_bytes
        entry = open_entry(self._store, request.key, first)
        return None if entry is None else self._first_of(entry, request)

    def _first_of(self, entry: OpenEntry, request: Request) -> tuple[OpenEntry, Wanted, bytes] | None:
        want = wanted(request.headers, entry.size, entry.etag)
        data = entry.read(want.start, min(want.stop, want.start + self._limits.piece_bytes))
        if data is None:
            entry.close()
            return None
        return entry, want, data

    async def _send(self, request: Request, data: bytes | bytearray, send: Send, last: bool) -> None:
        """Sends a piece, and waits until the client has taken it: only then it is somebody else's turn."""
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": not last})
        self._metrics.sent.inc(len(data))

    async def _receive(self, request: Request, receive: Receive) -> bytes:
        length = _length(request.headers)
        if length > self._limits.entry_bytes:
            raise Answer(413, f"at most {self._limits.entry_bytes} bytes", [CLOSE])
        if self._uploading + length > self._limits.upload_bytes:
            raise Answer(503, "too much is being received", [CLOSE, _BUSY])
        self._uploading += length
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds(length)):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Answer(400, "the client went away", [CLOSE])
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Answer(408, "the body came too slowly", [CLOSE]) from None
        finally:
            self._uploading -= length
        if size != length:
            raise Answer(400, "the body is not as long as said", [CLOSE])
        return b"".join(parts)

    async def _slot(self, request: Request, cost: int) -> Slot:
        try:
            return await self.slots.take(request.client, cost, self._limits.hold_seconds)
        except Full:
            raise Answer(503, "too much of this client waits", [_BUSY]) from None

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def request_of(scope: Scope) -> Request:
    """What is asked, of which entry.

    Raises:
        Answer: 404 for a path that is none of an entry.
    """
    path = PATH.fullmatch(scope["path"])
    if path is None:
        raise Answer(404)
    connection = scope.get("extensions", {}).get(CONNECTION)
    return Request(scope["state"]["client"], path[2], dict(scope["headers"]), connection)


def _length(headers: dict[bytes, bytes]) -> int:
    if b"transfer-encoding" in headers or b"content-length" not in headers:
        raise Answer(411, "say how long the body is: Content-Length", [CLOSE])
    return int(headers[b"content-length"])  # it is one: the parser read it


async def _begin(send: Send, entry: OpenEntry, want: Wanted) -> None:
    headers = [_KIND, _RANGES]
    if want.status != 304:
        headers.append((b"content-length", b"%d" % (want.stop - want.start)))
    if entry.etag is not None:
        headers.append((b"etag", entry.etag))
    if want.status == 206:
        headers.append((b"content-range", b"bytes %d-%d/%d" % (want.start, want.stop - 1, entry.size)))
    elif want.status == 416:
        headers.append((b"content-range", b"bytes */%d" % entry.size))
    await send({"type": "http.response.start", "status": want.status, "headers": headers})
