"""The entropy decoder on a GPU, beside a copy: part of `blendkv bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blendkv.bench.kernels import Timer, copy_rate
from blendkv.bench.results import device_name
from blendkv.codecs.rans import encode, lanes_for
from blendkv.codecs.tables import SLOTS, ZERO, row_of_log2, tables

DISTINCT = 8
"""Sections that are coded and compared; all others are the same bytes at other addresses."""


def coding_rows(
    tokens: int = 8192, layers: int = 32, channels: int = 1024, repeats: int = 20, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measures the decoder on the keys and values of a prompt, in sections of 256 and of 64 tokens.

    Scales of channels are log-normal, an octave wide, around one step; symbols are as likely as their rows say. Every
    distinct section is compared with what was coded, and every status looked at, before anything is timed.

    Args:
        tokens: of the prompt.
        layers: of the model.
        channels: of keys, and of values.
        repeats: timed calls of each; the median counts.
        seed: of scales and symbols.

    Yields:
        Rows as of `kernel_rows`; a rate counts 2 bytes a symbol, and `rows` the sections.

    Raises:
        ValueError: without a CUDA device, or if a section is decoded wrongly.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA device: PyTorch sees none")
    from blendkv.kernels.rans import decode

    device = torch.device("cuda", torch.cuda.current_device())
    time = Timer(repeats)
    ceiling = copy_rate(time, device)
    lut = torch.from_numpy(tables().lut.view(np.int32).copy()).to(device)
    out = torch.zeros(2 * layers * tokens, channels, dtype=torch.int16, device=device)
    for length in (256, 64):
        lanes = lanes_for(length, channels)
        symbols, *arrays = _sections(np.random.default_rng(seed), length, lanes, out)
        data, sections, described = (torch.from_numpy(array).to(device) for array in arrays)
        failed = int(decode(data, sections, described, lut, out, lanes).count_nonzero())
        want = torch.from_numpy(symbols).to(device)
        groups = out[: len(sections) // DISTINCT * DISTINCT * length].view(-1, *want.shape)
        if failed or not groups.eq(want).all():
            raise ValueError(f"{failed} of {len(sections)} sections failed, or all are wrong: no time is reported")
        seconds = time(partial(decode, data, sections, described, lut, out, lanes))
        rate = 2 * out.numel() / seconds / 1e9
        yield {
            "device": device_name(device),
            "kernel": f"rANS, {length} tokens, {lanes} lanes",
            "tokens": tokens,
            "rows": len(sections),
            "bits": 8 * len(data) / out.numel(),
            "seconds": seconds,
            "rate": rate,
            "unit": "GB/s",
            "ceiling": ceiling,
            "of_ceiling": rate / ceiling,
        }


def _sections(rng: np.random.Generator, length: int, lanes: int, out: Tensor) -> tuple[np.ndarray, ...]:
    """Symbols `[DISTINCT, length, C]`, then data, sections and channels as the kernel wants them, to fill `out`."""
    from blendkv.kernels.rans import Section, describe, describe_rows

    channels = out.shape[1]
    scales = np.clip(rng.normal(0, 16, (DISTINCT, channels)).round(), -40, 80).astype(int)
    rows = row_of_log2(scales)  # at these scales no channel is absent
    slots = rng.integers(0, SLOTS, (DISTINCT, length, channels))
    symbols = (tables().lut[rows[:, None], slots] >> 24).astype(np.int16) - ZERO
    payloads = [encode(*section, lanes) for section in zip(symbols, rows, strict=True)]
    sections, chosen, offset = [], [], 0
    for i in range(len(out) // length):
        first, to = i % DISTINCT * channels, i * length * channels
        chosen.append(payloads[i % DISTINCT])
        sections.append(Section(offset, len(chosen[-1]), first, channels, length, lanes, to, channels))
        offset += len(chosen[-1])
    described = np.concatenate([describe_rows(row) for row in rows])
    data = np.frombuffer(b"".join(chosen), np.uint8).copy()
    return symbols, data, describe(sections, described, offset, out.numel()), described
