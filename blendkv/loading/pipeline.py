"""Chunks of a prompt from stores, layer by layer: while layer i computes, those after it are fetched, checked, decoded.

CacheBlend (2405.16444), section 5. The head of each file is read first; then pieces of all files go through the
process's transfer slots in the order in which layers are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from blendkv.errors import ChunkFileError
from blendkv.expanding import for_kernels
from blendkv.loading.arriving import ArrivingChunk
from blendkv.loading.controller import Offer
from blendkv.loading.incoming import Attempt, Incoming, cut
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane, TransferScheduler, shared_scheduler
from blendkv.loading.sources import Absent, StoreSource
from blendkv.loading.sparing import LEAST_GAP, Spare, gaps
from blendkv.loading.transfer import Transfer
from blendkv.stores import Budget, Store, TieredStore
from blendkv.stores.breaker import Breaker
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


class Pipeline:
    """Fetches chunks from tiers so that a blend can begin before they are there.

    Args:
        tiers: memory over stores.
        scheduler: whose slots transfers use; None: those that all prompts of this process share.
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

    def fetch(
        self,
        keys: Sequence[str],
        homes: Sequence[torch.device] = (),
        budget: Budget | None = None,
        first: int | Callable[[], int] = 0,
        choose: Choose | None = None,
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
            choose: is told of all chunks that are there before the first of their layers is fetched, and names keys of
                those that had better be computed from their text.
            progress: is told what has come.
            spare: is told of all chunks that will be used, and says what will not be read of them: that is left out.

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
        attempts: list[Attempt] = []
        for level, store in enumerate(tiers.stores):
            lacking = [key for key in wanted if key not in found and key not in whole]
            if not lacking:
                break
            timed = budget is not None and not getattr(store, "local", False)
            if timed and not self.breakers[level].allows():
                store.stats.count("misses", "breaker", len(lacking))
                continue
            attempts.append(Attempt(self.breakers[level]))
            for key, opened in self._opened(lane, level, store, lacking, budget, homes[0], attempts[-1]).items():
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
        for attempt in attempts:
            attempt.begin(sum(item.attempt is attempt for item in coming))
        if whole:  # small ones, and those that a GPU's kernels decode, many at once
            found |= {k: got for k, got in zip(whole, tiers.fetch(whole, homes, budget), strict=True) if got.chunk}
        counted = [key for key in wanted if key in found and found[key].chunk is not None and key not in whole]
        tiers.count([found[key].tier for key in counted], len(set(wanted) - set(found) - set(whole)))
        if coming:
            order = {key: i for i, key in enumerate(wanted)}
            coming.sort(key=lambda item: order[item.key])
            progress = progress or Progress()
            begin = first if isinstance(first, int) else first()
            if spare is not None:
                self._leave_out(coming, spare({k: got.chunk for k, got in found.items()}), begin, progress)
            pieces = cut(coming, begin, self.piece_bytes, self.rest)
            transfer = Transfer(tiers, lane, coming, pieces, homes, self.ahead, progress)
            for item in coming:
                weakref.finalize(found[item.key].chunk, transfer.let_go)
            transfer.begin()
        return [found.get(key, Fetched(None)) for key in keys]

    def _leave_out(
        self, coming: Sequence[Incoming], spare: Mapping[str, np.ndarray], first: int, progress: Progress
    ) -> None:
        """Groups of tokens that will not be read are not fetched; layers before the first come last as they are."""
        for item in coming:
            if (unread := spare.get(item.key)) is None:
                continue
            found = gaps(item.file, unread, self.least_gap)
            layers = item.file.header.layers_of
            groups = {unit: those for unit, those in found.items() if layers(unit).stop > first}
            if groups:
                progress.leave_out(*item.leave_out(groups))
                item.source.keeps &= self.rest

    def _opened(
        self,
        lane: Lane,
        level: int,
        store: Store,
        keys: Sequence[str],
        budget: Budget | None,
        device: torch.device,
        attempt: Attempt,
    ) -> dict[str, Incoming | None]:
        """Files that a store has, verified as far as their heads say; None for what is better read whole."""
        local = budget is None or getattr(store, "local", False)
        opened: dict[str, Any] = {}
        with nullcontext() if local else budget.spend():
            sizes = self._sizes(level, store, keys)
            opened |= {key: None for key in keys if (sizes.get(key) or self.whole_bytes + 1) <= self.whole_bytes}
            given = (self._open, level, store, attempt)
            heads = {
                key: lane.submit(*given, key, device, budget, sizes.get(key), cost_bytes=1 << 14)
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
        item.attempt.late()
        if not item.arrival.failed and item.arrival.miss():
            self.tiers.lost(item.store.url)
            item.store.stats.count("misses", "deadline")

    def _open(
        self,
        level: int,
        store: Store,
        attempt: Attempt,
        key: str,
        device: torch.device,
        budget: Budget | None,
        size: int | None,
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
        return Incoming(key, file, source, level, store, file.fields | {"scores": file.scores}, attempt)


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
