"""Many clients of a gateway at once, which check every byte: `python -m blendkv.bench.gateway_load`, by JSON."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from typing import Any

import xxhash

BUFFER = 1 << 20
MIX = {"get": 0.55, "range": 0.3, "head": 0.05, "put": 0.05, "absent": 0.03, "stranger": 0.02}
"""What clients of a soak do, and how often."""
_EXPECTED = {"get": 200, "range": 206, "head": 200, "put": 201, "absent": 404, "stranger": 401}


class Client:
    """One connection at a time, and what came of it.

    Args:
        port: of the server on 127.0.0.1.
        token: of it.
        entries: key, bytes and their hash.
        shares: what is done, and how often.
        seed: of what is drawn.
        found: counters of all clients.
    """

    def __init__(
        self,
        port: int,
        token: str,
        entries: list[tuple[str, bytes, bytes]],
        shares: dict[str, float],
        seed: int,
        found: dict,
    ) -> None:
        self._port, self._token, self._entries, self._shares, self._found = port, token, entries, shares, found
        self._draw = random.Random(seed)
        self._buffer = memoryview(bytearray(BUFFER))
        self._sock: socket.socket | None = None

    async def run(self, end: float) -> None:
        """Asks until a time of `time.monotonic`."""
        while time.monotonic() < end:
            begin = time.perf_counter()
            try:
                await self._once()
            except (OSError, ValueError, IndexError) as error:
                self._found["errors"].append(f"{type(error).__name__}: {error}"[:100])
                self._hang_up()
                await asyncio.sleep(0.05)
            self._found["seconds"].append(time.perf_counter() - begin)
        self._hang_up()

    async def _once(self) -> None:
        what = self._draw.choices(list(self._shares), list(self._shares.values()))[0]
        key, data, expected = self._draw.choice(self._entries)
        method, headers, body = "GET", "", b""
        if what == "range":
            start = self._draw.randrange(len(data))
            stop = self._draw.randint(start + 1, min(len(data), start + (1 << 20)))
            headers = f"Range: bytes={start}-{stop - 1}\r\n"
        elif what == "put":
            method, body, headers = "PUT", data, f"Content-Length: {len(data)}\r\n"
        elif what == "head":
            method = "HEAD"
        elif what == "absent":
            key = f"{self._draw.getrandbits(256):064x}"
        token = "somebody-without-one" if what == "stranger" else self._token
        head = f"{method} /chunks/{key[:2]}/{key}.bkv HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\n"
        status, length, close, digest = await self._exchange((head + headers + "\r\n").encode(), body, method)
        self._found["requests"] += 1
        self._found["bytes"] += length + len(body)
        right = status == _EXPECTED[what]
        if right and what == "get":
            right = digest == expected
        elif right and what == "range":
            right = digest == xxhash.xxh3_128_digest(memoryview(data)[start:stop])
        self._found["wrong"] += not right
        if not right:
            self._found["errors"].append(f"{what}: {status}, {length} bytes")
        if close:
            self._hang_up()

    async def _exchange(self, head: bytes, body: bytes, method: str) -> tuple[int, int, bool, bytes]:
        """Status, bytes of the answer, whether the connection ends, and the hash of the answer."""
        loop = asyncio.get_running_loop()
        if self._sock is None:
            self._sock = socket.socket()
            self._sock.setblocking(False)
            await loop.sock_connect(self._sock, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._sock, head)
        if body:
            await loop.sock_sendall(self._sock, body)
        got = b""
        while b"\r\n\r\n" not in got:
            part = await loop.sock_recv(self._sock, 1 << 16)
            if not part:
                raise ConnectionError("the server hung up")
            got += part
        top, _, rest = got.partition(b"\r\n\r\n")
        lines = top.lower().split(b"\r\n")
        told = dict(line.split(b": ", 1) for line in lines[1:])
        length = 0 if method == "HEAD" else int(told.get(b"content-length", 0))
        digest, left = xxhash.xxh3_128(rest), length - len(rest)
        while left > 0:
            count = await loop.sock_recv_into(self._sock, self._buffer[: min(left, BUFFER)])
            if not count:
                raise ConnectionError(f"the server hung up {left} bytes before the end")
            digest.update(self._buffer[:count])
            left -= count
        return int(lines[0].split()[1]), length, told.get(b"connection") == b"close", digest.digest()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


async def load(port: int, token: str, files: dict[str, str], clients: int, seconds: float, only: str) -> dict[str, Any]:
    """So many clients for so long.

    Args:
        port: of the server on 127.0.0.1.
        token: of it.
        files: of each key, the file with its bytes.
        clients: at once.
        seconds: for which they ask.
        only: a name of `MIX`; all of them if empty.
    """
    entries = []
    for key, path in files.items():
        with open(path, "rb") as file:
            data = file.read()
        entries.append((key, data, xxhash.xxh3_128_digest(data)))
    found: dict[str, Any] = {"requests": 0, "bytes": 0, "wrong": 0, "errors": [], "seconds": []}
    shares = {only: 1.0} if only else MIX
    made = [Client(port, token, entries, shares, seed, found) for seed in range(clients)]
    begin = time.monotonic()
    await asyncio.gather(*(client.run(begin + seconds) for client in made))
    took, waits = time.monotonic() - begin, sorted(found.pop("seconds")) or [0.0]
    errors = found.pop("errors")
    found |= {"errors": len(errors), "some_errors": errors[:5], "took_s": took, "mb_s": found["bytes"] / took / 1e6}
    return found | {f"request_p{p}_s": waits[min(len(waits) - 1, len(waits) * p // 100)] for p in (50, 99)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(**json.load(sys.stdin)))))
