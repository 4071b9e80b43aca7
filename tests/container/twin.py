"""docs/format.md as a slow, obvious program, which shares nothing with the reader."""

from __future__ import annotations

import hashlib
import itertools
import struct

import xxhash


def parse(data: bytes, secret: bytes | None = None) -> dict:
    """Everything a chunk file says, with its segments; `AssertionError` or `struct.error` for a bad one."""
    assert data[:8] == bytes.fromhex("8B424B560D0A1A0A")
    version, flags = struct.unpack("<HH", data[8:12])
    assert version == 1
    assert flags < 8
    (head_bytes,) = struct.unpack("<I", data[12:16])
    (total,) = struct.unpack("<Q", data[16:24])
    (check,) = struct.unpack("<Q", data[24:32])
    assert total == len(data)
    end = 32 + head_bytes
    assert end <= 2**20
    assert end % 16 == 0
    assert xxhash.xxh3_64(data[:24] + data[32:end]).intdigest() == check
    authenticated = flags & 1
    found: dict = {"flags": flags}
    found["codec"] = data[32:48].decode("ascii").rstrip("\0")
    (found["level"],) = struct.unpack("<h", data[48:50])
    found["dtype"] = {1: "fp32", 2: "fp16", 3: "bf16"}[data[50]]
    parts, streams, token_streams, key_id_bytes, zero = data[51:56]
    assert zero == 0
    found["profile"] = data[56:72].hex()
    tokens, group = struct.unpack("<II", data[72:80])
    unit, layers, n_fingerprint, n_tokenizer, n_namespace, zero = struct.unpack("<6H", data[80:92])
    assert zero == 0
    n_conditioning, n_text = struct.unpack("<II", data[92:100])
    found |= {"group": group, "unit": unit, "parts": parts, "streams": streams}
    at = 100

    def take(n: int) -> bytes:
        nonlocal at
        piece = data[at : at + n]
        assert len(piece) == n
        at += n
        return piece

    found["layers"] = [struct.unpack("<HHH", take(6)) for _ in range(layers)]
    found["token_streams"] = []
    for _ in range(token_streams):
        name = take(16).decode("ascii").rstrip("\0")
        found["token_streams"].append((name, {1: "fp32", 2: "fp16", 3: "bf16"}[take(1)[0]]))
    assert found["token_streams"] == sorted(found["token_streams"])
    found["key_id"] = take(key_id_bytes)
    found["fingerprint"] = take(n_fingerprint).decode()
    found["tokenizer"] = take(n_tokenizer).decode()
    found["namespace"] = take(n_namespace).decode()
    found["conditioning"] = list(struct.unpack(f"<{n_conditioning}I", take(4 * n_conditioning)))
    found["ids"] = list(struct.unpack(f"<{tokens}I", take(4 * tokens)))
    found["text"] = take(n_text).decode() if flags & 4 else None
    stored = layers - 1 if flags & 2 else layers
    units = (stored + unit - 1) // unit
    groups = (tokens + group - 1) // group
    index = []
    for _ in range(token_streams + streams * units * parts * groups):
        (length,) = struct.unpack("<I", take(4))
        assert length % 16 == 0
        index.append((length, take(16 if authenticated else 8)))
    while at % 16:
        assert take(1) == b"\0"
    key = b""
    if authenticated:
        assert secret is not None
        key = hashlib.blake2b(
            found["namespace"].encode(), key=secret, person=b"blendkv mac".ljust(16, b"\0"), digest_size=64
        ).digest()
        tag = hashlib.blake2b(data[:24] + data[32:at], key=key, person=b"head".ljust(16, b"\0"), digest_size=32)
        assert take(32) == tag.digest()
    else:
        assert secret is None
    assert at == end
    found["segments"] = []
    for number, (length, seal) in enumerate(index):
        segment = take(length)
        if authenticated:
            person = b"segment " + struct.pack("<Q", number)
            assert seal == hashlib.blake2b(segment, key=key, person=person, digest_size=16).digest()
        else:
            assert seal == struct.pack("<Q", xxhash.xxh3_64(segment, seed=number).intdigest())
        found["segments"].append(segment)
    assert at == total
    names = [name for name, _ in found["token_streams"]]
    found["named"] = dict(zip(names, found["segments"], strict=False))
    rest = found["segments"][token_streams:]
    order = itertools.product(range(streams), range(units), range(parts), range(groups))
    found["coded"] = dict(zip(order, rest, strict=True))
    return found
