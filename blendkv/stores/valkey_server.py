"""One Valkey or Redis server: commands out, replies in, never longer than there is time for."""

from __future__ import annotations

import functools
import os
import select
import socket
import ssl
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from blendkv import _extras
from blendkv.stores.breaker import Breaker
from blendkv.stores.deadline import deadline, remaining
from blendkv.stores.resp import Replies

try:
    import redis
    from redis import exceptions as errors
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:  # pragma: no cover
    raise _extras.missing("a Valkey or Redis store", "redis", error) from error

WINDOW_BYTES = 32 << 20
"""Most bytes under way in one connection: a server holds the replies that nobody has read in its own memory."""


class Ask(NamedTuple):
    """A command, and what may come back.

    Attributes:
        name: the key that decides which server is asked.
        args: the command.
        kinds: types of reply; another one means that this is not the conversation we think it is.
        weight: bytes that travel, about.
    """

    name: str
    args: tuple[Any, ...]
    kinds: tuple[type, ...] = (bytes,)
    weight: int = 0


class Unavailable(Exception):
    """A server was not asked; the argument says why, in a word."""


class TimedSocket:
    """A socket of which every call ends within what remains of the deadline, however slowly bytes trickle."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        self._sock, self._silence = sock, silence

    def _arm(self) -> None:
        left = remaining(self._silence)
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left)

    def recv_into(self, *args: Any) -> int:
        """As of a socket."""
        self._arm()
        return self._sock.recv_into(*args)

    def recv(self, *args: Any) -> bytes:
        """As of a socket."""
        self._arm()
        return self._sock.recv(*args)

    def sendall(self, data: Any) -> None:
        """As of a socket, with the clock looked at between parts."""
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            self._arm()
            at += self._sock.send(view[at : at + (1 << 20)])

    @property
    def pending_bytes(self) -> int:
        """Bytes that TLS has decrypted and nobody has read."""
        return self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to read, not even an end."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return not self.pending_bytes and not poller.poll(0)

    def settimeout(self, seconds: float | None) -> None:
        """Nothing: the deadline decides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Timed:
    """Mixed into a connection class of redis-py."""

    _socket_timeout: float
    _socket_connect_timeout: float

    timed: TimedSocket

    def _connect(self) -> TimedSocket:
        self.timed = TimedSocket(super()._connect(), self._socket_timeout)  # ty: ignore[missing-attribute]
        return self.timed

    @property
    def socket_timeout(self) -> float:
        return max(remaining(self._socket_timeout), 1e-3)  # zero would mean: do not block

    @property
    def socket_connect_timeout(self) -> float:
        return max(remaining(self._socket_connect_timeout), 1e-3)


class _PatientSocket(socket.socket):
    """TLS asks a socket how long its handshake may take after reading certificates, which takes long itself."""

    def gettimeout(self) -> float:
        return max(remaining(super().gettimeout() or 0.0), 1e-3)


class _BelowTLS(redis.Connection):
    def _connect(self) -> socket.socket:
        plain = super()._connect()
        timeout = plain.gettimeout()
        sock = _PatientSocket(plain.family, plain.type, plain.proto, plain.detach())
        sock.settimeout(timeout)
        return sock


@functools.cache
def timed(connection_class: type) -> type:
    """That class, with sockets that keep to the deadline."""
    below = (_BelowTLS,) if issubclass(connection_class, redis.SSLConnection) else ()
    return type(f"Timed{connection_class.__name__}", (_Timed, connection_class, *below), {})


