"""F19 and F20: what one tenant of a store can see of another, and do to it."""

from __future__ import annotations

import itertools
import struct
import tempfile
import unicodedata
from contextlib import ExitStack
from pathlib import Path

import torch

from blendkv.chunk import ChunkCache, chunk_key
from blendkv.chunkwriter import encode_chunk
from blendkv.stores import DiskStore, Pool, RemoteStore, TieredStore
from blendkv.stores.valkey import ValkeyStore
from tests.chunks import payload_start
from tests.faults.entries import HeldStore, same
from tests.faults.rows import Result, row
from tests.fuzz import seal_head
from tests.s3 import BUCKET, OPTIONS, moto
from tests.stores.servers import BINARY, Server

FINGERPRINT, SECRET = "f" * 32, b"of one tenant only" * 2
TWINS = (
    *(
        "",
        "a",
        "A",
        " a",
        "a ",
        "a\0",
        "\0a",
        "aa",
        "a\na",
        "a/a",
        "a//a",
        "a/../a",
        "../a",
        "a:a",
        "a|a",
        "a,a",
        "a.a",
    ),
    *("\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}", "K", "\N{KELVIN SIGN}", "k"),
    *(
        "\N{CYRILLIC SMALL LETTER A}",
        "\N{FULLWIDTH LATIN SMALL LETTER A}",
        "a\N{ZERO WIDTH SPACE}",
        "\N{BYTE ORDER MARK}a",
    ),
    *(
        "\N{LATIN SMALL LIGATURE FI}",
        "fi",
        "stra\N{LATIN SMALL LETTER SHARP S}e",
        "strasse",
        "i",
        "\N{LATIN SMALL LETTER DOTLESS I}",
    ),
    *(
        "{a}",
        "a}",
        "a*",
        "a?",
        "[a]",
        "%61",
        "a%00",
        "a;b",
        "a\tb",
        "a" * 1024,
        "a" * 1023,
        "f" * 32,
        "ns",
        "ns" + "f" * 32,
    ),
)
"""Namespaces that somebody who is careless takes for each other."""


def entry(namespace: str, document: int) -> ChunkCache:
    """The chunk of a document; its numbers tell whose it is."""
    ids = torch.tensor([document, 2, 3])
    number = hash_of(namespace) + document
    states = torch.full((1, 3, 4), float(number))
    return ChunkCache(ids, (states,), (-states,), FINGERPRINT, namespace=namespace)


def hash_of(namespace: str) -> int:
    """The same in every process, small enough to be exact in fp32."""
    return int.from_bytes(namespace.encode()[-8:].rjust(8, b"\1"), "little") % 9973 * 1000


def key_for(namespace: str, document: int) -> str:
    return chunk_key([document, 2, 3], FINGERPRINT, namespace=namespace)


def look_up(result: Result, tiers, namespaces: list[str], documents: int, times: int, what: str) -> None:
    """Each tenant puts every other document of the same ones, and asks for all of them."""
    theirs = {name: [d for d in range(documents) if (n + d) % 2 == 0] for n, name in enumerate(namespaces)}
    for name in namespaces:
        kept = result.call(tiers.put_many, [entry(name, d) for d in theirs[name]])
        result.expect(all(done for _, done in kept), f"{what}: not stored")
    getattr(tiers, "flush", lambda: None)()
    keys = {name: [key_for(name, d) for d in range(documents)] for name in namespaces}
    for _ in range(times):
        for name in namespaces:
            got = result.call(tiers.fetch, keys[name])
            own = set(theirs[name])
            for d, each in enumerate(got):
                chunk = each.chunk
                result.tried += 1
                if chunk is None:
                    result.expect(d not in own, f"{what}: {name!r} does not find its own")
                    continue
                right = chunk.namespace == name and float(chunk.keys[0][0, 0, 0]) == hash_of(name) + d
                result.expect(d in own and right, f"{what}: {name!r} was given what is not its own")
                result.found += 1
    result.figures[f"look-ups: {what}"] += times * documents * len(namespaces)


def alike(result: Result, tiers, what: str) -> None:
    """Namespaces that look like each other, or like part of another field."""
    names = list(dict.fromkeys(TWINS))
    for name in names:
        tiers.put(entry(name, names.index(name)))
    getattr(tiers, "flush", lambda: None)()
    for asks, owner in itertools.product(names, names):
        chunk = result.call(tiers.fetch, [key_for(asks, names.index(owner))])[0].chunk
        result.tried += 1
        result.expect((chunk is not None) == (asks == owner), f"{what}: {asks[:9]!r} asks for one of {owner[:9]!r}")
        result.found += chunk is not None and same(chunk, entry(owner, names.index(owner)))
    # the same letters, cut into fields elsewhere
    cuts = {chunk_key([1], "ab"[:n], namespace="ab"[n:], tokenizer=t) for n in range(3) for t in ("", "a")}
    result.expect(len(cuts) == 6, "fields run into each other")
    nfc, nfd = (unicodedata.normalize(form, "\N{LATIN SMALL LETTER E WITH ACUTE}") for form in ("NFC", "NFD"))
    result.expect(nfc != nfd and key_for(nfc, 0) != key_for(nfd, 0), "two spellings of one letter")


