"""Chunks of a prompt from stores, layer by layer: while layer i computes, those after it are fetched, checked, decoded.

CacheBlend (2405.16444), section 5. The head of each file is read first; then pieces of all files of a store go through
the process's transfer slots for it in the order in which layers are computed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from blendkv.codecs.klt import KLT
from blendkv.errors import ChunkFileError
from blendkv.expanding import for_kernels
from blendkv.levelkeys import id_in
from blendkv.loading.arriving import ArrivingChunk
from blendkv.loading.decision import TEXT
from blendkv.loading.incoming import Attempt, Incoming, cut
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane, TransferScheduler, shared_scheduler
from blendkv.loading.sources import Absent, StoreSource
from blendkv.loading.sparing import LEAST_GAP, Spare, gaps
from blendkv.loading.survey import MEMORY, Chooser, Place, everywhere, sizes_at_once, survey
from blendkv.loading.transfer import Transfer
from blendkv.stores import Budget, Store, TieredStore
from blendkv.stores.breaker import Breaker
from blendkv.stores.deadline import remaining
from blendkv.stores.pool import Fetched

PIECE_BYTES = 1 << 20
"""Layers of a file are fetched together until they are so many bytes."""
AHEAD = 4
"""Pieces of a prompt that are under way from one store, or wait for a slot."""
WHOLE_BYTES = 1 << 16
"""Files up to this size are read whole, before anything is computed."""
TORN = frozenset({"truncated", "length", "header", "checksum"})
"""What is wrong with a head may come of an entry that is written anew just now: read whole, it may be good."""


class Pipeline:
    """Fetches chunks from tiers so that a blend can begin before they are there.

    Args:
        tiers: memory over stores.
        scheduler: whose slots transfers use, whatever store they are from; None: those that all prompts of this process
            share, which each store that is not local has of its own.
        piece_bytes: see `PIECE_BYTES`.
        ahead: see `AHEAD`.
        whole_bytes: see `WHOLE_BYTES`.
        least_gap: see `sparing.LEAST_GAP`.
        rest: whether tokens that were left out of a chunk come after everything else, so that memory and nearer stores
            can keep it. Without, such a chunk is kept nowhere: the next prompt reads it from its store again.
    """

    def __init__(
        self,
        tiers: TieredStore,
        scheduler: TransferScheduler | None = None,
        piece_bytes: int = PIECE_BYTES,
        ahead: int = AHEAD,
        whole_bytes: int = WHOLE_BYTES,
        least_gap: int = LEAST_GAP,
        rest: bool = True,
    ) -> None:
        self.tiers, self._scheduler = tiers, scheduler
        self.piece_bytes, self.ahead, self.whole_bytes = piece_bytes, ahead, whole_bytes
        self.least_gap, self.rest = least_gap, rest
        self.breakers = [Breaker() for _ in tiers.stores]
        """One a store: prompt after prompt that went on without it leaves it alone for a while."""

    def lanes(self) -> Callable[[int], Lane]:
        """A prompt's way to transfer slots, by number of the store."""
        if self._scheduler is not None:
            lane = self._scheduler.lane()
            return lambda tier: lane
        sources = ["" if getattr(store, "local", False) else store.url for store in self.tiers.stores]
        return cache(lambda tier: shared_scheduler(sources[tier]).lane())

    def comes_first(self, place: Place, homes: Sequence[torch.device]) -> bool:
        """Whether what lies in a store is read before anything is computed, for layers that are wanted there.

        That is so for all files of a local store (`at_once`), and for those that a GPU's kernels decode, many at once.
        """
        decoded = isinstance(place.form.codec, KLT) and all(home.type == "cuda" for home in homes)
        return decoded or at_once(self.tiers.stores[place.tier], homes)

    def fetch(
        self,
        keys: Sequence[str],
        homes: Sequence[torch.device] = (),
        budget: Budget | None = None,
        first: int | Callable[[], int] = 0,
        choose: Chooser | None = None,
        progress: Progress | None = None,
        spare: Spare | None = None,
    ) -> list[Fetched]:
        """Chunks as `TieredStore.fetch` gives them, those from stores while they are still on their way.

        Args:
            keys: of chunks, in prompt order.
            homes: where each layer is wanted; the CPU if that is left open.
            budget: how long stores that are not local may be waited for, here and while layers run; local ones are
                waited for as long as they take.
            first: the first layer whose stored states are wanted, or what says so once `choose` was asked. Those before
                it come last, for the next prompt.
            choose: is told where chunks are, and in which forms, before anything is read, and says which are loaded
                from where. None: the chunk's own entry, from the nearest store that has it; then its levels.
            progress: is told what has come.
            spare: is told of all chunks that will be used, and says what will not be read of them: that is left out.

        Returns:
            One a key; without a chunk, and with `TEXT` as tier, where `choose` wants its text computed.
        """
        wanted = list(dict.fromkeys(keys))
        visit = _Visit(self, homes, budget, progress or Progress(), choose)
        if choose is None:
            places: Mapping[str, Sequence[Place]] = everywhere(self.tiers, wanted)
        else:
            asked = visit.allows, choose.prefers, visit.late, choose.accepts
            there = survey(self.tiers, visit.lanes, wanted, budget, *asked)
            places = choose.choose(there)
            visit.found |= {key: Fetched(None, TEXT) for key in there if not places.get(key)}
        visit.look(wanted, places)
        visit.begin(wanted, first, spare)
        return [visit.found.get(key, Fetched(None)) for key in keys]