class Server:
    """Connections to one server, and whether it is worth asking.

    Args:
        settings: arguments of a connection of redis-py, with `connection_class` if it is not plain TCP.
        connect_timeout: most seconds to connect.
        read_timeout: longest silence in a conversation.
    """

    def __init__(self, settings: dict[str, Any], connect_timeout: float, read_timeout: float) -> None:
        self.host, self.port = settings.get("host", "localhost"), int(settings.get("port", 6379))
        self.breaker = Breaker()
        self._patience = min(connect_timeout + read_timeout, 1.5)  # to be back within two seconds
        away = ("host", "port") if "path" in settings else ()
        self._settings = {name: value for name, value in settings.items() if name not in away}
        self._settings |= {
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": read_timeout,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        self._make = timed(self._settings.pop("connection_class", redis.Connection))
        self._free: list[Any] = []
        self._pid = os.getpid()
        self._starved = False
        """Whether the last values that were asked for did not come: a slow network lets small answers through."""

    def exchange(self, asks: Sequence[Ask]) -> list[Any]:
        """Replies in order, of which any may be an exception; one round trip, if all fits under `WINDOW_BYTES`."""
        if self.breaker.state != "closed":
            return [Unavailable("breaker")] * len(asks)
        if remaining(1.0) <= 0:
            return [Unavailable("deadline")] * len(asks)
        return self._exchange(asks)

    def probe(self) -> bool:
        """One PING past the breaker, which learns from it."""
        with deadline(self._patience):
            return self._exchange([Ask("", ("PING",))]) == [b"PONG"]

    @contextmanager
    def connection(self) -> Generator[Any]:
        """A connection that nobody else uses, closed at the end."""
        connection = self._make(**self._settings)
        try:
            connection.connect()
            yield connection
        finally:
            connection.disconnect()

    def _take(self) -> Any:
        """A connection on which nothing waits to be read, as it would if it were closed or out of step; or a new one.

        Pools of redis-py ask that of new ones too, where session tickets of TLS are enough to refuse them.
        """
        if self._pid != os.getpid():  # these are our parent's
            self._free, self._pid = [], os.getpid()
        while self._free:
            with suppress(IndexError):
                connection = self._free.pop()
                if connection.timed.quiet:
                    return connection
                connection.disconnect()
        connection = self._make(**self._settings)
        connection.connect()
        return connection

    def _exchange(self, asks: Sequence[Ask]) -> list[Any]:
        replies: list[Any] = []
        try:
            connection = self._take()
        except Exception as error:
            self.breaker.failed()
            return [error.with_traceback(None)] * len(asks)
        try:
            self._converse(connection, asks, replies)
            self._free.append(connection)
            self._starved &= not _values(asks)
            self.breaker.succeeded(fully=not self._starved)
        except Exception as error:  # whatever it was: this connection may have half a reply in it
            connection.disconnect()
            self._starved |= _values(asks)
            self.breaker.failed()
            if isinstance(error, errors.InvalidResponse):
                replies.clear()  # who talks nonsense now may have before
            replies += [error.with_traceback(None)] * (len(asks) - len(replies))
        except BaseException:
            connection.disconnect()
            raise
        return replies

    @staticmethod
    def _converse(connection: Any, asks: Sequence[Ask], replies: list[Any]) -> None:
        heard, sent, under_way = Replies(connection.timed), 0, 0
        for ask in asks:
            batch = []
            while sent < len(asks) and (under_way == 0 or under_way + asks[sent].weight <= WINDOW_BYTES):
                batch.append(asks[sent].args)
                under_way += asks[sent].weight
                sent += 1
            if batch:
                connection.send_packed_command(connection.pack_commands(batch), check_health=False)
            replies.append(heard.read(ask.kinds, ask.weight))
            under_way -= ask.weight
        if heard.rest:
            raise errors.InvalidResponse("more replies than questions")

    def close(self) -> None:
        """Closes connections that are not in use."""
        while self._free:
            with suppress(IndexError):
                self._free.pop().disconnect()


def _values(asks: Sequence[Ask]) -> bool:
    """Whether what is asked for is large."""
    return any(ask.weight and ask.args[0] == "GETRANGE" for ask in asks)


_WORDS = (
    (errors.AuthenticationError, "auth"),
    (errors.BusyLoadingError, "loading"),
    (errors.TimeoutError, "timeout"),
    (TimeoutError, "timeout"),
    (errors.InvalidResponse, "protocol"),
    (errors.ReadOnlyError, "readonly"),
    (errors.OutOfMemoryError, "oom"),
    (errors.NoPermissionError, "permission"),
    (errors.ConnectionError, "connection"),
    (OSError, "connection"),
)


def why(error: BaseException) -> str:
    """A short word for counters: `timeout`, `connection`, `breaker`, `oom`, ...; else an error's first."""
    if isinstance(error, Unavailable):
        return str(error)
    for kind, word in _WORDS:
        if isinstance(error, kind):
            return word
    if isinstance(error, errors.ResponseError):
        first = error.status_code or str(error).split(" ", 1)[0]
        return first.lower() if first.isalpha() and first.isupper() else "refused"
    return "error"
