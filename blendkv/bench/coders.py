"""Coders beside which codecs are measured: zstd -1 on the very symbols that a codec codes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np

from blendkv.bench.measure import median
from blendkv.chunk import ChunkCache
from blendkv.codecs import Codec, LayerShape
from blendkv.codecs.statistics import units_of


class Zstd(NamedTuple):
    """What zstd -1 makes of sections.

    Attributes:
        size: bytes.
        seconds: of the core, to decompress all of them; the median of the repeats.
    """

    size: int
    seconds: float


def sections_of(chunk: ChunkCache, codec: Codec) -> list[bytes] | None:
    """What a codec codes, section by section, as bytes that suit zstd best.

    Symbols are clipped to int8 and laid out channel by channel. A codec without symbols (`raw`) codes the bytes of the
    tensors; None for a codec that needs a profile but does not show its symbols.
    """
    symbols = getattr(codec, "symbols", None)
    if symbols is None:
        return None if codec.needs_profile else [_bytes(t.numpy()) for t in (*chunk.keys, *chunk.values)]
    shapes = [LayerShape(k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(chunk.keys, chunk.values, strict=True)]
    layers = codec.arrangement(shapes, len(chunk)).unit_layers
    return [
        _bytes(np.clip(section, -127, 127).astype(np.int8).T)
        for unit in units_of(shapes, layers)
        for section in symbols(unit.start, chunk.keys[unit.start : unit.stop], chunk.values[unit.start : unit.stop])
    ]


def zstd1(sections: Sequence[bytes], repeats: int = 1) -> Zstd | None:
    """Compresses sections, and decompresses them against the clock; None if `zstandard` is not installed.

    Raises:
        ValueError: if they do not come back.
    """
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        return None
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed = [compressor.compress(section) for section in sections]
    seconds = []
    for _ in range(repeats):
        begin = time.thread_time()
        unpacked = [decompressor.decompress(section) for section in packed]
        seconds.append(time.thread_time() - begin)
        if unpacked != list(sections):
            raise ValueError("zstd gave back other bytes than it was given")
    return Zstd(sum(map(len, packed)), median(seconds))


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()
