"""A chunk whose layers come one after the other, while a model computes with those that are there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from blendkv.chunk import ChunkCache
from blendkv.codecs import DTYPES
from blendkv.container import Header
from blendkv.errors import ChunkMissError
from blendkv.stores.deadline import Budget, remaining

LATE = "late"
"""Why a chunk is missed whose layers did not come before the budget of its prompt was spent."""


class Arrival:
    """Layers of one chunk file, as far as they have come. Safe to share among threads.

    Args:
        layers: how many there are.
    """

    def __init__(self, layers: int) -> None:
        self._states: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._events: dict[int, Any] = {}
        self._why: str | None = None
        self._missed = False
        self._changed = threading.Condition()

    def deliver(self, first: int, states: Sequence[tuple[Tensor, Tensor]], event: Any = None) -> bool:
        """Layers from `first` on have come.

        Args:
            first: number of the first.
            states: keys `[H, T, D]` and values `[H, T, Dv]` of each.
            event: on a GPU, when they have been copied.

        Returns:
            Whether all layers are there now.
        """
        with self._changed:
            for layer, pair in enumerate(states, first):
                self._states[layer] = pair
                if event is not None:
                    self._events[layer] = event
            self._changed.notify_all()
            return all(pair is not None for pair in self._states)

    def fail(self, why: str) -> bool:
        """Layers that have not come will not; whether that is news."""
        with self._changed:
            first, self._why = self._why is None, self._why or why
            self._changed.notify_all()
            return first

    @property
    def failed(self) -> bool:
        """Whether layers that have not come will not."""
        with self._changed:
            return self._why is not None

    def miss(self) -> bool:
        """Somebody goes on without it, because it came late or not at all; whether that is news."""
        with self._changed:
            first, self._missed = not self._missed, True
            return first

    def wait(self, layer: int, seconds: float = math.inf) -> str | None:
        """Waits for a layer.

        Returns:
            None once it is there, or why it will not come, `LATE` if it did not in so many seconds.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._states[layer] is not None or self._why is not None,
                None if math.isinf(seconds) else max(0.0, seconds),
            )
            if self._states[layer] is None:
                return self._why or LATE
            return None

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has come; waits for one that has not.

        Raises:
            ChunkMissError: if it will not.
        """
        if (why := self.wait(layer)) is not None:
            raise ChunkMissError(f"layer {layer} of a chunk did not come from its store: {why}")
        pair = self._states[layer]
        assert pair is not None
        if (event := self._events.get(layer)) is not None:
            torch.cuda.current_stream(pair[0].device).wait_event(event)
            for tensor in pair:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return pair


class LayerStates(Sequence[Tensor]):
    """Keys, or values, of all layers: whoever asks for one waits until it has come."""

    def __init__(self, arrival: Arrival, part: int, layers: int) -> None:
        self._arrival, self._part, self._layers = arrival, part, layers

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
    """

    tier: str

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
        count = len(header.layers)
        chunk = cls.__new__(cls)
        chunk.__dict__.update(
            {"scores": {}} | fields,
            keys=LayerStates(arrival, 0, count),
            values=LayerStates(arrival, 1, count),
            sizes=tuple((shape.heads, shape.key_dim, shape.value_dim) for shape in header.layers),
            dtypes=frozenset({DTYPES[header.dtype]}),
            homes=(torch.device("cpu"),) * count,  # kernels take them layer by layer
            tier=tier,
            _arrival=arrival,
            _budget=budget,
            _late=late,
            _bytes=header.decoded_bytes,
        )
        return chunk

    def lacks(self, layer: int) -> str | None:
        """See `ChunkCache`; waits as long as the prompt's budget allows."""
        arrival = self.__dict__.get("_arrival")
        if arrival is None:  # a copy, which has all
            return None
        if (why := arrival.wait(layer, 0.0)) != LATE:
            return why
        budget = self.__dict__["_budget"]
        if budget is None:
            return arrival.wait(layer)
        with budget.spend():
            why = arrival.wait(layer, remaining(math.inf))
        if why == LATE:
            self.__dict__["_late"]()
        return why

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
        return f"ArrivingChunk({len(self)} tokens, {len(self.keys)} layers from {self.tier}, key={self.key[:12]}...)"
