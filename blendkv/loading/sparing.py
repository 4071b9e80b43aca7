"""Tokens of chunks that are not loaded, since a selector knows ahead that the prompt will compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendkv.cache import BlendedCache, Chunk
from blendkv.choosing import is_known_ahead, never_read
from blendkv.chunk import ChunkCache, MissingChunk
from blendkv.chunkfile import ChunkFile
from blendkv.codecs import Codec, LayerShape, apart
from blendkv.container import Header
from blendkv.plan import RowPlan, plan_row

LEAST_GAP = 1 << 15
"""Bytes that are worth a request of their own: a gap between what is read is left out only if it has as many. A local
disk reads so many in the time of a request; where requests are slow, give `Pipeline(least_gap=)` more."""

Found = Mapping[str, ChunkCache | None]
"""What there is of a prompt, by key; None for a chunk that will be computed from its text with the prompt."""
Spare = Callable[[Found], Mapping[str, np.ndarray]]
"""By key, `[layers, tokens]` True where what is stored will not be read."""


class Sparing:
    """Says what one prompt will not read of its chunks, before any of their layers is loaded.

    It is a forecast: a prompt that turns out to want more asks for it (`ArrivingChunk.lacks`).

    Args:
        ids: `[T]` token ids of the prompt.
        pieces: by key, in prompt order, the ids of each chunk, and those that stand before it while it is computed.
        options: of its `BlendedCache`, as they are once a controller has chosen.
        layers: of the model.
        computes: whether a chunk that no store has is computed and kept before the prompt begins.
        notes: told if a selector fails, which leaves nothing out.
        outputs: last rows of the prompt that are computed in any case; `generate` wants one.
    """

    def __init__(
        self,
        ids: Tensor | Sequence[int],
        pieces: Mapping[str, tuple[Sequence[int], tuple[int, ...]]],
        options: Mapping[str, Any],
        layers: int,
        computes: bool = True,
        notes: list[str] | None = None,
        outputs: int = 1,
    ) -> None:
        self._ids, self._pieces, self._options = np.asarray(ids), pieces, options
        self._layers, self._computes, self._outputs = layers, computes, outputs
        self._notes = [] if notes is None else notes

    def __call__(self, found: Found) -> Mapping[str, np.ndarray]:
        """What the prompt will not read.

        Args:
            found: chunks of memory and stores by key, None for those that are computed from text; others are missing.

        Returns:
            See `Spare`; nothing, if the selector must see layers before it knows.
        """
        try:
            return self._spare(found)
        except Exception as error:  # a plug-in's
            self._notes.append(f"what the selector will not read could not be foreseen, so all is loaded: {error!r}")
            return {}

    def _spare(self, found: Found) -> Mapping[str, np.ndarray]:
        cache = BlendedCache((), **self._options)
        selector = cache.selector
        missing = [key for key in self._pieces if key not in found]
        if not is_known_ahead(selector, cache.schedule, cache.corrector):
            return {}
        if selector.stored and missing and self._computes:
            return {}
        chunks: list[Chunk] = []
        for key, (ids, conditioning) in self._pieces.items():
            chunk = found.get(key) if key in found or not self._computes else _to_be_computed(key, ids, conditioning)
            chunks.append(MissingChunk(torch.tensor(ids)) if chunk is None else chunk)
        plan = plan_row(0, self._ids, chunks, lambda chunk: None, len(self._ids) - self._outputs)
        spare = never_read(plan, selector, cache.schedule, self._layers)
        return {chunk.key: spare[id(chunk)] for _, chunk in plan.placed if chunk.key in found}

    def at(self, ratio: float) -> Mapping[str, np.ndarray]:
        """What the prompt would not read at a ratio if stores have all of its chunks; before a file was looked at.

        Returns:
            See `Spare`; nothing for a selector that must see layers, or scores that are in files.
        """
        try:
            options: dict[str, Any] = {**self._options, "recompute_ratio": ratio}
            cache = BlendedCache((), **options)
            selector = cache.selector
            if selector.stored or not is_known_ahead(selector, cache.schedule, cache.corrector):
                return {}
            spare = never_read(self._there, selector, cache.schedule, self._layers)
            return {chunk.key: spare[id(chunk)] for _, chunk in self._there.placed}
        except Exception:  # a plug-in's; the call says so
            return {}

    @cached_property
    def _there(self) -> RowPlan:
        """The prompt with all of its chunks."""
        chunks = [_to_be_computed(key, ids, conditioning) for key, (ids, conditioning) in self._pieces.items()]
        return plan_row(0, self._ids, chunks, lambda chunk: None, len(self._ids) - self._outputs)


def _to_be_computed(key: str, ids: Sequence[int], conditioning: tuple[int, ...]) -> ChunkCache:
    """Stands for a chunk that will be there when the prompt begins."""

    def nothing() -> Any:
        raise AssertionError("nobody asks for keys or values of a chunk that is not there yet")

    fields = {"fingerprint": "", "conditioning": conditioning, "keyed": key}
    return ChunkCache.unchecked(nothing, ids=torch.tensor(ids), **fields)


def gaps(file: ChunkFile, spare: np.ndarray, least: int = LEAST_GAP) -> dict[int, frozenset[int]]:
    """Groups of tokens that are left out of each unit of a file; units of which all is read are not in it.

    Args:
        file: open.
        spare: `[layers, tokens]` True where what is stored will not be read.
        least: bytes of a gap (of the mean one, where groups that follow each other make several).
    """
    header = file.header
    if not apart(file.codec) or spare.shape != (len(header.layers), header.tokens):
        return {}
    return _gaps(header, file.sizes, spare, least)


def share_read(
    codec: Codec, shapes: Sequence[LayerShape], dtype: str, nbytes: int, spare: np.ndarray, least: int = LEAST_GAP
) -> float:
    """Share of a file's bytes that `gaps` would leave, were each number of it as long as any other; all if unknown.

    Args:
        codec: that is to have written it.
        shapes: of the layers.
        dtype: of what it holds.
        nbytes: of it.
        spare: see `gaps`.
        least: likewise.
    """
    tokens = spare.shape[1]
    if not apart(codec) or not nbytes:
        return 1.0
    try:
        arrangement = codec.arrangement(shapes, tokens)
    except ValueError:  # a codec of other layers did not write it
        return 1.0
    header = Header(codec.name, codec.level, dtype, arrangement, tuple(shapes), "", bytes(4 * tokens))
    numbers = np.array([shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes])
    units = np.array([numbers[header.layers_of(unit)].sum() for unit in range(header.units)]) / numbers.sum()
    groups = np.diff(np.arange(0, tokens, arrangement.group_tokens), append=tokens) / tokens
    streams, parts, shares = arrangement.streams, arrangement.parts, units[:, None] * groups
    sizes = np.broadcast_to(nbytes / (streams * parts) * shares[:, None], (streams, len(units), parts, len(groups)))
    return 1.0 - sum(shares[unit, list(left)].sum() for unit, left in _gaps(header, sizes, spare, least).items())


def _gaps(header: Header, sizes: np.ndarray, spare: np.ndarray, least: int) -> dict[int, frozenset[int]]:
    streams, units, parts, groups = sizes.shape
    starts = np.arange(groups) * header.arrangement.group_tokens
    unread = np.logical_and.reduceat(spare, starts, axis=1)
    alike: dict[bytes, list[int]] = {}  # there are few kinds of units
    for unit in range(units):
        layers = header.layers_of(unit)
        alike.setdefault(unread[layers.start : layers.stop].all(0).tobytes(), []).append(unit)
    found: dict[int, frozenset[int]] = {}
    for pattern, those in alike.items():
        runs = _runs(np.flatnonzero(np.frombuffer(pattern, bool)).tolist())
        several = streams * (1 if len(runs) == 1 and len(runs[0]) == groups else parts)
        worth = [(sizes[:, those, :, r.start : r.stop].sum((0, 2, 3)) >= least * several).tolist() for r in runs]
        for choice in set(zip(*worth, strict=True)):
            left = frozenset(group for run, is_left in zip(runs, choice, strict=True) if is_left for group in run)
            mine = [unit for unit, own in zip(those, zip(*worth, strict=True), strict=True) if own == choice]
            found |= dict.fromkeys(mine, left) if left else {}
    return found


def tokens_of(file: ChunkFile, groups: frozenset[int]) -> np.ndarray:
    """`[T]` True for the tokens of some groups."""
    wanted = np.zeros(file.sizes.shape[3], bool)
    wanted[list(groups)] = True
    return np.repeat(wanted, file.header.arrangement.group_tokens)[: file.header.tokens]


def _runs(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as runs that follow each other."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
