"""The centre of a catalog behind a gateway: names over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from blendkv.errors import StoreError
from blendkv.stores.catalog import Named
from blendkv.stores.keys import is_key
from blendkv.stores.urls import shown

MOST_BYTES = 16 << 20
"""Of an answer."""


class HttpCentre:
    """Who decides about names, asked through a gateway (`blendkv serve --catalog`).

    Updates are heard by asking again and again what is new: the gateway answers as soon as something is, or after a
    beat. What was announced before a question was sent is known once its answer is there, so that a region knows up to
    when it has heard everything, whatever the network does.

    Args:
        url: of the gateway, without `/chunks` and `/names`.
        token: of the gateway.
        beat: longest time that a question for news waits there. A region's `delay` should be several of them.
        timeout: most seconds for one question.

    Raises:
        StoreError: if it does not answer, refuses, or has no catalog.
    """

    def __init__(self, url: str, *, token: str | None = None, beat: float = 0.25, timeout: float = 5.0) -> None:
        self.url, self.beat, self._timeout = shown(url).rstrip("/"), beat, timeout
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ValueError(f"{self.url}: a gateway's URL is http://host:port or https://host:port")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._idle: list[http.client.HTTPConnection] = []
        self._lock, self._closed = threading.Lock(), False
        self.news("", -1, 0.0)

    def read(self, name: str) -> Named | None:
        """What a name stands for now.

        Raises:
            StoreError: if the gateway does not say.
        """
        status, body = self._ask("GET", f"/names/{quote(name, safe='')}?force_latest=1")
        return None if status == 404 else self._named(body)

    def write(self, name: str, keys: Iterable[str]) -> Named:
        """Gives a name its next version and announces it.

        Raises:
            StoreError: if the gateway does not say that it did.
            ValueError: for keys that are none.
        """
        keys = list(keys)
        if bad := [key for key in keys if not is_key(key)]:
            raise ValueError(f"{bad[0]!r} is no key: 64 hex digits")
        status, body = self._ask("PUT", f"/names/{quote(name, safe='')}", json.dumps({"keys": keys}).encode())
        if status == 404:
            raise ValueError(f"the gateway at {self.url} takes no name of {len(name)} letters")
        return self._named(body)

    def follow(self, heard: Callable[[Named], None]) -> HttpListener:
        """Calls a function for every update, in a thread."""
        return HttpListener(self, heard)

    def news(self, epoch: str, after: int, wait: float) -> dict[str, Any]:
        """What is new, within `wait` seconds (`blendkv.serving.names.Announced`).

        Raises:
            StoreError: if the gateway does not say.
        """
        status, body = self._ask("GET", "/names?" + urlencode({"after": after, "epoch": epoch, "wait": f"{wait:g}"}))
        if status == 404:
            raise StoreError(f"{self.url} has no names: is it a gateway of blendkv?")
        try:
            answer = json.loads(body)
            answer["updates"] = [_named(each) for each in answer["updates"]]
            found = {"epoch": str(answer["epoch"]), "next": int(answer["next"]), "heard": float(answer["heard"])}
            return found | {"updates": answer["updates"]}
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"what {self.url} says of names makes no sense") from error

    def close(self) -> None:
        """Closes connections; it is not asked any more. Followers are closed by themselves."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection in idle:
            connection.close()

    def _named(self, body: bytes) -> Named:
        try:
            return _named(json.loads(body))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"what {self.url} says of a name makes no sense") from error

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status 200 or 404, and what was said. A connection that was kept may be closed: then once more."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        fresh = connection is None
        connection = connection or self._connect()
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, self._headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read(MOST_BYTES)
            if answer.read(1):
                raise http.client.HTTPException("too long an answer")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if fresh or isinstance(error, TimeoutError):
                raise StoreError(f"{self.url} does not answer ({error or type(error).__name__})") from error
            # It was kept, and closed over there. A put may have been done: twice counts one version more, no harm.
            return self._ask(method, path, body)
        with self._lock:
            keep = status in (200, 404) and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        if status in (200, 404):
            return status, data
        if status in (401, 403):
            raise StoreError(f"{self.url} refuses: give its token with token=... or $BLENDKV_TOKEN")
        said = data[:200].decode("utf-8", "replace").strip()
        raise StoreError(f"{self.url} cannot tell about names ({status}{': ' + said if said else ''})")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        made = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)
        with suppress(OSError):
            made.connect()
            made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


class HttpListener:
    """Hears of updates until it is closed.

    Attributes:
        since: from when on, without a gap; infinite while disconnected.
        as_of: everything that was announced before has been heard.
    """

    def __init__(self, centre: HttpCentre, heard: Callable[[Named], None]) -> None:
        self.since, self.as_of = float("inf"), float("-inf")
        self._centre, self._heard, self._closed = centre, heard, threading.Event()
        self._thread = threading.Thread(target=self._run, name="blendkv-names", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops, within about a beat."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._centre.beat + 1.0)

    def _run(self) -> None:
        epoch, after = "", -1
        while not self._closed.is_set():
            asked = time.monotonic()
            try:
                news = self._centre.news(epoch, after, self._centre.beat if epoch else 0.0)
            except Exception:  # whatever it was, it shows in `since`, and is tried again
                self.since, epoch = float("inf"), ""
                self._closed.wait(max(0.0, asked + 1.0 - time.monotonic()))
                continue
            if not news["epoch"]:  # the gateway itself hears nothing now
                self.since, epoch = float("inf"), ""
                self._closed.wait(self._centre.beat)
                continue
            if news["epoch"] != epoch:  # from the answer on: what was announced before may have been missed
                epoch, after = news["epoch"], news["next"]
                self.as_of = self.since = time.monotonic()
                continue
            for named in news["updates"]:
                self._heard(named)
            after = news["next"]
            self.as_of = max(self.as_of, asked + news["heard"])


def _named(value: dict[str, Any]) -> Named:
    keys = tuple(value["keys"])
    if not isinstance(value["name"], str) or not all(is_key(key) for key in keys):
        raise ValueError("no name with keys")
    return Named(value["name"], keys, int(value["version"]), float(value["when"]))
