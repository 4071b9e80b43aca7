"""How likely symbols are: one row of integers for each class of scales, the same on every machine.

A row gives every symbol a share of 4,096 slots. Rows of the classes come first, for symbols -127..127 and the escape;
then, for each class, `CONTEXTS` rows of the refinement -1, 0, 1, one for each clipped base symbol.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import numpy as np

from blendkv.codecs.classes import BITS, COUNT, FILE, FIRST, REACH, SPACING

ABSENT = -1
"""The row of a channel that is not coded: it takes no bits, and its symbols are zeros."""
ESCAPE = 0
"""Index of the escape in a row; that of symbol s is s + `ZERO`."""
ZERO = 128
SLOTS = 2**BITS
START = 2**16
"""State of every lane when an encoder begins and a decoder ends."""
LANES = (4, 8, 16, 32, 64)
ALIGN = 16
"""Bytes: a section's length is a multiple of it."""
CONTEXTS = 2 * REACH + 1
"""Refinement rows of a class."""
THIRD = 25
"""Log2 of 3 in 1/16 octave: the base of a progressive layer has steps three times as large."""


@dataclass(frozen=True)
class Tables:
    """All rows, in the forms in which coders want them.

    Attributes:
        freq: `[R, 256]` uint32, slots of index symbol + 128; index 0 is the escape's.
        cum: `[R, 256]` uint32, slots of all smaller indices.
        lut: `[R, 4096]` uint32: of each slot index << 24 | freq << 12 | (slot - cum).
    """

    freq: np.ndarray
    cum: np.ndarray
    lut: np.ndarray


@cache
def tables() -> Tables:
    """Returns the tables, read once and not to be written to."""
    given = json.loads(FILE.read_text())
    freq = np.zeros((COUNT * (1 + CONTEXTS), ZERO * 2), np.uint32)
    for row, shares in zip(freq[:COUNT], given["symbols"], strict=True):
        row[ZERO : ZERO + len(shares)] = shares
        row[ZERO + 1 - len(shares) : ZERO] = shares[:0:-1]
        row[ESCAPE] = SLOTS - row.sum()
    refinements = freq[COUNT:].reshape(COUNT, CONTEXTS, -1)[..., ZERO - 1 : ZERO + 2]
    refinements[:, REACH:] = given["refinements"]
    refinements[:, :REACH] = refinements[:, :REACH:-1, ::-1]
    cum = np.cumsum(freq, 1, dtype=np.uint32) - freq
    index = np.repeat(np.tile(np.arange(2 * ZERO, dtype=np.uint32), len(freq)), freq.ravel()).reshape(-1, SLOTS)
    within = np.arange(SLOTS, dtype=np.uint32) - np.take_along_axis(cum, index, 1)
    lut = index << 24 | np.take_along_axis(freq, index, 1) << BITS | within
    for array in (freq, cum, lut):
        array.flags.writeable = False
    return Tables(freq, cum, lut)


def row_of_log2(scale: np.ndarray) -> np.ndarray:
    """The row of each channel.

    Args:
        scale: integers, log2(standard deviation / step) in 1/16 octave.

    Returns:
        int16, `ABSENT` where the scale is below a tenth of a step, so that one symbol in 10,000 would not be zero.
        (`np.maximum(row, 0)` codes those channels too.)
    """
    row = (np.asarray(scale, np.int64) - FIRST + SPACING // 2) // SPACING
    return np.where(row < 0, ABSENT, np.minimum(row, COUNT - 1)).astype(np.int16)


def refinement_row_of_log2(scale: np.ndarray) -> np.ndarray:
    """The row of each channel's refinements, to which `refinement_context` is added.

    Args:
        scale: integers, log2(standard deviation / fine step) in 1/16 octave. The base's row is
            `row_of_log2(scale - THIRD)`.

    Returns:
        int16, `ABSENT` like `row_of_log2(scale)`.
    """
    row = row_of_log2(scale)
    return np.where(row == ABSENT, ABSENT, COUNT + CONTEXTS * row).astype(np.int16)


def refinement_context(base: np.ndarray) -> np.ndarray:
    """The row within a class's refinement rows.

    Args:
        base: int16 symbols of the base.

    Returns:
        uint8, 0 to `CONTEXTS` - 1.
    """
    return (np.clip(base, -REACH, REACH) + REACH).astype(np.uint8)
