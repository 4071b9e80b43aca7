"""Processes that keep chunks and ask for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from blendkv.errors import StoreError
from blendkv.stores import Budget, DiskStore, Pool, RemoteStore, TieredStore
from blendkv.stores.catalog import Region
from tests.faults.world.centre import SimulatedCentre
from tests.faults.world.hosts import FOLDER, Host
from tests.faults.world.ledger import TENANTS, largest, universe
from tests.faults.world.scheduler import Process

if TYPE_CHECKING:
    from tests.faults.world.running import World

CLIENTS = 2
OPERATIONS = 8
SLACK_S = 0.05
"""Turns of others count towards nobody's budget."""
READ_S, PUT_S = 1.0, 5.0
DELAY_S = 0.5
NAMES = ("contract", "manual", "price list")


class Slot:
    """A process that is started again whenever it dies, with settings of its own.

    Attributes:
        left: operations that its clients still have to do.
    """

    def __init__(self, world: World, host: Host, number: int, random: Random) -> None:
        self.world, self.host, self.random = world, host, random
        self.name = f"{host.name}-{number}"
        self.left = OPERATIONS * CLIENTS
        self.process: Process | None = None
        self.tiers: TieredStore | None = None
        self.region: Region | None = None
        self.tenant, self.secret = random.choice(TENANTS)
        self.keys = list(universe()[self.tenant])
        self.write: Any = random.choice((None, "through", "behind", "back"))
        self.far = random.choice(((), ("s3",), ("sftp",), ("s3", "sftp")))
        self.pool_bytes = random.choice((1, 3, 100)) * largest()
        self.queue_bytes = random.choice((2 * largest(), 1 << 30))
        self.eviction = random.choice(("lru", "lfu", "gdsf"))
        self._back_at = 0.0

    # -- life -------------------------------------------------------------------------------------------------------

    def keep_alive(self) -> None:
        """Starts it, or starts it again a while after it has died."""
        world = self.world
        if self.process is not None and not self.process.dead:
            return
        if self.process is not None:
            self.count()
            self.process, self._back_at = None, world.scheduler.now + self.random.uniform(0.0, 0.5)
        if world.scheduler.now >= self._back_at:
            self.start(self.work)

    def start(self, then: Callable[[], None]) -> None:
        world = self.world
        world.pids += 1
        process = Process(f"{self.name}#{world.pids}", self.host, world.pids)
        self.process = process
        self.host.processes.append(process)
        world.ledger.say(f"{process.name} starts, tenant {self.tenant}, write {self.write}, {self.far}")

        def boot() -> None:
            if self.open():
                then()
            else:
                world.ledger.counts["not opened"] += 1
                self.host.end(process)

        world.scheduler.spawn(boot, process, process.name)

    def open(self) -> bool:
        stores: list[Any] = []
        for make in (self.disk, *(lambda name=name: Remote(self, f"{name}://bucket/chunks") for name in self.far)):
            try:
                stores.append(make())
            except StoreError:
                self.world.ledger.counts["stores not opened"] += 1
        if not stores:
            return False
        memory = Pool(self.pool_bytes, eviction=self.eviction)
        self.tiers = TieredStore(memory, *stores, write=self.write, secret=self.secret, queue_bytes=self.queue_bytes)
        world = self.world
        assert self.process is not None
        centre = SimulatedCentre(world.scheduler, world.network, self.process, world.centre, world.history)
        self.region = Region(centre, delay=DELAY_S)
        return True

    def disk(self) -> Disk:
        return Disk(self)

    def work(self) -> None:
        assert self.process is not None
        for number in range(CLIENTS):
            self.world.scheduler.spawn(self.client, self.process, f"{self.process.name} client {number}")

    def count(self) -> None:
        """Adds up what a process did, when it has ended."""
        if self.tiers is not None:
            counts, stats = self.world.ledger.counts, self.tiers.stats
            for tier, hits in stats.hits.items():
                counts[f"hits {tier.partition(':')[0]}"] += hits
                counts["hits"] += hits
            counts["misses"] += stats.misses
            counts["damage noticed"] += sum(stats.damaged.values())
            counts["promoted"] += stats.promoted
            counts["demoted"] += stats.demoted
            counts["dropped"] += sum(writer.dropped for writer in self.tiers._writers)
            self.tiers = None

    # -- what clients do --------------------------------------------------------------------------------------------

    def client(self) -> None:
        """Operations, one after the other, none of which may raise."""
        verbs = {self.prompt: 10, self.named: 3, self.lookup: 5, self.forget: 1, self.other: 1}
        while self.left > 0 and not self.world.calm:
            self.left -= 1
            verb = self.random.choices(list(verbs), list(verbs.values()))[0]
            with self.world.watched(f"{self.world.scheduler.current.name} {verb.__name__}"):  # ty: ignore
                verb()
            self.world.check()
            self.world.scheduler.sleep(self.random.expovariate(4.0))

    def some(self) -> list[str]:
        """Keys, a few of which are asked for often."""
        weights = [1 / (1 + rank) for rank in range(len(self.keys))]
        return self.random.choices(self.keys, weights, k=self.random.randint(1, 4))

    def prompt(self) -> None:
        self.fetch(self.some())

    def fetch(self, keys: Sequence[str], compute: bool = True) -> None:
        """What a library does: asks for chunks, computes those that are not there, and stores them."""
        assert self.tiers is not None
        ledger, seconds = self.world.ledger, self.random.choice((None, 0.05, 0.3, 1.0))
        budget = None if seconds is None else Budget(seconds)
        with self.budgeted(seconds):
            found = self.tiers.fetch(keys, budget=budget)
            lacking = list(dict.fromkeys(key for key, got in zip(keys, found, strict=True) if got.chunk is None))
            for key, got in zip(keys, found, strict=True):
                ledger.check_chunk(key, got.chunk, self.tenant)
                ledger.say(f"{self.name} {key[:8]} {got.tier or 'missed'}")
            ledger.counts["chunks asked for"] += len(keys)
            if compute:
                chunks = [universe()[self.tenant][key].chunk for key in lacking]
                for key, (chunk, kept) in zip(lacking, self.tiers.put_many(chunks, budget=budget), strict=True):
                    ledger.check_chunk(key, chunk, self.tenant)
                    ledger.counts["chunks kept"] += kept

    @contextmanager
    def budgeted(self, seconds: float | None) -> Generator[None]:
        """Stores that are far away take no longer than that in all."""
        task = self.world.scheduler.current
        assert task is not None
        self.world.waited[task] = 0.0
        yield
        waited = self.world.waited.pop(task)
        if seconds is not None:
            most = seconds + SLACK_S
            self.world.ledger.expect(waited <= most, f"{task.name} waited {waited:.3f} s of a budget of {seconds} s")

    def named(self) -> None:
        """Says what a document is made of now."""
        assert self.region is not None
        try:
            self.region.put(self.random.choice(NAMES), self.some())
        except OSError:
            self.world.ledger.counts["names not written"] += 1

    def lookup(self) -> None:
        """Asks what a document is made of; the answer was true lately, or now."""
        assert self.region is not None
        name, latest = self.random.choice(NAMES), self.random.random() < 0.5
        history, begin, unreachable = self.world.history, self.world.scheduler.now, self.region.state.unreachable
        named = self.region.get(name, force_latest=latest)
        if named is None and self.region.state.unreachable > unreachable:
            return  # by this call or another's: nothing was said
        end = self.world.scheduler.now
        possible = history.true_between(name, begin if latest else begin - DELAY_S, end)
        keys = () if named is None else named.keys
        self.world.ledger.expect(keys in possible, f"{self.name}: what {name!r} stands for is outdated ({latest=})")
        self.world.ledger.counts["names looked up"] += 1
        if named is not None:
            self.fetch([key for key in named.keys if key in self.keys], compute=False)

    def forget(self) -> None:
        assert self.tiers is not None
        self.tiers.delete(self.random.choice(self.keys))

    def other(self) -> None:
        assert self.tiers is not None
        verb = self.random.choice(("clear", "flush", "keys", "notes"))
        if verb == "clear":
            self.tiers.clear()
        elif verb == "flush":
            self.tiers.flush(self.random.choice((0.0, 0.1, None)))
        elif verb == "keys":
            list(self.tiers.keys())
        else:
            self.tiers.notes  # noqa: B018

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """When all is well, everything works: it opens, writes, and finds what it wrote."""
        ledger, host, scheduler = self.world.ledger, self.host, self.world.scheduler
        if self.process is not None and not self.process.dead:
            held = len(self.process.descriptors)
            ledger.expect(not held, f"{self.name}: {held} descriptors leak")
            waiting = [task.name for task in self.process.tasks if "client" in task.name]
            ledger.expect(not waiting, f"{self.name}: waiting for ever: {waiting}")
            if self.tiers is not None:
                done: list[bool] = []
                tiers = self.tiers
                task = scheduler.spawn(lambda: done.append(tiers.flush(30.0)), self.process, f"{self.name} flush")
                self.wait_for(task)
                ledger.expect(done == [True], f"{self.name}: what waits is not written")
            self.host.end(self.process)
            scheduler.sleep(0.01)
        self.count()
        opened: list[bool] = []
        self.start(lambda: opened.append(True))
        assert self.process is not None
        self.wait_for(self.process.tasks[0])
        if not opened or self.tiers is None:
            ledger.expect(False, f"{self.name}: it does not open when all is well")
            return
        task = scheduler.spawn(self.recover, self.process, f"{self.name} recovers")
        self.wait_for(task)
        left = [name for name in host.disk.files(FOLDER) if name.endswith(".tmp")]
        ledger.expect(not left, f"{host.name}: temporary files are left: {left}")

    def wait_for(self, task: Any) -> None:
        while not task.done:
            self.world.scheduler.sleep(0.1)

    def recover(self) -> None:
        tiers, ledger = self.tiers, self.world.ledger
        assert tiers is not None
        assert self.region is not None
        files = self.host.disk.files(FOLDER)
        refused = {name.partition("/")[2].removesuffix(".2") for name in files if name.endswith(".2")}
        for key in self.keys[:3]:
            if key in refused:
                continue
            with self.world.watched(f"{self.name} recovering"):
                kept = tiers.put(universe()[self.tenant][key].chunk)
                ledger.expect(kept, f"{self.name}: nothing is kept when all is well")
                flushed = tiers.flush(30.0)
                ledger.expect(flushed, f"{self.name}: nothing is written when all is well")
                tiers.pool.clear()
                got = tiers.get(key)
                ledger.expect(got is not None, f"{self.name}: nothing is found when all is well")
                ledger.check_chunk(key, got, self.tenant)
        for name in NAMES:
            named = self.region.get(name, force_latest=True)
            now = self.world.history.now.get(name)
            keys = now.keys if now is not None else ()
            ledger.expect((named.keys if named else ()) == keys, f"{self.name}: the latest {name!r} is not the latest")


