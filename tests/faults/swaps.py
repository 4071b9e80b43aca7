"""F07 and F21: right bytes in the wrong place, an older entry, another tenant's, a broken hash."""

from __future__ import annotations

import ast
import hashlib
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import xxhash

import blendkv
from blendkv import chunk as chunks
from blendkv import chunkfile, supply
from blendkv.attaching import attach
from blendkv.chunk import ChunkCache, chunk_key, ids_bytes
from blendkv.chunkfile import ChunkFile
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import LayerShape, get_codec
from blendkv.container.seals import Checksum
from blendkv.errors import ChunkFileError
from blendkv.library import ChunkLibrary
from blendkv.prefilling import prefill
from blendkv.stores import DiskStore, TieredStore
from blendkv.testing import byte_tokenizer, tiny_model
from blendkv.texts import digest
from tests.chunks import payload_start
from tests.drawn import SMALL, chunk_of, profile_of
from tests.faults.entries import HeldStore, keyed, made, same
from tests.faults.rows import Result, row

OURS, THEIRS, OLD = b"o" * 32, b"t" * 32, b"before it was replaced, " * 2

# -- F07 --------------------------------------------------------------------------------------------------------------


def document(number: int, version: int = 0, **fields) -> ChunkCache:
    """A chunk whose ids are its own: of one text, in one version of the model, of a tenant."""
    made = chunk_of(SMALL, 5, seed=1000 * version + number, **fields)
    return replace(made, ids=torch.tensor([number, version, 3, 4, 5]))


class Places:
    """A store that keeps what it is given and a folder, new for each fault: a folder refuses what was wrong twice.

    Args:
        folder: for the folders.
        settings: of the tiers above.
    """

    def __init__(self, folder: Path, **settings) -> None:
        self.folder, self.settings, self.made = folder, settings, 0

    def __call__(self, key: str, data: bytes) -> list[TieredStore]:
        self.made += 1
        stores = (HeldStore(), DiskStore(self.folder / str(self.made)))
        for store in stores:
            store.put(key, data)
        return [TieredStore(store, **self.settings) for store in stores]


def lays(result: Result, places: Places, key: str, data: bytes, why: str, what: str) -> None:
    """Bytes under a key that is not theirs: a miss, counted by what was wrong."""
    for tiers in places(key, data):
        result.tried += 1
        result.expect(result.call(tiers.get, key) is None, f"{what}: a chunk came back")
        told = tiers.stats.reasons + tiers.stats.unreadable
        result.expect(dict(told) == {why: 1}, f"{what}: not counted as {why!r} but {dict(told)}")
        result.figures.update(told)


def served(result: Result, places: Places, key: str, data: bytes, chunk: ChunkCache) -> None:
    """The same in its place is a hit."""
    for tiers in places(key, data):
        got = result.call(tiers.get, key)
        result.expect(same(got, chunk) and got.key == key, "an entry in its place is no hit")
        result.found += 1


@row
def f07(full: bool) -> Result:
    result = Result("F07")
    codec = get_codec("klt", profile=profile_of("klt"), level=4)
    for number in range(200 if full else 8):
        coding = (None, codec)[number % 2]
        with tempfile.TemporaryDirectory() as folder:
            plain, sealed = Path(folder) / "plain", Path(folder) / "sealed"
            swap_plain(result, Places(plain, codec=coding), number, coding)
            swap_sealed(result, Places(sealed, codec=coding, secret=OURS, key_id=b"1"), number, coding)
        rotate(result, number, coding)
    return result


def swap_plain(result: Result, places: Places, number: int, codec) -> None:
    a, b = (made("", document(number + shift, namespace="ours"), codec) for shift in (0, 500))
    served(result, places, a.key, a.data, a.chunk)
    lays(result, places, b.key, a.data, "key", "A under the key of B")
    before = made("", document(number, version=1, namespace="ours"), codec)
    lays(result, places, a.key, before.data, "key", "an older text")
    chunk = document(number, namespace="ours")
    for changed, what in (
        (replace(chunk, fingerprint="e" * 32), "of older weights"),
        (replace(chunk, namespace="theirs"), "another tenant's"),
        (replace(chunk, conditioning=(7,)), "computed behind something else"),
        (replace(chunk, tokenizer="u"), "of another tokenizer"),
    ):
        lays(result, places, a.key, encode_chunk(changed, codec or "raw"), "key", what)
    sealed = encode_chunk(chunk, codec or "raw", secret=THEIRS)
    lays(result, places, a.key, sealed, "authentication", "sealed, where nothing is")


