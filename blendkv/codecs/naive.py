"""What the entropy coders do, slowly and obviously: integers, lists and loops."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from blendkv.codecs.tables import ABSENT, ALIGN, ESCAPE, SLOTS, START, ZERO, tables
from blendkv.errors import ChunkFileError


def encode(symbols: list[list[int]], rows: list[int], lanes: int, context: list[list[int]] | None = None) -> bytes:
    """Codes one section (`rans.encode`): symbols and context are lists of tokens, lists of channels."""
    freq, cum = tables().freq, tables().cum
    states, words = [START] * lanes, []
    for step in reversed(list(_steps(len(symbols), rows, lanes))):
        coded = []
        for lane, token, channel in step:
            row = rows[channel] + (context[token][channel] if context else 0)
            symbol = symbols[token][channel]
            index = symbol + ZERO if -ZERO < symbol < ZERO and freq[row, symbol + ZERO] else ESCAPE
            coded.append((lane, symbol, index, int(freq[row, index]), int(cum[row, index])))
        for _, symbol, index, _, _ in reversed(coded):
            if index == ESCAPE:
                words.append(symbol % 2**16)
        for lane, _, _, share, first in reversed(coded):
            if states[lane] >= share * 2**20:
                words.append(states[lane] % 2**16)
                states[lane] //= 2**16
            states[lane] = states[lane] // share * SLOTS + first + states[lane] % share
    payload = struct.pack(f"<{lanes}I{len(words)}H", *states, *reversed(words))
    return payload + bytes(-len(payload) % ALIGN)


def decode(
    payload: bytes, rows: list[int], tokens: int, lanes: int, context: list[list[int]] | None = None
) -> list[list[int]]:
    """Decodes one section (`rans.decode`) to a list of tokens, lists of channels."""
    if len(payload) % ALIGN or len(payload) < 4 * lanes:
        raise ChunkFileError("not a section", reason="symbols")
    states = list(struct.unpack(f"<{lanes}I", payload[: 4 * lanes]))
    words = [word for (word,) in struct.iter_unpack("<H", payload[4 * lanes :])][::-1]
    lut, out = tables().lut, [[0] * len(rows) for _ in range(tokens)]
    try:
        for step in _steps(tokens, rows, lanes):
            for lane, token, channel in step:
                row = rows[channel] + (context[token][channel] if context else 0)
                entry = int(lut[row, states[lane] % SLOTS])
                states[lane] = entry // SLOTS % SLOTS * (states[lane] // SLOTS) + entry % SLOTS
                out[token][channel] = entry // 2**24 - ZERO
            for lane, _, _ in step:
                if states[lane] < 2**16:
                    states[lane] = states[lane] * 2**16 + words.pop()
            for _, token, channel in step:
                if out[token][channel] == ESCAPE - ZERO:
                    word = words.pop()
                    out[token][channel] = word if word < 2**15 else word - 2**16
    except IndexError:
        raise ChunkFileError("too few words", reason="symbols") from None
    if any(words) or states != [START] * lanes:
        raise ChunkFileError("it does not end where it should", reason="symbols")
    return out


def _steps(tokens: int, rows: list[int], lanes: int) -> Iterator[list[tuple[int, int, int]]]:
    """What is decoded at once, in order: (lane, token, channel)."""
    coded = [channel for channel, row in enumerate(rows) if row != ABSENT]
    for token in range(tokens):
        for start in range(0, len(coded), lanes):
            yield [(lane, token, channel) for lane, channel in enumerate(coded[start : start + lanes])]
