"""Range ANS (`codecs.rans`) on a GPU: one program a section, one warp, a lane's state in each element of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from blendkv.codecs.classes import BITS
from blendkv.codecs.tables import ABSENT, ALIGN, LANES, SLOTS, START, ZERO, tables
from blendkv.errors import ChunkFileError

_COLUMN = 16


class Section(NamedTuple):
    """Where one section is, and where its symbols go.

    Attributes:
        offset: bytes from the beginning of the data, a multiple of 4.
        length: bytes.
        first: index of its first channel among all that were described (`describe_rows`).
        coded: how many channels follow there.
        tokens: T.
        lanes: of the section.
        to: index of token 0, channel 0 in the output.
        stride: from token to token in the output.
    """

    offset: int
    length: int
    first: int
    coded: int
    tokens: int
    lanes: int
    to: int
    stride: int


def describe_rows(rows: np.ndarray) -> np.ndarray:
    """What the kernel must know of a section's channels.

    Args:
        rows: `[C]` row of every channel, or `ABSENT`.

    Returns:
        `[C']` int32 of the channels that are coded: channel << 16 | row.

    Raises:
        ValueError: for rows that do not exist, or more than 32,768 channels.
    """
    coded = np.flatnonzero(rows != ABSENT)
    if len(rows) > 1 << 31 - _COLUMN or not np.isin(rows[coded], np.arange(len(tables().freq))).all():
        raise ValueError(f"{len(rows)} channels of rows {rows.min()} to {rows.max()}")
    return (coded << _COLUMN | rows[coded]).astype(np.int32)


def describe(sections: Sequence[Section] | np.ndarray, channels: np.ndarray, data: int, out: int) -> np.ndarray:
    """The table of sections, to be copied to the device; the kernel reads and writes nothing outside what it says.

    Args:
        sections: to decode, in any order and of any sizes; or the same as `[S, 8]`.
        channels: int32, all that were described (`describe_rows`).
        data: bytes that there are.
        out: elements of the output.

    Returns:
        `[S, 8]` int64.

    Raises:
        ChunkFileError: (`reason="symbols"`) if a section is outside the data, or too short.
        ValueError: if its lanes, its channels or its place in the output cannot be.
    """
    table = np.array(sections, np.int64).reshape(-1, len(Section._fields))
    offset, length, first, coded, tokens, lanes, to, stride = table.T
    outside = (offset < 0) | (offset % 4 > 0) | (length % ALIGN > 0) | (length < 4 * lanes) | (length > data - offset)
    for i in np.flatnonzero(outside)[:1]:
        raise ChunkFileError(f"section {i} of {data} bytes: {sections[i]}", reason="symbols")
    wrong = ~np.isin(lanes, LANES) | (first < 0) | (coded < 0) | (first + coded > len(channels)) | (tokens < 0)
    widths = np.append(channels >> _COLUMN, 0)[np.where(wrong | (coded == 0), -1, first + coded - 1)] + 1
    wrong |= (to < 0) | (stride < 0) | ((tokens * coded > 0) & (to + (tokens - 1) * stride + widths > out))
    for i in np.flatnonzero(wrong)[:1]:
        raise ValueError(f"section {i} cannot be decoded: {sections[i]}")
    return table


def decode(
    data: Tensor,
    sections: Tensor,
    channels: Tensor,
    lut: Tensor,
    out: Tensor,
    lanes: int,
    context: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """Decodes many sections in one launch.

    Args:
        data: uint8, all sections, contiguous and aligned.
        sections: `[S, 8]` int64 (`describe`), contiguous.
        channels: int32 (`describe_rows` of every section, or of all that share rows).
        lut: `[R, 4096]` (`tables().lut` seen as int32), contiguous.
        out: int16, contiguous; only what is coded is written.
        lanes: the largest number in any section.
        context: uint8 added to the row of the symbol at the same place in `out`, or None; at most what
            `refinement_context` returns.
        status: `[S]` int32, to be returned; None makes one.

    Returns:
        `[S]` int32, not 0 where the bytes were no such section: what was written for it means nothing.
    """
    status = torch.empty(len(sections), dtype=torch.int32, device=out.device) if status is None else status
    if len(sections):
        _decode[(len(sections),)](
            data.view(torch.int16),
            sections,
            channels,
            lut,
            context,
            out,
            status,
            BITS=BITS,
            SLOTS=SLOTS,
            ZERO=ZERO,
            START=START,
            LANES=lanes,
            num_warps=1,
        )
    return status


@triton.jit
def _decode(
    words,
    sections,
    channels,
    lut,
    context,
    out,
    status,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    ZERO: tl.constexpr,
    START: tl.constexpr,
    LANES: tl.constexpr,
):
    section = sections + 8 * tl.program_id(0)
    words += tl.load(section) // 2
    size = (tl.load(section + 1) // 2).to(tl.int32)
    channels += tl.load(section + 2)
    coded = tl.load(section + 3).to(tl.int32)
    tokens = tl.load(section + 4).to(tl.int32)
    lanes = tl.load(section + 5).to(tl.int32)
    to, stride = tl.load(section + 6), tl.load(section + 7)

    lane = tl.arange(0, LANES)
    own = lane < lanes
    low = tl.load(words + 2 * lane, mask=own, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = tl.load(words + 2 * lane + 1, mask=own, other=1).to(tl.uint16, bitcast=True).to(tl.uint32)
    state = high << 16 | low
    at = 2 * lanes
    for _ in range(tokens):
        for start in range(0, coded, lanes):
            active = own & (start + lane < coded)
            channel = tl.load(channels + start + lane, mask=active, other=0)
            column, row = channel >> 16, channel & 0xFFFF
            if context is not None:
                row += tl.load(context + to + column, mask=active, other=0).to(tl.int32)
            slot = (state & (SLOTS - 1)).to(tl.int32)
            entry = tl.load(lut + (row * SLOTS + slot), mask=active, other=0).to(tl.uint32, bitcast=True)
            popped = (entry >> BITS & (SLOTS - 1)) * (state >> BITS) + (entry & (SLOTS - 1))
            state = tl.where(active, popped, state)
            symbol = (entry >> 24).to(tl.int32) - ZERO
            # Both are counted at once: lanes that need a word, and above them those whose symbol follows.
            need = active & (state < START)
            escaped = active & (symbol == -ZERO)
            takes = need.to(tl.int32) + (escaped.to(tl.int32) << 16)
            before = tl.cumsum(takes, 0) - takes
            total = tl.sum(takes, 0)
            index = at + (before & 0xFFFF)
            word = tl.load(words + index, mask=need & (index < size), other=0)
            state = tl.where(need, state << 16 | word.to(tl.uint16, bitcast=True).to(tl.uint32), state)
            at += total & 0xFFFF
            if total > 0xFFFF:
                index = at + (before >> 16)
                word = tl.load(words + index, mask=escaped & (index < size), other=0)
                symbol = tl.where(escaped, word.to(tl.int32), symbol)
                at += total >> 16
            tl.store(out + to + column, symbol.to(tl.int16), mask=active)
        to += stride
    left = tl.arange(0, 8)
    rest = tl.load(words + at + left, mask=at + left < size, other=0).to(tl.int32)
    bad = (at > size) | (tl.sum((rest != 0).to(tl.int32), 0) > 0)
    bad = bad | (tl.sum((state != START).to(tl.int32), 0) > 0)
    tl.store(status + tl.program_id(0), bad.to(tl.int32))