def swap_sealed(result: Result, places: Places, number: int, codec) -> None:
    chunk, other = document(number, namespace="ours"), document(number + 500, namespace="ours")
    seal = {"secret": OURS, "key_id": b"1"}
    mine, swapped = (encode_chunk(each, codec or "raw", **seal) for each in (chunk, other))
    key = keyed(chunk, OURS)
    served(result, places, key, mine, replace(made("", chunk, codec).chunk, keyed=key))
    lays(result, places, key, swapped, "key", "A under the key of B, both sealed")
    theirs = encode_chunk(replace(chunk, namespace="theirs"), codec or "raw", **seal)
    lays(result, places, key, theirs, "key", "another namespace's, of one secret")
    forged = encode_chunk(chunk, codec or "raw", secret=THEIRS, key_id=b"1")
    lays(result, places, key, forged, "authentication", "sealed with another secret")
    lays(result, places, keyed(chunk, None), mine, "key", "under the key that it has without the secret")
    lays(result, places, key, encode_chunk(chunk, codec or "raw"), "authentication", "not sealed")
    renamed = encode_chunk(chunk, codec or "raw", secret=OURS, key_id=b"2")
    lays(result, places, key, renamed, "authentication", "of another key id")
    lays(result, places, key, spliced(mine, swapped), "authentication", "segments of another entry")
    flipped = bytearray(mine)
    flipped[40] ^= 1  # in the head, which has a checksum too: an accident, not a forgery
    lays(result, places, key, bytes(flipped), "checksum", "a bit of a sealed entry")


def rotate(result: Result, number: int, codec) -> None:
    """A secret is replaced: both are read while both are given, by key id."""
    chunk = document(number, namespace="ours")
    files = {
        key_id: encode_chunk(chunk, codec or "raw", secret=secret, key_id=key_id)
        for key_id, secret in ((b"old", OLD), (b"new", OURS))
    }
    settings = {"codec": codec}
    for key_id, data in files.items():
        with ChunkFile(data, secret={b"old": OLD, b"new": OURS}, **settings) as file:
            result.found += len(file.read()) == len(chunk)
        for secrets in ({b"new": THEIRS, b"old": THEIRS}, {b"else": OLD}, {b"new": OLD, b"old": OURS}, THEIRS):
            result.tried += 1
            result.expect(reason_of(data, secrets, settings) == "authentication", f"{key_id!r} was read with others")
    result.tried += 1
    result.expect(reason_of(files[b"old"], {b"new": OURS}, settings) == "authentication", "the old one is gone")
    store = HeldStore({keyed(chunk, OLD): files[b"old"]})
    over = TieredStore(store, codec=codec, secret=OURS, key_id=b"new")
    result.expect(over.get(keyed(chunk, OURS)) is None, "keys are the secret's too")
    result.expect(over.get(keyed(chunk, OLD)) is None, "an entry of the old secret under its key")
    result.figures["rotated: authentication"] += over.stats.reasons["authentication"]


def reason_of(data: bytes, secret, settings: dict) -> str:
    try:
        with ChunkFile(data, secret=secret, **settings) as file:
            file.read()
    except ChunkFileError as error:
        return error.reason
    return ""


def spliced(head: bytes, payload: bytes) -> bytes:
    """The head of one entry with the segments of another, of which the sizes are changed to those of the first."""
    start, other = payload_start(head), payload_start(payload)
    segments = payload[other:] + bytes(len(head))
    return head[:start] + segments[: len(head) - start]


# -- F21 --------------------------------------------------------------------------------------------------------------

SEED = 7719792486815757662
PAIR = (
    bytes.fromhex("efcdab89674523011032547698badcfe") + bytes(16),
    bytes.fromhex("1032547698badcfeefcdab8967452301") + bytes(16),
)
"""Two messages that xxh3 takes for one with that seed (Cyan4973/xxHash#1127)."""
XXHASH = {"container/seals.py", "texts.py", "models.py", "bench/gateway_load.py"}
"""Files that use it: seals of segments, names of texts behind a profile, the name of a converted GGUF file, and
whether a benchmark's bytes are those that it wrote."""


