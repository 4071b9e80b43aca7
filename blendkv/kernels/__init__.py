"""Triton kernels for what a blend does on a GPU, and their slow twins in plain torch (`naive`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
"""The oldest cards that the kernels were written for (Ampere)."""
LARGEST_HEAD = 256


def unusable(devices: Iterable[torch.device], dtype: torch.dtype, dims: Iterable[int]) -> str | None:
    """Why plain torch and SDPA must do the work, or None if the kernels can.

    Args:
        devices: of the layers.
        dtype: of keys and values.
        dims: head dims of keys and values.
    """
    if os.environ.get("BLENDKV_KERNELS", "") == "off":
        return "switched off by BLENDKV_KERNELS"
    for device in set(devices):
        if device.type != "cuda":
            return f"layers on {device.type}, not on CUDA"
        if (found := _capability(device)) < CAPABILITY:
            return f"a card of compute capability {found[0]}.{found[1]}, below {CAPABILITY[0]}.{CAPABILITY[1]}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"keys of {dtype}"
    odd = sorted({dim for dim in dims if dim > LARGEST_HEAD or dim * dtype.itemsize % 16})
    return f"a head dim of {odd[0]}" if odd else None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_cuda(device: torch.device) -> bool:
    """Whether layers there are worth what only a GPU rewards: CUDA graphs, fused norms."""
    return device.type == "cuda"


def on(device: torch.device) -> AbstractContextManager:
    """Makes a device current, as Triton wants it for a launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
