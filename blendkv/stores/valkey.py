"""Chunks in Valkey or Redis, alone or in a Cluster.

An entry is a manifest, `prefix:{key}`, and pieces, `prefix:{key}:generation:number`. The braces put all of them into
one hash slot: reading takes two round trips to one server, and when a server of a Cluster is lost, so are its entries
only, where pieces spread over all servers would make every large entry incomplete. Prompts are made of many chunks,
which is what spreads the load. The manifest is written last and says which generation counts, so that an entry which
is half written, or half evicted, is absent, and one that is overwritten is read as it was or as it is.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from blendkv.errors import StoreError
from blendkv.stores.base import Entry, StoreStats
from blendkv.stores.deadline import deadline
from blendkv.stores.valkey_server import Ask, Server, errors, why
from blendkv.stores.valkey_servers import Servers
from blendkv.stores.valkey_url import of_client, parse

PIECE_BYTES = 4 << 20
MAX_PIECE = 256 << 20
MAX_BYTES = 16 << 30
"""Entries above are refused: nobody's chunk is that large, so a manifest that says so is wrong."""
UNFINISHED_SECONDS = 3600
"""How long pieces stay without a manifest, after a writer died."""
REMEMBERED = 4096
"""Manifests that a store remembers, for ranged reads of one round trip."""
_KEY = re.compile(r"[0-9a-f]{64}")
_UNTOUCHED, _TOUCHED = ("CLIENT", "NO-TOUCH", "ON"), ("CLIENT", "NO-TOUCH", "OFF")
"""Around reads that are no use of an entry; servers before 7.2 refuse this."""
_MANIFEST = re.compile(rb"blendkv1 (\d{1,11}) (\d{1,9}) ([0-9a-f]{16})")