@contextmanager
def broken_hash() -> Generator[None]:
    """Keys have eight bits."""

    def key(*args, **kwargs) -> str:
        return hashlib.sha256(chunk_key(*args, **kwargs).encode()).hexdigest()[:2] + "0" * 62

    with (
        mock.patch.object(chunks, "chunk_key", key),
        mock.patch.object(chunkfile, "chunk_key", key),
        mock.patch.object(supply, "chunk_key", key),
    ):
        yield


def collide(result: Result, count: int) -> None:
    """Documents by the thousand under 256 keys: what comes back is the document's own, or computed."""
    model, tokenizer = attach(tiny_model("llama", num_hidden_layers=2)), byte_tokenizer()
    texts = [f"{number:05d}" for number in range(count)]
    ids = [list(map(int, tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts]
    right = prefill(model, ids, progress=False)
    with tempfile.TemporaryDirectory() as folder, broken_hash():
        kv = ChunkLibrary(model, tokenizer, DiskStore(folder), capacity_bytes=200 * right[0].nbytes)
        for number, (text, wanted) in enumerate(zip(texts, right, strict=True)):
            if number % 50 == 0:
                kv.clear()  # then it comes from the folder
            for _ in range(2):
                loaded = sum(kv.pool.stats.hits.values())
                (got,) = result.call(kv.prefill, [text])
                result.tried += 1
                worst = max(float((a - b).abs().max()) for a, b in zip(states(got), states(wanted), strict=True))
                result.expect(got.ids.tolist() == wanted.ids.tolist() and worst < 1e-4, f"{text}: off by {worst}")
            result.found += sum(kv.pool.stats.hits.values()) > loaded
        result.figures["keys"] = len(list(kv.pool.keys()))
        result.expect(result.figures["keys"] <= 256, "the hash is not broken")
        # several in one prompt, of which some have one key
        for start in range(0, count - 40, max(40, count // 20)):
            got = result.call(kv.prefill, texts[start : start + 40])
            result.tried += 1
            result.expect(
                [each.ids.tolist() for each in got] == ids[start : start + 40], "another document's chunk in one prompt"
            )


def states(chunk: ChunkCache) -> tuple[torch.Tensor, ...]:
    return (*chunk.keys, *chunk.values)


def vector(result: Result) -> None:
    """Messages that collide, through everything that uses xxHash."""
    a, b = PAIR
    result.expect(xxhash.xxh3_128_digest(a, SEED) == xxhash.xxh3_128_digest(b, SEED), "the vector is none")
    ids = [torch.frombuffer(bytearray(each), dtype=torch.int32).long() % (1 << 32) for each in PAIR]
    assert [ids_bytes(each) for each in ids] == [a, b]
    fields = {"fingerprint": "f", "conditioning": (), "tokenizer": "t"}
    keys = {chunk_key(each, secret=secret, **fields) for each in ids for secret in (None, a, b)}
    result.expect(len(keys) == 6, "two chunks have one key")
    made_of = [replace(chunk_of((LayerShape(1, 4, 4),), 8, seed=n), ids=each) for n, each in enumerate(ids)]
    store = HeldStore({chunk.key: encode_chunk(chunk) for chunk in made_of})
    tiers = TieredStore(store)
    for chunk, other in (made_of, made_of[::-1]):
        result.tried += 1
        result.found += same(tiers.get(chunk.key), chunk)
        tiers.pool.clear()
        swapped = TieredStore(HeldStore({chunk.key: encode_chunk(other)}))
        result.expect(swapped.get(chunk.key) is None, "one chunk was served for the other")
    for number in (*range(4096), (1 << 32) - 1):  # every seed that a segment's checksum may have begins like this
        result.tried += 1
        result.expect(Checksum().segment(number, a) != Checksum().segment(number, b), f"segment {number}")
    texts = [each.decode("latin-1") for each in PAIR]
    result.expect(
        digest(texts[0]) != digest(texts[1]) and xxhash.xxh3_64_digest(a) != xxhash.xxh3_64_digest(b), "names"
    )
    folder = Path(blendkv.__file__).parent
    using = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any(alias.name == "xxhash" for alias in node.names)
    }
    result.expect(using == XXHASH, f"xxHash is used by {sorted(using)}: look at each, and name it here")


@row
def f21(full: bool) -> Result:
    result = Result("F21")
    vector(result)
    collide(result, 10_000 if full else 400)
    return result
