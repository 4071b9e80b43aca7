"""Which of a prompt's tokens come from chunks, which are missed, and which are fresh: settled before any layer runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from blendkv.cache import Chunk
from blendkv.chunk import ChunkCache, MissingChunk
from blendkv.errors import CacheStateError, ChunkMissError
from blendkv.prompt import Span, find_spans
from blendkv.report import ChunkUse

Placement = tuple[Span, ChunkCache]
LAST_ROWS = "among the rows whose logits are wanted"
"""Why a chunk that is there, and good, is computed all the same."""


@dataclass(frozen=True)
class RowPlan:
    """One row of the batch.

    Attributes:
        placed: spans that are filled from chunks, in prompt order.
        fresh: `[T]` True where a token is computed in every layer.
        missed: number of those that belong to a chunk that cannot be used.
        uses: what became of each chunk.
        asks: `[T]` True for the question: text after the last span that is filled, missed chunks left out.
        exact: `[T]` True where stored states are what the model would compute: a chunk that stands where it was
            computed, after the same tokens and nothing else.
    """

    placed: list[Placement]
    fresh: np.ndarray
    missed: int
    uses: list[ChunkUse]
    asks: np.ndarray
    exact: np.ndarray

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens filled from chunks unless they are recomputed."""
        return sum(span.length for span, _ in self.placed)

    @property
    def chunk_bytes(self) -> int:
        """Stored keys and values that are placed."""
        return sum(chunk.nbytes // len(chunk) * span.length for span, chunk in self.placed)

    def spans(self, length: int) -> np.ndarray:
        """For each of `length` prompt tokens: number of its span, index in the span, tokens of the span; `[3, T]`."""
        found = np.zeros((3, length), np.int64)
        for i, (span, _) in enumerate(self.placed):
            part = found[:, span.start : span.stop]
            part[0], part[1], part[2] = i, np.arange(span.length), span.length
        return found

    def scores(self, name: str, length: int) -> Tensor:
        """`[length]` fp32 what chunks have stored under a name for each prompt token; NaN where nothing is."""
        found = torch.full((length,), torch.nan)
        for span, chunk in self.placed:
            if name in chunk.scores:
                found[span.start : span.stop] = chunk.scores[name][span.offset : span.offset + span.length].float()
        return found

    def without(self, reasons: Mapping[int, str]) -> RowPlan:
        """The same row when some chunks turn out not to be had: their tokens are computed, and counted as missed.

        Args:
            reasons: by `id` of the chunk, why.
        """
        gone = [(span, chunk) for span, chunk in self.placed if id(chunk) in reasons]
        fresh, exact, why = self.fresh.copy(), self.exact.copy(), {chunk.key: reasons[id(chunk)] for _, chunk in gone}
        for span, _ in gone:
            fresh[span.start : span.stop], exact[span.start : span.stop] = True, False
        return replace(
            self,
            placed=[placement for placement in self.placed if id(placement[1]) not in reasons],
            fresh=fresh,
            exact=exact,
            missed=self.missed + sum(span.length for span, _ in gone),
            uses=[replace(use, hit=False, reason=why[use.key]) if use.key in why else use for use in self.uses],
        )

    @cached_property
    def runs(self) -> list[list[Placement]]:
        """Spans that follow each other without a gap, together: placed at once."""
        runs: list[list[Placement]] = []
        for span, chunk in self.placed:
            if runs and runs[-1][-1][0].stop == span.start:
                runs[-1].append((span, chunk))
            else:
                runs.append([(span, chunk)])
        return runs


def plan_row(
    row: int, ids: np.ndarray, chunks: Sequence[Chunk], mismatch: Callable[[ChunkCache], str | None], stop: int
) -> RowPlan:
    """Finds the chunks of one prompt.

    Args:
        row: its index in the batch.
        ids: `[T]` token ids, -1 at padding.
        chunks: that may be in it.
        mismatch: why a chunk must not be used, or None.
        stop: prompt index from which on every token is fresh, in a chunk or not.
    """
    reasons = [(mismatch(c) or "") if isinstance(c, ChunkCache) else c.reason for c in chunks]
    owners: dict[bytes, int] = {}  # of chunks with equal ids, the first that can be used
    for i in sorted(range(len(chunks)), key=lambda i: bool(reasons[i])):
        owners.setdefault(_ids(chunks[i]), i)
    seen: set[int] = set()
    found = dict.fromkeys(range(len(chunks)), 0)
    placed: list[Placement] = []
    fresh, lost = np.ones(len(ids), bool), np.zeros(len(ids), bool)
    missed = 0
    for span in find_spans(ids, [chunk.ids.numpy() for chunk in chunks]):
        owner = owners[_ids(chunks[span.chunk])]
        part, chunk = span.cut(stop), chunks[owner]
        seen.add(owner)
        if part is None:
            continue
        found[owner] += part.length
        if isinstance(chunk, MissingChunk) or reasons[owner]:
            missed += part.length
            lost[part.start : part.stop] = True
        else:
            placed.append((part, chunk))
            fresh[part.start : part.stop] = False
    uses = []
    for i, chunk in enumerate(chunks):
        owner = owners[_ids(chunk)]
        reason = reasons[i] or ("" if owner in seen else "not in the prompt")
        if not reason and not found[owner]:
            reason = LAST_ROWS
        use = ChunkUse(
            index=i,
            row=row,
            key=chunk.key if isinstance(chunk, ChunkCache) else "",
            tokens=len(chunk),
            found=found[i],
            hit=not reason,
            reason=reason or ("partial" if found[owner] < len(chunk) else ""),
        )
        uses.append(use)
    return RowPlan(placed, fresh, missed, uses, _question(ids, placed, lost), _exact(ids, placed))


def _question(ids: np.ndarray, placed: Sequence[Placement], lost: np.ndarray) -> np.ndarray:
    """`[T]` see `RowPlan.asks`; the prompt's last token if nothing else is left."""
    asks = (ids >= 0) & ~lost
    if placed:
        asks[: placed[-1][0].stop] = False
    if not asks.any():
        asks[np.flatnonzero(ids >= 0)[-1:]] = True
    return asks


def _exact(ids: np.ndarray, placed: Sequence[Placement]) -> np.ndarray:
    """`[T]` see `RowPlan.exact`; padding in front of the prompt does not count."""
    exact = np.zeros(len(ids), bool)
    pads = int((ids < 0).argmin())
    for span, chunk in placed:
        if span.offset == 0 and span.start - pads == len(chunk.conditioning):
            same = tuple(ids[pads : span.start].tolist()) == chunk.conditioning
            exact[span.start : span.stop] = same
    return exact


def require_hits(plan: RowPlan, chunks: Sequence[Chunk]) -> None:
    """Raises for the first chunk that is not used, unless another with the same ids is.

    Raises:
        ChunkMissError: with the chunk's place and the reason.
    """
    good = {_ids(chunks[use.index]) for use in plan.uses if use.hit}
    for use in plan.uses:
        if not use.hit and use.reason != LAST_ROWS and _ids(chunks[use.index]) not in good:
            raise ChunkMissError(
                f"chunk {use.index} of row {use.row} ({use.tokens} tokens) cannot be used: {use.reason}"
            )


def nothing_found(uses: Sequence[ChunkUse], chunks: Sequence[Sequence[Chunk]], length: int) -> bool:
    """Whether not one token of any chunk is in the prompt, which is warned of.

    Args:
        uses: of all batch rows.
        chunks: by row, that were looked for.
        length: of the prompt in tokens.

    Raises:
        CacheStateError: if the ids are not those of a whole prompt.
    """
    if not uses or any(use.found for use in uses):
        return False
    longest_row = max((sum(map(len, row)) for row in chunks), default=0)
    if longest_row > length:
        raise CacheStateError(
            f"none of the chunks ({longest_row} tokens) is in the {length} input_ids: a BlendedCache wants "
            "the ids of the whole prompt, chunks included, not only the new ones"
        )
    warnings.warn(
        "no chunk was found in the prompt, so everything is computed: build the prompt from the chunks' own ids "
        "(ChunkLibrary does), or compare tokenisers",
        stacklevel=3,
    )
    return True


def chunks_per_row(chunks: Sequence[Sequence[Chunk]], rows: int) -> list[Sequence[Chunk]]:
    """The chunks of each batch row: one list serves all, several are repeated as `generate` repeats prompts.

    Raises:
        ValueError: if the numbers do not fit.
    """
    if rows % len(chunks):
        raise ValueError(
            f"a batch of {rows} prompts, but {len(chunks)} lists of chunks: give one list, or one list per prompt"
        )
    return [row for row in chunks for _ in range(rows // len(chunks))]


def _ids(chunk: Chunk) -> bytes:
    return chunk.ids.numpy().tobytes()
