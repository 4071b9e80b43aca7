"""A chunk file to verified segments, in ranged reads."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Self

from blendkv.container import format as f
from blendkv.container.header import Head, Header
from blendkv.container.packing import Prelude, parse_head, parse_prelude
from blendkv.container.seals import Checksum, Secret, Tag, choose, same
from blendkv.container.sources import FileSource, MemorySource, Source, as_source, read_exactly
from blendkv.errors import ChunkFileError

FIRST_READ = 1 << 14
"""Bytes read to begin with: most heads fit, and a second read fetches the rest of one that does not."""


class ContainerReader:
    """An open chunk file. Its head was verified; segments are verified when they are read.

    Args:
        source: bytes, a path, a seekable binary file or a `Source`.
        secret: the secret, or secrets by key id. With one, only files that it sealed are read; without, only files
            that nobody sealed.
        max_bytes: most bytes that keys and values may take when decoded.

    Attributes:
        size: bytes of the file.
        starts: where each segment begins, counted from the beginning of the file, and where the last one ends.

    Raises:
        ChunkFileError: if this is no such file, or not a whole one.
        OSError: from the source.
        TypeError: for something that is no source.
    """

    def __init__(self, source: Any, *, secret: Secret | None = None, max_bytes: int = f.MAX_DECODED) -> None:
        self._source = as_source(source)
        self._ours = self._source is not source
        try:
            self._head = self._open(secret, max_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, secret: Secret | None, max_bytes: int) -> Head:
        self.size = self._source.size
        data = read_exactly(self._source, 0, min(self.size, FIRST_READ))
        prelude = parse_prelude(data, self.size)
        if secret is not None and not prelude.flags & f.AUTHENTICATED:
            raise ChunkFileError(
                "the chunk file is not sealed, and a secret was given, which means that only sealed ones are trusted; "
                "delete the entry",
                reason="authentication",
            )
        if secret is None and prelude.flags & f.AUTHENTICATED:
            raise ChunkFileError("the chunk file is sealed: give the secret that sealed it", reason="authentication")
        data = _front(self._source, data, prelude)
        head = parse_head(data, prelude)
        self._seal: Checksum | Tag = Checksum()
        if secret is not None:
            self._seal = self._verified(head.header, data, secret)
        head.check_sizes(max_bytes)
        self.starts = tuple(accumulate(head.lengths, initial=prelude.head_end))
        return head

    def _verified(self, header: Header, data: memoryview, secret: Secret) -> Tag:
        tag = Tag(choose(secret, header.key_id or b""), header.namespace)
        end = len(data) - f.HEAD_TAG_BYTES
        if not same(tag.head(bytes(data[: f.CHECKED]) + data[f.PRELUDE.size : end]), data[end:]):
            raise ChunkFileError(f"the head of the chunk file is not genuine: {Tag.advice}", reason="authentication")
        return tag

    @property
    def header(self) -> Header:
        """What the file says about itself."""
        return self._head.header

    def segments(self, numbers: range) -> list[memoryview]:
        """Consecutive segments, with their padding, verified; one ranged read.

        Raises:
            ChunkFileError: with reason "checksum", "authentication" or "truncated".
            OSError: from the source.
        """
        return self.joined(numbers)[1] if numbers else []

    def joined(self, numbers: range) -> tuple[memoryview, list[memoryview]]:
        """The bytes of at least one segment, and `segments`, which are views of them."""
        start = self.starts[numbers.start]
        data = read_exactly(self._source, start, self.starts[numbers.stop] - start)
        found, starts, checks, holds = [], self.starts, self._head.checks, self._seal.holds
        for number in numbers:
            segment = data[starts[number] - start : starts[number + 1] - start]
            if not holds(number, segment, checks[number]):
                raise ChunkFileError(
                    f"segment {number} of the chunk file is not what was written: {self._seal.advice}",
                    reason=self._seal.reason,
                )
            found.append(segment)
        return data, found

    def unit(self, unit: int, stream: int = 0) -> list[memoryview]:
        """The segments of a unit in one stream, by part and group; one ranged read."""
        return self.segments(self.header.segments_of(unit, stream))

    def streams(self, count: int) -> list[memoryview]:
        """Segments of all units of the first `count` streams; one ranged read."""
        first = len(self.header.token_streams)
        return self.segments(range(first, first + count * self.header.units * self.header.unit_segments))

    def token_stream(self, name: str) -> memoryview:
        """The bytes of a token stream, without padding.

        Raises:
            KeyError: for an unknown name.
        """
        for number, stream in enumerate(self.header.token_streams):
            if stream.name == name:
                return self.segments(range(number, number + 1))[0][: stream.nbytes(self.header.tokens)]
        raise KeyError(f"no token stream {name!r}; there are {[stream.name for stream in self.header.token_streams]}")

    def close(self) -> None:
        """Closes what was opened for a path."""
        if self._ours and isinstance(self._source, (FileSource, MemorySource)):
            self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_head(source: Any) -> Head:
    """The head of a chunk file, sealed or not, for those who list and look: its checksum holds, its seal is not asked.

    Args:
        source: as for `ContainerReader`; a file that was opened for a path is closed again.

    Raises:
        ChunkFileError: if this is no chunk file, or its head is damaged.
        OSError: from the source.
        TypeError: for something that is no source.
    """
    opened = as_source(source)
    try:
        data = read_exactly(opened, 0, min(opened.size, FIRST_READ))
        prelude = parse_prelude(data, opened.size)
        return parse_head(_front(opened, data, prelude), prelude)
    finally:
        if opened is not source and isinstance(opened, (FileSource, MemorySource)):
            opened.close()


def _front(source: Source, data: memoryview, prelude: Prelude) -> memoryview:
    """Everything before the payload, of which `data` has been read."""
    if prelude.head_end > len(data):
        rest = read_exactly(source, len(data), prelude.head_end - len(data))
        data = memoryview(b"".join((data, rest)))
    return data[: prelude.head_end]
