"""CUDA streams on which pieces of one job are copied and worked on at the same time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Self

import torch


class Overlap:
    """On CUDA streams for copying, for decoding each piece, and for inverse transforms; elsewhere nothing.

    Sections of a piece are decoded side by side in the time of one, so what is to be decoded goes before inverse
    transforms of other pieces, which would fill the device.
    """

    def __init__(self, device: torch.device, pieces: int) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._current = torch.cuda.current_stream(device)
            self._copies, self._inverses = (torch.cuda.Stream(device) for _ in range(2))
            self._decodes = [torch.cuda.Stream(device, priority=-1) for _ in range(pieces)]
            self._streams = [self._copies, self._inverses, *self._decodes]
            self._copied: dict[int, torch.cuda.Event] = {}

    def start(self) -> None:
        """All that the current stream was given before comes before what is queued from here on."""
        for stream in self._streams:
            stream.wait_stream(self._current)

    @contextmanager
    def copying(self, piece: int) -> Generator[None]:
        """Within it, copies of a piece are queued."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._copies):
            yield
            self._copied[piece] = self._copies.record_event()

    @contextmanager
    def decoding(self, piece: int) -> Generator[None]:
        """Within it, what needs those copies is queued."""
        if not self._streams:
            yield
            return
        stream = self._decodes[piece]
        stream.wait_event(self._copied[piece])
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def inverting(self, piece: int) -> Generator[None]:
        """Within it, what needs the symbols of a piece is queued."""
        if not self._streams:
            yield
            return
        self._inverses.wait_stream(self._decodes[piece])
        with torch.cuda.stream(self._inverses):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """What the current stream does from here on, and with the memory of this, comes after all of that."""
        for stream in self._streams:
            self._current.wait_stream(stream)
