"""Files on their way, in pieces: a few under way at a time, each fetched, checked, decoded and handed over."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.errors import ChunkFileError
from blendkv.kernels.table import ALIGN
from blendkv.loading.arriving import LATE
from blendkv.loading.incoming import Incoming, Piece
from blendkv.loading.progress import Progress
from blendkv.loading.scheduler import Lane
from blendkv.loading.sources import Absent
from blendkv.loading.sparing import tokens_of
from blendkv.stores import TieredStore


class Transfer:
    """Brings pieces of a prompt from one store, a few ahead of each other. Keeps no thread while it waits.

    Args:
        tiers: that keep what has come.
        lane: the prompt's way to transfer slots.
        items: files of the prompt that the store has.
        pieces: in the order in which they are wanted.
        homes: device of each layer, or one for all.
        ahead: pieces under way, or waiting for a slot.
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
            for item in self._items:
                item.arrival.abandon()
                item.arrival.on_wanted = _nothing  # else they would hold each other, and what came, until a collection
            if self._pid == os.getpid():
                self._lane.abandon()

    def _want(self, item: Incoming, layer: int) -> None:
        """Somebody waits for what was left out of a layer: that of it, and of layers after it, is fetched now."""
        first, item.rest_is_wanted = item.file.header.unit_of(layer), True
        if item.spoilt or not self._users:
            self._lost(item, item.spoilt or "cancelled")
            return
        if item.arrival.failed or not self._mine(item, first):
            return
        for unit, rest in item.rests.items():
            if unit < first or (unit > first and not self._mine(item, unit)):
                continue
            self._progress.asked_for(rest.nbytes, rest.told)
            piece = Piece(item, range(unit, unit + 1), rest.nbytes, False, rest.groups)
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
            if piece.of.spoilt and not piece.wanted:
                self._drop(piece, piece.of.spoilt)
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
            if self._failed(piece, error.reason) and not self._is_good(item):
                item.damage = error.bare()
        except Absent as error:
            self._failed(piece, error.why or LATE)
        except Exception as error:
            self._failed(piece, f"error ({type(error).__name__})")
        self._discard(item)

    def _discard(self, item: Incoming) -> None:
        """Puts a damaged file out of use, once nobody wants anything of it that may be good."""
        damage, waits = item.damage, not (item.arrival.has_come or item.arrival.failed)
        if damage is not None and not waits and item.is_news("discarded"):
            self._tiers.discard(item.store, item.entry, damage)

    def _failed(self, piece: Piece, why: str) -> bool:
        """A piece did not come; whether that is news. What nobody wants yet leaves the prompt what it wants."""
        item = piece.of
        if piece.wanted:
            return self._lost(item, why)
        news = item.is_news("spoilt") and not item.arrival.failed
        item.spoilt = item.spoilt or why
        self._drop(piece, why)
        if item.rest_is_wanted:  # asked after it was set, so that one of two threads sees what the other says
            self._lost(item, why)
        return news

    def _drop(self, piece: Piece, why: str) -> None:
        """What nobody wants yet will not come; of what was left out `_want` says so."""
        if not piece.is_rest:
            layers = piece.of.file.header.layers_of
            piece.of.arrival.lose([layer for unit in piece.units for layer in layers(unit)], why)

    def _note(self, item: Incoming) -> None:
        """Tells, once each, that all that the prompt wanted of a file is there, and that all of it is."""
        if item.arrival.has_come and item.is_news("come"):
            item.attempt.came()
        if item.arrival.is_whole and item.is_news("whole"):
            self._keep(item)

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


def _nothing(layer: int) -> None:
    """Nobody sends for what has not come."""


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
