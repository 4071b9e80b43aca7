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
    header = head.header
    names = [utf8(name) for name in (header.fingerprint, header.tokenizer, header.namespace)]
    text = utf8(header.text or "")
    arrangement = header.arrangement
    fields = f.FIELDS.pack(
        header.codec.encode(),
        header.level,
        f.DTYPES[header.dtype][0],
        arrangement.parts,
        arrangement.streams,
        len(header.token_streams),
        len(header.key_id or b""),
        0,
        bytes.fromhex(header.profile_hash or "0" * 32),
        header.tokens,
        arrangement.group_tokens,
        arrangement.unit_layers,
        len(header.layers),
        *map(len, names),
        0,
        len(header.conditioning) // 4,
        len(text),
    )
    layers = [f.LAYER.pack(s.heads, s.key_dim, s.value_dim) for s in header.layers]
    streams = [f.TOKEN_STREAM.pack(s.name.encode(), f.DTYPES[s.dtype][0]) for s in header.token_streams]
    index = [pack("<I", length) + check for length, check in zip(head.lengths, head.checks, strict=True)]
    variable = (header.key_id or b"", *names, header.conditioning, header.ids, text)
    body = b"".join((fields, *layers, *streams, *variable, *index))
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


def parse_head(data: memoryview, prelude: Prelude) -> Head:
    """The head of a file; its tag, if it has one, is not looked at.

    Args:
        data: everything before the payload.
        prelude: of the file.

    Raises:
        ChunkFileError: with reason "checksum", "header" or "limit".
    """
    if head_check(bytes(data[: f.CHECKED]) + data[f.PRELUDE.size :]) != prelude.check:
        raise ChunkFileError("the head of the chunk file is damaged; delete the entry", reason="checksum")
    authenticated = bool(prelude.flags & f.AUTHENTICATED)
    end = prelude.head_end - (f.HEAD_TAG_BYTES if authenticated else 0)
    if end < f.PRELUDE.size + f.FIELDS.size:
        raise _malformed("its head is too short")
    codec, level, dtype, parts, streams, n_streams, n_key_id, zero, profile, *numbers = f.FIELDS.unpack_from(
        data, f.PRELUDE.size
    )
    tokens, group_tokens, unit_layers, n_layers, n_fingerprint, n_tokenizer, n_namespace, zero2, *numbers = numbers
    n_conditioning, n_text = numbers
    arrangement = Arrangement(group_tokens, unit_layers, parts, streams)
    check_arrangement(arrangement)
    if n_layers < (2 if prelude.flags & f.NO_LAYER0 else 1):
        raise _malformed("it holds no layer")
    stored = n_layers - bool(prelude.flags & f.NO_LAYER0)
    groups, units = -(-tokens // group_tokens), -(-stored // unit_layers)
    segments = n_streams + streams * units * parts * groups
    entry = 4 + (f.TAG_BYTES if authenticated else f.CHECK_BYTES)
    sizes = [f.LAYER.size * n_layers, f.TOKEN_STREAM.size * n_streams, n_key_id]
    sizes += [n_fingerprint, n_tokenizer, n_namespace, 4 * n_conditioning, 4 * tokens, n_text, entry * segments]
    used = f.PRELUDE.size + f.FIELDS.size + sum(sizes)
    if f.aligned(used) != end:
        raise _malformed(f"its counts ask for a head of {f.aligned(used):,} bytes, it has {end:,}")
    if zero or zero2 or any(data[used:end]):
        raise _malformed("bytes that must be zero are not")
    layers, named, key_id, fingerprint, tokenizer, namespace, conditioning, ids, text, index = _cut(
        data, f.PRELUDE.size + f.FIELDS.size, sizes
    )
    if n_key_id and not authenticated:
        raise _malformed("a key id without authentication")
    if n_text and not prelude.flags & f.HAS_TEXT:
        raise _malformed("a text without its flag")
    header = Header(
        codec=_name(codec),
        level=level,
        dtype=_dtype(dtype),
        arrangement=arrangement,
        layers=tuple(LayerShape(*shape) for shape in f.LAYER.iter_unpack(layers)),
        fingerprint=_text(fingerprint),
        ids=bytes(ids),
        profile_hash=profile.hex() if any(profile) else "",
        conditioning=bytes(conditioning),
        tokenizer=_text(tokenizer),
        namespace=_text(namespace),
        text=_text(text) if prelude.flags & f.HAS_TEXT else None,
        layer0=not prelude.flags & f.NO_LAYER0,
        token_streams=tuple(TokenStream(_name(n), _dtype(d)) for n, d in f.TOKEN_STREAM.iter_unpack(named)),
        key_id=bytes(key_id) if authenticated else None,
    )
    entries = list(iter_unpack(f"<I{entry - 4}s", index))
    head = Head(header, tuple(length for length, _ in entries), tuple(check for _, check in entries))
    if any(length % f.ALIGN for length in head.lengths):
        raise _malformed(f"a segment's length is no multiple of {f.ALIGN}")
    if prelude.head_end + head.payload_bytes != prelude.total:
        raise _malformed("its segments do not add up to its length")
    return head


def _cut(data: memoryview, at: int, sizes: Sequence[int]) -> Iterable[memoryview]:
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


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise _malformed("a text that is not UTF-8") from None
