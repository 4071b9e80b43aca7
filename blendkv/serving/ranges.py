"""Which bytes a request wants: `Range`, `If-Range`, `If-Match` and `If-None-Match` of RFC 9110."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANGE = re.compile(rb"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*", re.IGNORECASE)
_TAG = re.compile(rb'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')


class Wanted(NamedTuple):
    """What to answer with.

    Attributes:
        status: 200, 206, 304, 412 or 416.
        start: first byte.
        stop: after the last one.
    """

    status: int
    start: int
    stop: int


def wanted(headers: dict[bytes, bytes], size: int, etag: bytes | None) -> Wanted:
    """What a GET or HEAD with these headers wants of an entry.

    A `Range` of several ranges, or one that makes no sense, counts as none, as RFC 9110 allows: all of it is sent.

    Args:
        headers: by name, in lower case.
        size: bytes of the entry.
        etag: of the entry, with its quotes.
    """
    match = headers.get(b"if-match")
    if match is not None and not _names(match, etag):
        return Wanted(412, 0, 0)
    none = headers.get(b"if-none-match")
    if none is not None and _names(none, etag):
        return Wanted(304, 0, 0)
    condition = headers.get(b"if-range")
    if condition is not None and (etag is None or condition.strip() != etag):
        return Wanted(200, 0, size)
    found = _RANGE.fullmatch(headers.get(b"range", b""))
    if found is None or not (found[1] or found[2]):
        return Wanted(200, 0, size)
    if not found[1]:  # the last so many bytes
        length = int(found[2])
        return Wanted(206, max(0, size - length), size) if length and size else Wanted(416, 0, 0)
    start, stop = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    if found[2] and int(found[2]) < start:
        return Wanted(200, 0, size)
    return Wanted(206, start, stop) if start < size else Wanted(416, 0, 0)


def _names(value: bytes, etag: bytes | None) -> bool:
    return etag is not None and (value.strip() == b"*" or etag in _TAG.findall(value))
