"""One chunk file put together from ranges in any order, each segment checked on arrival; what is there is used.

A segment's address is its number, which stands for stream, unit, part and group (docs/format.md), and its checksum is
in the head. So whoever joins them needs no order: base before refinements, single refinements before their base, or
half of it from another source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import DTYPES, Codec, Profiles
from blendkv.container import ContainerReader, Header
from blendkv.container.format import MAX_DECODED, MAX_HEAD, PRELUDE
from blendkv.container.packing import parse_prelude
from blendkv.container.seals import Secret
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import id_in

MAX_FILE = 1 << 32
"""Bytes of a file that room is made for; what is larger was not written by us, or is no chunk."""


class Place(NamedTuple):
    """What a segment is of: stream (0 the base), unit of layers, part (keys, values, ...), group of tokens."""

    stream: int
    unit: int
    part: int
    group: int


def place_of(header: Header, number: int) -> Place | None:
    """The address of a segment; None for a token stream, which stands before all layers."""
    number -= len(header.token_streams)
    if number < 0:
        return None
    groups = -(-header.tokens // header.arrangement.group_tokens)
    number, group = divmod(number, groups)
    number, part = divmod(number, header.arrangement.parts)
    stream, unit = divmod(number, header.units)
    return Place(stream, unit, part, group)


class Assembly:
    """A chunk file as far as it has come. For one thread at a time.

    Args:
        size: of the file, as its source says.
        secret: of a sealed file.
        codec: that wrote it, if it is at hand.
        profiles: where profiles of codecs are found.
        device: where tensors go.

    Attributes:
        size: of the file.
        wrong: bytes that came and were not what was written.
        suspects: sources that gave some of what was found wrong by the last `add`.

    Raises:
        ChunkFileError: for a size that no chunk file has.
    """

    def __init__(
        self,
        size: int,
        *,
        secret: Secret | None = None,
        codec: Codec | None = None,
        profiles: Profiles | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not PRELUDE.size <= size <= MAX_FILE:
            raise ChunkFileError(f"a chunk file of {size:,} bytes: that is none; delete the entry", reason="length")
        self.size, self.wrong = size, 0
        self._settings: dict[str, Any] = {"secret": secret, "codec": codec, "profiles": profiles, "device": device}
        self._data = np.empty(size, np.uint8)
        self.suspects: set[int] = set()
        self._came: list[tuple[int, int]] = []
        self._by: list[tuple[int, int, int]] = []
        self._there: np.ndarray | None = None
        self._file: ChunkFile | None = None

    # -- bytes --------------------------------------------------------------------------------------------------------

    def add(self, start: int, data: bytes | memoryview, source: int = 0) -> list[tuple[int, int]]:
        """Takes bytes `[start, start + len(data))` of the file.

        Args:
            start: where they belong.
            data: the bytes.
            source: number of who gave them, for `suspects`.

        Returns:
            Ranges that are not what was written, and were thrown away: of wrong bytes, or of a wrong head.

        Raises:
            ValueError: for bytes outside the file.
        """
        stop = start + len(data)
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"bytes [{start}, {stop}) of a file of {self.size}")
        if not data:
            return []
        here = self._data[start:stop]
        new = np.frombuffer(data, np.uint8)
        for known, end in self._verified(start, stop):  # what was checked stays
            a, b = max(known, start), min(end, stop)
            if a < b:
                new = new.copy() if not new.flags.writeable else new
                new[a - start : b - start] = self._data[a:b]
        here[:] = new
        self._came = _joined([*self._came, (start, stop)])
        self._by.append((start, stop, source))
        if self._file is None and not self._open():
            wrong = self._forget_all() if self._head_is_wrong else []
        else:
            wrong = self._check()
        self.suspects = {who for a, b, who in self._by if any(a < y and x < b for x, y in wrong)}
        if self._file is not None:
            self._by = [each for each in self._by if not self._settled(each[0], each[1])]
        return wrong

    @property
    def header(self) -> Header | None:
        """What the file says about itself; None before its head has come."""
        return None if self._file is None else self._file.header

    @property
    def starts(self) -> np.ndarray:
        """Where each segment begins, and where the last one ends."""
        return self.file.starts

    @property
    def file(self) -> ChunkFile:
        """The file, whose segments can be read as far as they are there.

        Raises:
            ValueError: before its head has come.
        """
        if self._file is None:
            raise ValueError("the head of the file has not come")
        return self._file

    @property
    def head_bytes(self) -> int:
        """Bytes that must come first: the prelude, and then the head that it tells of."""
        if not self._covers(0, PRELUDE.size):
            return PRELUDE.size
        body = PRELUDE.unpack(self._data[: PRELUDE.size].tobytes())[3]
        return min(self.size, PRELUDE.size + min(body, MAX_HEAD))

    def has(self, number: int) -> bool:
        """Whether a segment is there, and is what was written."""
        return self._there is not None and bool(self._there[number])

    def _segments(self, numbers: range) -> np.ndarray:
        """For each of some segments whether it is there."""
        return np.zeros(len(numbers), bool) if self._there is None else self._there[numbers.start : numbers.stop]

    def missing(self, numbers: Sequence[int] | range | None = None) -> list[tuple[int, int]]:
        """Ranges of bytes that are not there, of some segments or of all; before the head has come, of the head."""
        if self._there is None:
            return _less([(0, self.head_bytes)], self._came)
        starts = self.starts
        wanted = range(len(self._there)) if numbers is None else numbers
        lacking = _joined([(int(starts[n]), int(starts[n + 1])) for n in wanted if not self._there[n]])
        return _less(lacking, self._came)

    # -- what is usable -----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self._there is not None and bool(self._there.all())

    def streams(self, unit: int, groups: int | None = None) -> int:
        """How many streams of a unit are there, in their first `groups` groups of tokens (None: in all)."""
        header = self.file.header
        whole = -(-header.tokens // header.arrangement.group_tokens)
        wanted = whole if groups is None else groups
        for stream in range(header.arrangement.streams):
            numbers = header.segments_of(unit, stream)
            there = self._segments(numbers).reshape(-1, whole)
            if not there[:, :wanted].all():
                return stream
        return header.arrangement.streams

    @property
    def groups(self) -> int:
        """First groups of tokens of which all layers are there at least as a base."""
        if self._there is None:
            return 0
        header = self.file.header
        whole = -(-header.tokens // header.arrangement.group_tokens)
        least = whole
        for unit in range(header.units):
            numbers = header.segments_of(unit, 0)
            there = self._segments(numbers).reshape(-1, whole).all(0)
            least = min(least, whole if there.all() else int(there.argmin()))
        return least

    def usable(self) -> ChunkCache | None:
        """The chunk as far as it has come: its first tokens, each layer with the streams that are there; None if none.

        A chunk's keys and values do not depend on tokens behind them, so its first tokens are a chunk themselves, with
        a key of their own. Layers whose refinement has come are refined, others are not.

        Raises:
            ChunkFileError: for bytes that no encoder writes, or if layer 0 was left out of the file.
        """
        groups = self.groups
        if not groups:
            return None
        file, header = self.file, self.file.header
        tokens = min(groups * header.arrangement.group_tokens, header.tokens)
        if not header.layer0:
            raise ChunkFileError("layer 0 is not in the chunk file: read it as a whole", reason="layer0")
        keys, values = [], []
        for unit in range(header.units):
            for k, v in self._decode(unit, groups, tokens):
                keys.append(k)
                values.append(v)
        base = any(self.streams(unit, groups) < header.arrangement.streams for unit in range(header.units))
        fields: dict[str, Any] = file.fields | {"coded": id_in(header)._replace(base=base)}
        if tokens < header.tokens:
            fields |= {"ids": file.ids[:tokens], "text": None, "keyed": ""}
        return ChunkCache(keys=tuple(keys), values=tuple(values), **fields)

    def _decode(self, unit: int, groups: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        file, header = self.file, self.file.header
        streams = self.streams(unit, groups)
        if tokens == header.tokens:
            yield from file.unit(unit, streams)
            return
        whole = -(-header.tokens // header.arrangement.group_tokens)
        numbers = [
            number
            for stream in range(streams)
            for number in header.segments_of(unit, stream)
            if (number - header.segments_of(unit, stream).start) % whole < groups
        ]
        segments = [self._data[self.starts[n] : self.starts[n + 1]].data for n in numbers]
        layers = header.layers_of(unit)
        shapes = [header.layers[layer] for layer in layers]
        keys, values = file.codec.decode_unit(layers.start, shapes, tokens, DTYPES[header.dtype], segments, streams)
        device = self._settings["device"]
        for shape, k, v in zip(shapes, keys, values, strict=True):
            if k.shape != (shape.heads, tokens, shape.key_dim) or v.shape != (shape.heads, tokens, shape.value_dim):
                raise ChunkFileError(f"decoded {tuple(k.shape)} and {tuple(v.shape)}", reason="geometry")
            yield (k, v) if device is None else (k.to(device), v.to(device))

    # -- a source for `ChunkFile` -------------------------------------------------------------------------------------

    def read(self, start: int, length: int) -> memoryview:
        """Bytes that came.

        Raises:
            OSError: if some did not.
        """
        if not self._covers(start, start + length):
            raise OSError(f"bytes [{start}, {start + length}) have not all come")
        return self._data[start : start + length].data

    def _open(self) -> bool:
        self._head_is_wrong = False
        if not self._covers(0, PRELUDE.size):
            return False
        try:
            parse_prelude(self._data[: PRELUDE.size].data, self.size)
            if not self._covers(0, self.head_bytes):
                return False
            front = _Front(self)
            self._reader = ContainerReader(front, secret=self._settings["secret"], max_bytes=MAX_DECODED)
            self._file = ChunkFile(front, max_bytes=MAX_DECODED, **self._settings)
            front.opening = False
        except ChunkFileError as error:
            if error.reason in ("codec", "profile", "version"):
                raise
            self._head_is_wrong = True
            return False
        self._there = np.zeros(self._file.header.segments, bool)
        return True

    def _check(self) -> list[tuple[int, int]]:
        """Looks at segments that have newly come, and throws wrong ones away."""
        assert self._there is not None
        starts, wrong = self.starts, []
        for a, b in self._came:
            first, last = int(np.searchsorted(starts, a)), int(np.searchsorted(starts, b, "right")) - 1
            for number in (first + np.flatnonzero(~self._there[first:last])).tolist():
                try:
                    self._reader.segments(range(number, number + 1))
                    self._there[number] = True
                except ChunkFileError:
                    wrong.append((int(starts[number]), int(starts[number + 1])))
        if wrong:
            self._came = _less(self._came, wrong)
            self.wrong += sum(b - a for a, b in wrong)
        return _joined(wrong)

    def _forget_all(self) -> list[tuple[int, int]]:
        gone, self._came = self._came, []
        self.wrong += sum(b - a for a, b in gone)
        return gone

    def _verified(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges that were checked, of the head and of segments that overlap a range."""
        if self._there is None:
            return []
        starts, numbers = self.starts, self._overlapping(start, stop)
        there = numbers.start + np.flatnonzero(self._there[numbers.start : numbers.stop])
        return [(0, int(starts[0])), *((int(starts[n]), int(starts[n + 1])) for n in there)]

    def _overlapping(self, start: int, stop: int) -> range:
        """Numbers of segments that have bytes in a range."""
        first = max(0, int(np.searchsorted(self.starts, start, "right")) - 1)
        return range(first, max(first, min(int(np.searchsorted(self.starts, stop)), len(self.starts) - 1)))

    def _settled(self, start: int, stop: int) -> bool:
        """Whether nothing in a range waits for the rest of its segment."""
        assert self._there is not None
        numbers = self._overlapping(start, stop)
        waiting = [n for n in numbers if not self._there[n]]
        return not any(
            a < self.starts[n + 1] and self.starts[n] < b
            for n in waiting
            for a, b in self._came
            if a < stop and start < b
        )

    def _covers(self, start: int, stop: int) -> bool:
        return start >= stop or any(a <= start and stop <= b for a, b in self._came)


class _Front:
    """An assembly as a source; while its head is read, what has not come may be read too, and is not looked at."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self.size, self.opening = assembly, assembly.size, True

    def read(self, start: int, length: int) -> memoryview:
        if not self.opening:
            return self._assembly.read(start, length)
        return self._assembly._data[start : start + length].data


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        elif a < b:
            found.append((a, b))
    return found


def _less(ranges: Sequence[tuple[int, int]], without: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without others."""
    left = list(ranges)
    for a, b in without:
        left = [piece for x, y in left for piece in ((x, min(y, a)), (max(x, b), y)) if piece[0] < piece[1]]
    return left
