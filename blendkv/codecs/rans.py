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

from blendkv.codecs.classes import BITS
from blendkv.codecs.tables import ABSENT, ESCAPE, SLOTS, ZERO, tables
from blendkv.errors import ChunkFileError

LANES = (4, 8, 16, 32, 64)
ALIGN = 16
"""Bytes: a section's length is a multiple of it."""
_START = 1 << 16
_RECIPROCAL = 44
"""x // f = x * ceil(2^44 / f) >> 44, without overflow of 64 bits, for all x < 2^20 f and f < 2^12."""
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
    words, states = np.empty(2 * dense.size, np.uint16), np.full(lanes, _START, np.uint32)
    at = _encode(dense, rows, context, *_coding(), states, words)
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
    at = _decode(words, size, states, rows, context, tables().lut.reshape(-1), dense)
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
    """Channels that are coded, their rows, and their context `[T, C']`, of no tokens if there is none."""
    if lanes not in LANES:
        raise ValueError(f"{lanes} lanes: must be one of {LANES}")
    rows = np.asarray(rows).astype(np.int64)
    coded = np.flatnonzero(rows != ABSENT)
    if context is not None and context.shape != (tokens, len(rows)):
        raise ValueError(f"context of shape {context.shape} for {tokens} tokens of {len(rows)} channels")
    rows = rows[coded]
    added = np.empty((0, len(rows)), np.uint8)
    if context is not None:
        added = np.ascontiguousarray(_only(context, coded), np.uint8)
    most = rows.max(initial=0) + added.max(initial=0)
    if rows.min(initial=0) < 0 or most >= len(tables().freq):
        raise ValueError(f"rows {rows.min(initial=0)} to {most}: there are 0 to {len(tables().freq) - 1}")
    return coded, rows, added


def _only(array: np.ndarray, coded: np.ndarray) -> np.ndarray:
    return array if len(coded) == array.shape[1] else array[:, coded]


@cache
def _coding() -> tuple[np.ndarray, np.ndarray]:
    """`[R, 256]` of each symbol's byte: slots << 12 | first slot, marked where it is the escape's; 2^44 / slots."""
    freq, cum = tables().freq.astype(np.uint64), tables().cum.astype(np.uint64)
    share = freq << np.uint64(BITS) | cum
    share = np.where(freq > 0, share, share[:, ESCAPE, None] | np.uint64(_ESCAPED))
    share[:, ESCAPE] |= np.uint64(_ESCAPED)
    slots = share >> np.uint64(BITS) & np.uint64(SLOTS - 1)
    reciprocal = -(-(1 << _RECIPROCAL) // np.maximum(slots, 1).astype(np.int64))
    return share.astype(np.uint32), reciprocal.astype(np.uint64)


def _compiled(function):
    """The function, compiled when first called, and kept on disk where numba finds a folder to write to."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@_compiled
def _encode(symbols, rows, context, shares, reciprocals, states, words):
    """Writes words from the end of the buffer; returns where they begin, or -1 for a symbol that has no code."""
    tokens, channels = symbols.shape
    lanes, at = len(states), len(words)
    last = (channels - 1) // lanes * lanes
    for token in range(tokens - 1, -1, -1):
        for start in range(last, -1, -lanes):
            for c in range(min(start + lanes, channels) - 1, start - 1, -1):
                row = rows[c] + (context[token, c] if len(context) else 0)
                value = np.int64(symbols[token, c]) + ZERO
                share = shares[row, value if 0 <= value < 2 * ZERO else ESCAPE]
                if share & _ESCAPED:
                    at -= 1
                    words[at] = np.uint16(symbols[token, c])
            for c in range(min(start + lanes, channels) - 1, start - 1, -1):
                row = rows[c] + (context[token, c] if len(context) else 0)
                value = np.int64(symbols[token, c]) + ZERO
                index = value if 0 <= value < 2 * ZERO else ESCAPE
                share, state = np.uint64(shares[row, index]), np.uint64(states[c - start])
                freq = share >> BITS & (SLOTS - 1)
                if freq == 0:
                    return -1
                if state >> (32 - BITS) >= freq:
                    at -= 1
                    words[at] = np.uint16(state)
                    state >>= 16
                quotient = state * reciprocals[row, index] >> _RECIPROCAL
                states[c - start] = state + quotient * (SLOTS - freq) + (share & (SLOTS - 1))
    return at


@_compiled
def _decode(words, size, states, rows, context, lut, out):
    """Fills `out`; returns how many words were used, or -1 if there were too few."""
    tokens, channels = out.shape
    lanes, at = len(states), 0
    for token in range(tokens):
        for start in range(0, channels, lanes):
            escaped = False
            for c in range(start, min(start + lanes, channels)):
                row = rows[c] + (context[token, c] if len(context) else 0)
                state = states[c - start]
                entry = lut[row * SLOTS + (state & np.uint32(SLOTS - 1))]
                state = (entry >> np.uint32(BITS) & np.uint32(SLOTS - 1)) * (state >> np.uint32(BITS))
                state += entry & np.uint32(SLOTS - 1)
                if state < _START:
                    state = state << np.uint32(16) | words[at]
                    at += 1
                states[c - start] = state
                symbol = np.int64(entry >> np.uint32(24)) - ZERO
                escaped |= symbol == -ZERO
                out[token, c] = symbol
            if escaped:
                for c in range(start, min(start + lanes, channels)):
                    if out[token, c] == -ZERO:
                        out[token, c] = np.int16(words[at])
                        at += 1
            if at > size:
                return -1
    return at
