"""Real Valkey or Redis servers on loopback, and a proxy that does to their bytes what networks do."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.patience import until

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """One server process, which keeps nothing on disk unless told to."""

    def __init__(self, *args: str, port: int | None = None) -> None:
        self.port, self.args = port or free_port(), args
        self.folder = tempfile.mkdtemp(prefix="blendkv-valkey-")
        self.process: subprocess.Popen | None = None
        atexit.register(self.__exit__)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> Server:
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", ""]
        self.process = subprocess.Popen([*command, *self.args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait:
            until(self.answers, 10)
        return self

    def client(self, **settings) -> redis.Redis:
        settings = {"socket_timeout": 5, "protocol": 2, "retry": Retry(NoBackoff(), 0), **settings}
        return redis.Redis(port=self.port, **settings)

    def tell(self, *command, **settings):
        with self.client(**settings) as client:
            return client.execute_command(*command)

    def answers(self) -> bool:
        try:
            return bool(self.tell("PING"))
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def info(self, section: str) -> bytes:
        """Lines as they come."""
        return self._lines("INFO", section)

    def nodes(self) -> bytes:
        return self._lines("CLUSTER", "NODES")

    def well(self) -> bool:
        return b"cluster_state:ok" in self._lines("CLUSTER", "INFO")

    def _lines(self, *command: str) -> bytes:
        with self.client() as client:
            connection = client.connection_pool.get_connection()
            try:
                connection.send_command(*command)
                return bytes(connection.read_response())
            finally:
                client.connection_pool.release(connection)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Server:
        return self if self.process else self.start()

    def __exit__(self, *exc) -> None:
        atexit.unregister(self.__exit__)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Proxy:
    """Bytes between clients and a server, in the way of which things can be put while they flow.

    Attributes:
        cut: after so many more bytes to clients, `on_cut` is called and the connection closed; None never.
        reset: close with RST.
        garble: what becomes of bytes to clients.
        rate: bytes a second to clients; None as fast as they come, 0 none.
        connections: accepted so far.
        trips: times that the talk went from the server back to a client.
        sent: bytes to clients.
    """

    def __init__(self, port: int) -> None:
        self.cut: int | None = None
        self.on_cut: Callable[[], None] = lambda: None
        self.rate: float | None = None
        self.reset = False
        self.garble: Callable[[bytes], bytes] | None = None
        self.connections = self.trips = self.sent = 0
        self._target, self._open = port, set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            turn = ["client"]
            threading.Thread(target=self._up, args=(client, server, turn), daemon=True).start()
            threading.Thread(target=self._down, args=(client, server, turn), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, turn: list[str]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 18):
                turn[0] = "up"
                server.sendall(data)
        self._end(client, server)

    def _down(self, client: socket.socket, server: socket.socket, turn: list[str]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if turn[0] == "up":
                    turn[0] = "down"
                    self.trips += 1
                if self.garble is not None:
                    data = self.garble(data)
                while data:
                    if self.rate == 0:
                        time.sleep(0.01)
                        continue
                    part = data if self.rate is None else data[: max(1, int(self.rate / 50))]
                    if self.cut is not None:
                        part = part[: self.cut]
                        self.cut -= len(part)
                    client.sendall(part)
                    self.sent += len(part)
                    data = data[len(part) :]
                    if self.cut == 0:
                        self.cut = None
                        self.on_cut()
                        if self.reset:
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        raise OSError
                    if self.rate:
                        time.sleep(len(part) / self.rate)
        self._end(client, server)

    def _end(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            if not self.reset:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                sock.close()
            self._open.discard(sock)

    def drop(self) -> None:
        """Closes all connections."""
        self._end(*list(self._open))

    def close(self) -> None:
        self._closed = True
        self.rate = None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """The port of something that answers everything with the same bytes, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                while client.recv(1 << 16):
                    client.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def cluster(count: int = 3, replicas: int = 1, timeout_ms: int = 2000) -> list[Server]:
    """A running Cluster: `count` primaries first, then their replicas in the same order."""
    servers = []
    for _ in range(count * (1 + replicas)):
        servers.append(member(timeout_ms))
    first = servers[0]
    for other in servers[1:]:
        first.tell("CLUSTER", "MEET", "127.0.0.1", other.port, bus(other))
    for number, server in enumerate(servers[:count]):
        server.tell("CLUSTER", "ADDSLOTSRANGE", number * 16384 // count, (number + 1) * 16384 // count - 1)
    until(lambda: all(server.nodes().count(b" connected") == len(servers) for server in servers), 20)
    for number, server in enumerate(servers[count:]):
        identity = servers[number % count].tell("CLUSTER", "MYID").decode()
        server.tell("CLUSTER", "REPLICATE", identity)
    until(lambda: all(server.well() for server in servers), 20)
    until(lambda: all(b"master_link_status:up" in server.info("replication") for server in servers[count:]), 20)
    return servers


def member(timeout_ms: int = 2000) -> Server:
    """A server in Cluster mode that knows nobody yet."""
    port = free_port()
    args = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(timeout_ms), "--cluster-port", str(free_port())]
    args += ["--repl-diskless-sync-delay", "0", "--appendonly", "no"]
    return Server(*args, port=port).start()


def bus(server: Server) -> int:
    return int(server.args[server.args.index("--cluster-port") + 1])


def clean(servers: list[Server]) -> None:
    for server in servers:
        server.__exit__()
