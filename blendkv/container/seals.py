"""What stands in the index beside each segment: a checksum against accidents, or a tag against forgery."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import xxhash

from blendkv.container.format import CHECK_BYTES, HEAD_TAG_BYTES, TAG_BYTES
from blendkv.errors import ChunkFileError

Secret = bytes | Mapping[bytes, bytes]
"""A secret of 16 to 64 bytes, or several by key id, while one replaces another."""


class Checksum:
    """xxh3_64, seeded with the segment's number."""

    size = CHECK_BYTES
    reason = "checksum"
    advice = "the bytes are damaged; delete the entry and compute the chunk again"

    def segment(self, number: int, payload: Any) -> bytes:
        """The checksum of a segment, with its padding."""
        return xxhash.xxh3_64_intdigest(payload, number).to_bytes(self.size, "little")

    def holds(self, number: int, payload: Any, check: bytes) -> bool:
        """Whether a segment has that checksum."""
        return xxhash.xxh3_64_intdigest(payload, number) == int.from_bytes(check, "little")


class Tag:
    """Keyed BLAKE2b; the key is the secret's for one namespace.

    Args:
        secret: 16 to 64 bytes.
        namespace: of the chunk.

    Raises:
        ValueError: for a secret of another length.
    """

    size = TAG_BYTES
    reason = "authentication"
    advice = "it was changed, or sealed with another secret; delete the entry, or give the secret of its key id"

    def __init__(self, secret: bytes, namespace: str) -> None:
        check_secret(secret)
        self._key = hashlib.blake2b(namespace.encode(), key=secret, person=b"blendkv mac", digest_size=64).digest()

    def segment(self, number: int, payload: Any) -> bytes:
        """The tag of a segment, with its padding."""
        person = b"segment " + number.to_bytes(8, "little")
        return hashlib.blake2b(payload, key=self._key, person=person, digest_size=self.size).digest()

    def holds(self, number: int, payload: Any, check: bytes) -> bool:
        """Whether a segment has that tag."""
        return same(self.segment(number, payload), check)

    def head(self, head: Any) -> bytes:
        """The tag of the head: everything before the tag but the prelude's check."""
        return hashlib.blake2b(head, key=self._key, person=b"head", digest_size=HEAD_TAG_BYTES).digest()


def check_secret(secret: bytes | None) -> None:
    """Refuses what is no secret; None is none.

    Raises:
        ValueError: for something else than 16 to 64 bytes.
    """
    if secret is not None and not isinstance(secret, bytes):
        raise ValueError(f"a secret that is a {type(secret).__name__}: take bytes, as of secrets.token_bytes(32)")
    if secret is not None and not 16 <= len(secret) <= 64:
        raise ValueError(f"a secret of {len(secret)} bytes: take 16 to 64 random ones, as of secrets.token_bytes(32)")


def head_check(head: Any) -> int:
    """The checksum of the prelude and the head, without the eight bytes that hold it."""
    return xxhash.xxh3_64_intdigest(head)


def same(a: bytes, b: Any) -> bool:
    """Whether two tags are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(a, bytes(b))


def choose(secret: Secret, key_id: bytes) -> bytes:
    """The secret of a key id.

    Raises:
        ChunkFileError: if there is none.
    """
    if isinstance(secret, bytes):
        return secret
    if key_id not in secret:
        raise ChunkFileError(
            f"the chunk file was sealed with key {key_id!r}, which is not among the secrets given; add it, or delete "
            "the entry",
            reason="authentication",
        )
    return secret[key_id]
