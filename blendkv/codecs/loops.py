"""The inner loops of range ANS, compiled by numba.

Each step is cut into loops without branches, and indices are unsigned (numba wraps negative ones), so that LLVM makes
vectors of all but those that move words: three times as fast as one loop.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit
from numba import uint32 as u32
from numba import uint64 as u64

from blendkv.codecs.classes import BITS
from blendkv.codecs.tables import ESCAPE, SLOTS, START, ZERO, tables

ESCAPED = 1 << 24


@cache
def shares() -> np.ndarray:
    """`[R * 256]` of each symbol's byte: slots << 12 | first slot, with a bit above them where it is the escape's."""
    freq, cum = tables().freq, tables().cum
    shares = freq << BITS | cum
    coded = (freq > 0) & (np.arange(freq.shape[1]) != ESCAPE)
    return np.where(coded, shares, shares[:, ESCAPE, None] | ESCAPED).ravel()


@cache
def reciprocals() -> np.ndarray:
    """`[4096]` of f: ceil(2^44 / f). x // f is x times that >> 44, within 64 bits, for all x < 2^20 f and f < 2^12."""
    return np.array([0] + [-(-(1 << 44) // f) for f in range(1, SLOTS)], np.uint64)


def _compiled(function):
    """The function, compiled when first called, and kept on disk where numba finds a folder to write to."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@_compiled
def push(symbols, rows, context, shares, reciprocals, states, words):
    """Writes words from the end of the buffer.

    Args:
        symbols: `[T * C]` int16.
        rows: `[C]` uint32, multiplied by 256.
        context: `[T * C]` uint8, or `[0]`.
        shares: see `shares`.
        reciprocals: see `reciprocals`.
        states: `[lanes]` uint32, changed.
        words: `[1 + 2 * T * C]` uint16.

    Returns:
        Where the words begin, or -1 for a symbol that has no code.
    """
    channels, lanes, at = len(rows), len(states), u64(len(words))
    share = np.empty(lanes, np.uint32)
    last = (channels - 1) // lanes * lanes
    for first in range(len(symbols) - channels, -1, -max(channels, 1)):
        for start in range(last, -1, -lanes):
            count, c, s, flags = min(lanes, channels - start), u64(start), u64(first + start), u32(0)
            for i in range(count):
                index = u32(np.int32(symbols[s + u64(i)]) + np.int32(ZERO))
                index = index if index < u32(2 * ZERO) else u32(ESCAPE)
                index += rows[c + u64(i)]
                if len(context):
                    index += context[s + u64(i)] * u32(2 * ZERO)
                share[u64(i)] = shares[u64(index)]
                flags |= share[u64(i)]
            if flags & u32(ESCAPED):
                for i in range(count - 1, -1, -1):
                    if share[u64(i)] == u32(ESCAPED):
                        return -1
                    if share[u64(i)] & u32(ESCAPED):
                        at -= u64(1)
                        words[at] = np.uint16(symbols[s + u64(i)])
            for i in range(count - 1, -1, -1):
                state = states[u64(i)]
                full = u32(state >> u32(32 - BITS) >= (share[u64(i)] >> u32(BITS) & u32(SLOTS - 1)))
                words[at - u64(1)] = np.uint16(state)  # kept only if the next one is written elsewhere
                at -= u64(full)
                states[u64(i)] = state >> (full * u32(16))
            for i in range(count):
                slots = share[u64(i)] >> u32(BITS) & u32(SLOTS - 1)
                quotient = u32(states[u64(i)] * reciprocals[u64(slots)] >> u64(44))
                states[u64(i)] += quotient * (u32(SLOTS) - slots) + (share[u64(i)] & u32(SLOTS - 1))
    return np.int64(at)


@_compiled
def pop(words, size, states, rows, context, lut, out):
    """Takes symbols off the states.

    Args:
        words: `[size + 2 * lanes]` uint16.
        size: of the words, without what stands behind them.
        states: `[lanes]` uint32, changed.
        rows: `[C]` uint32, multiplied by 4096.
        context: `[T * C]` uint8, or `[0]`.
        lut: `[R * 4096]` uint32.
        out: `[T * C]` int16, filled.

    Returns:
        How many words were used, or -1 if there were too few.
    """
    channels, lanes, at = len(rows), len(states), u64(0)
    entries = np.empty(lanes, np.uint32)
    for first in range(0, len(out), max(channels, 1)):
        for start in range(0, channels, lanes):
            count, c, s, least = min(lanes, channels - start), u64(start), u64(first + start), u32(2**32 - 1)
            for i in range(count):
                slot = rows[c + u64(i)] + (states[u64(i)] & u32(SLOTS - 1))
                if len(context):
                    slot += context[s + u64(i)] * u32(SLOTS)
                entries[u64(i)] = lut[u64(slot)]
            for i in range(count):
                entry, state = entries[u64(i)], states[u64(i)]
                states[u64(i)] = (entry >> u32(BITS) & u32(SLOTS - 1)) * (state >> u32(BITS)) + (entry & u32(SLOTS - 1))
                out[s + u64(i)] = np.int16(entry >> u32(24)) - np.int16(ZERO)
                least = min(least, entry)
            for i in range(count):
                need = u32(states[u64(i)] < u32(START))
                states[u64(i)] = states[u64(i)] << (need * u32(16)) | u32(words[at]) & (u32(0) - need)
                at += u64(need)
            if least < u32(ESCAPED):
                for i in range(count):
                    if out[s + u64(i)] == -ZERO:
                        out[s + u64(i)] = np.int16(words[at])
                        at += u64(1)
            if at > u64(size):
                return -1
    return np.int64(at)
