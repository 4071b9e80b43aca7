"""Names of documents over HTTP: `/names/NAME`, and `/names` for those who follow."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any
from urllib.parse import parse_qs, unquote

from blendkv.serving.answers import CLOSE, Answer, Receive, Scope, Send, read_body, send_json
from blendkv.stores.catalog import Centre, Named, Region
from blendkv.stores.keys import is_key

PREFIX = "/names/"
MOST_BYTES = 8 << 20
"""Of a list of keys, as JSON."""
MOST_WAIT = 5.0
"""Seconds that one who follows may wait for the next update."""
BODY_SECONDS = 30.0
REMEMBERED, REMEMBERED_KEYS = 10_000, 200_000
"""Updates, and keys in them; who has missed more begins anew."""
_TRUE = ("1", "true", "yes")


class Names:
    """What documents' names stand for: looked up in memory, or by asking who decides.

    Args:
        centre: who decides.
        delay: most seconds that an answer may be behind (`Region`).
    """

    def __init__(self, centre: Centre, delay: float = 1.0) -> None:
        self._centre = centre
        self.region = Region(centre, delay=delay)
        self.announced = Announced(centre)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="blendkv-names")

    async def get(self, scope: Scope, send: Send) -> None:
        """Answers GET: a name, with `force_latest=1` as who decides knows it now."""
        name, query = name_of(scope), parse_qs(scope["query_string"].decode("ascii", "replace"))
        force = query.get("force_latest", [""])[-1].lower() in _TRUE
        named = await self._in_thread(self._find, name, force)
        if named is None or not named.keys:
            raise Answer(404)
        await send_json(send, shown(named))

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers PUT of `{"keys": [...]}`: from now on the name stands for these; none forgets it."""
        name = name_of(scope)
        try:
            keys = _keys(await asyncio.wait_for(read_body(receive, MOST_BYTES), BODY_SECONDS))
        except TimeoutError:
            raise Answer(408, "the body came too slowly", [CLOSE]) from None
        try:
            named = await self._in_thread(self.region.put, name, keys)
        except ValueError as error:
            raise Answer(400, str(error)) from None
        except OSError:
            raise _unreachable() from None
        await send_json(send, shown(named))

    async def follow(self, scope: Scope, send: Send) -> None:
        """Answers GET `/names?after=N&epoch=E&wait=S`: updates since, as soon as there are any."""
        query = {
            name: values[-1] for name, values in parse_qs(scope["query_string"].decode("ascii", "replace")).items()
        }
        try:
            after, wait = int(query.get("after", "-1")), float(query.get("wait", "0"))
        except ValueError:
            raise Answer(400, "after and wait are numbers") from None
        wait = wait if 0 <= wait <= MOST_WAIT else MOST_WAIT if wait > 0 else 0.0
        await send_json(send, await self.announced.since(after, query.get("epoch", ""), wait))

    def close(self) -> None:
        """Stops listening."""
        self.region.close()
        self.announced.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, name: str, force: bool) -> Named | None:
        found = None if force else self.region.get(name)
        if found is not None:
            return found
        try:
            return self._centre.read(name)  # unknown and cannot be asked are two answers
        except OSError:
            raise _unreachable() from None

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


class Announced:
    """The last updates, numbered, for those who ask what is new.

    Nothing is lost with it: who asks another gateway, or this one after it was away, is told by the epoch that there
    may be a gap, and asks who decides until it has caught up.

    Args:
        centre: who announces.
    """

    def __init__(self, centre: Centre) -> None:
        self._id, self._lock = token_hex(8), threading.Lock()
        self._updates: deque[tuple[int, Named]] = deque(maxlen=REMEMBERED)
        self._count = self._keys = 0
        self._wake: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._following = centre.follow(self._heard)

    async def since(self, after: int, epoch: str, wait: float) -> dict[str, Any]:
        """What is new, in at most `wait` seconds.

        Returns:
            `epoch`: changes when there may be a gap; "" while nothing is heard. `next`: number of the last update.
            `heard`: how many seconds before (negative) or after this was asked everything announced has been heard.
            `updates`: after number `after`; none for another epoch.
        """
        asked = time.monotonic()
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        waiter = (loop, event)
        with self._lock:
            news = epoch != self._epoch() or self._count != after
            if not news:
                self._wake.add(waiter)
        if not news:
            try:
                async with asyncio.timeout(wait):
                    await event.wait()
            except TimeoutError:
                pass
            finally:
                with self._lock:
                    self._wake.discard(waiter)
        return self._answer(after, epoch, asked)

    def close(self) -> None:
        """Stops listening."""
        self._following.close()

    def _answer(self, after: int, epoch: str, asked: float) -> dict[str, Any]:
        current, as_of = self._epoch(), self._following.as_of  # before the updates: what it vouches for is among them
        with self._lock:
            first = self._updates[0][0] if self._updates else self._count + 1
            if epoch == current and first <= after + 1 <= self._count + 1:
                updates = [shown(named) for number, named in self._updates if number > after]
            elif epoch == current and current:
                current, updates = current + "+", []  # it missed some, and must notice
            else:
                updates = []
            count = self._count
        heard = max(-1e9, as_of - asked)
        return {"epoch": current, "next": count, "heard": heard, "updates": updates}

    def _epoch(self) -> str:
        since = self._following.since
        return "" if since == float("inf") else f"{self._id}-{since:.6f}"

    def _heard(self, named: Named) -> None:
        with self._lock:
            self._count += 1
            self._keys += len(named.keys)
            if len(self._updates) == self._updates.maxlen:
                self._keys -= len(self._updates[0][1].keys)
            self._updates.append((self._count, named))
            while self._keys > REMEMBERED_KEYS and len(self._updates) > 1:
                self._keys -= len(self._updates.popleft()[1].keys)
            for loop, event in self._wake:
                loop.call_soon_threadsafe(event.set)


def shown(named: Named) -> dict[str, Any]:
    """A name as JSON."""
    return {"name": named.name, "keys": list(named.keys), "version": named.version, "when": named.when}


def name_of(scope: Scope) -> str:
    """The name in a path.

    Raises:
        Answer: 404 if there is none, or none that can be read.
    """
    raw = scope["raw_path"].decode("ascii", "replace")
    try:
        name = unquote(raw.removeprefix(PREFIX), errors="strict")
    except UnicodeDecodeError:
        raise Answer(404) from None
    if not raw.startswith(PREFIX) or not 0 < len(name) <= 4096:
        raise Answer(404)
    return name


def _keys(body: bytes) -> list[str]:
    try:
        keys = json.loads(body)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        keys = None
    if not isinstance(keys, list) or not all(is_key(key) for key in keys):
        raise Answer(400, 'give {"keys": [...]}, keys of 64 hex digits')
    return keys


def _unreachable() -> Answer:
    return Answer(503, "who decides about names cannot be asked now", [(b"retry-after", b"1")])
