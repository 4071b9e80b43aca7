"""Segments to a chunk file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from blendkv.container import format as f
from blendkv.container.header import Head, Header, utf8
from blendkv.container.packing import pack_head
from blendkv.container.seals import Checksum, Tag
from blendkv.errors import ChunkFileError


def pack(header: Header, segments: Sequence[bytes], *, secret: bytes | None = None) -> bytes:
    """A chunk file.

    Args:
        header: what it says; with a key id if and only if there is a secret. Its text is left out where the head would
            become larger than 1 MiB.
        segments: token streams first, then by stream, unit, part and group. They are padded to multiples of 16 bytes
            by zeros, the last one further where a reader would refuse so small a payload for so large a chunk.
        secret: 16 to 64 bytes; seals the file against forgery.

    Raises:
        ChunkFileError: for what the format has no room for.
        ValueError: for a wrong number of segments, or a key id without a secret.
    """
    return b"".join(_pieces(header, segments, secret))


def write(file: BinaryIO, header: Header, segments: Sequence[bytes], *, secret: bytes | None = None) -> int:
    """Writes a chunk file (see `pack`) piece by piece.

    Returns:
        Bytes written.
    """
    written = 0
    for piece in _pieces(header, segments, secret):
        file.write(piece)
        written += len(piece)
    return written


def _pieces(header: Header, segments: Sequence[bytes], secret: bytes | None) -> list[bytes]:
    if len(segments) != header.segments:
        raise ValueError(f"{len(segments)} segments for a header that speaks of {header.segments}")
    if (secret is None) != (header.key_id is None):
        raise ValueError("a secret and a key id (b'' will do) belong together")
    tag = None if secret is None else Tag(secret, header.namespace)
    seal = tag or Checksum()
    sizes = [f.aligned(len(segment)) for segment in segments]
    if sizes:
        sizes[-1] += f.aligned(max(0, -(-header.decoded_bytes // f.MAX_RATIO) - sum(sizes)))
    if max(sizes) > f.MAX_SEGMENT:
        raise ChunkFileError(f"a segment of {max(sizes):,} bytes: take smaller groups or chunks", reason="limit")
    padded = [_padded(segment, size) for segment, size in zip(segments, sizes, strict=True)]
    checks = tuple(seal.segment(number, segment) for number, segment in enumerate(padded))
    head = Head(_without_long_text(header, len(padded) * (4 + seal.size)), tuple(sizes), checks)
    head.check_sizes(max_bytes=header.decoded_bytes)
    return [pack_head(head, tag), *padded]


def _padded(segment: bytes, size: int) -> bytes:
    return segment if len(segment) == size else segment + bytes(size - len(segment))


def _without_long_text(header: Header, index_bytes: int) -> Header:
    """The header, without its text where there is no room for it."""
    if header.text is None:
        return header
    fixed = f.PRELUDE.size + f.FIELDS.size + f.LAYER.size * len(header.layers) + f.HEAD_TAG_BYTES + f.ALIGN
    fixed += f.TOKEN_STREAM.size * f.MAX_TOKEN_STREAMS + f.MAX_KEY_ID + 3 * f.MAX_NAME_BYTES
    variable = len(header.ids) + len(header.conditioning) + index_bytes + len(utf8(header.text))
    return header if fixed + variable <= f.MAX_HEAD else replace(header, text=None)