class Disk(DiskStore):
    """Keeps account of what was promised."""

    def __init__(self, slot: Slot) -> None:
        self._host, self._ledger = slot.host, slot.world.ledger
        super().__init__(FOLDER, capacity_bytes=slot.host.capacity, durable=slot.host.durable)

    def put(self, key: str, data: bytes) -> bool:
        where, host = (self._host.name, key), self._host
        before = self._ledger.departed[where], host.upheavals
        host.puts += 1
        host.most_puts = max(host.most_puts, host.puts)
        try:
            kept = super().put(key, data)
        finally:
            host.puts -= 1
        if kept and before == (self._ledger.departed[where], host.upheavals):
            self._ledger.promised[where] = self.durable
        return kept


class Remote(RemoteStore):
    """Keeps account of how long its callers wait."""

    def __init__(self, slot: Slot, url: str) -> None:
        self._world = slot.world
        super().__init__(url, timeout=READ_S, put_timeout=PUT_S)

    @contextmanager
    def _timed(self, most: float) -> Generator[None]:
        scheduler = self._world.scheduler
        task, begin = scheduler.current, scheduler.now
        yield
        took = scheduler.now - begin
        if task in self._world.waited:
            self._world.waited[task] += took
        self._world.ledger.expect(took <= most + SLACK_S, f"{self.url}: a call took {took:.3f} s")

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        with self._timed(READ_S):
            return super().get_many(keys)

    def put(self, key: str, data: bytes) -> bool:
        with self._timed(PUT_S):
            return super().put(key, data)
