"""Chunks of a prompt from stores, layer by layer: while layer i computes, those after it are fetched, checked, decoded.

CacheBlend (2405.16444), section 5. The head of each file is read first; then pieces of all files go through the
process's transfer slots in the order in which layers are computed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.chunkfile import ChunkFile
from blendkv.errors import ChunkFileError
from blendkv.expanding import for_kernels
from blendkv.loading.arriving import LATE, Arrival, ArrivingChunk
from blendkv.loading.controller import Offer
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane, TransferScheduler, shared_scheduler
from blendkv.loading.sources import Absent, StoreSource
from blendkv.stores import Budget, Store, TieredStore
from blendkv.stores.deadline import remaining
from blendkv.stores.pool import Fetched

PIECE_BYTES = 1 << 20
"""Layers of a file are fetched together until they are so many bytes."""
AHEAD = 4
"""Pieces of a prompt that are under way or wait for a slot."""
WHOLE_BYTES = 1 << 16
"""Files up to this size are read whole, before anything is computed."""
TEXT = "text"
"""Where chunks come from that are computed from their text, although a store has them."""
TORN = frozenset({"truncated", "length", "header", "checksum"})
"""What is wrong with a head may come of an entry that is written anew just now: read whole, it may be good."""
Choose = Callable[[list[Offer]], Collection[str]]


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
        arrival: of its layers.
    """

    key: str
    file: ChunkFile
    source: StoreSource
    level: int
    store: Store
    fields: dict[str, Any]
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


