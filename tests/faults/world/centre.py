"""The centre of a catalog on the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blendkv.stores.catalog import Named
from tests.faults.world.network import Network, Server
from tests.faults.world.scheduler import Process, Scheduler

INFINITE = float("inf")
BEAT_S = 0.2


class History:
    """What names stood for, and when: the truth that regions are measured by."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now: dict[str, Named] = {}
        self._past: dict[str, list[tuple[float, Named | None]]] = {}
        self.regions: list[Subscription] = []
        self.beat = BEAT_S

    def set(self, name: str, named: Named | None) -> None:
        self._past.setdefault(name, [(-INFINITE, None)]).append((self._scheduler.now, named))
        if named is None:
            self.now.pop(name, None)
        else:
            self.now[name] = named

    def true_between(self, name: str, start: float, end: float) -> list[tuple[str, ...]]:
        """All that a name stood for at some moment of a time; () is nothing."""
        past = self._past.get(name, [(-INFINITE, None)])
        ends = [when for when, _ in past[1:]] + [INFINITE]
        return [
            () if named is None else named.keys
            for (begin, named), stop in zip(past, ends, strict=True)
            if begin <= end and stop >= start
        ]


class SimulatedCentre:
    """A `Centre`, as one process reaches it."""

    def __init__(
        self, scheduler: Scheduler, network: Network, process: Process, server: Server, history: History
    ) -> None:
        self._scheduler, self._network, self._process = scheduler, network, process
        self._server, self._history = server, history

    def _ask(self, function: Callable[[], object]) -> object:
        return self._network.call(self._process, self._server, function)

    def read(self, name: str) -> Named | None:
        try:
            return self._ask(lambda: self._history.now.get(name))  # ty: ignore
        except Exception as error:
            raise ConnectionError(str(error)) from error

    def write(self, name: str, keys: Iterable[str]) -> Named:
        keys = tuple(keys)

        def decide() -> Named:
            before = self._history.now.get(name)
            named = Named(name, keys, before.version + 1 if before else 1, self._scheduler.now)
            self._history.set(name, named)
            for region in self._history.regions:
                region.send(named)
            return named

        try:
            return self._ask(decide)  # ty: ignore
        except Exception as error:
            raise ConnectionError(str(error)) from error

    def follow(self, heard: Callable[[Named], None]) -> Subscription:
        subscription = Subscription(self._scheduler, self._process, self._server, self._history, heard)
        self._history.regions.append(subscription)
        self._scheduler.spawn(subscription.listen, self._process, f"{self._process.name} listener")
        return subscription


class Subscription:
    """A connection on which updates come in order, until it breaks; then everything on the way is lost."""

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        server: Server,
        history: History,
        heard: Callable[[Named], None],
    ) -> None:
        self._scheduler, self._process, self._server = scheduler, process, server
        self._history, self._heard = history, heard
        self.since, self.as_of = INFINITE, -INFINITE
        self._way: list[tuple[float, Named | None]] | None = None
        self._closed = False

    def _apart(self) -> bool:
        return self._server.state != "up" or self._process.host.name in self._server.away

    def send(self, named: Named | None) -> None:
        """At the centre; None is a heartbeat."""
        if self._way is not None and not self._apart():
            self._way.append((self._scheduler.now, named))
        elif self._way is not None:
            self._way = None  # what is lost breaks the connection

    def listen(self) -> None:
        while not self._closed:
            delay = self._scheduler.random.uniform(0.001, 0.05) * self._server.slow
            if self._way is None:
                self.since = INFINITE
                self._scheduler.sleep(delay + self._history.beat)
                if not self._apart():
                    self._way, began = [], self._scheduler.now
                    self._scheduler.sleep(delay)
                    self.since = self.as_of = began
                continue
            beat = self._scheduler.now
            self._scheduler.sleep(delay)
            if self._way is None or self._apart():
                self._way = None
                continue
            way, self._way = self._way, []
            for sent, named in way:
                if named is not None:
                    self._heard(named)
                self.as_of = max(self.as_of, sent)
            if not way:
                self.as_of = max(self.as_of, beat)
                self._scheduler.sleep(self._history.beat * self._scheduler.random.random())

    def cut(self) -> None:
        """The connection breaks."""
        self._way = None

    def close(self) -> None:
        self._closed = True
