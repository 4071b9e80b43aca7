"""Gateways on 127.0.0.1 in threads, requests of every kind to them, and chunk files to put."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from blendkv.chunkwriter import encode_chunk
from blendkv.serving.limits import Limits
from blendkv.serving.logs import Log
from blendkv.serving.server import GatewayServer, Settings
from blendkv.serving.tokens import Tokens
from blendkv.sockets import listen
from blendkv.stores import DiskStore
from tests.chunks import make_chunk

TOKEN, READER = "a-token-of-the-tests", "a-token-that-only-reads"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


class Running:
    """A gateway that answers.

    Attributes:
        url: of it.
        port: that it listens on.
        log: what it wrote.
        server: it.
    """

    def __init__(self, server: GatewayServer, port: int, log: io.StringIO) -> None:
        self.server, self.port, self.log = server, port, log
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = AUTH, **more: str):
        """Status, headers (in lower case) and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {**(headers or {}), **more})
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data
        finally:
            connection.close()

    def raw(self, timeout: float = 30) -> socket.socket:
        """A connection on which anything may be sent."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def events(self) -> list[dict[str, Any]]:
        """Lines of the log."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


@contextmanager
def gateway(store: Any, limits: dict[str, Any] | None = None, **settings: Any) -> Generator[Running]:
    """A gateway over a store."""
    log, ready = io.StringIO(), threading.Event()
    sock = listen("127.0.0.1", 0)
    made = Settings(store, Tokens([TOKEN], [READER]), Limits(**(limits or {})), log=Log("debug", log), **settings)
    server = GatewayServer(made, [sock], ready.set)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Running(server, port, log)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@cache
def chunk_file(seed: int = 0, tokens: int = 40, secret: bytes | None = None) -> tuple[str, bytes]:
    """Key and bytes of a chunk file."""
    chunk = make_chunk(tokens=tokens, seed=seed)
    return chunk.key, bytes(encode_chunk(chunk, secret=secret))


def path_of(key: str) -> str:
    """Where an entry is."""
    return f"/chunks/{key[:2]}/{key}.bkv"


def disk(folder: Any) -> DiskStore:
    """A folder for a store."""
    return DiskStore(folder)
