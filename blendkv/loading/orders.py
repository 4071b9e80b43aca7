"""In which order the pieces of progressive chunk files are sent, so that what has come by a deadline is worth most.

`sequential` sends chunk by chunk. `base-first` sends the base (or anchors) of all chunks, then their refinements (or
deltas): after a fraction of the bytes every chunk is usable. `refinements-first` sends single refinements, each with
the address of its group, and the bases last: only then is anything usable, all of it in full. It was proposed for links
so slow that one would rather send little of much; `blendkv bench streaming` measures what each is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendkv.loading.assembly import Assembly

ORDERS = ("sequential", "base-first", "refinements-first")
PIECE = 1 << 16
"""Most bytes of a piece, unless a segment is larger."""


@dataclass(frozen=True)
class Piece:
    """Consecutive segments of one file, by which it can be asked for and joined in any order.

    Attributes:
        file: number of the file.
        segments: numbers of the segments (`assembly.place_of` says what they are of).
        start: first byte in the file.
        stop: after the last.
    """

    file: int
    segments: range
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Of the piece."""
        return self.stop - self.start


def pieces(files: Sequence[Assembly], order: str, most: int = PIECE) -> list[Piece]:
    """What is to be sent of files whose heads have come, in an order.

    Args:
        files: the heads say how they are cut.
        order: one of `ORDERS`.
        most: bytes of a piece; single refinements are pieces of their own.

    Raises:
        ValueError: for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r}; choose among {', '.join(ORDERS)}")
    if order == "sequential":
        return [piece for file in range(len(files)) for piece in _cut(files, file, range(_segments(files[file])), most)]
    bases = [piece for file in range(len(files)) for piece in _cut(files, file, _of(files[file], base=True), most)]
    single = order == "refinements-first"
    rest = [
        piece
        for file in range(len(files))
        for piece in _cut(files, file, _of(files[file], base=False), 1 if single else most)
    ]
    return rest + bases if single else bases + rest


def _segments(file: Assembly) -> int:
    return file.file.header.segments


def _of(file: Assembly, base: bool) -> range:
    """Segments of the base with what stands before it, or of what refines it."""
    header = file.file.header
    end = header.segments_of(header.units - 1, 0).stop
    return range(end) if base else range(end, header.segments)


def _cut(files: Sequence[Assembly], file: int, numbers: range, most: int) -> list[Piece]:
    """Consecutive segments as pieces of at most so many bytes, at least one segment each."""
    starts, found, first = files[file].starts, [], numbers.start
    for number in numbers:
        if number > first and starts[number + 1] - starts[first] > most:
            found.append(Piece(file, range(first, number), int(starts[first]), int(starts[number])))
            first = number
    if len(numbers):
        found.append(Piece(file, range(first, numbers.stop), int(starts[first]), int(starts[numbers.stop])))
    return found
