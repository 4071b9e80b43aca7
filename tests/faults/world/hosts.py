"""Machines, and the calls to the system that fail on them."""

from __future__ import annotations

from random import Random

from tests.faults.world.calls import ERRORS, fail
from tests.faults.world.disks import Disk, Node
from tests.faults.world.ledger import Ledger, every, flipped, largest
from tests.faults.world.scheduler import Process, Scheduler

FOLDER = "/data/chunks"


class Host:
    """A machine with a disk and processes.

    Attributes:
        jumped: seconds by which its wall clock was set forward.
        orderly: whether nothing happened for which the cap may be exceeded.
        puts: that are under way in its folder.
        most_puts: that were ever under way at a time: so many entries more than the cap there may be.
        upheavals: how often folders were removed.
    """

    def __init__(self, name: str, scheduler: Scheduler, ledger: Ledger, capacity: int, durable: bool) -> None:
        self.name, self.capacity, self.durable = name, capacity, durable
        self._scheduler, self._ledger = scheduler, ledger
        self.disk = Disk()
        self.disk.root.names["data"] = Node("dir")
        self.disk.root.sync()
        self.jumped, self.orderly = 0.0, True
        self.puts = self.most_puts = self.upheavals = 0
        self.processes: list[Process] = []

    def kill(self, process: Process, where: str = "") -> None:
        """A process is killed: what it has not given to the kernel is lost."""
        self._ledger.fault("kill", f"{process.name} {where}")
        self.end(process)

    def end(self, process: Process) -> None:
        for opened in process.descriptors.values():
            if opened.node.lock is opened:
                opened.node.lock = None
        process.descriptors.clear()
        self._scheduler.kill(process)
        if process in self.processes:
            self.processes.remove(process)

    def power_lost(self, random: Random) -> None:
        """All processes end, and what was not synced may be gone."""
        self._ledger.fault("power", self.name)
        self.orderly = False
        for process in list(self.processes):
            self.end(process)
        self.puts = 0
        self.disk.power_lost(random)
        for (host, key), durable in list(self._ledger.promised.items()):
            if host == self.name and not durable:
                self._ledger.left(host, key)

    def entries(self) -> dict[str, Node]:
        """Files of entries, by key."""
        return {
            name.partition("/")[2].removesuffix(".bkv"): node
            for name, node in self.disk.files(FOLDER).items()
            if name.endswith(".bkv")
        }

    def bytes(self) -> int:
        """Of entries and of bad ones."""
        return sum(len(node.data) for name, node in self.disk.files(FOLDER).items() if not name.endswith(".tmp"))

    def check(self) -> None:
        """Entries are whole, those that were promised are there, and the cap is kept."""
        there = self.entries()
        for key, node in there.items():
            known = every().get(key)
            right = node.hurt or (known is not None and node.data == known.data)
            self._ledger.expect(right, f"{self.name}: the entry {key[:8]} is not what was put")
        for host, key in list(self._ledger.promised):
            if host == self.name and key not in there:
                self._ledger.expect(False, f"{self.name}: the entry {key[:8]} was acknowledged and is lost")
                self._ledger.left(host, key)
        if self.orderly:
            most = self.capacity + self.most_puts * largest()
            self._ledger.expect(self.bytes() <= most, f"{self.name}: {self.bytes()} bytes, where {most} may be")


class SystemFaults:
    """Calls that fail, stall, are cut short or give other bits.

    Attributes:
        rate: how often a call fails.
        slow: how often it takes long.
        on: whether anything of this happens.
    """

    def __init__(self, scheduler: Scheduler, random: Random, ledger: Ledger) -> None:
        self._scheduler, self._random, self._ledger = scheduler, random, ledger
        self.rate = self.slow = self.short = self.flips = 0.0
        self.codes: tuple[str, ...] = ERRORS

    @property
    def on(self) -> bool:
        return bool(self.rate or self.slow)

    def before(self, name: str) -> None:
        if self.slow and self._random.random() < self.slow:
            self._ledger.fault("slow call", name)
            self._scheduler.sleep(self._random.choice((0.001, 0.02, 0.5)))
        if self.rate and self._random.random() < self.rate:
            code = self._random.choice(self.codes)
            self._ledger.fault(code, name)
            self._scheduler.current.process.host.orderly = False  # ty: ignore[possibly-missing-attribute]
            raise fail(code)

    def cut(self, length: int) -> int:
        if length and self.short and self._random.random() < self.short:
            self._ledger.fault("short call")
            return self._random.randrange(length) + 1
        return length

    def flip(self, data: bytes) -> bytes:
        if data and self.flips and self._random.random() < self.flips:
            self._ledger.fault("flip in memory")
            return flipped(data, self._random)
        return data
