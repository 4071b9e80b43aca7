"""Chunk files on their way: what is known of each, and how they are cut into pieces in the order of layers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blendkv.chunkfile import ChunkFile
from blendkv.errors import ChunkFileError
from blendkv.loading.arriving import Arrival
from blendkv.loading.sources import StoreSource
from blendkv.loading.sparing import tokens_of
from blendkv.stores import Store
from blendkv.stores.breaker import Breaker


class Attempt:
    """One prompt's files from one store: late if the prompt went on without one, well if all of them came before that.

    A store that did not say in time what it has was late, too. Safe to share among threads: files come in several of
    them, while the prompt waits in another. The garbage collector tells an attempt nothing (`Transfer.let_go`), so it
    never waits for the lock.

    Args:
        breaker: is told, once.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker, self._left, self._over = breaker, 0, False
        self._lock = threading.Lock()

    def begin(self, files: int) -> None:
        """So many files are on their way; with none there is nothing against the store."""
        if self._ends(files):
            self._breaker.succeeded()

    def came(self) -> None:
        """One file is there."""
        if self._ends(-1):
            self._breaker.succeeded()

    def late(self) -> None:
        """The prompt went on without one, or does not know of it."""
        if self._ends():
            self._breaker.failed()

    def _ends(self, more: int | None = None) -> bool:
        """Whether it is over now, and was not before: with so many files more nothing is left, or at once."""
        with self._lock:
            self._left += more or 0
            news = not self._over and (more is None or not self._left)
            self._over |= news
            return news


class Rest(NamedTuple):
    """What is left out of a unit.

    Attributes:
        groups: of tokens that are left out.
        others: that are not.
        nbytes: of those that are.
        told: whether the prompt's report counts them.
    """

    groups: frozenset[int]
    others: frozenset[int]
    nbytes: int
    told: bool


@dataclass(eq=False)
class Incoming:
    """A chunk file on its way.

    Attributes:
        key: of the chunk.
        file: open over ranges of the store.
        source: those ranges.
        level: of the store among the tiers.
        store: that has it.
        fields: of the chunk, besides keys and values.
        attempt: of its prompt on that store.
        entry: key of the file in the store, which for a level is not that of the chunk.
        arrival: of its layers.
        rests: by unit, what of it the prompt will not read.
        rest_is_wanted: whether somebody asked for some of that after all.
        spoilt: why some of that will not come; "" as far as is known.
        damage: what is wrong with the file, if it is to be put out of use.
    """

    key: str
    file: ChunkFile
    source: StoreSource
    level: int
    store: Store
    fields: dict[str, Any]
    attempt: Attempt
    entry: str
    arrival: Arrival = field(init=False)
    rests: dict[int, Rest] = field(default_factory=dict)
    rest_is_wanted: bool = False
    spoilt: str = ""
    damage: ChunkFileError | None = None
    _said: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Nothing has come yet."""
        self.arrival = Arrival(self.file.header)

    def leave_out(self, groups: Mapping[int, frozenset[int]], told: bool = True) -> tuple[int, int]:
        """Groups of tokens of units are fetched only if somebody wants them.

        Args:
            groups: by unit.
            told: whether the prompt's report counts them.

        Returns:
            How many tokens those are, in some layer or all, and how many bytes.
        """
        by_groups: dict[frozenset[int], list[int]] = {}
        for unit, those in groups.items():
            by_groups.setdefault(those, []).append(unit)
        some, nbytes = np.zeros(self.file.header.tokens, bool), 0
        for those, units in by_groups.items():
            tokens = tokens_of(self.file, those)
            some |= tokens
            self.arrival.leave_out([layer for unit in units for layer in self.file.header.layers_of(unit)], tokens)
            sizes = self.file.sizes[:, units][..., list(those)].sum((0, 2, 3)).tolist()
            others = self.every_group - those
            self.rests |= {unit: Rest(those, others, size, told) for unit, size in zip(units, sizes, strict=True)}
            nbytes += sum(sizes)
        return int(some.sum()), nbytes

    @property
    def every_group(self) -> frozenset[int]:
        """Of the tokens of the file."""
        return frozenset(range(self.file.sizes.shape[3]))

    def is_news(self, what: str) -> bool:
        """Whether nobody has said so before: pieces come in several threads."""
        with self._lock:
            known = what in self._said
            self._said.add(what)
            return not known


@dataclass(frozen=True)
class Piece:
    """Units of a file that are fetched with one request for each run of segments.

    Attributes:
        of: the file.
        units: that follow each other.
        nbytes: of it.
        wanted: by this prompt, or only for the next.
        groups: of tokens; None: all.
    """

    of: Incoming
    units: range
    nbytes: int
    wanted: bool
    groups: frozenset[int] | None = None

    @property
    def is_rest(self) -> bool:
        """Whether it is what was left out before."""
        return not self.wanted and self.groups is not None


def cut(coming: Sequence[Incoming], first: int, piece_bytes: int, rest: bool = True) -> list[Piece]:
    """Files as pieces, in the order in which a blend wants them.

    Args:
        coming: files, in prompt order.
        first: the first layer that is wanted; those before it come last.
        piece_bytes: most bytes of a piece, unless one unit has more. A unit of which something is left out is a piece
            of its own, since it does not follow the one before.
        rest: whether what is left out comes last, with layers before the first, or only if somebody wants it.

    Returns:
        Pieces by layer, then by file.
    """
    late_ones: list[tuple[int, int, Piece]] = []
    pieces: list[tuple[int, int, Piece]] = []
    for number, item in enumerate(coming):
        header = item.file.header
        begin = header.unit_of(min(max(first, header.stored.start), header.stored.stop - 1))
        for units, into in ((range(begin, header.units), pieces), (range(begin), late_ones)):
            runs = _runs(item, units, piece_bytes, wanted=into is pieces)
            into += [(piece.units.start, number, piece) for piece in runs]
        for unit, left in item.rests.items() if rest else ():
            late_ones.append((unit, number, Piece(item, range(unit, unit + 1), left.nbytes, False, left.groups)))
    return [piece for group in (pieces, late_ones) for _, _, piece in sorted(group, key=lambda entry: entry[:2])]


def _runs(item: Incoming, units: range, most: int, wanted: bool) -> list[Piece]:
    """Consecutive units, as many together as are no more than so many bytes; those with gaps alone."""
    found: list[Piece] = []
    begin, size = units.start, 0
    for unit in units:
        rest, more = item.rests.get(unit), item.file.unit_sizes[unit]
        if size and (size + more > most or rest is not None):
            found.append(Piece(item, range(begin, unit), size, wanted))
            begin, size = unit, 0
        if rest is None:
            size += more
            continue
        if rest.others:
            found.append(Piece(item, range(unit, unit + 1), more - rest.nbytes, wanted, rest.others))
        begin = unit + 1
    return [*found, Piece(item, range(begin, units.stop), size, wanted)] if begin < units.stop else found
