"""One process of F26: threads that fetch and put chunks while a hundredth of all calls fails."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

import torch

from blendkv.chunk import ChunkCache
from blendkv.errors import StoreError
from blendkv.stores import Budget, DiskStore, Pool, TieredStore
from blendkv.stores.valkey import ValkeyStore
from tests.chunks import make_chunk
from tests.faults.rows import Result
from tests.faults.systems import ERRORS, system

RATE = 0.01
CHUNKS, ENTRY = 150, 17_000
BUDGET_S = 0.25
MODES = (None, "through", "behind", "back")


class Settings(NamedTuple):
    """What a worker is told: its number, how many threads, where to keep chunks, when it is stuck."""

    number: int
    threads: int
    folder: str
    url: str | None
    stall_s: float


class Dice:
    """One in a hundred; safe to share among threads."""

    def __init__(self, seed: int) -> None:
        self._random, self.faults = Random(seed), Counter()

    def hit(self, fault: str) -> bool:
        if self._random.random() < RATE:
            self.faults[fault] += 1
            return True
        return False

    def before(self, name: str) -> None:
        """A call to the system fails."""
        if self.hit("failing call"):
            code = self._random.choice(ERRORS)
            raise OSError(code, f"{os.strerror(code)} (injected into {name})")

    def cut(self, length: int) -> int:
        return self._random.randrange(length) + 1 if length and self.hit("short call") else length

    def spoiled(self, found: dict[str, bytes]) -> dict[str, bytes]:
        """What arrives of entries: other bits, not all of it, that of another, late."""
        for key, data in list(found.items()):
            if data and self.hit("flip on the way"):
                at = self._random.randrange(len(data))
                found[key] = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
            if data and self.hit("cut on the way"):
                found[key] = data[: self._random.randrange(len(data))]
            others = [data for other, data in found.items() if other != key]
            if others and self.hit("another's answer"):
                found[key] = self._random.choice(others)
        if self.hit("late answer"):
            time.sleep(0.05)
        return found


class SpoiledDisk(DiskStore):
    dice: Dice

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        return self.dice.spoiled(super().get_many(keys))


class SpoiledServer(ValkeyStore):
    dice: Dice

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        if self.dice.hit("refused by a server"):
            raise ConnectionResetError("injected")
        return self.dice.spoiled(super().get_many(keys))


def opened(settings: Settings, dice: Dice) -> TieredStore:
    """Tiers of this process; opening may fail, as anything may."""
    stores: list[Any] = []
    while not stores:
        try:
            disk = SpoiledDisk(settings.folder, capacity_bytes=60 * ENTRY)
            disk.dice = dice
            stores.append(disk)
        except StoreError:
            time.sleep(0.01)
    tries = 100
    while settings.url is not None and len(stores) < 2 and tries:
        try:
            server = SpoiledServer(url=settings.url)
            server.dice = dice
            stores.append(server)
        except StoreError:
            tries -= 1
            time.sleep(0.1)
    return TieredStore(Pool(20 * ENTRY), *stores, write=MODES[settings.number % len(MODES)], queue_bytes=40 * ENTRY)


class Worker:
    """Threads, what they saw, and when each of them last got somewhere."""

    def __init__(self, settings: Settings, dice: Dice, end: Any) -> None:
        self.settings, self.end = settings, end
        self.chunks: dict[str, ChunkCache] = {}
        for seed in range(CHUNKS):
            chunk = make_chunk(tokens=16, layers=2, heads=2, key_dim=32, seed=seed, namespace="soak")
            self.chunks[chunk.key] = chunk
        self.keys = list(self.chunks)
        self.weights = [1 / (1 + rank) for rank in range(CHUNKS)]
        self.tiers = opened(settings, dice)
        self.result, self.latencies = Result("F26"), Counter[int]()
        self.lock = threading.Lock()

    def thread(self, number: int) -> None:
        random, mine = Random(1000 * self.settings.number + number), Result("F26")
        latencies: Counter[int] = Counter()
        while time.time() < self.end.value:
            keys = random.choices(self.keys, self.weights, k=random.randint(1, 4))
            begin = time.perf_counter()
            found = mine.call(lambda keys=keys: self.tiers.fetch(keys, budget=Budget(BUDGET_S))) or []
            latencies[round(math.log(max(1.0, 1e6 * (time.perf_counter() - begin)), 1.05))] += 1
            lacking = []
            for key, got in zip(keys, found, strict=False):
                if got.chunk is None:
                    lacking.append(self.chunks[key])
                else:
                    mine.found += 1
                    mine.figures["from " + (got.tier.partition(":")[0])] += 1
                    mine.expect(self.right(key, got.chunk), f"{key[:8]} of {got.tier}: wrong keys and values")
            if lacking:
                mine.call(lambda lacking=lacking: self.tiers.put_many(lacking, budget=Budget(BUDGET_S)))
            if random.random() < 0.001:
                mine.call(self.tiers.delete, random.choice(self.keys))
            mine.figures["gets"] += 1
            self.seen[number] = time.monotonic()
        with self.lock:
            for name in ("found", "wrong", "exceptions"):
                setattr(self.result, name, getattr(self.result, name) + getattr(mine, name))
            self.result.why = [*self.result.why, *mine.why][:5]
            self.result.figures.update(mine.figures)
            self.latencies.update(latencies)

    def right(self, key: str, chunk: ChunkCache) -> bool:
        wanted = self.chunks[key]
        return chunk.key == key and all(map(torch.equal, (*chunk.keys, *chunk.values), (*wanted.keys, *wanted.values)))

    def run(self) -> None:
        self.seen = [time.monotonic()] * self.settings.threads
        threads = [
            threading.Thread(target=self.thread, args=(number,), daemon=True) for number in range(self.settings.threads)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            late = [n for n, thread in enumerate(threads) if thread.is_alive() and self.age(n) > self.settings.stall_s]
            if late:
                faulthandler.dump_traceback(sys.stderr)
                with self.lock:
                    self.result.expect(False, f"threads {late} did nothing for {self.settings.stall_s:.0f} s: deadlock")
                return

    def age(self, number: int) -> float:
        return time.monotonic() - self.seen[number]


def work(settings: Settings, answers: Any, ready: Any, end: Any) -> None:
    """The process."""
    torch.set_num_threads(1)
    dice = Dice(settings.number)
    with system(before=dice.before, cut=dice.cut):
        worker = Worker(settings, dice, end)
        ready.release()
        while math.isinf(end.value):
            time.sleep(0.01)
        worker.run()
        flushed = worker.tiers.flush(settings.stall_s)
        worker.result.expect(flushed, "what waits was not written")
    result = worker.result
    result.figures.update({f"fault: {kind}": count for kind, count in dice.faults.items()})
    answers.put(
        {
            "number": settings.number,
            "tried": dice.faults.total(),
            **{name: getattr(result, name) for name in ("found", "wrong", "exceptions", "why", "figures")},
            "latencies": worker.latencies,
        }
    )
    answers.close()
    answers.join_thread()
