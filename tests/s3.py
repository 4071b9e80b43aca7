"""An S3 on 127.0.0.1 (moto), and a proxy in front of it that misbehaves."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "chunks"
OPTIONS: dict[str, Any] = {"key": "test", "secret": "test", "client_kwargs": {"region_name": "us-east-1"}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def moto() -> Generator[int]:
    """The port of a server with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("PUT", f"/{BUCKET}", headers={"Host": f"127.0.0.1:{port}"})
                if connection.getresponse().status == 200:
                    break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
            finally:
                connection.close()
        yield port
    finally:
        process.kill()
        process.wait()


class Proxy:
    """Passes requests for entries on to a server, or does to them what `fault` says.

    Faults: "503", "500", "403", "404", "truncated", "longer", "range ignored", "stall", "reset", "garbage".
    """

    def __init__(self, port: int) -> None:
        self.fault, self.requests = "", 0
        self.stalled = threading.Event()  # set: those that stall give up
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do_GET(self) -> None:
                proxy.answer(self, port)

            do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        self.requests += 1
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        fault, headers = self.fault, dict(handler.headers)
        if fault == "stall":
            self.stalled.wait(30)
            handler.close_connection = True
            return
        if fault == "reset":
            handler.connection.close()
            handler.close_connection = True
            return
        if fault == "range ignored":
            headers = {name: value for name, value in headers.items() if name.lower() != "range"}
        if fault.isdigit():
            code = {"503": "SlowDown", "500": "InternalError", "403": "AccessDenied", "404": "NoSuchKey"}[fault]
            status, data, kept = int(fault), f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode(), {}
        else:
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            server.request(handler.command, handler.path, body, headers)
            reply = server.getresponse()
            status, data, kept = reply.status, reply.read(), dict(reply.getheaders())
            server.close()
        length = int(kept.get("Content-Length", len(data)) if handler.command == "HEAD" else len(data))
        if handler.command == "GET" and status < 300:
            if fault == "truncated":
                data = data[: len(data) // 2]  # and the length still says all of it
                handler.close_connection = True
            elif fault == "longer":
                data += b"more"
                length += 4
            elif fault == "garbage":
                data = bytes(len(data))
        handler.send_response(status)
        for name, value in kept.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def close(self) -> None:
        self.stalled.set()
        self.server.shutdown()
        self.server.server_close()
