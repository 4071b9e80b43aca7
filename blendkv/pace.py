"""How fast this machine computes a prompt, as far as it must be known before the first one was."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from blendkv import flops

_SIZE = 768
_TRIES = 3


def seconds_to_compute(shape: flops.ModelShape | None, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """The least that prefilling so many tokens can take here: their operations at the rate of a matrix product.

    Args:
        shape: of the model; None (its layers could not be counted) gives 0.
        tokens: of the prompt.
        device: that computes.
        dtype: of the weights.

    Returns:
        Seconds.
    """
    if shape is None or not tokens:
        return 0.0
    return flops.full_flops(shape, tokens) / matmul_rate(device.type, device.index, dtype)


@lru_cache(maxsize=16)
def matmul_rate(kind: str, index: int | None, dtype: torch.dtype) -> float:
    """Operations a second of a matrix product, measured once; some milliseconds on a CPU."""
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    size = _SIZE if kind == "cpu" else 8 * _SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_TRIES):
        begin = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