class _Entry(NamedTuple):
    size: int
    piece: int
    generation: str

    def line(self) -> str:
        return f"blendkv1 {self.size} {self.piece} {self.generation}"

    @classmethod
    def parse(cls, line: Any) -> _Entry | None:
        found = _MANIFEST.fullmatch(line) if isinstance(line, bytes) else None
        entry = cls(int(found[1]), int(found[2]), found[3].decode()) if found else None
        return entry if entry and entry.size <= MAX_BYTES and 1024 <= entry.piece <= MAX_PIECE else None

    @property
    def pieces(self) -> int:
        return -(-self.size // self.piece)

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Pieces that hold `[start, stop)`: number, and which bytes of it."""
        start = max(start, 0)
        for number in range(start // self.piece, -(-stop // self.piece) if start < stop else 0):
            first = number * self.piece
            yield number, max(start - first, 0), min(stop - first, self.piece)


class ValkeyStore:
    """Entries in a Valkey or Redis server or Cluster, through redis-py.

    Nothing that happens after opening raises: what cannot be had in time is a miss, and `stats.faults` says why
    (`timeout`, `connection`, `breaker`, `loading`, `auth`, `oom`, `readonly`, `moved`, `clusterdown`, `protocol`,
    `pieces`, ...). After five failures in a row a server is left alone, and asked by PING once a second, in the
    background, whether it is back.

    Args:
        client: a `redis.Redis` or `redis.RedisCluster`, of which address, user and TLS are taken; connections and
            timeouts are the store's own.
        url: or a URL, see `from_url`.
        prefix: first part of all names. Stores of one prefix share their entries.
        ttl: seconds until an entry expires, from its last put; None keeps it until it is deleted or evicted.
        connect_timeout: most seconds to connect.
        read_timeout: longest silence of a server, in seconds.
        timeout: most seconds for one call in all; a `deadline` around it may be shorter.
        piece_bytes: most bytes of one value.
        check: False opens without asking the server, and misses until it answers.

    Raises:
        StoreError: if the server cannot be reached or refuses.
        ValueError: for settings that make no sense.
    """

    def __init__(
        self,
        client: Any = None,
        url: str | None = None,
        *,
        prefix: str = "blendkv",
        ttl: float | None = None,
        connect_timeout: float = 0.25,
        read_timeout: float = 1.0,
        timeout: float = 10.0,
        piece_bytes: int = PIECE_BYTES,
        check: bool = True,
    ) -> None:
        if (client is None) == (url is None):
            raise ValueError("give a client of redis-py or a URL, one of the two")
        if not re.fullmatch(r"[\w.:/-]{1,64}", prefix, re.ASCII):
            raise ValueError(f"prefix={prefix!r}: 1 to 64 letters, digits and . : / - _")
        if not 1024 <= piece_bytes <= MAX_PIECE:
            raise ValueError(f"piece_bytes={piece_bytes}: give 1 KiB to 256 MiB (4 MiB is a good size)")
        if ttl is not None and not 1 <= ttl <= 1e9:
            raise ValueError(f"ttl={ttl}: give seconds, at least 1, or None")
        target = parse(url) if url is not None else of_client(client)
        self.url, self.stats = target.url, StoreStats()
        self._prefix, self._ttl, self._timeout, self._piece_bytes = prefix, ttl, timeout, piece_bytes
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._lock, self._no_touch = threading.Lock(), True
        self._servers = Servers(target.settings, connect_timeout, read_timeout)
        if not check:
            self._servers.open_later()
            return
        self._servers.open()
        if target.cluster and not self._servers.cluster:
            self.close()
            raise StoreError(f"{self.url} is no Cluster, or does not answer CLUSTER SLOTS: leave out cluster=true")

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> Self:
        """A store by URL: `redis://[user:password@]host[:port][/db]`, also `valkey://`; with TLS `rediss://`.

        A Cluster is found out; `redis+cluster://` or `?cluster=true` insist on one. Settings may be in the query
        (`?prefix=...&ttl=...`), and so may those of redis-py for TLS (`ssl_ca_certs=...`).

        Raises:
            StoreError: if the server cannot be reached or refuses.
            ValueError: for a URL that makes no sense.
        """
        return cls(url=url, **{**parse(url).options, **settings})

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes `[start, stop)` of an entry, or None; one round trip if its manifest was read before, else two."""
        with deadline(self._timeout):
            known = self._known.get(key)
            data, faults = self._read({key: known} if known else {}, start, stop)
            if known is None or faults.get(key) == "pieces":  # it may have been overwritten
                data, faults = self._read(self._entries([key]), start, stop)
        self._count(data, faults)
        return data.get(key)

    def peek(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """As `get`, but it is no use of the entry, for servers from 7.2 on."""
        with deadline(self._timeout):
            data, faults = self._read(self._entries([key], peek=True), start, stop, peek=True)
        self._count(data, faults)
        return data.get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Whole entries, those that there are, in two round trips; in one if all manifests were read before."""
        keys = list(dict.fromkeys(keys))
        with deadline(self._timeout):
            known = {key: entry for key in keys if (entry := self._known.get(key)) is not None}
            data, faults = self._read(known | self._entries([key for key in keys if key not in known]), 0, None)
            if again := [key for key in known if faults.get(key) == "pieces"]:  # they may have been overwritten
                more, still = self._read(self._entries(again), 0, None)
                data, faults = data | more, {key: why for key, why in faults.items() if key not in again} | still
        self._count(data, faults)
        return data

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Bytes of those entries that there are, in one round trip; others are counted as misses."""
        with deadline(self._timeout):
            return {key: entry.size for key, entry in self._entries(list(dict.fromkeys(keys))).items()}

    def size(self, key: str) -> int | None:
        """Bytes of an entry, or None."""
        with deadline(self._timeout):
            found = self._entries([key], absent=False)
        return found[key].size if key in found else None

    def put(self, key: str, data: bytes) -> bool:
        """Stores an entry whole, or not at all."""
        view = memoryview(data).cast("B")
        entry = _Entry(len(view), self._piece_bytes, secrets.token_hex(8))
        if not _KEY.fullmatch(key) or entry.size > MAX_BYTES:
            self.stats.count("put_failures", "key" if entry.size <= MAX_BYTES else "size")
            return False
        with deadline(self._timeout):
            fault = self._write(key, entry, view)
        self.stats.count("put_failures" if fault else "puts", fault)
        return not fault

    def delete(self, key: str) -> None:
        """Forgets an entry, its manifest first."""
        self._remember(key, None)
        if not _KEY.fullmatch(key):
            return
        with deadline(self._timeout):
            name = self._name(key)
            line = self._servers.ask([Ask(name, ("GETDEL", name), (bytes, type(None)))])[0]
            if isinstance(line, Exception):
                self.stats.count("misses", why(line))
            else:
                self._unlink(key, _Entry.parse(line))

    def keys(self) -> Iterator[str]:
        """Keys of all entries; those that are put or deleted meanwhile may be among them or not."""
        return (key for _, keys in self._scan() for key in keys)

    def entries(self) -> Iterator[Entry]:
        """All entries, as `keys` finds them; some round trips for a thousand.

        The last use is known unless the server evicts by frequency; then `hits` is its counter, which is logarithmic.
        """
        for node, keys in self._scan():
            with deadline(self._timeout):
                found = self._described(node, keys)
            yield from found

    def _described(self, node: Server, keys: list[str]) -> list[Entry]:
        """What a server knows of its entries. Their first pieces tell of use: manifests are remembered by readers."""
        asks = [Ask(name, ("GET", name), (bytes, type(None))) for name in map(self._name, keys)]
        lines = self._quietly(node.exchange, asks)
        entries = {key: entry for key, line in zip(keys, lines, strict=True) if (entry := _Entry.parse(line))}
        names = [self._piece(key, entry, 0) if entry.size else self._name(key) for key, entry in entries.items()]

        def ask(word: str, names: list[str]) -> list[Any]:
            return node.exchange([Ask(name, ("OBJECT", word, name), (int, type(None))) for name in names])

        word = "IDLETIME"
        if isinstance(next(iter(ask(word, names[:1])), None), errors.ResponseError):
            word = "FREQ"  # one of the two is refused, by the server's policy of eviction
        now, found = time.time(), []
        for (key, entry), reply in zip(entries.items(), ask(word, names), strict=True):
            known = reply if isinstance(reply, int) else None
            if word == "FREQ":
                found.append(Entry(key, entry.size, None, known))
            else:
                found.append(Entry(key, entry.size, None if known is None else now - known))
        return found

    def _scan(self) -> Iterator[tuple[Server, list[str]]]:
        """Servers and keys that they have, some at a time."""
        seen: set[str] = set()
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix) + ":{*}"
        for node in self._servers.nodes():
            cursor = b"0"
            while True:
                with deadline(self._timeout):
                    scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                    reply = node.exchange([Ask("", scan, (list,))])[0]
                if isinstance(reply, Exception):
                    self.stats.count("misses", why(reply))
                    break
                cursor, names = reply
                new = {name.decode()[len(self._prefix) + 2 : -1] for name in names} - seen
                seen |= new
                if new:
                    yield node, sorted(new)
                if cursor == b"0":
                    break

    def close(self) -> None:
        """Closes connections and ends threads."""
        self._servers.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{{{key}}}"

    def _piece(self, key: str, entry: _Entry, number: int) -> str:
        return f"{self._name(key)}:{entry.generation}:{number}"

    def _entries(self, keys: Sequence[str], absent: bool = True, peek: bool = False) -> dict[str, _Entry]:
        """Manifests; misses are counted, those that are just absent if asked to."""
        good = [key for key in keys if _KEY.fullmatch(key)]
        names = [self._name(key) for key in good]
        asks = [Ask(name, ("GET", name), (bytes, type(None))) for name in names]
        found = {}
        for key, line in zip(good, self._ask(asks, peek), strict=True):
            if entry := _Entry.parse(line):
                found[key] = entry
                self._remember(key, entry)
            elif line is not None or absent:
                fault = why(line) if isinstance(line, Exception) else "manifest" if line is not None else ""
                self.stats.count("misses", fault)
        if wrong := len(keys) - len(good):
            self.stats.count("misses", "key", times=wrong)
        return found

    def _read(
        self, entries: dict[str, _Entry], start: int, stop: int | None, peek: bool = False
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        """Ranges of entries, and why those that are missing are; one round trip."""
        asks, keys = [], []
        for key, entry in entries.items():
            stop_at = entry.size if stop is None else min(stop, entry.size)
            for number, low, high in entry.parts(start, stop_at):
                name = self._piece(key, entry, number)
                asks.append(Ask(name, ("GETRANGE", name, low, high - 1), (bytes,), high - low))
                keys.append(key)
        parts: dict[str, list[bytes]] = {key: [] for key in entries}
        faults: dict[str, str] = {}
        for key, ask, reply in zip(keys, asks, self._ask(asks, peek), strict=True):
            if isinstance(reply, Exception):
                faults.setdefault(key, why(reply))
            elif len(reply) != ask.weight:  # of a piece that is gone, nothing comes
                faults.setdefault(key, "pieces")
            else:
                parts[key].append(reply)
        for key in faults:
            self._remember(key, None)
        return {key: b"".join(part) for key, part in parts.items() if key not in faults}, faults

    def _write(self, key: str, entry: _Entry, view: memoryview) -> str:
        """Pieces, then the manifest, then what was there before goes; the fault, or nothing."""
        name, ttl = self._name(key), ("PX", int(self._ttl * 1000)) if self._ttl else ()
        pieces = [self._piece(key, entry, number) for number in range(entry.pieces)]
        life = ttl or ("EX", UNFINISHED_SECONDS)
        data = [view[at : at + entry.piece] for at in range(0, entry.size, entry.piece)]
        asks = [
            Ask(piece, ("SET", piece, part, *life), weight=len(part)) for piece, part in zip(pieces, data, strict=True)
        ]
        fault = _first(self._ask(asks))
        if not fault:
            asks = [Ask(name, ("SET", name, entry.line(), *ttl, "GET"), (bytes, type(None)))]
            asks += [Ask(piece, ("PERSIST", piece), (int,)) for piece in pieces] if not ttl else []
            old, *kept = self._ask(asks)
            fault = _first([old, *kept])
            if not isinstance(old, Exception):
                self._remember(key, entry)
                self._unlink(key, _Entry.parse(old))
                return fault
        self._unlink(key, entry)  # frees memory, if that was what lacked
        return fault

    def _unlink(self, key: str, entry: _Entry | None) -> None:
        names = [self._piece(key, entry, number) for number in range(entry.pieces)] if entry else []
        self._ask([Ask(name, ("UNLINK", name), (int,)) for name in names])

    def _ask(self, asks: list[Ask], peek: bool = False) -> list[Any]:
        if not asks:
            return []
        return self._quietly(self._servers.ask, asks) if peek else self._servers.ask(asks)

    def _quietly(self, ask: Callable[[list[Ask]], list[Any]], asks: list[Ask]) -> list[Any]:
        """Replies of one server; that it was asked is no use of entries, if it can leave it at that."""
        if not self._no_touch or not asks:
            return ask(asks)
        name = asks[0].name
        on, *replies, _ = ask([Ask(name, _UNTOUCHED), *asks, Ask(name, _TOUCHED)])
        if isinstance(on, errors.ResponseError):
            self._no_touch = False
        return replies

    def _remember(self, key: str, entry: _Entry | None) -> None:
        with self._lock:
            self._known.pop(key, None)
            if entry is not None:
                self._known[key] = entry
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def _count(self, data: dict[str, bytes], faults: dict[str, str]) -> None:
        self.stats.count("hits", times=len(data))
        for fault in faults.values():
            self.stats.count("misses", fault)


def _first(replies: list[Any]) -> str:
    """The first fault among replies."""
    return next((why(reply) for reply in replies if isinstance(reply, Exception)), "")
