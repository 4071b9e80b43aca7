"""Where a cache's buffers are, as numbers on the device: a kernel reads them there, so a CUDA graph fits any cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN = 16
"""Bytes: kernels read and write vectors of this size, so every buffer and every chunk starts at a multiple of it."""


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, on CUDA without waiting for it (torch keeps the pinned memory until it was read)."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def describe(layers: Sequence[tuple[Tensor, Tensor]], filled: int) -> np.ndarray:
    """The table of a cache, to be copied to the device.

    Args:
        layers: for each layer the buffers of keys `[B, H, capacity, D]` and values `[B, H, capacity, Dv]`.
        filled: tokens held by each.

    Returns:
        `[L, 4]` int64: address of keys, address of values, capacity, filled.

    Raises:
        ValueError: for a buffer that kernels cannot address.
    """
    return np.array(
        [(address(keys), address(values), keys.shape[2], filled) for keys, values in layers], np.int64
    ).reshape(-1, 4)


def address(tensor: Tensor) -> int:
    """Where a tensor begins.

    Raises:
        ValueError: if it is not contiguous, or not aligned.
    """
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGN:
        raise ValueError(f"kernels need contiguous tensors that start at a multiple of {ALIGN} bytes")
    return tensor.data_ptr()
