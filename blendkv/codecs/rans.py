"""Interleaved range ANS: symbols to bits and back, with numba.

After Duda 2013, "Asymmetric numeral systems", and Giesen 2014, "Interleaved entropy coders": several lanes, each with a
state of its own, share one sequence of words, in the order in which the decoder wants them. A section is

    u32 state of every lane | u16 words | zeros up to a multiple of 16 bytes

in little endian. Channels that are coded are numbered in order; number c of a token belongs to lane c % lanes. Tokens
follow each other, and in a token blocks of `lanes` channels. For each block every lane takes a symbol off its state;
lanes whose state fell below 2^16 take a word each, in order; lanes whose symbol was the escape take one more each, in
order, which is the symbol. The encoder does all this backwards, from 2^16 in every lane, so the decoder must end there.
`naive` says the same in plain Python.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit
from numba import uint32 as u32
from numba import uint64 as u64

from blendkv.codecs.classes import BITS
from blendkv.codecs.tables import ABSENT, ESCAPE, SLOTS, ZERO, tables
from blendkv.errors import ChunkFileError

LANES = (4, 8, 16, 32, 64)
ALIGN = 16
"""Bytes: a section's length is a multiple of it."""
_START = 1 << 16
_ESCAPED = 1 << 24


def lanes_for(tokens: int, channels: int) -> int:
    """How many lanes a section gets: each costs about 23 bits, and makes it quicker to decode.

    Args:
        tokens: of the section.
        channels: that are coded.

    Returns:
        A power of two, 4 to 64, for less than 1% of a section with more than 2 bits a symbol.
    """
    most = min(tokens * channels // 1536, channels, LANES[-1])
    return max(LANES[0], 1 << most.bit_length() - 1 if most else 0)


def encode(symbols: np.ndarray, rows: np.ndarray, lanes: int, context: np.ndarray | None = None) -> bytes:
    """Codes one section.

    Args:
        symbols: `[T, C]` integers within int16.
        rows: `[C]` row of every channel (`row_of_log2`), `ABSENT` for channels that are not coded, whatever they hold.
        lanes: one of `LANES` (`lanes_for`).
        context: `[T, C]` uint8 added to a channel's row, or None.

    Returns:
        The section; its length is a multiple of 16.

    Raises:
        ValueError: for symbols outside int16, or outside a refinement's -1..1, and for rows that do not exist.
    """
    symbols = np.asarray(symbols)
    if symbols.dtype != np.int16 and symbols.size and not -0x8000 <= symbols.min() <= symbols.max() <= 0x7FFF:
        raise ValueError(f"symbols are {symbols.min()} to {symbols.max()}, and must be within int16")
    coded, rows, context = _checked(rows, len(symbols), lanes, context)
    dense = np.ascontiguousarray(_only(symbols, coded), np.int16)
    words, states = np.empty(1 + 2 * dense.size, np.uint16), np.full(lanes, _START, np.uint32)
    at = _encode(dense.ravel(), rows * u32(2 * ZERO), context, _shares(), _reciprocals(), states, words)
    if at < 0:
        raise ValueError("a refinement must be -1, 0 or 1")
    payload = states.tobytes() + words[at:].tobytes()
    return payload + bytes(-len(payload) % ALIGN)


def decode(
    payload: bytes | memoryview, rows: np.ndarray, tokens: int, lanes: int, context: np.ndarray | None = None
) -> np.ndarray:
    """Decodes one section.

    Args:
        payload: what `encode` returned.
        rows: as there.
        tokens: T.
        lanes: as there.
        context: as there.

    Returns:
        `[T, C]` int16 symbols, zeros in channels that were not coded.

    Raises:
        ChunkFileError: (`reason="symbols"`) if the bytes are no such section.
        ValueError: for rows that do not exist.
    """
    channels = len(rows)
    coded, rows, context = _checked(rows, tokens, lanes, context)
    if len(payload) % ALIGN or len(payload) < 4 * lanes:
        raise _damaged(f"a section of {len(payload)} bytes")
    states = np.frombuffer(payload, np.uint32, lanes).copy()
    size = (len(payload) - 4 * lanes) // 2
    words = np.zeros(size + 2 * lanes, np.uint16)  # a step may read this far past the end before that is noticed
    words[:size] = np.frombuffer(payload, np.uint16, size, 4 * lanes)
    dense = np.empty((tokens, len(rows)), np.int16)
    at = _decode(words, size, states, rows * u32(SLOTS), context, tables().lut.ravel(), dense.ravel())
    if at < 0 or size - at >= ALIGN // 2 or words[at:].any() or (states != _START).any():
        raise _damaged("symbols that do not end where they should")
    if len(rows) == channels:
        return dense
    out = np.zeros((tokens, channels), np.int16)
    out[:, coded] = dense
    return out


def _damaged(what: str) -> ChunkFileError:
    return ChunkFileError(f"{what}: the bytes are damaged, or were coded with another profile", reason="symbols")


def _checked(
    rows: np.ndarray, tokens: int, lanes: int, context: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Channels that are coded, their rows, and their context `[T * C']`, empty if there is none."""
    if lanes not in LANES:
        raise ValueError(f"{lanes} lanes: must be one of {LANES}")
    rows = np.asarray(rows).astype(np.int64)
    coded = np.flatnonzero(rows != ABSENT)
    if context is not None and context.shape != (tokens, len(rows)):
        raise ValueError(f"context of shape {context.shape} for {tokens} tokens of {len(rows)} channels")
    rows = rows[coded]
    added = np.empty(0, np.uint8)
    if context is not None:
        added = np.ascontiguousarray(_only(context, coded), np.uint8).ravel()
    most = rows.max(initial=0) + added.max(initial=0)
    if rows.min(initial=0) < 0 or most >= len(tables().freq):
        raise ValueError(f"rows {rows.min(initial=0)} to {most}: there are 0 to {len(tables().freq) - 1}")
    return coded, rows.astype(np.uint32), added


def _only(array: np.ndarray, coded: np.ndarray) -> np.ndarray:
    return array if len(coded) == array.shape[1] else array[:, coded]


@cache
def _shares() -> np.ndarray:
    """`[R * 256]` of each symbol's byte: slots << 12 | first slot, with a bit above them where it is the escape's."""
    freq, cum = tables().freq, tables().cum
    shares = freq << BITS | cum
    coded = (freq > 0) & (np.arange(freq.shape[1]) != ESCAPE)
    return np.where(coded, shares, shares[:, ESCAPE, None] | _ESCAPED).ravel()


@cache
def _reciprocals() -> np.ndarray:
    """`[4096]` of f: ceil(2^44 / f). x // f is x times that >> 44, within 64 bits, for all x < 2^20 f and f < 2^12."""
    return np.array([0] + [-(-(1 << 44) // f) for f in range(1, SLOTS)], np.uint64)


def _compiled(function):
    """The function, compiled when first called, and kept on disk where numba finds a folder to write to."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


# Each step is cut into loops without branches, and indices are unsigned (numba wraps negative ones), so that LLVM makes
# vectors of all but those that move words: three times as fast as one loop.


@_compiled
def _encode(symbols, rows, context, shares, reciprocals, states, words):
    """Writes words from the end of the buffer.

    Args:
        symbols: `[T * C]` int16.
        rows: `[C]` uint32, multiplied by 256.
        context: `[T * C]` uint8, or `[0]`.
        shares: see `_shares`.
        reciprocals: see `_reciprocals`.
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
            if flags & u32(_ESCAPED):
                for i in range(count - 1, -1, -1):
                    if share[u64(i)] == u32(_ESCAPED):
                        return -1
                    if share[u64(i)] & u32(_ESCAPED):
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
def _decode(words, size, states, rows, context, lut, out):
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
                need = u32(states[u64(i)] < u32(_START))
                states[u64(i)] = states[u64(i)] << (need * u32(16)) | u32(words[at]) & (u32(0) - need)
                at += u64(need)
            if least < u32(_ESCAPED):
                for i in range(count):
                    if out[s + u64(i)] == -ZERO:
                        out[s + u64(i)] = np.int16(words[at])
                        at += u64(1)
            if at > u64(size):
                return -1
    return np.int64(at)
