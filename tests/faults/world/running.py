"""Builds a world from a seed, and lives through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from random import Random
from typing import Any
from unittest import mock
from weakref import WeakSet

from blendkv.stores import breaker, catalog, coding, disk, files, inventory, patience, pool, remote, tiered, writing
from tests.faults.world.calls import Calls
from tests.faults.world.centre import History
from tests.faults.world.clients import Slot
from tests.faults.world.disks import Node
from tests.faults.world.hosts import Host, SystemFaults
from tests.faults.world.ledger import Ledger, every, largest
from tests.faults.world.nemesis import Nemesis
from tests.faults.world.network import HANGS_S, Network, RemoteFiles, Server
from tests.faults.world.scheduler import Process, Scheduler, Stuck
from tests.faults.world.standins import Future, Threading, Time

deadline = import_module("blendkv.stores.deadline")  # a function of that name hides it
LIFE_S = 30.0
"""How long there are faults."""
END_S = 600.0


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    events: int
    turns: int
    digest: str
    wrong: list[str]
    faults: Counter[str]
    counts: Counter[str] = field(default_factory=Counter)


class World:
    """Two machines with folders, some processes on each, two object stores far away, and the centre of a catalog.

    Args:
        seed: decides everything.
        trace: told of every event.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random = Random(seed)
        self.scheduler = Scheduler(Random(random.random()))
        self.ledger = Ledger(lambda: self.scheduler.now, trace)
        self.network = Network(self.scheduler, Random(random.random()), self.ledger)
        self.system_faults = SystemFaults(self.scheduler, Random(random.random()), self.ledger)
        self.stores = [Server("s3"), Server("sftp")]
        self.centre = Server("centre")
        self.servers = [*self.stores, self.centre]
        self.history = History(self.scheduler)
        self.hosts = [
            Host(
                name,
                self.scheduler,
                self.ledger,
                capacity=random.choice((4, 8, 100)) * largest(),
                durable=random.random() < 0.5,
            )
            for name in ("east", "west")
        ]
        self.process = Process("world")
        self.calm = False
        self.traced = trace is not None
        self.calls = Calls(self.scheduler, self.system_faults, self._gone, self._called)
        self.nemesis = Nemesis(self, Random(random.random()))
        self.slots = [Slot(self, host, number, Random(random.random())) for host in self.hosts for number in range(2)]
        self.pids = 100
        self.waited: dict[Any, float] = {}
        """Seconds that a task has waited for stores far away, of its budget."""

    def later(self, seconds: float, function: Callable[[], Any]) -> None:
        """Does something after a while."""

        def wait() -> None:
            self.scheduler.sleep(seconds)
            function()

        self.scheduler.spawn(wait, self.process, "later")

    @contextmanager
    def watched(self, what: str) -> Generator[None]:
        """What is done within is an event, and must not raise."""
        self.ledger.say(what)
        self.ledger.counts["operations"] += 1
        try:
            yield
        except Exception as error:
            self.ledger.expect(False, f"{what}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """All that can be seen from outside."""
        for host in self.hosts:
            host.check()
        for server in self.stores:
            for path, data in server.objects.items():
                if path.endswith(".bkv") and path not in server.hurt:
                    known = every().get(path.rpartition("/")[2].removesuffix(".bkv"))
                    right = known is not None and known.data == data
                    self.ledger.expect(right, f"{server.name}: the object {path} is not what was put")
        for task, error in self.scheduler.failed:
            self.ledger.expect(False, f"{task.name}: {type(error).__name__}: {error}")
        self.scheduler.failed.clear()

    def _gone(self, host: Host, name: str, node: Node) -> None:
        if name.endswith(".bkv"):
            self.ledger.left(host.name, name.removesuffix(".bkv"))

    def _called(self, process: Process, name: str) -> None:
        self.ledger.events += 1
        self.ledger.counts["calls to the system"] += 1
        if self.traced:
            self.ledger.say(f"{process.name} {name}")
            self.ledger.events -= 1

    def live(self) -> None:
        """A task: faults for a while, then none, and everybody must be well again."""
        self.scheduler.spawn(self.nemesis.work, self.process, "nemesis")
        while any(slot.left for slot in self.slots) and self.scheduler.now < 1000.0 + LIFE_S:
            self.scheduler.sleep(0.1)
            for slot in self.slots:
                slot.keep_alive()
        self.calm = True
        self.nemesis.heal()
        self.history.beat = HANGS_S
        self.ledger.say("all is well from now on")
        self.scheduler.sleep(2 * HANGS_S + 5.0)
        for slot in self.slots:
            slot.finish()
            self.check()
        for host in self.hosts:
            self.ledger.expect(host.bytes() <= host.capacity, f"{host.name}: above its cap when all is well")


def live(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """What comes of a seed; the same for the same seed."""
    world = World(seed, trace)
    scheduler = world.scheduler
    with installed(world):
        main = scheduler.spawn(world.live, world.process, "main")
        try:
            scheduler.run(lambda: main.done, before=1000.0 + END_S)
        except Stuck as error:
            world.ledger.expect(False, f"stuck: {error}")
        for host in world.hosts:
            for process in list(host.processes):
                host.end(process)
        scheduler.kill(world.process)
        scheduler.run(lambda: True, before=0)
        world.check()
        for slot in world.slots:
            slot.count()
    ledger = world.ledger
    ledger.expect(ledger.counts["hits"] > 0, "nothing was ever found: the harness is broken")
    return Outcome(seed, ledger.events, scheduler.turns, ledger.digest, ledger.wrong, ledger.faults, ledger.counts)


@contextmanager
def installed(world: World) -> Generator[None]:
    """The stores live in this world meanwhile."""
    scheduler, random = world.scheduler, Random(world.random.random())
    threading, time, calls = Threading(scheduler), Time(scheduler), world.calls
    locks = mock.Mock(flock=calls.flock, LOCK_EX=2, LOCK_NB=4)

    def connect(url: str, **options: Any) -> tuple[RemoteFiles, str]:
        scheme, _, root = url.partition("://")
        server = next(server for server in world.stores if server.name == scheme)
        assert scheduler.current is not None
        return RemoteFiles(world.network, scheduler.current.process, server), root

    places = {
        "os": ((disk, files, inventory), calls),
        "time": ((disk, files, inventory, deadline, breaker, patience, writing, catalog), time),
        "threading": ((disk, breaker, patience, writing, catalog, pool, tiered, coding), threading),
        "fcntl": ((files,), locks),
        "token_hex": ((files, remote), lambda size: f"{random.randrange(1 << 8 * size):0{2 * size}x}"),
        "Future": ((patience,), _Futures(scheduler)),
        "Breaker": ((remote,), partial(breaker.Breaker, clock=time.monotonic)),
        "url_to_fs": ((remote,), connect),
        "_WRITERS": ((writing,), WeakSet()),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(files.DiskSource, "__del__", _nothing))  # the dead close nothing
        for name, (modules, value) in places.items():
            for module in modules:
                stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Futures:
    """`Future` and `Future[Any]`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __call__(self) -> Future:
        return Future(self._scheduler)

    def __getitem__(self, of: object) -> _Futures:
        return self


def _nothing(source: files.DiskSource) -> None:
    """In place of `__del__`."""
