"""Who may ask: tokens, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from blendkv.errors import StoreError

SHORTEST = 16
FILE = "gateway-token"
_BEARER = b"bearer "


class Caller(NamedTuple):
    """Somebody with a token.

    Attributes:
        name: says whose token it is, in this process alone, and tells nothing of the token.
        writes: whether it may put.
    """

    name: str
    writes: bool


class Tokens:
    """The tokens of a gateway. Only their hashes are kept.

    Args:
        tokens: of those who may read and write.
        readers: of those who may only read.

    Raises:
        ValueError: if there is none, or one is too short or cannot be sent in a header.
    """

    def __init__(self, tokens: Iterable[str], readers: Iterable[str] = ()) -> None:
        salt = secrets.token_bytes(16)
        self._known: list[tuple[bytes, Caller]] = []
        for writes, given in ((True, tokens), (False, readers)):
            for token in given:
                _check(token)
                digest = hashlib.sha256(token.encode()).digest()
                name = hashlib.blake2b(digest, key=salt, digest_size=4).hexdigest()
                self._known.append((digest, Caller(name, writes)))
        if not self._known:
            raise ValueError("no token: give one, so that not everybody who reaches the gateway is served")

    def find(self, authorization: bytes | None) -> Caller | None:
        """Who sends this header, or None. All tokens are looked at, whichever fits."""
        value = authorization or b""
        given = value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else b""
        digest, found = hashlib.sha256(given).digest(), None
        for known, caller in self._known:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def token_file(path: Path) -> tuple[list[str], bool]:
    """The tokens in a file, one a line, and whether it was made now: with a new one, for this user only.

    Raises:
        StoreError: if it cannot be read or made, holds none, or others may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return _read(path), False
        token = secrets.token_urlsafe(32)
        with os.fdopen(fd, "w") as file:
            file.write(token + "\n")
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"the file of tokens {path} cannot be read or made: {error.strerror or error}") from error
    return [token], True


def _read(path: Path) -> list[str]:
    if path.stat().st_mode & 0o077:
        raise StoreError(f"the file of tokens {path} is open to other users: chmod 600 it, or make new tokens")
    tokens = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    if not tokens:
        raise StoreError(f"the file of tokens {path} is empty: write one a line, or delete it and a new one is made")
    return tokens


def _check(token: str) -> None:
    if len(token) < SHORTEST:
        raise ValueError(f"a token of {len(token)} characters can be guessed: give at least {SHORTEST}")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise ValueError("a token has printable ASCII characters and no space around it")
