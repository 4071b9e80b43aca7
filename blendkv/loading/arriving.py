"""A chunk whose layers come one after the other, while a model computes with those that are there."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.codecs import DTYPES
from blendkv.container import Header
from blendkv.errors import ChunkMissError
from blendkv.stores.deadline import Budget, remaining

LATE = "late"
"""Why a chunk is missed whose layers did not come before the budget of its prompt was spent."""
FORKED = "forked"
"""Why a chunk is missed that was on its way when the process was forked: the child has no threads that bring it."""
_ARRIVALS: WeakSet[Arrival] = WeakSet()


class Arrival:
    """Layers of one chunk file, as far as they have come. Safe to share among threads.

    Tokens may be left out of a layer: they come if somebody wants them (`on_wanted`), or later, or not at all.

    Args:
        header: of the file.

    Attributes:
        on_wanted: called with a layer of which somebody wants what was left out; in any thread, more than once.
    """

    def __init__(self, header: Header) -> None:
        self._header, count = header, len(header.layers)
        self._states: list[tuple[Tensor, Tensor] | None] = [None] * count
        self._lacking = np.ones((count, header.tokens), bool)
        self._left_out = np.zeros((count, header.tokens), bool)
        self._events: dict[int, Any] = {}
        self._why: str | None = None
        self._gone: dict[int, str] = {}
        self._missed = False
        self._changed = threading.Condition()
        self.on_wanted: Callable[[int], object] = lambda layer: None
        _ARRIVALS.add(self)

    def leave_out(self, layers: Sequence[int], tokens: np.ndarray) -> None:
        """Tokens `[T]` (True) of layers come only if somebody wants them; to be said before anything comes."""
        self._left_out[layers] |= tokens

    @property
    def has_gaps(self) -> bool:
        """Whether something that was left out is not there."""
        with self._changed:
            return bool((self._lacking & self._left_out).any())

    @property
    def is_whole(self) -> bool:
        """Whether everything is there."""
        with self._changed:
            return not self._lacking.any()

    @property
    def has_come(self) -> bool:
        """Whether everything is there but what was left out."""
        with self._changed:
            return not (self._lacking & ~self._left_out).any()

    def deliver(
        self, first: int, states: Sequence[tuple[Tensor, Tensor]], event: Any = None, tokens: np.ndarray | None = None
    ) -> None:
        """Layers from `first` on have come.

        Args:
            first: number of the first.
            states: keys `[H, T, D]` and values `[H, T, Dv]` of each.
            event: on a GPU, when they have been copied.
            tokens: `[T]` True for those that are in them; None: all.
        """
        with self._changed:
            for layer, pair in enumerate(states, first):
                there, done = self._states[layer], event
                if there is not None and tokens is not None:  # whoever has what was there keeps it as it is
                    pair, done = _joined(there, self._events.get(layer), pair, event, tokens)
                self._states[layer] = pair
                if done is not None:
                    self._events[layer] = done
                self._lacking[layer] &= False if tokens is None else ~tokens
            self._changed.notify_all()

    def fail(self, why: str) -> bool:
        """What has not come will not; whether that is news."""
        with self._changed:
            first, self._why = self._why is None, self._why or why
            self._changed.notify_all()
            return first

    def lose(self, layers: Sequence[int], why: str) -> None:
        """Layers that nobody has wanted as yet will not come; the others may."""
        with self._changed:
            self._gone |= dict.fromkeys(layers, why)
            self._changed.notify_all()

    def abandon(self) -> None:
        """As `fail`, for the garbage collector, which must wait for no lock: nobody sends for what has not come.

        It wakes nobody, as nobody waits: whoever does holds the `Hold`, and this is called once that is gone.
        """
        self._why = self._why or "cancelled"

    @property
    def failed(self) -> bool:
        """Whether what has not come will not."""
        with self._changed:
            return self._why is not None

    def miss(self) -> bool:
        """Somebody goes on without it, because it came late or not at all; whether that is news."""
        with self._changed:
            first, self._missed = not self._missed, True
            return first

    def wait(self, layer: int, seconds: float = math.inf, reads: np.ndarray | None = None) -> str | None:
        """Waits for a layer.

        Args:
            layer: of the model.
            seconds: most of them.
            reads: `[T]` True for tokens that are wanted; None: all.

        Returns:
            None once they are there, or why they will not come, `LATE` if they did not in so many seconds.
        """
        wanted = np.ones(self._header.tokens, bool) if reads is None else reads
        if (self._lacking[layer] & self._left_out[layer] & wanted).any():
            self.on_wanted(layer)
        with self._changed:
            self._changed.wait_for(
                lambda: self._why or self._gone.get(layer) or not (self._lacking[layer] & wanted).any(),
                None if math.isinf(seconds) else max(0.0, seconds),
            )
            if (self._lacking[layer] & wanted).any():
                return self._why or self._gone.get(layer) or LATE
            return None

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; waits until all of it has come.

        Args:
            layer: of the model.

        Raises:
            ChunkMissError: if it will not come.
        """
        if (why := self.wait(layer)) is not None:
            raise ChunkMissError(f"layer {layer} of a chunk did not come from its store: {why}")
        return self.part(layer)

    def part(self, layer: int) -> tuple[Tensor, Tensor]:
        """As far as a layer has come, NaN elsewhere; waits for nothing, as who asks has waited for what it reads."""
        with self._changed:
            pair, event = self._states[layer], self._events.get(layer)
        if pair is None:
            shape, dtype = self._header.layers[layer], DTYPES[self._header.dtype]
            sizes = [(shape.heads, self._header.tokens, dim) for dim in (shape.key_dim, shape.value_dim)]
            return torch.full(sizes[0], torch.nan, dtype=dtype), torch.full(sizes[1], torch.nan, dtype=dtype)
        if event is not None:
            _after(event, pair)
        return pair

    def forked(self) -> None:
        """In a child of this process: those who bring layers are not here, nor is who held the lock."""
        self._changed, self._why = threading.Condition(), self._why or FORKED


