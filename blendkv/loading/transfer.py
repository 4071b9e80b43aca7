"""Files on their way, in pieces: a few under way at a time, each fetched, checked, decoded and handed over."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.errors import ChunkFileError
from blendkv.loading.arriving import LATE, Arrival
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane
from blendkv.loading.sources import Absent, StoreSource
from blendkv.loading.sparing import tokens_of
from blendkv.stores import Store, TieredStore
from blendkv.stores.breaker import Breaker


class Attempt:
    """One prompt's files from one store: late if the prompt went on without one, well if all of them came before that.

    Args:
        breaker: is told, once.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker, self._left, self._over = breaker, 0, False

    def begin(self, files: int) -> None:
        """So many files are on their way; with none there is nothing against the store."""
        self._left = files
        if not files:
            self._breaker.succeeded()

    def came(self) -> None:
        """One file is there."""
        self._left -= 1
        if not self._left and not self._over:
            self._over = True
            self._breaker.succeeded()

    def late(self) -> None:
        """The prompt went on without one."""
        if not self._over:
            self._over = True
            self._breaker.failed()


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
        arrival: of its layers.
        left_out: groups of tokens of each unit that the prompt will not read.
    """

    key: str
    file: ChunkFile
    source: StoreSource
    level: int
    store: Store
    fields: dict[str, Any]
    attempt: Attempt
    arrival: Arrival = field(init=False)
    left_out: Mapping[int, frozenset[int]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Nothing has come yet."""
        self.arrival = Arrival(self.file.header)

    def leave_out(self, groups: Mapping[int, frozenset[int]]) -> int:
        """Groups of tokens of units are fetched only if somebody wants them; says how many bytes they have."""
        self.left_out = groups
        for unit, those in groups.items():
            for layer in self.file.header.layers_of(unit):
                self.arrival.leave_out(layer, tokens_of(self.file, those))
        return sum(self.bytes_of(unit, those) for unit, those in groups.items())

    def bytes_of(self, unit: int, groups: Collection[int] | None = None) -> int:
        """Bytes of a unit in the file; of some groups of tokens, or of all."""
        return self.file.run_bytes(self.file.runs(range(unit, unit + 1), groups))

    def others(self, unit: int) -> frozenset[int] | None:
        """Groups of a unit that are not left out; None for all."""
        if (left := self.left_out.get(unit)) is None:
            return None
        header = self.file.header
        return frozenset(range(header.unit_segments // header.arrangement.parts)) - left

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


class Transfer:
    """Brings pieces of a prompt, a few ahead of each other. Keeps no thread while it waits.

    Args:
        tiers: that keep what has come.
        lane: the prompt's way to transfer slots.
        items: files of the prompt.
        pieces: in the order in which they are wanted.
        homes: device of each layer, or one for all.
        ahead: pieces under way or waiting for a slot.
        progress: is told what has come.
    """

    def __init__(
        self,
        tiers: TieredStore,
        lane: Lane,
        items: Sequence[Incoming],
        pieces: Sequence[Piece],
        homes: Sequence[torch.device],
        ahead: int,
        progress: Progress,
    ) -> None:
        self._tiers, self._lane, self._homes, self._ahead = tiers, lane, homes, ahead
        self._left, self._progress = deque(pieces), progress
        self._items, self._users, self._pid = items, [None] * len(items), os.getpid()
        self._asked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        for item in items:
            item.arrival.on_wanted = partial(self._want, item)

    def begin(self) -> None:
        """Hands in the first pieces."""
        self._progress.begin(sum(piece.wanted for piece in self._left))
        for item in self._items:
            self._note(item)  # all of it may have been left out
        for _ in range(self._ahead):
            self._next()

    def let_go(self) -> None:
        """One chunk is of no use to anybody any more; after the last, what is not under way is not fetched.

        The garbage collector calls this, in any thread and between any two steps of it, so it waits for no lock.
        """
        self._users.pop()
        if not self._users:
            self._left.clear()
            if self._pid == os.getpid():
                self._lane.abandon()

    def _want(self, item: Incoming, layer: int) -> None:
        """Somebody waits for what was left out of a layer: it is fetched before anything that is not under way yet."""
        unit = item.file.header.unit_of(layer)
        if item.arrival.failed or not self._mine(item, unit):
            return
        if not self._users:
            self._lost(item, "cancelled")
            return
        groups = item.left_out[unit]
        piece = Piece(item, range(unit, unit + 1), item.bytes_of(unit, groups), False, groups)
        self._progress.asked_for(piece.nbytes)
        try:
            future = self._lane.submit(self._bring, piece, cost_bytes=piece.nbytes)
        except RuntimeError:  # the scheduler was closed
            self._lost(item, "cancelled")
            return
        future.add_done_callback(lambda done: self._lost(item, "cancelled") if done.cancelled() else None)

    def _mine(self, item: Incoming, unit: int) -> bool:
        """Whether nobody has asked for the rest of a unit before."""
        with self._lock:
            asked = (id(item), unit) in self._asked
            self._asked.add((id(item), unit))
            return not asked

    def _next(self, before: Piece | None = None, done: Future | None = None) -> None:
        if before is not None and done is not None and done.cancelled() and self._users:
            self._lost(before.of, "cancelled")
        if (piece := self._pop()) is None:
            return
        try:
            future = self._lane.submit(self._bring, piece, cost_bytes=piece.nbytes)
        except Exception:  # the scheduler was closed: nothing more will come
            self._lost(piece.of, "cancelled")
            while (piece := self._pop()) is not None:
                self._lost(piece.of, "cancelled")
            return
        future.add_done_callback(partial(self._next, piece))

    def _pop(self) -> Piece | None:
        """The next piece that is still of use."""
        while True:
            try:
                piece = self._left.popleft()
            except IndexError:
                return None
            if piece.of.arrival.failed:
                continue
            if not piece.is_rest or self._mine(piece.of, piece.units.start):
                return piece

    def _bring(self, piece: Piece) -> None:
        """Fetches, checks, decodes and hands over; no fault of a store or a file raises."""
        item = piece.of
        if not self._users or item.arrival.failed:
            return
        try:
            states = item.file.units(piece.units, groups=piece.groups)
            first = item.file.header.layers_of(piece.units.start).start
            self._progress.came(item.store.url, piece.nbytes, piece.wanted)
            tokens = None if piece.groups is None else tokens_of(item.file, piece.groups)
            item.arrival.deliver(first, *self._at_home(states, first), tokens)
            self._note(item)
        except ChunkFileError as error:
            if self._lost(item, error.reason) and not self._is_good(item):
                self._tiers.discard(item.store, item.key, error.bare())
        except Absent as error:
            self._lost(item, error.why or LATE)
        except Exception as error:
            self._lost(item, f"error ({type(error).__name__})")

    def _note(self, item: Incoming) -> None:
        """Tells, once each, that all that the prompt wanted of a file is there, and that all of it is."""
        if item.arrival.has_come and item.is_news("come"):
            item.attempt.came()
        if item.arrival.is_whole and item.is_news("whole"):
            self._keep(item)

    def _is_good(self, item: Incoming) -> bool:
        """Whether a file is good when it is read at once: then parts of two were read, one after the other."""
        with suppress(Exception):  # a plug-in's, or what is wrong with it
            data = item.store.get(item.key)
            self._tiers.opener.checked(item.key, data or b"", torch.device("cpu")).verify()
            return True
        return False

    def _lost(self, item: Incoming, why: str) -> bool:
        """A file will not come whole; whether that is news."""
        if not item.arrival.fail(why):
            return False
        if item.arrival.miss():
            self._tiers.lost(item.store.url)
        return True

    def _at_home(self, states: list, first: int) -> tuple[list, Any]:
        """Layers where they are wanted: copied to a GPU beside what it computes."""
        homes = [self._homes[(first + i) % len(self._homes)] for i in range(len(states))]
        if all(home.type != "cuda" for home in homes):
            return states, None
        (device,) = set(homes) if len(set(homes)) == 1 else (None,)
        if device is None:  # layers on several GPUs: each is copied when it is wanted
            return states, None
        stream = _side_stream(device)
        with torch.cuda.stream(stream):
            moved = [tuple(t.pin_memory().to(device, non_blocking=True) for t in pair) for pair in states]
            return moved, stream.record_event()

    def _keep(self, item: Incoming) -> None:
        """All of a chunk is there: memory and nearer stores are given it."""
        with suppress(Exception):  # it serves its prompt in any case
            count = len(item.file.header.layers)
            keys, values = zip(*(item.arrival.states(layer) for layer in range(count)), strict=True)
            chunk = ChunkCache(keys=keys, values=values, **item.fields)
            self._tiers.keep(item.level, item.key, chunk, item.source.whole())


def cut(coming: Sequence[Incoming], first: int, piece_bytes: int, rest: bool = True) -> list[Piece]:
    """Files as pieces, in the order in which a blend wants them.

    Args:
        coming: files, in prompt order.
        first: the first layer that is wanted; those before it come last.
        piece_bytes: most bytes of a piece, unless one unit has more. A unit of which something is left out is a piece
            of its own, since it does not follow the one before.
        rest: whether what is left out comes last, with layers before the first. Without, files of which something is
            left out bring only what is wanted.

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
        if not item.left_out:
            continue
        for unit, groups in item.left_out.items():
            left = Piece(item, range(unit, unit + 1), item.bytes_of(unit, groups), False, groups)
            late_ones.append((unit, number, left))
        if not rest:
            late_ones = [entry for entry in late_ones if entry[1] != number]
    return [piece for group in (pieces, late_ones) for _, _, piece in sorted(group, key=lambda entry: entry[:2])]


def _runs(item: Incoming, units: range, most: int, wanted: bool) -> list[Piece]:
    """Consecutive units, as many together as are no more than so many bytes; those with gaps alone."""
    found: list[Piece] = []
    begin, size = units.start, 0
    for unit in units:
        groups, more = item.others(unit), item.file.unit_bytes(unit)
        if size and (size + more > most or groups is not None):
            found.append(Piece(item, range(begin, unit), size, wanted))
            begin, size = unit, 0
        if groups is None:
            size += more
            continue
        if groups:
            found.append(Piece(item, range(unit, unit + 1), item.bytes_of(unit, groups), wanted, groups))
        begin = unit + 1
    return [*found, Piece(item, range(begin, units.stop), size, wanted)] if begin < units.stop else found


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