class _Visit:
    """One prompt's way through the tiers."""

    def __init__(
        self,
        pipeline: Pipeline,
        homes: Sequence[torch.device],
        budget: Budget | None,
        progress: Progress,
        choose: Chooser | None,
    ) -> None:
        self._pipeline, self._tiers = pipeline, pipeline.tiers
        self._homes = tuple(homes) or (torch.device("cpu"),)
        self._budget, self._progress = budget, progress
        self._accepts = None if choose is None else choose.accepts
        self.lanes = pipeline.lanes()
        self.found: dict[str, Fetched] = {}
        self._coming: list[Incoming] = []
        self._attempts: dict[int, Attempt | None] = {}

    def allows(self, tier: int, count: int) -> bool:
        """Whether a store is asked by this prompt, settled once; about so many chunks."""
        store, breaker = self._tiers.stores[tier], self._pipeline.breakers[tier]
        timed = self._budget is not None and not getattr(store, "local", False)
        if tier not in self._attempts:
            self._attempts[tier] = Attempt(breaker) if not timed or breaker.allows() else None
        if self._attempts[tier] is None:
            store.stats.count("misses", "breaker", count)
        return self._attempts[tier] is not None

    def late(self, tier: int) -> None:
        """A store that was asked did not answer in time."""
        if (attempt := self._attempts[tier]) is not None:
            attempt.late()

    def look(self, keys: Sequence[str], places: Mapping[str, Sequence[Place]]) -> None:
        """Opens each chunk at the first of its places where it is; small ones are read at once."""
        left = {key: list(places.get(key, ())) for key in keys}
        whole: dict[str, Place] = {}
        while True:
            turn: dict[int, dict[str, Place]] = {}
            for key, those in left.items():
                if those and key not in self.found and key not in whole:
                    place = those.pop(0)
                    turn.setdefault(place.tier, {})[key] = place
            for tier in sorted(turn):
                if tier == MEMORY:
                    self._found(
                        self._tiers.remembered({key: place.form for key, place in turn[tier].items()}), turn[tier]
                    )
                elif self.allows(tier, len(turn[tier])):
                    whole |= self._open_all(tier, turn[tier])
            if not turn and not whole:
                return
            if not turn:  # small ones, and those that a GPU's kernels decode, many at once
                for tier in sorted({place.tier for place in whole.values()}):
                    forms = {key: place.form for key, place in whole.items() if place.tier == tier}
                    begin = time.monotonic()
                    got = self._tiers.take(tier, forms, self._homes, self._budget, self._accepts)
                    nbytes = sum(one.nbytes for one in got.values())
                    self._progress.came_first(self._tiers.stores[tier].url, nbytes, time.monotonic() - begin)
                    self._found(got, whole)
                whole = {}

    def begin(self, keys: Sequence[str], first: int | Callable[[], int], spare: Spare | None = None) -> None:
        """Counts what was found, and sends for the layers of what is coming."""
        for tier, attempt in self._attempts.items():
            if attempt is not None:
                attempt.begin(sum(item.level == tier for item in self._coming))
        told = {key: self._progress.levels.get(key, TEXT) for key in keys if key in self.found}
        self._progress.levels = told
        had = [self.found[key].tier for key in keys if key in self.found and self.found[key].chunk is not None]
        self._tiers.count(had, len(set(keys) - self.found.keys()))
        if not self._coming:
            self._progress.begin(0)
            return
        order = {key: i for i, key in enumerate(keys)}
        self._coming.sort(key=lambda item: order[item.key])
        begin = first if isinstance(first, int) else first()
        if spare is not None:
            self._leave_out(spare({key: got.chunk for key, got in self.found.items()}), begin)
        pipeline, coming = self._pipeline, self._coming
        pieces = cut(coming, begin, pipeline.piece_bytes, pipeline.rest)
        self._progress.begin(sum(piece.wanted for piece in pieces))
        for tier in sorted({item.level for item in coming}):  # apart: what one store does not give holds up no other
            items = [item for item in coming if item.level == tier]
            mine = [piece for piece in pieces if piece.of.level == tier]
            transfer = Transfer(self._tiers, self.lanes(tier), items, mine, self._homes, pipeline.ahead, self._progress)
            for item in items:
                chunk = self.found[item.key].chunk
                assert isinstance(chunk, ArrivingChunk)
                weakref.finalize(chunk.hold, transfer.let_go)
            transfer.begin()

    def _leave_out(self, spare: Mapping[str, np.ndarray], first: int) -> None:
        """Groups of tokens that will not be read are not fetched; layers before the first come last as they are.

        Where no chunk is kept that lacks something, those layers are not fetched either. Each file is looked at as it
        is, in the form in which its chunk is loaded.
        """
        for item in self._coming:
            if (unread := spare.get(item.key)) is None:
                continue
            found = gaps(item.file, unread, self._pipeline.least_gap)
            layers = item.file.header.layers_of
            groups = {unit: those for unit, those in found.items() if layers(unit).stop > first}
            if groups:
                self._progress.leave_out(*item.leave_out(groups))
            if groups and not self._pipeline.rest:
                before = [unit for unit in range(item.file.header.units) if layers(unit).stop <= first]
                item.leave_out(dict.fromkeys(before, item.every_group), told=False)
                item.source.keeps = False

    def _found(self, got: Mapping[str, Fetched], places: Mapping[str, Place]) -> None:
        self.found |= got
        for key, one in got.items():
            self._progress.levels[key] = one.level or places[key].form.level

    def _open_all(self, tier: int, places: Mapping[str, Place]) -> dict[str, Place]:
        """Files that a store has, verified as far as their heads say; gives those that are better read whole."""
        store, attempt = self._tiers.stores[tier], self._attempts[tier]
        assert attempt is not None
        if at_once(store, self._homes):
            return dict(places)
        most = None if getattr(store, "local", False) else self._budget
        opened = self._opened(tier, places, attempt)
        for key, item in opened.items():
            if item is None:
                continue
            self._coming.append(item)
            late = partial(_late, self._tiers, self._progress, item)  # it must not hold this, which holds the chunk
            chunk = ArrivingChunk.of(item.arrival, item.file.header, store.url, most, late, **item.fields)
            self.found[key] = Fetched(chunk, store.url, places[key].form.unless(chunk))
            self._progress.levels[key] = id_in(item.file.header).name
        return {key: places[key] for key, item in opened.items() if item is None}

    def _opened(self, tier: int, places: Mapping[str, Place], attempt: Attempt) -> dict[str, Incoming | None]:
        """Files by key of the chunk; None for what is better read whole."""
        store, budget, small = self._tiers.stores[tier], self._budget, self._pipeline.whole_bytes
        local = budget is None or getattr(store, "local", False)
        opened: dict[str, Any] = {}
        with nullcontext() if local else budget.spend():
            unknown = {place.form.entry: key for key, place in places.items() if place.nbytes is None}
            told = sizes_at_once(self._tiers, tier, list(unknown)) if unknown else {}
            sizes = {unknown[entry]: size for entry, size in told.items()}
            sizes |= {key: place.nbytes for key, place in places.items() if place.nbytes is not None}
            opened |= {key: None for key in places if (sizes.get(key) or small + 1) <= small}
            heads = {
                key: self.lanes(tier).submit(self._open, tier, key, place, attempt, sizes.get(key), cost_bytes=1 << 14)
                for key, place in places.items()
                if key not in opened and sizes.get(key, 0) is not None
            }
            most = remaining(float("inf"))
            wait(heads.values(), None if most == float("inf") else most)
        for key, head in heads.items():
            if not head.done():
                head.cancel()
                store.stats.count("misses", "deadline")
                attempt.late()
            elif head.cancelled():  # the scheduler was closed
                store.stats.count("misses", "error")
            elif (error := head.exception()) is None:
                if (result := head.result()) is not _NOTHING:
                    opened[key] = result
            elif isinstance(error, ChunkFileError):
                self._tiers.discard(store, places[key].form.entry, error.bare())
            elif not isinstance(error, Absent):
                store.stats.count("misses", "error")
        return opened

    def _open(self, tier: int, key: str, place: Place, attempt: Attempt, size: int | None) -> Any:
        """The head of a file, of which the size may be known."""
        tiers, store, form = self._tiers, self._tiers.stores[tier], place.form
        if (waiting := tiers.waiting(tier, form.entry)) is not None:
            source = StoreSource(form.entry, len(waiting), [_Bytes(waiting)])
        elif (size := store.size(form.entry) if size is None else size) is None:
            store.stats.count("misses")
            return _NOTHING
        elif size <= self._pipeline.whole_bytes:
            return None
        else:
            local = getattr(store, "local", False)  # then nobody else sees to the budget
            stores = [store, *tiers.stores[tier + 1 :]]
            source = StoreSource(form.entry, size, stores, self._budget if local else None)
        try:
            file = tiers.opener.checked_head(form.entry, source, None if form.main else form.codec)
        except ChunkFileError as error:
            if error.reason not in TORN:
                raise
            return None
        if self._accepts is not None and not self._accepts(id_in(file.header)):
            store.stats.count("misses")
            return _NOTHING
        if not file.header.layer0:
            raise ChunkFileError("layer 0 is not in the chunk file, and is not rebuilt here", reason="layer0")
        device = self._homes[0]
        if device.type != "cpu" and for_kernels(file, device):
            return None
        source.keeps = tier > 0 or tiers.pool.codec is not None
        fields = file.fields | {"scores": file.scores}
        return Incoming(key, file, source, tier, store, fields, attempt, form.entry)


def at_once(store: Store, homes: Sequence[torch.device]) -> bool:
    """Whether files of a store are read whole before anything is computed: those of a local one, for a GPU.

    Pieces hold Python's lock, which the thread that launches the GPU's kernels needs too. Where bytes come as fast as
    from a page cache, that costs more than overlapping saves: with 2.1 GB, 16k tokens of an 8B model, the first token
    took 0.8 to 1.0 s in pieces, and 0.3 to 0.4 s when files were landed first (docs/lab-log.md, 2026-11-29).

    Args:
        store: that has them.
        homes: where each layer is wanted.
    """
    return bool(getattr(store, "local", False)) and all(home.type == "cuda" for home in homes)


class _Bytes:
    """An entry that a store is about to be given."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._data[start:stop]


def _late(tiers: TieredStore, progress: Progress, item: Incoming) -> None:
    """A prompt went on without a file that was counted as a hit."""
    item.attempt.late()
    progress.lost(item.key)
    if not item.arrival.failed and item.arrival.miss():
        tiers.lost(item.store.url)
        item.store.stats.count("misses", "deadline")


_NOTHING = object()
