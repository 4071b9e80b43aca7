"""Interleaved range ANS: symbols to bits and back, with numba.

After Duda 2013, "Asymmetric numeral systems", and Giesen 2014, "Interleaved entropy coders": several lanes, each with a
state of its own, share one sequence of words, in the order in which the decoder wants them. A section is

    u32 state of every lane | u16 words | zeros, up to a multiple of 16 bytes

in little endian. Channels that are coded are numbered in order; number c of a token belongs to lane c % lanes. Tokens
follow each other, and in a token blocks of `lanes` channels. For each block every lane takes a symbol off its state;
lanes whose state fell below 2^16 take a word each, in order; lanes whose symbol was the escape take one more each, in
order, which is the symbol. The encoder does all this backwards, from 2^16 in every lane, so the decoder must end there.
`naive` says the same in plain Python.
"""

from __future__ import annotations

import numpy as np

from blendkv.codecs.loops import pop, push, reciprocals, shares
from blendkv.codecs.tables import ABSENT, ALIGN, LANES, SLOTS, START, ZERO, tables
from blendkv.errors import ChunkFileError


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
    if symbols.dtype.kind not in "iu":
        raise ValueError(f"symbols of {symbols.dtype}: must be integers")
    if symbols.dtype != np.int16 and symbols.size and not -0x8000 <= symbols.min() <= symbols.max() <= 0x7FFF:
        raise ValueError(f"symbols are {symbols.min()} to {symbols.max()}, and must be within int16")
    if symbols.ndim != 2 or symbols.shape[1] != len(rows):
        raise ValueError(f"symbols of shape {symbols.shape} for {len(rows)} channels")
    coded, rows, context = _checked(rows, len(symbols), lanes, context)
    dense = np.ascontiguousarray(_only(symbols, coded), np.int16)
    words, states = np.empty(1 + 2 * dense.size, np.uint16), np.full(lanes, START, np.uint32)
    at = push(dense.ravel(), rows * np.uint32(2 * ZERO), context, shares(), reciprocals(), states, words)
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
    at = pop(words, size, states, rows * np.uint32(SLOTS), context, tables().lut.ravel(), dense.ravel())
    if at < 0 or words[at:].any() or (states != START).any():
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
