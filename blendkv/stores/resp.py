"""Replies of a Valkey or Redis server, read as strictly as bytes of strangers should be.

hiredis makes room for whatever length it is told, 16 GB for ten bytes; here nothing longer than was asked for is begun,
and large values are received where they will stay.
"""

from __future__ import annotations

from typing import Any, Protocol

from blendkv import _extras

try:
    from redis.connection import DefaultParser
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import InvalidResponse
except ImportError as error:
    raise _extras.missing("a Valkey or Redis store", "redis", error) from error

SMALL = 1 << 16
"""Bytes of a line, of a value that nobody gave a size, and of a read."""


class Receiver(Protocol):
    """What is needed of a socket."""

    def recv(self, size: int, /) -> bytes:
        """Some bytes, none at the end."""
        ...

    def recv_into(self, buffer: Any, /) -> int:
        """The same, into memory that is there."""
        ...


class Replies:
    """What a server says in one conversation.

    Args:
        sock: where it comes from.
    """

    def __init__(self, sock: Receiver) -> None:
        self._sock, self._data, self._at = sock, b"", 0

    @property
    def rest(self) -> int:
        """Bytes that came and were not read."""
        return len(self._data) - self._at

    def read(self, kinds: tuple[type, ...], most: int = 0) -> Any:
        """The next reply: `bytes` (or a `bytearray`), `int`, `list` or None, of those kinds; or an error, returned.

        Raises:
            InvalidResponse: for anything else.
            ConnectionError: of redis-py, at the end of the stream or where the server tells us to go.
        """
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"-":
            error = DefaultParser.parse_error(text.decode("utf-8", "replace"))
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        if kind == b"+" and bytes in kinds:
            return text
        number = self._number(text)
        if kind == b":" and int in kinds:
            return number
        if number == -1 and kind in b"$*" and type(None) in kinds:
            return None
        if kind == b"$" and bytes in kinds and 0 <= number <= max(most, SMALL):
            return self._bulk(number)
        if kind == b"*" and list in kinds and 0 <= number <= SMALL:
            return [self._element(max(most, SMALL), 1) for _ in range(number)]
        raise InvalidResponse(f"not a reply to what was asked: {line[:20]!r}")

    def _element(self, most: int, depth: int) -> Any:
        line = self._line()
        kind, number = line[:1], self._number(line[1:]) if line[:1] in b"$:*" else 0
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return number
        if kind == b"$" and -1 <= number <= most:
            return None if number < 0 else self._bulk(number)
        if kind == b"*" and 0 <= number <= SMALL and depth < 4:
            return [self._element(most, depth + 1) for _ in range(number)]
        raise InvalidResponse(f"not part of a reply: {line[:20]!r}")

    @staticmethod
    def _number(text: bytes) -> int:
        if len(text) > 20 or not text.removeprefix(b"-").isdigit():
            raise InvalidResponse(f"not a number: {text[:20]!r}")
        return int(text)

    def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n", self._at)) < 0:
            if self.rest > SMALL:
                raise InvalidResponse("a line without an end")
            self._data, self._at = self._data[self._at :] + self._more(), 0
        line, self._at = self._data[self._at : end], end + 2
        return line

    def _more(self) -> bytes:
        if not (data := self._sock.recv(SMALL)):
            raise RedisConnectionError("the server closed the connection")
        return data

    def _bulk(self, length: int) -> bytes | bytearray:
        if self.rest >= length + 2:
            data = self._data[self._at : self._at + length]
            self._at += length
        else:
            data = bytearray(length + 2)
            filled = self.rest
            data[:filled] = self._data[self._at :]
            self._data, self._at = b"", 0
            with memoryview(data) as view:
                while filled < length + 2:
                    if not (got := self._sock.recv_into(view[filled:])):
                        raise RedisConnectionError("the server closed the connection")
                    filled += got
            self._data = bytes(data[length:])
            del data[length:]
        if self._data[self._at : self._at + 2] != b"\r\n":
            raise InvalidResponse("a value longer than it said")
        self._at += 2
        return data if length > SMALL else bytes(data)
