"""Several levels of one chunk in a store: one chunk file each, under keys of their own (`levelkeys`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace

from blendkv.chunk import ChunkCache
from blendkv.chunkwriter import encode_chunk
from blendkv.codecs import Codec
from blendkv.container import read_head
from blendkv.levelkeys import level_key, name_of
from blendkv.stores.base import Store

ASKING = 8
"""Sizes that are asked for at once."""


@dataclass(frozen=True)
class Level:
    """One level of one chunk in a store.

    Attributes:
        name: tells it from the chunk's others, such as `klt@4` or `klt@0+2` (two streams).
        codec: that wrote it.
        chunk: the chunk's key.
        nbytes: of the file; None if it is not there.
        base_bytes: of its beginning that is usable alone, where it has two streams and that is known.
        main: whether it is the chunk's own entry, under the chunk's key, which another codec may have written.
    """

    name: str
    codec: Codec
    chunk: str
    nbytes: int | None = None
    base_bytes: int | None = None
    main: bool = False

    @property
    def key(self) -> str:
        """Of its entry."""
        return self.chunk if self.main else level_key(self.chunk, self.codec)


def write_levels(
    store: Store,
    chunk: ChunkCache,
    codecs: Iterable[Codec],
    *,
    key: str | None = None,
    secret: bytes | None = None,
    key_id: bytes = b"",
) -> list[Level]:
    """Encodes a chunk at several levels and puts them into a store.

    Args:
        store: that is to keep them.
        chunk: exact; every level is made of it.
        codecs: one for each level.
        key: of the chunk; None: its own.
        secret: seals the files.
        key_id: of the secret.

    Returns:
        A level for each codec; without a size where the store did not keep it.

    Raises:
        ValueError: for a chunk that a codec refuses.
    """
    written = []
    for codec in codecs:
        data = encode_chunk(chunk, codec, secret=secret, key_id=key_id)
        level = Level(name_of(codec), codec, key or chunk.key, len(data), base_bytes(data))
        kept = store.put(level.key, data)
        written.append(level if kept else replace(level, nbytes=None))
    return written


def base_bytes(data: bytes) -> int | None:
    """Bytes of a chunk file until the end of its base; None if it has no other stream."""
    head = read_head(data)
    header = head.header
    if header.arrangement.streams == 1:
        return None
    return len(data) - sum(head.lengths[header.segments_of(header.units - 1, 0).stop :])


def find_levels(store: Store, keys: Sequence[str], codecs: Sequence[Codec]) -> list[list[Level]]:
    """What there is of chunks, with sizes; several questions under way at a time, within the deadline around.

    Args:
        store: to ask.
        keys: of chunks.
        codecs: levels that may be there.

    Returns:
        For each chunk its levels that are there, in the order of the codecs.
    """
    wanted = [Level(name_of(codec), codec, key) for key in keys for codec in codecs]
    if not wanted:
        return [[] for _ in keys]
    with ThreadPoolExecutor(ASKING, "blendkv-levels") as pool:
        asked = [pool.submit(copy_context().run, store.size, level.key) for level in wanted]
        sizes = [future.result() for future in asked]
    there = [replace(level, nbytes=size) for level, size in zip(wanted, sizes, strict=True)]
    count = len(codecs)
    return [[one for one in there[i * count : (i + 1) * count] if one.nbytes] for i in range(len(keys))]
