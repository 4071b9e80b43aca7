"""Rows F12, F13, F14 and F16 of the fault plan, against real servers on loopback."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blendkv.stores import deadline
from blendkv.stores.valkey import ValkeyStore
from tests.patience import SLACK_S, until
from tests.stores.servers import BINARY, Proxy, Server, bus, clean, cluster, member

DEADLINE = 0.25
MOST = DEADLINE * 1.1 + SLACK_S
BACK = 2.0 + SLACK_S


@dataclass
class Tally:
    """What was tried and what came of it."""

    row: str
    tried: int = 0
    wrong: int = 0
    exceptions: int = 0
    max_added_s: float = 0.0
    failed: list[str] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, store: ValkeyStore, entries: dict[str, bytes]) -> int:
        """Reads entries under the deadline; how many came back."""
        found: dict[str, bytes] = {}
        start, raised = time.perf_counter(), 0
        try:
            with deadline(DEADLINE):
                if len(entries) == 1:
                    (key,) = entries
                    data = store.get(key)
                    found = {} if data is None else {key: data}
                else:
                    found = store.get_many(entries)
        except Exception:
            raised = 1
        self.note(time.perf_counter() - start, sum(found[key] != entries[key] for key in found), raised)
        return len(found)

    def write(self, store: ValkeyStore, key: str, data: bytes) -> bool:
        """Writes an entry under the deadline."""
        start, raised, done = time.perf_counter(), 0, False
        try:
            with deadline(DEADLINE):
                done = store.put(key, data)
        except Exception:
            raised = 1
        self.note(time.perf_counter() - start, 0, raised)
        return done

    def note(self, seconds: float, wrong: int, raised: int) -> None:
        with self.lock:
            self.tried += 1
            self.wrong += wrong
            self.exceptions += raised
            self.max_added_s = max(self.max_added_s, seconds)

    def there(self, what: str, asked: Callable[[], object]) -> None:
        """At once, or, where seconds are not judged, when the machine has no pause as long as the deadline."""
        try:
            until(asked, 0.0)
        except TimeoutError:
            self.failed.append(what)

    def check(self, what: str, true: object) -> None:
        if not true:
            self.failed.append(what)

    def back(self, what: str, store: ValkeyStore, entries: dict[str, bytes]) -> None:
        """Reuse must be back within two seconds from now."""
        try:
            took = until(lambda: self.read(store, entries) == len(entries), BACK)
        except TimeoutError:
            took = float("inf")
        self.notes[f"back after {what}, s"] = round(took, 2)
        self.check(f"not back after {what}", took <= BACK)

    def down(self, what: str, store: ValkeyStore, entries: dict[str, bytes], seconds: float) -> None:
        """Nothing can be read for some seconds; the breaker must open within five failures."""
        end, asked = time.monotonic() + seconds, 0
        breaker = store._servers.nodes()[0].breaker
        while time.monotonic() < end:
            asked += 1
            self.check(f"read something during {what}", self.read(store, entries) == 0)
            if asked == 5:
                self.check(f"breaker closed after five failures of {what}", breaker.state != "closed")
            time.sleep(0.01)

    def row_of(self) -> dict:
        ok = not self.failed and not self.wrong and not self.exceptions and self.max_added_s <= MOST
        return {
            "row": self.row,
            "tried": self.tried,
            "wrong": self.wrong,
            "exceptions": self.exceptions,
            "max_added_s": round(self.max_added_s, 3),
            "ok": ok,
            **({"failed": sorted(set(self.failed))} if self.failed else {}),
            **({"notes": self.notes} if self.notes else {}),
        }


def entry(name: object, size: int) -> dict[str, bytes]:
    return {hashlib.sha256(str(name).encode()).hexdigest(): os.urandom(size)}


def killed_while_reading(full: bool = False) -> dict:
    """F12: SIGKILL when k bytes of the answer were sent, for k from nothing to all."""
    tally, size = Tally("F12"), 1 << 20
    one = entry("one", size)
    ((key, data),) = one.items()
    with Server() as server, Proxy(server.port) as proxy:
        store = ValkeyStore.from_url(proxy.url, piece_bytes=1 << 18)
        steps = 200 if full else 12
        for step in range(steps + 1):
            tally.check("not stored", store.put(key, data))
            store._known.clear()
            proxy.on_cut, proxy.cut = server.kill, 1 + step * (size + 100) // steps
            got = tally.read(store, one)
            tally.check("read all of what was cut", got == 0 or proxy.sent >= size)
            server.kill()
            proxy.cut = None
            tally.check("read from a dead server", tally.read(store, one) == 0)
            server.start()
            tally.check("not reconnected in time", until(lambda: tally.write(store, key, data), BACK) <= BACK)
            tally.there("reuse not back", lambda: tally.read(store, one) == 1)
        store.close()
    return tally.row_of()


def one_server(full: bool = False) -> dict:
    """F13: paused, restarted, loading, read-only, out of memory, locked, and speaking nonsense."""
    tally, one = Tally("F13"), entry("one", 1 << 18)
    ((key, data),) = one.items()
    with Server("--enable-debug-command", "yes") as server, Proxy(server.port) as proxy:
        store = ValkeyStore.from_url(proxy.url, piece_bytes=1 << 16)
        store.put(key, data)
        for paused in (_paused, _restarted, _loading, _read_only, _out_of_memory, _locked, _nonsense):
            paused(tally, store, server, proxy, one, full)
        store.close()
    late = Server()
    store = ValkeyStore(url=late.url, check=False)
    tally.down("never started", store, one, 2.5 if full else 1.2)
    late.start()
    tally.back("a first start", store, {})
    until(lambda: store.put(key, data), BACK)
    tally.back("a first start", store, one)
    store.close()
    late.__exit__()
    return tally.row_of()


def _paused(tally, store, server, proxy, one, full) -> None:
    seconds, connections = 30.0 if full else 1.5, proxy.connections
    server.pause()
    tally.down("a pause", store, one, seconds)
    tally.check("a storm of connections", proxy.connections - connections <= 5 + seconds + 1)
    server.resume()
    tally.back("a pause", store, one)


def _restarted(tally, store, server, proxy, one, full) -> None:
    ((key, data),) = one.items()
    server.kill()
    tally.down("a restart", store, one, 2.5 if full else 1.2)
    server.start()
    tally.notes["put back after a restart, s"] = round(until(lambda: tally.write(store, key, data), BACK), 2)
    tally.back("a restart", store, one)


def _loading(tally, store, server, proxy, one, full) -> None:
    with server.client() as client:
        with client.pipeline() as pipe:
            for number in range(600):
                pipe.set(f"filler:{number}", "x")
            pipe.execute()
        client.save()
    server.kill()
    args, server.args = (
        server.args,
        (*server.args, "--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024"),
    )
    server.start(wait=False)
    before = store.stats.faults["loading"]
    until(lambda: tally.read(store, one) == 1, 20)
    tally.check("never seen loading", store.stats.faults["loading"] > before)
    server.args = args
    tally.back("loading", store, one)


def _read_only(tally, store, server, proxy, one, full) -> None:
    ((key, data),) = one.items()
    server.tell("CONFIG", "SET", "replica-serve-stale-data", "yes")
    server.tell("REPLICAOF", "127.0.0.1", "1")
    tally.check("wrote to a replica", not tally.write(store, key, data))
    tally.check("readonly not counted", store.stats.faults["readonly"])
    tally.there("could not read from a replica", lambda: tally.read(store, one) == 1)
    server.tell("REPLICAOF", "NO", "ONE")
    tally.there("could not write again", lambda: tally.write(store, key, data))


def _out_of_memory(tally, store, server, proxy, one, full) -> None:
    used = server.tell("INFO", "memory")["used_memory"]
    server.tell("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", used + (1 << 20))
    failures, keys = store.stats.put_failures, server.tell("DBSIZE")
    ((key, data),) = entry("large", 8 << 20).items()
    tally.check("wrote what had no room", not tally.write(store, key, data))
    tally.check("oom not counted", store.stats.faults["oom"] and store.stats.put_failures == failures + 1)
    tally.check("pieces left behind", server.tell("DBSIZE") == keys)
    tally.there("could not read when memory was full", lambda: tally.read(store, one) == 1)
    tally.check("breaker opened for want of memory", store._servers.nodes()[0].breaker.state == "closed")
    server.tell("CONFIG", "SET", "maxmemory", 0)
    tally.there("could not write again", lambda: tally.write(store, key, data))


def _locked(tally, store, server, proxy, one, full) -> None:
    server.tell("CONFIG", "SET", "requirepass", "secret")
    proxy.drop()
    tally.down("a password", store, one, 1.2)
    tally.check("auth not counted", store.stats.faults["auth"])
    server.tell("CONFIG", "SET", "requirepass", "", password="secret")
    tally.back("a password", store, one)


NONSENSE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b":1\r\n" * 50,
    b"+OK\r\n" * 50,
    b"$-5\r\n",
    b"$99999999999999999999\r\n",
    b"$999999999\r\nabc",
    b"*2147483647\r\n",
    b"*-1\r\n" * 50,
    b"*1\r\n" * 100,
    b"-\r\n" * 50,
    b"-MOVED x y\r\n" * 50,
    b"-ASK 5 :0\r\n" * 50,
    b"-MOVED 99999 127.0.0.1:1\r\n" * 50,
    b"\0" * 100,
    b"$5\r\nhello\r\n" * 50,
    b"%1\r\n",
    b"\xff\xfe" * 50,
]


def _nonsense(tally, store, server, proxy, one, full) -> None:
    """Each answer instead of the server's; then random damage to the server's own.

    Damage inside values is what checksums of the chunk file are for: only that no exception comes counts here.
    """
    for text in NONSENSE:
        for known in (True, False):
            if not known:
                store._known.clear()
            proxy.garble = lambda _, text=text: text
            tally.check(f"read {text[:12]!r}", tally.read(store, one) == 0)
            proxy.garble = None
            proxy.drop()
            tally.back("nonsense", store, one)
    draw = random.Random(7)
    flipped = Tally("")
    for _ in range(2000 if full else 50):
        at = draw.randrange(100)
        proxy.garble = lambda data, at=at: data[:at] + os.urandom(1) + data[at + 1 :]
        flipped.read(store, one)
        proxy.garble = None
        proxy.drop()
        if store._servers.nodes()[0].breaker.state != "closed":
            tally.back("damage", store, one)
    tally.note(flipped.max_added_s, 0, flipped.exceptions)


def bad_network(full: bool = False) -> dict:
    """F16: a byte a second, 1 Mbit/s, nothing at all, connections reset after k bytes."""
    tally, one = Tally("F16"), entry("one", 1 << 20)
    ((key, data),) = one.items()
    with Server() as server, Proxy(server.port) as proxy:
        store = ValkeyStore.from_url(proxy.url, piece_bytes=1 << 18)
        tally.check("not stored", store.put(key, data))
        for rate, name in ((1.0, "1 byte/s"), (0.0, "a black hole")):
            proxy.rate = rate
            tally.down(name, store, one, 10 if full else 1.3)
            proxy.rate = None
            proxy.drop()
            tally.back(name, store, one)
        proxy.rate = 125_000
        for _ in range(40 if full else 8):
            tally.check("a megabyte in a quarter of a second at 1 Mbit/s", tally.read(store, one) == 0)
        proxy.rate = None
        proxy.drop()
        tally.back("1 Mbit/s", store, one)
        proxy.reset = True
        for step in range(100 if full else 8):
            store._known.clear()
            proxy.cut = 1 + step * (1 << 20) // (100 if full else 8)
            tally.check("read what was reset", tally.read(store, one) == 0)
            proxy.cut = None
            tally.back("a reset", store, one)
        store.close()
    return tally.row_of()


def cluster_under_load(full: bool = False) -> dict:
    """F14: a primary killed, a failover asked for, a node added and 1,000 slots moved, all while being read."""
    tally, servers = Tally("F14"), cluster(timeout_ms=5000 if full else 1500)
    entries: dict[str, bytes] = {}
    for number in range(300 if full else 100):
        entries |= entry(number, 60_000)
    store = ValkeyStore.from_url(servers[0].url, piece_bytes=1 << 14)
    try:
        tally.check("not all stored", all(store.put(key, data) for key, data in entries.items()))
        load = _Load(tally, store, entries, threads=4 if full else 2)
        for name, event in (("kill", _kill), ("failover", _failover), ("slots moved", _move_slots)):
            load.through(name, lambda event=event: event(servers, full), 30.0 if full else 6.0)
        load.stop()
        tally.notes["share of all reads that hit"] = round(load.hits / max(load.asked, 1), 4)
    finally:
        store.close()
        clean(servers)
    return tally.row_of()


class _Load:
    """Threads that read, and put what they missed, as prompts do."""

    def __init__(self, tally: Tally, store: ValkeyStore, entries: dict[str, bytes], threads: int) -> None:
        self.tally, self.store, self.entries = tally, store, entries
        self.hits = self.asked = 0
        self._recent: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()
        time.sleep(1.0)

    def _run(self, seed: int) -> None:
        draw, names = random.Random(seed), list(self.entries)
        while not self._stop.is_set():
            wanted = {name: self.entries[name] for name in draw.sample(names, 8)}
            got = self.tally.read(self.store, wanted)
            with self.tally.lock:
                self.hits += got
                self.asked += 8
                self._recent.append((time.monotonic(), got, 8))
            if got < 8 and draw.random() < 0.2:
                name = draw.choice(list(wanted))
                self.tally.write(self.store, name, self.entries[name])
            time.sleep(0.005)

    def rate(self, since: float) -> float:
        with self.tally.lock:
            recent = [(got, of) for when, got, of in self._recent if when >= since]
        return sum(got for got, _ in recent) / max(sum(of for _, of in recent), 1)

    def through(self, name: str, event: Callable[[], None], seconds: float) -> None:
        """The hit rate must be back to 95% of what it was within 30 s from the beginning of an event."""
        before, start = self.rate(time.monotonic() - 1.0), time.monotonic()
        event()
        took = float("inf")
        while time.monotonic() - start < max(seconds, 30.0 + SLACK_S):
            time.sleep(0.5)
            now = time.monotonic()
            if self.rate(now - 0.5) >= 0.95 * before:
                took = min(took, now - start)
                if now - start > (seconds if name == "kill" else 2.0) or not seconds:
                    break
            else:
                took = float("inf")
        self.tally.notes[f"hit rate before {name}"] = round(before, 3)
        self.tally.notes[f"lowest in a second of {name}"] = round(self.lowest(start), 3)
        self.tally.notes[f"back after {name}, s"] = round(took, 1)
        self.tally.check(f"hit rate not back after {name}", took <= 30.0 + SLACK_S and before > 0.9)

    def lowest(self, since: float) -> float:
        rates, at = [1.0], since
        while at + 1.0 < time.monotonic():
            with self.tally.lock:
                part = [(got, of) for when, got, of in self._recent if at <= when < at + 1.0]
            rates.append(sum(got for got, _ in part) / max(sum(of for _, of in part), 1))
            at += 1.0
        return min(rates)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _kill(servers: list[Server], full: bool) -> None:
    servers[0].kill()


def _failover(servers: list[Server], full: bool) -> None:
    servers[4].tell("CLUSTER", "FAILOVER")
    until(lambda: b"role:master" in servers[4].info("replication"), 15)


def _move_slots(servers: list[Server], full: bool) -> None:
    """A new node gets slots of the third primary, one after another."""
    new, source = member(), servers[2]
    servers.append(new)
    new.tell("CLUSTER", "MEET", "127.0.0.1", source.port, bus(source))
    mine = new.tell("CLUSTER", "MYID").decode()
    theirs = source.tell("CLUSTER", "MYID").decode()
    until(lambda: mine.encode() in source.nodes() and theirs.encode() in new.nodes(), 10)
    until(lambda: new.well(), 10)
    first = 2 * 16384 // 3 + 10
    with new.client() as to, source.client() as at:
        for slot in range(first, first + (1000 if full else 200)):
            to.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", theirs)
            at.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", mine)
            while keys := at.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                at.execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
            for node in (to, at):
                node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", mine)


ROWS: dict[str, Callable[[bool], dict]] = (
    {"F12": killed_while_reading, "F13": one_server, "F14": cluster_under_load, "F16": bad_network} if BINARY else {}
)

if __name__ == "__main__":
    import json
    import sys

    for name in sys.argv[2:] or ROWS:
        begun = time.monotonic()
        result = ROWS[name](sys.argv[1] == "full")
        print(json.dumps(result), f"{time.monotonic() - begun:.0f} s", file=sys.stdout, flush=True)
