"""Servers far away, and what becomes of questions to them and of answers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.faults.world.ledger import Ledger, flipped
from tests.faults.world.scheduler import Process, Scheduler

HANGS_S = 60.0
LATENCY_S = 0.002


class Busy(Exception):
    """What a server says that cannot serve."""

    status = 503


class Server:
    """One server.

    Attributes:
        objects: by path.
        hurt: paths that a fault changed.
        state: "up", "down" (refuses), "hung" (never answers).
        slow: factor of its latency.
        away: names of hosts that do not reach it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects: dict[str, bytes] = {}
        self.hurt: set[str] = set()
        self.state, self.slow = "up", 1.0
        self.away: set[str] = set()


class Network:
    """Carries calls.

    Attributes:
        rates: how often a call is spoiled, by fault: "error", "late", "lost", "cut", "flip", "swap", "absent".
    """

    def __init__(self, scheduler: Scheduler, random: Random, ledger: Ledger) -> None:
        self._scheduler, self._random, self._ledger = scheduler, random, ledger
        self.rates: dict[str, float] = {}

    def hit(self, fault: str) -> bool:
        """Whether this fault comes now."""
        if self._random.random() < self.rates.get(fault, 0.0):
            self._ledger.fault(f"network {fault}")
            return True
        return False

    def call(self, process: Process, server: Server, function: Callable[[], Any]) -> Any:
        """What the server answers.

        Raises:
            OSError: if it does not.
        """
        self._travel(server)
        if server.state == "hung" or process.host.name in server.away or self.hit("lost"):
            self._hang()
        if server.state == "down":
            raise ConnectionRefusedError(f"{server.name} is down")
        if self.hit("error"):
            raise self._random.choice((Busy("slow down"), PermissionError("expired"), OSError("internal error")))
        answer = function()
        if self.hit("lost"):
            self._hang()
        if self.hit("late"):
            self._scheduler.sleep(self._random.uniform(0.1, 10.0))
        self._travel(server)
        if server.state != "up":
            raise ConnectionResetError(f"{server.name} went away")
        return answer

    def spoiled(self, data: bytes, server: Server) -> bytes:
        """What arrives of an object."""
        if self.hit("cut"):
            return data[: self._random.randrange(len(data) + 1)]
        if data and self.hit("flip"):
            return flipped(data, self._random)
        if server.objects and self.hit("swap"):
            return self._random.choice(list(server.objects.values()))
        return data

    def _travel(self, server: Server) -> None:
        self._scheduler.sleep(self._random.uniform(0.2, 2.0) * LATENCY_S * server.slow)

    def _hang(self) -> None:
        self._scheduler.sleep(HANGS_S)
        raise ConnectionResetError("no answer")


class RemoteFiles:
    """A file system of fsspec, as far as `RemoteStore` uses it."""

    retries = 0

    def __init__(self, network: Network, process: Process, server: Server) -> None:
        self._network, self._process, self._server = network, process, server

    def _call(self, function: Callable[[], Any]) -> Any:
        return self._network.call(self._process, self._server, function)

    def _object(self, path: str) -> bytes:
        if path not in self._server.objects or self._network.hit("absent"):
            raise FileNotFoundError(path)
        return self._server.objects[path]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._network.spoiled(self._call(lambda: self._object(path))[start:end], self._server)

    def cat(self, paths: list[str], on_error: str = "return") -> dict[str, Any]:
        def read() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for path in paths:
                try:
                    found[path] = self._object(path)
                except FileNotFoundError as error:
                    found[path] = error
            return found

        answers = self._call(read)
        return {
            path: data if isinstance(data, Exception) else self._network.spoiled(data, self._server)
            for path, data in answers.items()
        }

    def info(self, path: str) -> dict[str, int]:
        if "/" not in path:  # a bucket
            return self._call(lambda: {"size": 0})
        return {"size": len(self._call(lambda: self._object(path)))}

    def pipe_file(self, path: str, data: bytes) -> None:
        def write() -> None:
            self._server.objects[path] = data
            self._server.hurt.discard(path)

        self._call(write)

    def mv(self, old: str, new: str) -> None:
        def move() -> None:
            self._server.objects[new] = self._server.objects.pop(old)
            self._server.hurt.discard(new)
            if old in self._server.hurt:
                self._server.hurt = {*self._server.hurt - {old}, new}

        try:
            self._call(move)
        except KeyError as error:
            raise FileNotFoundError(old) from error

    def rm_file(self, path: str) -> None:
        self._call(lambda: self._server.objects.pop(path, None))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._call(lambda: None)

    def find(self, root: str) -> list[str]:
        return self._call(lambda: list(self._server.objects))

    def invalidate_cache(self) -> None:
        pass
