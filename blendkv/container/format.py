"""Constants of the chunk file, version 1. docs/format.md explains them."""

from __future__ import annotations

import re
from struct import Struct
from typing import NamedTuple

MAGIC = b"\x8bBKV\r\n\x1a\n"
"""A byte above 127, CR LF, end-of-file of DOS, LF: a transfer as text damages at least one of them."""
VERSION = 1

AUTHENTICATED, NO_LAYER0, HAS_TEXT = 1, 2, 4
FLAGS = AUTHENTICATED | NO_LAYER0 | HAS_TEXT

PRELUDE = Struct("<8sHHIQQ")
"""Magic, version, flags, bytes of the head after this prelude, bytes of the file, check of all before the payload."""
CHECKED = PRELUDE.size - 8
"""Bytes of the prelude in front of the check, which it covers with the rest of the head."""
FIELDS = Struct("<16sh6B16sIIHHHHHHII")
"""`Fields`, in order."""
LAYER = Struct("<HHH")
"""Heads, head dim of keys, head dim of values."""
TOKEN_STREAM = Struct("<16sB")
"""Name, dtype."""

CHECK_BYTES, TAG_BYTES, HEAD_TAG_BYTES = 8, 16, 32
"""Of a segment's checksum, of its tag in an authenticated file, of the head's tag there."""
ALIGN = 16
"""Bytes: the payload and every segment start at a multiple of it."""

DTYPES = {"fp32": (1, 4), "fp16": (2, 2), "bf16": (3, 2)}
"""Name -> code, bytes of an element."""
DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}

NAME = re.compile(r"[a-z0-9-]{1,16}")
PROFILE = re.compile(r"[0-9a-f]{32}")

MAX_HEAD = 1 << 20
MAX_TOKENS = 1 << 17
MAX_LAYERS = 1024
MAX_PARTS = 16
MAX_STREAMS = 8
MAX_TOKEN_STREAMS = 8
MAX_DIM = (1 << 16) - 1
MAX_KEY_ID = 16
MAX_NAME_BYTES = 1024
"""Of fingerprint, tokenizer and namespace, in UTF-8."""
MAX_SEGMENT = (1 << 32) - ALIGN
MAX_DECODED = 16 << 30
"""Bytes of keys and values that a reader makes room for unless it is told otherwise."""
MAX_RATIO = 4096
"""Decoded bytes for each byte of payload."""


class Fields(NamedTuple):
    """What every head begins with; `_bytes` are lengths of what follows, other plurals are counts."""

    codec: bytes
    level: int
    dtype: int
    parts: int
    streams: int
    token_streams: int
    key_id_bytes: int
    zero: int
    profile: bytes
    tokens: int
    group_tokens: int
    unit_layers: int
    layers: int
    fingerprint_bytes: int
    tokenizer_bytes: int
    namespace_bytes: int
    zero2: int
    conditioning: int
    text_bytes: int


def aligned(size: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN
