"""A head as bytes, in the one way that the format allows, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import iter_unpack, pack

from blendkv.container import format as f
from blendkv.container.header import Arrangement, Head, Header, LayerShape, TokenStream, check_arrangement, utf8
from blendkv.container.seals import Tag, head_check
from blendkv.errors import ChunkFileError


@dataclass(frozen=True)
class Prelude:
    """The first 32 bytes.

    Attributes:
        flags: bits of `format.FLAGS`.
        head_end: where the head ends and the payload begins.
        total: bytes of the file.
        check: of everything before the payload.
    """

    flags: int
    head_end: int
    total: int
    check: int


def pack_head(head: Head, tag: Tag | None = None) -> bytes:
    """Everything before the payload.

    Args:
        head: what to write; its tags are in it.
        tag: seals the head; given if and only if the header has a key id.

    Raises:
        ChunkFileError: if it takes more than 1 MiB.
    """
    header, arrangement = head.header, head.header.arrangement
    key_id, text = header.key_id or b"", utf8(header.text or "")
    fingerprint, tokenizer, namespace = map(utf8, (header.fingerprint, header.tokenizer, header.namespace))
    fields = f.Fields(
        codec=header.codec.encode(),
        level=header.level,
        dtype=f.DTYPES[header.dtype][0],
        parts=arrangement.parts,
        streams=arrangement.streams,
        token_streams=len(header.token_streams),
        key_id_bytes=len(key_id),
        zero=0,
        profile=bytes.fromhex(header.profile_hash or "0" * 32),
        tokens=header.tokens,
        group_tokens=arrangement.group_tokens,
        unit_layers=arrangement.unit_layers,
        layers=len(header.layers),
        fingerprint_bytes=len(fingerprint),
        tokenizer_bytes=len(tokenizer),
        namespace_bytes=len(namespace),
        zero2=0,
        conditioning=len(header.conditioning) // 4,
        text_bytes=len(text),
    )
    layers = [f.LAYER.pack(s.heads, s.key_dim, s.value_dim) for s in header.layers]
    streams = [f.TOKEN_STREAM.pack(s.name.encode(), f.DTYPES[s.dtype][0]) for s in header.token_streams]
    variable = (key_id, fingerprint, tokenizer, namespace, header.conditioning, header.ids, text)
    body = b"".join((f.FIELDS.pack(*fields), *layers, *streams, *variable, *_index(head)))
    body += bytes(f.aligned(len(body)) - len(body))
    end = f.PRELUDE.size + len(body) + (0 if tag is None else f.HEAD_TAG_BYTES)
    if end > f.MAX_HEAD:
        raise ChunkFileError(
            f"a head of {end:,} bytes, more than {f.MAX_HEAD:,}: cut the text into smaller chunks, or take a codec "
            "with larger groups",
            reason="limit",
        )
    flags = f.AUTHENTICATED * (header.key_id is not None) | f.NO_LAYER0 * (not header.layer0)
    flags |= f.HAS_TEXT * (header.text is not None)
    prelude = (f.MAGIC, f.VERSION, flags, end - f.PRELUDE.size, end + head.payload_bytes)
    front = f.PRELUDE.pack(*prelude, 0)[: f.CHECKED]
    if tag is not None:
        body += tag.head(front + body)
    return front + pack("<Q", head_check(front + body)) + body


def parse_prelude(data: memoryview, size: int) -> Prelude:
    """The prelude of a file, checked as far as it can be alone.

    Args:
        data: its first 32 bytes, or all of a shorter file.
        size: bytes of the whole file.

    Raises:
        ChunkFileError: with reason "magic", "truncated", "version", "header", "limit" or "length".
    """
    if bytes(data[: len(f.MAGIC)]) != f.MAGIC[: len(data)]:
        raise ChunkFileError(
            "not a chunk file of blendkv: it begins with other bytes; delete the entry", reason="magic"
        )
    if len(data) < f.PRELUDE.size:
        raise ChunkFileError(f"the chunk file ends after {size} bytes; delete the entry", reason="truncated")
    _, version, flags, head_length, total, check = f.PRELUDE.unpack(data[: f.PRELUDE.size])
    if version != f.VERSION:
        raise ChunkFileError(
            f"the chunk file has version {version}, this blendkv reads version {f.VERSION}: install a version that "
            "knows it, or delete the entry",
            reason="version",
        )
    end = f.PRELUDE.size + head_length
    if end > f.MAX_HEAD:
        raise ChunkFileError(
            f"the chunk file declares a head of {head_length:,} bytes; delete the entry", reason="limit"
        )
    if total != size or end > size:
        raise ChunkFileError(
            f"the chunk file should have {max(total, end):,} bytes and has {size:,}; delete the entry",
            reason="truncated" if max(total, end) > size else "length",
        )
    if flags & ~f.FLAGS:
        raise _malformed(f"unknown flags {flags:#06x}")
    return Prelude(flags, end, total, check)


def parse_head(data: bytes | memoryview, prelude: Prelude) -> Head:
    """The head of a file; its tag, if it has one, is not looked at.

    Args:
        data: everything before the payload.
        prelude: of the file.

    Raises:
        ChunkFileError: with reason "checksum", "header" or "limit".
    """
    data = bytes(data)  # no views: iterators over them would be kept by a traceback, which CPython cannot collect
    if head_check(data[: f.CHECKED] + data[f.PRELUDE.size :]) != prelude.check:
        raise ChunkFileError("the head of the chunk file is damaged; delete the entry", reason="checksum")
    authenticated = bool(prelude.flags & f.AUTHENTICATED)
    end = prelude.head_end - (f.HEAD_TAG_BYTES if authenticated else 0)
    if end < f.PRELUDE.size + f.FIELDS.size:
        raise _malformed("its head is too short")
    fields = f.Fields(*f.FIELDS.unpack_from(data, f.PRELUDE.size))
    sizes, entry = _sizes(fields, prelude.flags), 4 + (f.TAG_BYTES if authenticated else f.CHECK_BYTES)
    used = f.PRELUDE.size + f.FIELDS.size + sum(sizes)
    if f.aligned(used) != end:
        raise _malformed(f"its counts ask for a head of {f.aligned(used):,} bytes, it has {end:,}")
    if fields.zero or fields.zero2 or any(data[used:end]):
        raise _malformed("bytes that must be zero are not")
    if fields.key_id_bytes and not authenticated:
        raise _malformed("a key id without authentication")
    if fields.text_bytes and not prelude.flags & f.HAS_TEXT:
        raise _malformed("a text without its flag")
    layers, streams, key_id, fingerprint, tokenizer, namespace, conditioning, ids, text, index = _cut(
        data, f.PRELUDE.size + f.FIELDS.size, sizes
    )
    header = Header(
        codec=_name(fields.codec),
        level=fields.level,
        dtype=_dtype(fields.dtype),
        arrangement=_arrangement(fields),
        layers=tuple(LayerShape(*shape) for shape in f.LAYER.iter_unpack(layers)),
        fingerprint=_text(fingerprint),
        ids=ids,
        profile_hash=fields.profile.hex() if any(fields.profile) else "",
        conditioning=conditioning,
        tokenizer=_text(tokenizer),
        namespace=_text(namespace),
        text=_text(text) if prelude.flags & f.HAS_TEXT else None,
        layer0=not prelude.flags & f.NO_LAYER0,
        token_streams=tuple(TokenStream(_name(n), _dtype(d)) for n, d in f.TOKEN_STREAM.iter_unpack(streams)),
        key_id=key_id if authenticated else None,
    )
    lengths = tuple(length for (length,) in iter_unpack(f"<I{entry - 4}x", index))
    checks = tuple(index[at + 4 : at + entry] for at in range(0, len(index), entry))
    head = Head(header, lengths, checks)
    if any(length % f.ALIGN for length in head.lengths):
        raise _malformed(f"a segment's length is no multiple of {f.ALIGN}")
    if prelude.head_end + head.payload_bytes != prelude.total:
        raise _malformed("its segments do not add up to its length")
    return head


def _index(head: Head) -> Iterable[bytes]:
    for length, check in zip(head.lengths, head.checks, strict=True):
        yield pack("<I", length) + check


def _arrangement(fields: f.Fields) -> Arrangement:
    return Arrangement(fields.group_tokens, fields.unit_layers, fields.parts, fields.streams)


def _sizes(fields: f.Fields, flags: int) -> list[int]:
    """Bytes of everything between the fixed fields and the padding, in order."""
    check_arrangement(_arrangement(fields))
    stored = fields.layers - bool(flags & f.NO_LAYER0)
    if stored < 1:
        raise _malformed("it holds no layer")
    groups, units = -(-fields.tokens // fields.group_tokens), -(-stored // fields.unit_layers)
    segments = fields.token_streams + fields.streams * units * fields.parts * groups
    names = [fields.key_id_bytes, fields.fingerprint_bytes, fields.tokenizer_bytes, fields.namespace_bytes]
    return [
        f.LAYER.size * fields.layers,
        f.TOKEN_STREAM.size * fields.token_streams,
        *names,
        4 * fields.conditioning,
        4 * fields.tokens,
        fields.text_bytes,
        segments * (4 + (f.TAG_BYTES if flags & f.AUTHENTICATED else f.CHECK_BYTES)),
    ]


def _cut(data: bytes, at: int, sizes: Sequence[int]) -> Iterable[bytes]:
    for size in sizes:
        yield data[at : at + size]
        at += size


def _malformed(what: str) -> ChunkFileError:
    return ChunkFileError(f"malformed chunk file: {what}; delete the entry", reason="header")


def _name(padded: bytes) -> str:
    name = padded.rstrip(b"\0")
    if not name.isascii():
        raise _malformed("a name that is not ASCII")
    return name.decode("ascii")


def _dtype(code: int) -> str:
    if code not in f.DTYPE_NAMES:
        raise _malformed(f"unknown dtype {code}")
    return f.DTYPE_NAMES[code]


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _malformed("a text that is not UTF-8") from None
