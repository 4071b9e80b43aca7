"""Files on their way, in pieces: a few under way at a time, each fetched, checked, decoded and handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.errors import ChunkFileError
from blendkv.kernels.table import ALIGN
from blendkv.loading.arriving import LATE, Arrival
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane
from blendkv.loading.sources import Absent, StoreSource
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
        entry: key of the file in the store, which for a level is not that of the chunk.
        arrival: of its layers.
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

    def __post_init__(self) -> None:
        """Nothing has come yet."""
        self.arrival = Arrival(len(self.file.header.layers))


@dataclass(frozen=True)
class Piece:
    """Units of a file that are fetched with one request a stream; `wanted` by this prompt, or only for the next."""

    of: Incoming
    units: range
    nbytes: int
    wanted: bool


class Transfer:
    """Brings pieces of a prompt, a few ahead of each other. Keeps no thread while it waits.

    Args:
        tiers: that keep what has come.
        lane: the prompt's way to transfer slots.
        pieces: in the order in which they are wanted.
        homes: device of each layer, or one for all.
        ahead: pieces under way or waiting for a slot.
        progress: is told what has come.
    """

    def __init__(
        self,
        tiers: TieredStore,
        lane: Lane,
        pieces: Sequence[Piece],
        homes: Sequence[torch.device],
        ahead: int,
        progress: Progress,
    ) -> None:
        self._tiers, self._lane, self._homes, self._ahead = tiers, lane, homes, ahead
        self._left, self._progress = deque(pieces), progress
        self._users = [None] * len({id(piece.of) for piece in pieces})

    def begin(self) -> None:
        """Hands in the first pieces."""
        self._progress.begin(sum(piece.wanted for piece in self._left))
        for _ in range(self._ahead):
            self._next()

    def let_go(self) -> None:
        """One chunk is of no use to anybody any more; after the last, what is not under way is not fetched.

        The garbage collector calls this, in any thread and between any two steps of it, so it waits for no lock.
        """
        self._users.pop()
        if not self._users:
            self._left.clear()
            self._lane.abandon()

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
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def _bring(self, piece: Piece) -> None:
        """Fetches, checks, decodes and hands over; no fault of a store or a file raises."""
        item = piece.of
        if not self._users:
            return
        try:
            states = item.file.units(piece.units)
            first = item.file.header.layers_of(piece.units.start).start
            self._progress.came(item.store.url, piece.nbytes, piece.wanted)
            if item.arrival.deliver(first, *self._at_home(states, first)):
                item.attempt.came()
                self._keep(item)
        except ChunkFileError as error:
            if self._lost(item, error.reason) and not self._is_good(item):
                self._tiers.discard(item.store, item.entry, error.bare())
        except Absent:
            self._lost(item, LATE)
        except Exception as error:
            self._lost(item, f"error ({type(error).__name__})")

    def _is_good(self, item: Incoming) -> bool:
        """Whether a file is good when it is read at once: then parts of two were read, one after the other."""
        with suppress(Exception):  # a plug-in's, or what is wrong with it
            data = item.store.get(item.entry)
            self._tiers.opener.checked(item.entry, data or b"", torch.device("cpu")).verify()
            return True
        return False

    def _lost(self, item: Incoming, why: str) -> bool:
        """A file will not come whole; whether that is news."""
        if not item.arrival.fail(why):
            return False
        self._progress.lost(item.key)
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
            return _moved(states, device), stream.record_event()

    def _keep(self, item: Incoming) -> None:
        """All of a chunk is there: memory and nearer stores are given it."""
        with suppress(Exception):  # it serves its prompt in any case
            count = len(item.file.header.layers)
            keys, values = zip(*(item.arrival.states(layer) for layer in range(count)), strict=True)
            chunk = ChunkCache(keys=keys, values=values, **item.fields)
            self._tiers.keep(item.level, item.entry, chunk, item.source.whole())


def cut(coming: Sequence[Incoming], first: int, piece_bytes: int) -> list[Piece]:
    """Files as pieces, in the order in which a blend wants them.

    Args:
        coming: files, in prompt order.
        first: the first layer that is wanted; those before it come last.
        piece_bytes: most bytes of a piece, unless one unit has more.

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
    return [piece for group in (pieces, late_ones) for _, _, piece in sorted(group, key=lambda entry: entry[:2])]


def _runs(item: Incoming, units: range, most: int, wanted: bool) -> list[Piece]:
    """Consecutive units, as many together as are no more than so many bytes."""
    found: list[Piece] = []
    begin, size = units.start, 0
    for unit in units:
        more = item.file.unit_bytes(unit)
        if size and size + more > most:
            found.append(Piece(item, range(begin, unit), size, wanted))
            begin, size = unit, 0
        size += more
    return [*found, Piece(item, range(begin, units.stop), size, wanted)] if len(units) else found


def _moved(states: Sequence[tuple[torch.Tensor, ...]], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Tensors on a GPU, by one copy from pinned memory, on the current stream."""
    starts = list(accumulate((-(-t.nbytes // ALIGN) * ALIGN for pair in states for t in pair), initial=0))
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    places = iter(starts)
    spans = [[(start := next(places), start + t.nbytes) for t in pair] for pair in states]
    for pair, span in zip(states, spans, strict=True):
        for t, (start, stop) in zip(pair, span, strict=True):
            pinned[start:stop].copy_(t.reshape(-1).view(torch.uint8))
    here = pinned.to(device, non_blocking=True)
    return [
        tuple(here[a:b].view(t.dtype).view(t.shape) for t, (a, b) in zip(pair, span, strict=True))
        for pair, span in zip(states, spans, strict=True)
    ]


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