def tampered(result: Result) -> None:
    """The namespace in a file is changed: the checksum tells, and where that is made right, the tag of a secret."""
    ours, theirs = entry("ours", 1), entry("them", 1)
    for secret in (None, SECRET):
        data = bytearray(encode_chunk(theirs, secret=secret))
        at = data.index(b"them")
        data[at : at + 4] = b"ours"
        key = chunk_key(ours.ids, FINGERPRINT, namespace="ours", secret=secret)
        for repaired in (False, True):
            if repaired:  # by somebody who may write to the store and knows the format
                seal_head(data, payload_start(data))
            tiers = TieredStore(HeldStore({key: bytes(data)}), secret=secret)
            got = result.call(tiers.get, key)
            result.tried += 1
            if repaired and secret is None:
                result.figures["forged without a secret"] += got is not None  # what a secret is for
                continue
            result.expect(got is None, f"a namespace that was changed, {secret=}, {repaired=}")
            why = "checksum" if not repaired else "authentication"
            result.expect(tiers.stats.reasons[why] == 1, f"counted as {dict(tiers.stats.reasons)}")
    sealed = encode_chunk(ours, secret=SECRET)
    key = chunk_key(ours.ids, FINGERPRINT, namespace="ours", secret=SECRET)
    result.found += TieredStore(HeldStore({key: sealed}), secret=SECRET).get(key) is not None
    wrong = struct.pack("<32s", bytes(32))
    result.expect(wrong not in sealed[: payload_start(sealed)], "the tag of the head is zeros")


@row
def f19(full: bool) -> Result:
    result = Result("F19")
    namespaces, documents = [f"tenant-{n}" for n in range(100 if full else 12)], 100 if full else 12
    tampered(result)
    look_up(result, Pool(), namespaces, documents, 60 if full else 3, "memory")
    alike(result, Pool(), "memory")
    with tempfile.TemporaryDirectory() as folder:
        look_up(result, TieredStore(Pool(1), DiskStore(folder)), namespaces, documents, 30 if full else 2, "disk")
        alike(result, TieredStore(Pool(1), DiskStore(folder)), "disk")
        look_up(result, TieredStore(DiskStore(folder)), namespaces, documents, 4 if full else 1, "memory over disk")
    with ExitStack() as stack:
        if BINARY:
            server = stack.enter_context(Server())
            store = ValkeyStore(url=server.url)
            look_up(result, TieredStore(Pool(1), store), namespaces, documents, 5 if full else 1, "Valkey")
            alike(result, TieredStore(Pool(1), store), "Valkey")
            store.close()
        url = f"http://127.0.0.1:{stack.enter_context(moto())}"
        store = RemoteStore(f"s3://{BUCKET}/store", endpoint_url=url, timeout=30.0, **OPTIONS)
        some = namespaces if full else namespaces[:4]
        look_up(result, TieredStore(Pool(1), store, write="through"), some, documents, 1, "S3")
        store.close()
    return result


# -- F20 --------------------------------------------------------------------------------------------------------------


def flood(result: Result, mine, theirs, room: int, entries: list[ChunkCache], what: str) -> int:
    """B keeps entries; A puts ten times the room. How many B still finds; never anything else."""
    for chunk in entries:
        result.expect(mine.put(chunk), f"{what}: not stored")
    found = [got.chunk for got in mine.fetch([chunk.key for chunk in entries])]
    result.expect(all(same(a, b) for a, b in zip(found, entries, strict=True)), f"{what}: B's are not there before")
    for number in range(10 * room):
        result.tried += 1
        result.call(theirs.put, big("A", number))
    left = [result.call(mine.get, chunk.key) for chunk in entries]
    result.expect(all(a is None or same(a, b) for a, b in zip(left, entries, strict=True)), f"{what}: wrong")
    return sum(chunk is not None for chunk in left)


def big(namespace: str, document: int) -> ChunkCache:
    """A chunk of about 100 KiB."""
    states = torch.full((4, 100, 32), float(document))
    ids = torch.arange(100) + document
    return ChunkCache(ids, (states,), (states,), FINGERPRINT, namespace=namespace)


@row
def f20(full: bool) -> Result:
    result, room = Result("F20"), 100 if full else 20
    entries = [big("B", number) for number in range(10)]
    cap = room * (len(encode_chunk(entries[0])) + 16)
    with tempfile.TemporaryDirectory() as parent:

        def folder(name: str) -> TieredStore:
            return TieredStore(Pool(1), DiskStore(Path(parent) / name, capacity_bytes=cap))

        shared = folder("shared")
        left = flood(result, shared, shared, room, entries, "one folder")
        result.figures["left in one folder"] = left
        result.expect(left == 0, f"{left} of B's are left: say in the guide why")
        result.expect(all(shared.put(chunk) for chunk in entries), "B cannot come back")
        result.found += sum(shared.get(chunk.key) is not None for chunk in entries)

        pool = Pool(cap)
        result.figures["left in one pool"] = flood(result, pool, pool, room, entries, "one pool")

        mine = folder("B")
        left = flood(result, mine, folder("A"), room, entries, "folders of their own")
        result.figures["left in folders of their own"] = left
        result.expect(left == len(entries), "A reached into the folder of B")
        result.found += left
        used = sum(path.stat().st_size for path in (Path(parent) / "A").rglob("*.bkv"))
        result.expect(0 < used <= cap, f"A has {used:,} bytes of {cap:,}")
    return result
