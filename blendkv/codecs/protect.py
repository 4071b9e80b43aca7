"""The first tokens of a chunk, which later ones attend to far more than to others: eight bits a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blendkv.container.format import aligned
from blendkv.errors import ChunkFileError

LARGEST = 127
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(LARGEST), np.float32(0))
"""`LARGEST` times this is still finite."""


def protected_bytes(tokens: int, heads: Sequence[int]) -> int:
    """Bytes of a block: a float and the channels of each head, for each token, in all a multiple of 16.

    Args:
        tokens: that are protected.
        heads: channels of each head.
    """
    return aligned(tokens * (4 * len(heads) + sum(heads)))


def protect(states: Tensor, heads: Sequence[int]) -> bytes:
    """Codes tokens `[t, C]` fp32: `[t, heads]` fp32 scales, `[t, C]` int8, zeros up to a multiple of 16 bytes."""
    scales = torch.stack([head.abs().amax(1) for head in states.split(list(heads), 1)], 1) / LARGEST
    scales = scales.clamp_max(float(LARGEST_SCALE))
    wide = scales.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(torch.tensor(heads), 1)
    numbers = (states / wide).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    block = scales.numpy().astype("<f4").tobytes() + numbers.numpy().tobytes()
    return block + bytes(protected_bytes(len(states), heads) - len(block))


def unprotect(data: memoryview | bytes, tokens: int, heads: Sequence[int]) -> Tensor:
    """Decodes what `protect` returned, to `[tokens, C]` fp32; more bytes may follow.

    Raises:
        ChunkFileError: (`reason="symbols"`) for bytes that no encoder writes.
    """
    if len(data) < protected_bytes(tokens, heads):
        raise ChunkFileError("the protected tokens are cut off", reason="symbols")
    scales = scales_of(data, tokens * len(heads)).reshape(tokens, len(heads))
    numbers = np.frombuffer(data, np.int8, tokens * sum(heads), scales.nbytes).reshape(tokens, sum(heads))
    end = scales.nbytes + numbers.nbytes
    if numbers.min(initial=0) < -LARGEST or any(data[end : aligned(end)]):
        raise ChunkFileError("protected tokens that no encoder writes", reason="symbols")
    return torch.from_numpy(numbers * np.repeat(scales, heads, 1))


def scales_of(data: memoryview | bytes, count: int) -> np.ndarray:
    """The `count` fp32 scales that a block begins with.

    Raises:
        ChunkFileError: (`reason="symbols"`) if one is negative, not finite, or so large that `LARGEST` of it are not.
    """
    scales = np.frombuffer(data, "<f4", count)
    if not ((scales >= 0) & (scales <= LARGEST_SCALE)).all():
        raise ChunkFileError("a scale that no encoder writes", reason="symbols")
    return scales