class Pipeline:
    """Fetches chunks from tiers so that a blend can begin before they are there.

    Args:
        tiers: memory over stores.
        scheduler: whose slots transfers use; None: those that all prompts of this process share.
        piece_bytes: see `PIECE_BYTES`.
        ahead: see `AHEAD`.
        whole_bytes: see `WHOLE_BYTES`.
    """

    def __init__(
        self,
        tiers: TieredStore,
        scheduler: TransferScheduler | None = None,
        piece_bytes: int = PIECE_BYTES,
        ahead: int = AHEAD,
        whole_bytes: int = WHOLE_BYTES,
    ) -> None:
        self.tiers, self._scheduler = tiers, scheduler
        self.piece_bytes, self.ahead, self.whole_bytes = piece_bytes, ahead, whole_bytes

    def fetch(
        self,
        keys: Sequence[str],
        homes: Sequence[torch.device] = (),
        budget: Budget | None = None,
        first: int | Callable[[], int] = 0,
        choose: Choose | None = None,
        progress: Progress | None = None,
    ) -> list[Fetched]:
        """Chunks as `TieredStore.fetch` gives them, those from stores while they are still on their way.

        Args:
            keys: of chunks, in prompt order.
            homes: where each layer is wanted; the CPU if that is left open.
            budget: how long stores that are not local may be waited for, here and while layers run; local ones are
                waited for as long as they take.
            first: the first layer whose stored states are wanted, or what says so once `choose` was asked. Those before
                it come last, for the next prompt.
            choose: is told of all chunks that are there before the first of their layers is fetched, and names keys of
                those that had better be computed from their text.
            progress: is told what has come.

        Returns:
            One a key; without a chunk, and with `TEXT` as tier, where `choose` named it.
        """
        tiers, wanted = self.tiers, list(dict.fromkeys(keys))
        found = {key: got for key, got in zip(wanted, tiers.pool.fetch(wanted), strict=True) if got.chunk is not None}
        homes = tuple(homes) or (torch.device("cpu"),)
        scheduler = self._scheduler or shared_scheduler()
        lane = scheduler.lane()
        coming: list[Incoming] = []
        whole: list[str] = []
        for level, store in enumerate(tiers.stores):
            lacking = [key for key in wanted if key not in found and key not in whole]
            if not lacking:
                break
            for key, opened in self._opened(lane, level, store, lacking, budget, homes[0]).items():
                if isinstance(opened, Incoming):
                    coming.append(opened)
                    most = None if getattr(store, "local", False) else budget
                    given = (opened.arrival, opened.file.header, store.url, most, partial(self._late, opened))
                    found[key] = Fetched(ArrivingChunk.of(*given, **opened.fields), store.url)
                else:
                    whole.append(key)
        if choose is not None:
            text = set(choose(_offers(wanted, found, coming)))
            coming = [item for item in coming if item.key not in text]
            found |= dict.fromkeys(text, Fetched(None, TEXT))
        if whole:  # small ones, and those that a GPU's kernels decode, many at once
            found |= {k: got for k, got in zip(whole, tiers.fetch(whole, homes, budget), strict=True) if got.chunk}
        counted = [key for key in wanted if key in found and found[key].chunk is not None and key not in whole]
        tiers.count([found[key].tier for key in counted], len(set(wanted) - set(found) - set(whole)))
        if coming:
            order = {key: i for i, key in enumerate(wanted)}
            coming.sort(key=lambda item: order[item.key])
            pieces = cut(coming, first if isinstance(first, int) else first(), self.piece_bytes)
            transfer = Transfer(tiers, lane, pieces, homes, self.ahead, progress or Progress())
            for item in coming:
                weakref.finalize(found[item.key].chunk, transfer.let_go)
            transfer.begin()
        return [found.get(key, Fetched(None)) for key in keys]

    def _opened(
        self,
        lane: Lane,
        level: int,
        store: Store,
        keys: Sequence[str],
        budget: Budget | None,
        device: torch.device,
    ) -> dict[str, Incoming | None]:
        """Files that a store has, verified as far as their heads say; None for what is better read whole."""
        local = budget is None or getattr(store, "local", False)
        opened: dict[str, Any] = {}
        with nullcontext() if local else budget.spend():
            sizes = self._sizes(level, store, keys)
            opened |= {key: None for key in keys if (sizes.get(key) or self.whole_bytes + 1) <= self.whole_bytes}
            heads = {
                key: lane.submit(self._open, level, store, key, device, budget, sizes.get(key), cost_bytes=1 << 14)
                for key in keys
                if key not in opened and sizes.get(key, 0) is not None
            }
            most = remaining(float("inf"))
            wait(heads.values(), None if most == float("inf") else most)
        for key, head in heads.items():
            if not head.done():
                head.cancel()
                store.stats.count("misses", "deadline")
            elif (error := head.exception()) is None:
                if (result := head.result()) is not _NOTHING:
                    opened[key] = result
            elif isinstance(error, ChunkFileError):
                self.tiers.discard(store, key, error.bare())
            elif not isinstance(error, Absent):
                store.stats.count("misses", "error")
        return opened

    def _sizes(self, level: int, store: Store, keys: Sequence[str]) -> dict[str, int | None]:
        """Sizes of entries, None of those that are absent, from a store that tells many at once; else nothing."""
        asked = [key for key in keys if self.tiers.waiting(level, key) is None]
        sizes: Any = getattr(store, "sizes", None)
        if sizes is None or not asked:
            return {}
        try:
            return dict.fromkeys(asked) | sizes(asked)
        except Exception:  # a plug-in's, for ours never raise
            store.stats.count("misses", "error", len(asked))
            return dict.fromkeys(asked)

    def _late(self, item: Incoming) -> None:
        """A prompt went on without a file that was counted as a hit."""
        if not item.arrival.failed and item.arrival.miss():
            self.tiers.lost(item.store.url)
            item.store.stats.count("misses", "deadline")

    def _open(
        self, level: int, store: Store, key: str, device: torch.device, budget: Budget | None, size: int | None
    ) -> Any:
        """The head of a file, of which the size may be known."""
        if (waiting := self.tiers.waiting(level, key)) is not None:
            source = StoreSource(key, len(waiting), [_Bytes(waiting)])
        elif (size := store.size(key) if size is None else size) is None:
            store.stats.count("misses")
            return _NOTHING
        elif size <= self.whole_bytes:
            return None
        else:
            local = getattr(store, "local", False)  # then nobody else sees to the budget
            source = StoreSource(key, size, [store, *self.tiers.stores[level + 1 :]], budget if local else None)
        try:
            file = self.tiers.opener.checked_head(key, source)
        except ChunkFileError as error:
            if error.reason not in TORN:
                raise
            return None
        if not file.header.layer0:
            raise ChunkFileError("layer 0 is not in the chunk file, and is not rebuilt here", reason="layer0")
        if device.type != "cpu" and for_kernels(file, device):
            return None
        source.keeps = level > 0 or self.tiers.pool.codec is not None
        return Incoming(key, file, source, level, store, file.fields | {"scores": file.scores})


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
                self._keep(item)
        except ChunkFileError as error:
            if self._lost(item, error.reason) and not self._is_good(item):
                self._tiers.discard(item.store, item.key, error.bare())
        except Absent:
            self._lost(item, LATE)
        except Exception as error:
            self._lost(item, f"error ({type(error).__name__})")

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


class _Bytes:
    """An entry that a store is about to be given."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._data[start:stop]


def _offers(wanted: Sequence[str], found: Mapping[str, Fetched], coming: Sequence[Incoming]) -> list[Offer]:
    """What memory and stores have of a prompt; what kernels decode whole is not up for choice."""
    files = {item.key: item for item in coming}
    offers = []
    for key in wanted:
        if (item := files.get(key)) is not None:
            header = item.file.header
            size = item.file.size, header.decoded_bytes
            offers.append(Offer(key, header.tokens, *size, item.store.url, header.codec))
        elif key in found and (chunk := found[key].chunk) is not None:
            offers.append(Offer(key, len(chunk)))
    return offers


_NOTHING = object()
_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


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
