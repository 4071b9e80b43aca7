"""The first tokens of a chunk, which later ones attend to far more than to others: eight bits a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blendkv.container.format import aligned
from blendkv.errors import ChunkFileError

LARGEST = 127


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
    scales = np.frombuffer(data, "<f4", tokens * len(heads)).reshape(tokens, -1)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise ChunkFileError("the scale of a protected token is not a positive number", reason="symbols")
    numbers = np.frombuffer(data, np.int8, tokens * sum(heads), scales.nbytes).reshape(tokens, -1)
    return torch.from_numpy(numbers * np.repeat(scales, heads, 1))
