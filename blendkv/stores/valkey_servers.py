"""All servers of one Valkey or Redis: alone, or a Cluster whose map of slots may change at any time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from redis import exceptions as errors
from redis.crc import key_slot

from blendkv.errors import StoreError
from blendkv.stores.deadline import deadline
from blendkv.stores.valkey_server import Ask, Server, Unavailable, why

WORKERS = 32
"""Most servers that are talked to at the same time, by all threads; they start when there is work for them."""
REDIRECTS = 3
"""How often a command follows MOVED or ASK."""
_ADVICE = {
    "auth": "give the right user and password in the URL, redis://user:password@host, or the server's requirepass/ACL",
    "timeout": "look whether the server is overloaded or a firewall drops packets, or give a longer connect_timeout",
    "connection": "look whether it runs, and at host and port",
    "loading": "wait until it has loaded its data",
    "protocol": "look whether this is a Valkey or Redis server, and whether it wants TLS (rediss://)",
}


class Servers:
    """Finds the server of each key, asks all in parallel, follows redirects, and keeps trying those that are gone.

    Args:
        settings: arguments of a connection of redis-py, to any of the servers.
        connect_timeout: most seconds to connect.
        read_timeout: longest silence in a conversation.

    Attributes:
        cluster: whether this is a Cluster; known once a server answered.
        trips: rounds of commands and replies so far.
    """

    def __init__(self, settings: dict[str, Any], connect_timeout: float, read_timeout: float) -> None:
        self._settings, self._timeouts = settings, (connect_timeout, read_timeout)
        self.cluster, self.trips = False, 0
        self._lock = threading.Lock()
        self._nodes: dict[tuple[str, int], Server] = {}
        self._seed = self._server(settings.get("host", "localhost"), int(settings.get("port", 6379)))
        self._slots: list[Server] = [self._seed] * 16384
        self._pid, self._threads = os.getpid(), ThreadPoolExecutor(WORKERS, "blendkv-valkey")
        self._watcher: threading.Thread | None = None
        self._stale, self._closed = False, threading.Event()

    def open(self) -> None:
        """Asks for the first time.

        Raises:
            StoreError: if nobody answers, or not as a Valkey or Redis server does.
        """
        with deadline(sum(self._timeouts)):
            reply = self._seed.exchange([Ask("", ("PING",))])[0]
            if not isinstance(reply, Exception):
                self._learn(self._seed)
                return
        self.close()
        word = why(reply)
        advice = _ADVICE.get(word, "put that right")
        raise StoreError(f"no store at {self._seed.host}:{self._seed.port} ({word}: {reply}): {advice}") from reply

    def open_later(self) -> None:
        """Asks in the background, and is unavailable until somebody answers."""
        while self._seed.breaker.state == "closed":
            self._seed.breaker.failed()
        self._wake()

    def nodes(self) -> list[Server]:
        """The servers that own slots; none once this is closed."""
        if self._closed.is_set():
            return []
        return list(dict.fromkeys(self._slots)) if self.cluster else [self._seed]

    def ask(self, asks: Sequence[Ask]) -> list[Any]:
        """Replies in order, of which any may be an exception. One round trip, unless slots are on the move."""
        if self._closed.is_set():
            return [Unavailable("closed")] * len(asks)
        replies: list[Any] = [None] * len(asks)
        todo: dict[Server, list[tuple[int, Ask]]] = {}
        for number, ask in enumerate(asks):
            todo.setdefault(self._owner(ask.name), []).append((number, ask))
        for redirects in range(REDIRECTS + 1):
            self.trips += 1
            again: dict[Server, list[tuple[int, Ask]]] = {}
            for server, part, answers in self._exchange(todo):
                for (number, ask), reply in zip(part, answers, strict=True):
                    replies[number] = reply
                    if isinstance(reply, errors.AskError) and self.cluster and redirects < REDIRECTS:
                        other = self._server(reply.host or server.host, reply.port)
                        if isinstance(reply, errors.MovedError):
                            self._slots[reply.slot_id % 16384] = other
                            self._stale = True
                        else:
                            again.setdefault(other, []).append((-1, Ask("", ("ASKING",))))
                        again.setdefault(other, []).append((number, ask))
                    elif isinstance(reply, Exception) and not isinstance(reply, errors.OutOfMemoryError):
                        self._stale = True
            if not (todo := again):
                break
        if self._stale:
            self._wake()
        return replies

    def _exchange(self, todo: dict[Server, list[tuple[int, Ask]]]) -> list[Any]:
        def run(server: Server, part: list[tuple[int, Ask]]) -> list[Any]:
            answers = server.exchange([ask for _, ask in part])
            kept = [(pair, answer) for pair, answer in zip(part, answers, strict=True) if pair[0] >= 0]
            part[:] = [pair for pair, _ in kept]
            return [answer for _, answer in kept]

        first, *rest = todo.items()
        others = [(*item, self._workers().submit(copy_context().run, run, *item)) for item in rest]
        answers = run(*first)
        return [(*first, answers), *((server, part, other.result()) for server, part, other in others)]

    def _workers(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pid, self._threads = os.getpid(), ThreadPoolExecutor(WORKERS, "blendkv-valkey")
        return self._threads

    def _owner(self, name: str) -> Server:
        return self._slots[key_slot(name.encode())] if self.cluster else self._seed

    def _server(self, host: str, port: int) -> Server:
        with self._lock:
            if (host, port) not in self._nodes:
                self._nodes[host, port] = Server({**self._settings, "host": host, "port": port}, *self._timeouts)
            return self._nodes[host, port]

    def _learn(self, server: Server) -> bool:
        """The map of slots, as one server sees it."""
        reply = server.exchange([Ask("", ("CLUSTER", "SLOTS"), (list,))])[0]
        if isinstance(reply, Exception):  # no Cluster, or nobody may ask
            return not self.cluster and isinstance(reply, errors.ResponseError)
        slots, found = list(self._slots), False
        try:
            for first, last, (host, port, *_), *_ in reply:
                if not 0 <= first <= last < len(slots):
                    return False
                owner = self._server((host or b"").decode().strip("?") or server.host, int(port))
                slots[first : last + 1] = [owner] * (last + 1 - first)
                found = True
        except (TypeError, ValueError, AttributeError):  # that is no map of slots
            return False
        if not found:
            return False
        self._slots, self.cluster = slots, True
        with self._lock:
            gone = [key for key, node in self._nodes.items() if node not in slots and node is not self._seed]
            dropped = [self._nodes.pop(key) for key in gone]
        for node in dropped:
            node.close()
        return True

    def _wake(self) -> None:
        with self._lock:
            if not self._closed.is_set() and (self._watcher is None or not self._watcher.is_alive()):
                self._watcher = threading.Thread(target=self._watch, name="blendkv-valkey-watch", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        """Asks what is gone, and for the map of slots, once a second until all is well."""
        asked = 0.0
        while not self._closed.is_set():
            owners = self.nodes()
            ill = [node for node in owners if node.breaker.state != "closed"]
            if len(ill) == len(owners) and self._seed not in owners and self._seed.breaker.state != "closed":
                ill.append(self._seed)  # all that we knew are gone: begin as at first
            due = [node for node in ill if node.breaker.allows()]
            for probe in [threading.Thread(target=node.probe, daemon=True) for node in due[1:]]:
                probe.start()  # one that hangs must not keep the others waiting
            if due:
                due[0].probe()
            if (self._stale or ill) and time.monotonic() - asked >= 1.0:
                asked, self._stale = time.monotonic(), False
                self._stale = not self._relearn()
            with self._lock:
                if not self._stale and all(node.breaker.state == "closed" for node in ill):
                    self._watcher = None
                    return
            self._closed.wait(0.1)

    def _relearn(self) -> bool:
        for node in dict.fromkeys([*self._slots, self._seed]):
            if node.breaker.state == "closed":
                with deadline(sum(self._timeouts)):
                    if self._learn(node):
                        return True
        return False

    def close(self) -> None:
        """Closes connections and ends threads."""
        self._closed.set()
        self._threads.shutdown(wait=False)
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()
