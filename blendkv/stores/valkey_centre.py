"""The centre of a catalog in one Valkey or Redis server."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from blendkv.errors import StoreError
from blendkv.stores.catalog import Named
from blendkv.stores.deadline import deadline
from blendkv.stores.resp import Replies
from blendkv.stores.valkey_server import Ask, why
from blendkv.stores.valkey_servers import Servers
from blendkv.stores.valkey_url import parse

MOST_BYTES = 4 << 20
"""Longest list of keys: about 60,000."""

# The version, what it stands for and the announcement are one step: updates are announced in the order of versions.
_WRITE = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
local version = 1
if old then version = tonumber(string.match(old, '^%d+')) + 1 end
local now = redis.call('TIME')
local value = string.format('%d %d.%06d ', version, now[1], now[2]) .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], value)
redis.call('PUBLISH', ARGV[3], #ARGV[1] .. ' ' .. ARGV[1] .. value)
return value
"""


class ValkeyCentre:
    """Names in a hash of a Valkey or Redis server, with updates announced by publish and subscribe.

    One server, because only of the server that decides can a subscriber know that it has heard everything: it sends
    PING on the connection that announcements come on, and what was announced before comes before the answer. Its user
    needs `+eval +hget +hset +time +publish +subscribe +ping +cluster|slots ~prefix:names &prefix:names`.

    Args:
        url: as of `ValkeyStore.from_url`.
        prefix: first part of the hash's name.
        beat: seconds between PINGs of those who follow. A region's `delay` should be at least three of them.
        connect_timeout: most seconds to connect.
        read_timeout: longest silence.
        timeout: most seconds for one question.

    Raises:
        StoreError: if the server cannot be reached or refuses, or is a Cluster.
        ValueError: for a URL that makes no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "blendkv",
        beat: float = 0.25,
        connect_timeout: float = 0.25,
        read_timeout: float = 1.0,
        timeout: float = 2.0,
    ) -> None:
        target = parse(url)
        self.url, self._hash = target.url, f"{prefix}:names"
        self.beat, self.patience, self._timeout = beat, read_timeout, timeout
        self._servers = Servers(target.settings, connect_timeout, read_timeout)
        self._servers.open()
        if self._servers.cluster:
            self.close()
            raise StoreError(f"{self.url} is a Cluster: the centre of a catalog must be one server (chunks need not)")

    def read(self, name: str) -> Named | None:
        """What a name stands for now.

        Raises:
            StoreError: if the server does not say.
        """
        value = self._ask(("HGET", self._hash, name), (bytes, type(None)))
        return None if value is None else _named(name, bytes(value))

    def write(self, name: str, keys: Iterable[str]) -> Named:
        """Gives a name its next version and announces it.

        Raises:
            StoreError: if the server does not answer; whether it was done is not known then.
            ValueError: for keys that are none.
        """
        text = " ".join(keys)
        if len(text) > MOST_BYTES or not text.isascii() or len(name) > 4096:
            raise ValueError(f"a name of {len(name)} letters for {len(text):,} of keys: at most 4096, {MOST_BYTES:,}")
        value = self._ask(("EVAL", _WRITE, 1, self._hash, name, text, self._hash), (bytes,))
        return _named(name, bytes(value))

    def follow(self, heard: Callable[[Named], None]) -> Listener:
        """Calls a function for every update, in a thread; a lost connection is made again, once a second at most."""
        return Listener(self, heard)

    def subscribed(self) -> Any:
        """A connection of one's own, as a context."""
        return self._servers.nodes()[0].connection()

    @property
    def channel(self) -> str:
        """Where updates are announced."""
        return self._hash

    def close(self) -> None:
        """Closes connections. Followers are closed by themselves."""
        self._servers.close()

    def _ask(self, command: tuple[Any, ...], kinds: tuple[type, ...]) -> Any:
        with deadline(self._timeout):
            reply = self._servers.ask([Ask(self._hash, command, kinds, 2 * MOST_BYTES)])[0]
        if isinstance(reply, Exception):
            raise StoreError(f"the catalog at {self.url} does not answer ({why(reply)}: {reply})") from reply
        return reply


class Listener:
    """Hears of updates until it is closed.

    Attributes:
        since: from when on, without a gap; infinite while disconnected.
        as_of: everything that was announced before has been heard.
    """

    def __init__(self, centre: ValkeyCentre, heard: Callable[[Named], None]) -> None:
        self.since, self.as_of = float("inf"), float("-inf")
        self._centre, self._heard, self._closed = centre, heard, threading.Event()
        self._thread = threading.Thread(target=self._run, name="blendkv-catalog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops, within about a beat."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._centre.beat + 2 * self._centre.patience)

    def _run(self) -> None:
        while not self._closed.is_set():
            begun = time.monotonic()
            try:
                with self._centre.subscribed() as connection:
                    self._listen(connection, Replies(connection.timed))
            except Exception:  # whatever it was, it shows in `since`, and is tried again
                self.since = float("inf")
            self._closed.wait(max(0.0, begun + 1.0 - time.monotonic()))

    def _listen(self, connection: Any, replies: Replies) -> None:
        with deadline(self._centre.patience):
            connection.send_command("SUBSCRIBE", self._centre.channel, check_health=False)
            replies.read((list,))
        self.as_of = self.since = time.monotonic()
        pings, asked = deque[float](), float("-inf")
        poller = select.poll()
        poller.register(connection.timed, select.POLLIN)
        while not self._closed.is_set():
            now = time.monotonic()
            if pings and now - pings[0] > self._centre.patience:
                raise TimeoutError("no answer to a PING")
            if now - asked >= self._centre.beat:
                asked = now
                pings.append(now)
                with deadline(self._centre.patience):
                    connection.send_command("PING", check_health=False)
            if not (replies.rest or connection.timed.pending_bytes or poller.poll(self._centre.beat * 1000)):
                continue
            with deadline(self._centre.patience):
                kind, *rest = replies.read((list,), 2 * MOST_BYTES)
            if kind == b"pong":
                self.as_of = pings.popleft()
            elif kind == b"message":
                self._heard(_announced(bytes(rest[1])))


def _named(name: str, value: bytes) -> Named:
    try:
        version, when, *keys = value.decode("ascii").split(" ")
        return Named(name, tuple(key for key in keys if key), int(version), float(when))
    except ValueError:
        raise StoreError(f"what the catalog says of {name!r} makes no sense: {value[:40]!r}") from None


def _announced(message: bytes) -> Named:
    length, _, rest = message.partition(b" ")
    return _named(rest[: int(length)].decode(), rest[int(length) :])