def _joined(
    old: tuple[Tensor, Tensor], came: Any, new: tuple[Tensor, Tensor], event: Any, tokens: np.ndarray
) -> tuple[tuple[Tensor, Tensor], Any]:
    """Tokens of `new` where they are, of `old` elsewhere, and when that has been done on a GPU."""
    device = old[0].device
    here = torch.from_numpy(tokens)[None, :, None]
    if device.type != "cuda":
        keys, values = (torch.where(here, b, a) for a, b in zip(old, new, strict=True))
        return (keys, values), None
    with torch.cuda.device(device):
        for done, pair in ((came, old), (event, new)):
            if done is not None:
                _after(done, pair)
        here = here.to(device)
        keys, values = (torch.where(here, b.to(device), a) for a, b in zip(old, new, strict=True))
        return (keys, values), torch.cuda.current_stream(device).record_event()


def _after(event: Any, pair: tuple[Tensor, Tensor]) -> None:
    """The current stream goes on once layers have been copied to its GPU."""
    stream = torch.cuda.current_stream(pair[0].device)
    stream.wait_event(event)
    for tensor in pair:
        tensor.record_stream(stream)


class Hold:
    """What a chunk on its way and its layers have in common: layers are sent for as long as somebody has one of them.

    So keys may outlive their chunk, and the garbage collector takes nothing away for which somebody waits.
    """


class LayerStates(Sequence[Tensor]):
    """Keys, or values, of all layers: whoever asks for one waits until it has come."""

    def __init__(self, arrival: Arrival, part: int, layers: int, hold: Hold) -> None:
        self._arrival, self._part, self._layers, self._hold = arrival, part, layers, hold

    def __len__(self) -> int:
        """Layers of the model."""
        return self._layers

    def __getitem__(self, layer: Any) -> Any:
        """`[H, T, D]` of a layer."""
        if isinstance(layer, slice):
            return tuple(self[i] for i in range(*layer.indices(self._layers)))
        if not -self._layers <= layer < self._layers:
            raise IndexError(f"layer {layer} of {self._layers}")
        return self._arrival.states(layer % self._layers)[self._part]


class ArrivingChunk(ChunkCache):
    """A `ChunkCache` that is being loaded.

    Attributes:
        tier: URL of the store that it comes from.
        hold: its own and its layers'.
    """

    tier: str
    hold: Hold

    @classmethod
    def of(
        cls,
        arrival: Arrival,
        header: Header,
        tier: str,
        budget: Budget | None,
        late: Callable[[], object] = lambda: None,
        **fields: Any,
    ) -> Self:
        """The chunk of a file whose head has been verified.

        Args:
            arrival: of its layers.
            header: of the file.
            tier: URL of the store.
            budget: how long its prompt may wait, in all.
            late: called when a prompt goes on without it because that was over.
            **fields: of the chunk, other than keys and values.
        """
        count, hold = len(header.layers), Hold()
        chunk = cls.__new__(cls)
        chunk.__dict__.update(
            {"scores": {}} | fields,
            keys=LayerStates(arrival, 0, count, hold),
            values=LayerStates(arrival, 1, count, hold),
            sizes=tuple((shape.heads, shape.key_dim, shape.value_dim) for shape in header.layers),
            dtypes=frozenset({DTYPES[header.dtype]}),
            homes=(torch.device("cpu"),) * count,  # kernels take them layer by layer
            tier=tier,
            hold=hold,
            _arrival=arrival,
            _budget=budget,
            _late=late,
            _bytes=header.decoded_bytes,
        )
        return chunk

    def lacks(self, layer: int, reads: np.ndarray | None = None) -> str | None:
        """See `ChunkCache`; waits as long as the prompt's budget allows."""
        arrival = self.__dict__.get("_arrival")
        if arrival is None:  # a copy, which has all
            return None
        if (why := arrival.wait(layer, 0.0, reads)) != LATE:
            return why
        budget = self.__dict__["_budget"]
        if budget is None:
            return arrival.wait(layer, reads=reads)
        with budget.spend():
            why = arrival.wait(layer, remaining(math.inf), reads)
        if why == LATE:
            self.__dict__["_late"]()
        return why

    @property
    def has_gaps(self) -> bool:
        """See `ChunkCache`."""
        return "_arrival" in self.__dict__ and self.__dict__["_arrival"].has_gaps

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `ChunkCache`."""
        return self.__dict__["_arrival"].part(layer) if "_arrival" in self.__dict__ else super().states(layer)

    @property
    def nbytes(self) -> int:
        """See `ChunkCache`."""
        return self.__dict__["_bytes"] if "_bytes" in self.__dict__ else super().nbytes

    @property
    def dtype(self) -> torch.dtype:
        """See `ChunkCache`."""
        return next(iter(self.dtypes))

    def __repr__(self) -> str:
        """A line for people; waits for nothing."""
        if "_arrival" not in self.__dict__:
            return super().__repr__()
        return f"ArrivingChunk({len(self)} tokens, {len(self.keys)} layers from {self.tier}, key={self.key[:12]}...)"


def _forked() -> None:
    for arrival in list(_ARRIVALS):
        arrival.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
