"""F26: many threads of many processes on one folder and one server, for long, where one thing in a hundred fails."""

from __future__ import annotations

import math
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.faults.rows import Result, row
from tests.faults.soak_worker import Settings, work
from tests.stores.servers import BINARY, Server

STALL_S = 30.0


class Load(NamedTuple):
    """How much, and when memory is compared."""

    processes: int
    threads: int
    seconds: float
    warm: float


CI, FULL = Load(2, 8, 8.0, 3.0), Load(16, 4, 600.0, 180.0)


def rss(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def spoil(folder: Path, random: Random) -> str:
    """What happens to files on a disk: a bit flips, an end is cut off, somebody deletes, entries are exchanged."""
    files = list(folder.glob("??/*.bkv"))
    if not files:
        return ""
    path, how = random.choice(files), random.choice(("flip", "cut", "delete", "swap"))
    with suppress(OSError):
        if how == "delete":
            path.unlink()
        elif how == "cut":
            os.truncate(path, random.randrange(1 + path.stat().st_size))
        elif how == "swap":
            os.replace(path, random.choice(files))
        else:
            with open(path, "r+b") as file:
                at = random.randrange(os.fstat(file.fileno()).st_size or 1)
                file.seek(at)
                byte = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << random.randrange(8)]))
    return how


class Soak:
    """One run: workers that are watched, one that is killed again and again, a server that stops and starts."""

    def __init__(self, load: Load, folder: str, server: Server | None) -> None:
        self.load, self.folder, self.server = load, folder, server
        self.result, self.random = Result("F26"), Random(26)
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(["tests.faults.soak_worker"])
        self.answers = self.context.Queue()
        self.samples: list[tuple[float, int, int]] = []
        self.end = self.context.Value("d", math.inf)
        self.ready = self.context.Semaphore(0)

    def start(self, number: int):
        url = None if self.server is None else self.server.url
        settings = Settings(number, self.load.threads, self.folder, url, STALL_S)
        process = self.context.Process(target=work, args=(settings, self.answers, self.ready, self.end), daemon=True)
        process.start()
        return process

    def run(self) -> Result:
        workers = [self.start(number) for number in range(self.load.processes)]
        for _ in workers:
            self.result.expect(self.ready.acquire(timeout=120.0), "a worker did not begin")
        begin = time.time()
        self.end.value = begin + self.load.seconds
        victim, next_kill, next_stop = self.start(1000), begin + 3.0, begin + 5.0
        while (now := time.time()) < self.end.value:
            time.sleep(0.25)
            how = spoil(Path(self.folder), self.random)
            self.fault(f"{how} at rest" if how else "")
            pids = [process.pid for process in workers if process.is_alive() and process.pid]
            with suppress(OSError):
                self.samples.append((now - begin, sum(map(rss, pids)), sum(map(descriptors, pids))))
            if now > next_kill and victim.pid is not None:
                os.kill(victim.pid, signal.SIGKILL)
                victim.join()
                self.fault("kill")
                victim, next_kill = self.start(1000 + len(self.samples)), now + self.random.uniform(2.0, 15.0)
            if self.server is not None and now > next_stop:
                self.harm(self.server)
                next_stop = now + self.random.uniform(5.0, 30.0)
        self.gather(len(workers))
        for process in workers:
            process.join(timeout=STALL_S)
            self.result.expect(process.exitcode == 0, f"a worker ended with {process.exitcode}")
        victim.kill()
        self.measure()
        return self.result

    def fault(self, kind: str) -> None:
        if kind:
            self.result.tried += 1
            self.result.figures[f"fault: {kind}"] += 1

    def harm(self, server: Server) -> None:
        """The server stalls for a second, or is killed, and has lost everything when it is back."""
        how = self.random.choice(("stall", "restart", "away"))
        self.fault(f"server {how}")
        if how == "stall":
            server.pause()
            time.sleep(1.0)
            server.resume()
        else:
            server.kill()
            time.sleep(2.0 if how == "away" else 0.0)
            server.start()

    def gather(self, count: int) -> None:
        """What workers say; one that does not is stuck."""
        latencies: Counter[int] = Counter()
        heard: set[int] = set()
        end = time.time() + 2 * STALL_S
        while len(heard) < count and time.time() < end:
            with suppress(Exception):
                said = self.answers.get(timeout=1.0)
                if said["number"] >= 1000:  # a victim that lived long enough
                    continue
                heard.add(said["number"])
                for name in ("tried", "found", "wrong", "exceptions"):
                    setattr(self.result, name, getattr(self.result, name) + said[name])
                self.result.why = [*self.result.why, *said["why"]][:5]
                self.result.figures.update(said["figures"])
                latencies.update(said["latencies"])
        self.result.expect(len(heard) == count, f"{count - len(heard)} processes are stuck, or died")
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            self.result.figures[f"us, {name} of a get"] = percentile(latencies, share)
        if latencies:
            self.result.max_added_s = round(1e-6 * 1.05 ** max(latencies), 3)

    def measure(self) -> None:
        """Memory and descriptors at the end beside those after warming up."""

        def around(when: float, what: int) -> float:
            near = [sample[what] for sample in self.samples if abs(sample[0] - when) <= self.load.warm / 9]
            return statistics.median(near or [0])

        last = self.samples[-1][0] - self.load.warm / 9
        for what, name, scale in ((1, "MiB in memory", 2**20), (2, "descriptors", 1)):
            before, after = around(self.load.warm, what) / scale, around(last, what) / scale
            self.result.figures[f"{name}, warm"], self.result.figures[f"{name}, end"] = round(before), round(after)
            if self.load is FULL:
                room = 0.02 * before if what == 1 else 0.1 * before
                self.result.expect(after <= before + room, f"{name}: {before:.0f} when warm, {after:.0f} at the end")
            else:
                self.result.expect(after <= 2 * before + 64, f"{name}: {before:.0f}, then {after:.0f}")
        left = [path.name for path in Path(self.folder).rglob("*.tmp")]
        most = self.load.processes * self.load.threads
        self.result.expect(len(left) <= most, f"{len(left)} temporary files are left")


def percentile(latencies: Counter[int], share: float) -> int:
    """Microseconds, from a histogram of steps of 5%."""
    left = share * latencies.total()
    for step in sorted(latencies):
        left -= latencies[step]
        if left <= 0:
            return round(1.05**step)
    return 0


@row
def f26(full: bool) -> Result:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        memory = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
        server = Server(*memory).start() if BINARY else None
        try:
            return Soak(FULL if full else CI, folder, server).run()
        finally:
            if server is not None:
                server.__exit__()
