"""What must be true in a simulated world: chunks that are known beforehand, and an account of what was promised."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import NamedTuple

import torch

from blendkv.chunk import ChunkCache, chunk_key
from blendkv.chunkwriter import encode_chunk
from tests.chunks import make_chunk

SECRET = b"a secret of the third tenant"
TENANTS: tuple[tuple[str, bytes | None], ...] = (("one", None), ("two", None), ("three", SECRET))
DOCUMENTS = 10


class Wrong(Exception):
    """Something that must be true is not."""


class Known(NamedTuple):
    """A chunk, and the only bytes that may stand for it."""

    chunk: ChunkCache
    data: bytes


@cache
def universe() -> dict[str, dict[str, Known]]:
    """Chunks by tenant and key: the same documents for every tenant, so that keys alone keep them apart."""
    tenants: dict[str, dict[str, Known]] = {}
    for number, (namespace, secret) in enumerate(TENANTS):
        known: dict[str, Known] = {}
        for document in range(DOCUMENTS):
            chunk = make_chunk(tokens=1 + document, layers=1, heads=1, key_dim=8, seed=document, namespace=namespace)
            chunk = replace(chunk, keys=tuple(k + number for k in chunk.keys))  # as if models differed
            key = chunk_key(chunk.ids, chunk.fingerprint, chunk.conditioning, chunk.tokenizer, namespace, secret)
            chunk = replace(chunk, keyed="" if secret is None else key)
            known[key] = Known(chunk, encode_chunk(chunk, "raw", secret=secret))
        tenants[namespace] = known
    return tenants


@cache
def every() -> dict[str, Known]:
    return {key: known for tenant in universe().values() for key, known in tenant.items()}


@cache
def largest() -> int:
    return max(len(known.data) for known in every().values())


def flipped(data: bytes, random: Random) -> bytes:
    """One bit is another."""
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


class Ledger:
    """Counts what happens in a world, and says what is wrong.

    Attributes:
        events: operations of clients, calls to the system and to servers, faults.
        faults: injected, by kind.
        counts: whatever else is counted.
        wrong: what should not have been.
    """

    def __init__(self, clock: Callable[[], float], trace: Callable[[str], None] | None) -> None:
        self._clock, self._trace = clock, trace
        self.events = 0
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self.promised: dict[tuple[str, str], bool] = {}
        """Entries of a host's folder that must be there, and whether a loss of power is no excuse."""
        self.departed: Counter[tuple[str, str]] = Counter()

    def say(self, what: str) -> None:
        """An event; the digest of all tells two runs apart."""
        self.events += 1
        line = f"{self._clock() - 1000:10.6f} {what}"
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def fault(self, kind: str, where: str = "") -> None:
        self.faults[kind] += 1
        self.say(f"FAULT {kind} {where}")

    def expect(self, right: bool, what: str) -> None:
        if not right:
            self.say(f"WRONG {what}")
            self.wrong.append(what)

    def check_chunk(self, key: str, chunk: ChunkCache | None, tenant: str) -> None:
        """A chunk that was returned is, bit by bit, the one that its key names."""
        if chunk is None:
            return
        known = universe()[tenant].get(key)
        if known is None:
            self.expect(False, f"{key[:8]}: a chunk of another tenant than {tenant}")
            return
        right = known.chunk
        same = (
            chunk.key == key
            and chunk.namespace == right.namespace
            and torch.equal(chunk.ids, right.ids)
            and all(map(torch.equal, (*chunk.keys, *chunk.values), (*right.keys, *right.values)))
        )
        self.expect(same, f"{key[:8]}: wrong keys and values for {tenant}")

    def left(self, host: str, key: str) -> None:
        """An entry is no longer promised: it was evicted, deleted or damaged."""
        self.departed[host, key] += 1
        self.promised.pop((host, key), None)
