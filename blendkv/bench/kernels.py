"""`blendkv bench kernels`: each kernel beside the card's own ceiling, a matrix product or a copy, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from blendkv.bench.results import device_name
from blendkv.kernels import naive
from blendkv.kernels.table import describe, upload

HEADS, GROUPS, DIM = 8, 4, 128
"""KV heads, query heads for each, head dim: Llama-3.1-8B."""
SQUARE = 8192
"""Side of the matrices whose product is the ceiling of arithmetic."""


def kernel_rows(
    lengths: Sequence[int], ratio: float, question_tokens: int = 64, repeats: int = 20, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measures kernels at Llama-3.1-8B's attention shape in bfloat16, rows spread at random over the context.

    Attention counts needed operations only: 4 x query heads x head dim for each row and key at or before it. Bytes of
    placing are those read and written once. Each kernel is compared with its naive twin at the smallest length before
    anything is timed.

    Args:
        lengths: context tokens.
        ratio: share of context rows computed.
        question_tokens: rows after the context, all computed.
        repeats: timed calls of each; the median counts.
        seed: of rows and numbers.

    Yields:
        `{"kernel", "tokens", "rows", "seconds", "rate", "ceiling", "of_ceiling", "unit"}`; rate in TFLOP/s or GB/s.

    Raises:
        ValueError: without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA device: PyTorch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(seed)
    time = Timer(repeats)
    product, copy = _product(time, device), copy_rate(time, device)
    head = {"device": device_name(device), "ratio": ratio}
    for tokens in sorted(lengths):
        setting = _Setting(tokens, ratio, question_tokens, device)
        if tokens == min(lengths):
            setting.check()
        for name, run, work, ceiling, unit in setting.kernels(product, copy):
            seconds = time(run)
            rate = work / seconds / (1e12 if unit == "TFLOP/s" else 1e9)
            yield head | {
                "kernel": name,
                "tokens": tokens,
                "rows": setting.rows.shape[1],
                "seconds": seconds,
                "rate": rate,
                "unit": unit,
                "ceiling": ceiling,
                "of_ceiling": rate / ceiling,
            }


def _product(time: Timer, device: torch.device) -> float:
    """TFLOP/s of a bfloat16 matrix product."""
    a, b = (torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * SQUARE**3 / time(lambda: a @ b) / 1e12


def copy_rate(time: Timer, device: torch.device) -> float:
    """GB/s of a copy in device memory, read and written."""
    source, target = (torch.randn(2**28, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * source.nbytes / time(lambda: target.copy_(source)) / 1e9


class Timer:
    """Median seconds of a call by CUDA events; between calls something large is written, so that caches are cold."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(2**28, dtype=torch.int32, device="cuda")

    def __call__(self, run: Callable[[], object]) -> float:
        """Calls it three times, then `repeats` times more, and returns the median of those."""
        for _ in range(3):
            run()
        seconds = []
        for _ in range(self.repeats):
            for _ in range(3):  # a millisecond, in which the host launches what is timed
                self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        return median(seconds)


class _Kind(TypedDict):
    device: torch.device
    dtype: torch.dtype


class _Setting:
    """One layer's buffers and the rows that are computed."""

    def __init__(self, tokens: int, ratio: float, question_tokens: int, device: torch.device) -> None:
        self.length = tokens + question_tokens
        chosen = torch.randperm(tokens)[: round(ratio * tokens)].sort().values
        self.rows = torch.cat([chosen, torch.arange(tokens, self.length)])[None].to(device)
        count, kind = self.rows.shape[1], _Kind(device=device, dtype=torch.bfloat16)
        self.query = torch.randn(1, count, HEADS * GROUPS, DIM, **kind).transpose(1, 2)
        self.keys, self.values = (torch.randn(1, HEADS, self.length, DIM, **kind) for _ in range(2))
        self.table = upload(describe([(self.keys, self.values)], self.length), device)
        self.stored = torch.randn(2, -(-tokens // 512), HEADS, 512, DIM, **kind)
        angle = torch.rand(1, 1, self.length, DIM // 2, device=device) * 6
        self.angles = angle.cos(), angle.sin()
        self.tokens = tokens

    def attention(self) -> Tensor:
        """The scattered rows, by the kernel."""
        from blendkv.kernels.attention import scattered_attention

        return scattered_attention(self.query, self.rows, self.table, 0, HEADS, DIM, DIM**-0.5)

    def masked(self) -> Tensor:
        """The same by SDPA with a boolean mask."""
        seen = (torch.arange(self.length, device=self.rows.device) <= self.rows[0, :, None])[None, None]
        keys, values = (t.repeat_interleave(GROUPS, 1) for t in (self.keys, self.values))
        return F.scaled_dot_product_attention(self.query, keys, values, attn_mask=seen).transpose(1, 2)

    def dense(self) -> Tensor:
        """All rows, causal, by SDPA."""
        return F.scaled_dot_product_attention(self._all, self.keys, self.values, is_causal=True, enable_gqa=True)

    def mass(self) -> Tensor:
        """What attention the last rows pay to every key."""
        from blendkv.kernels.mass import attention_mass

        question = self.length - self.tokens
        query, rows = self.query[:, :, -question:], self.rows[:, -question:]
        return attention_mass(query, rows, self.table, 0, HEADS, self.length, DIM**-0.5)

    def placing(self) -> Callable[[], None]:
        """A layer of chunks of 512 tokens to their places."""
        from blendkv.kernels.placing import cut, rotate_and_place

        starts = range(0, self.tokens, 512)
        pieces, tiles = cut([(0, start, min(512, self.tokens - start), 512) for start in starts])
        step = HEADS * DIM * self.stored.element_size()
        sources = np.array([[[t.data_ptr() + start * step for t in self.stored] for start in starts]], np.int64)
        given = [upload(array, self.rows.device) for array in (sources, pieces, tiles)]
        kind = range(1), (HEADS, DIM, DIM), torch.bfloat16, "half"
        return lambda: rotate_and_place(*given, self.table, *kind, self.angles)

    def kernels(self, product: float, copy: float) -> Iterator[tuple[str, Callable[[], object], float, float, str]]:
        """Name, call, work, ceiling and unit of each."""
        needed = 4 * HEADS * GROUPS * DIM * float((self.rows + 1).sum())
        yield "scattered attention", self.attention, needed, product, "TFLOP/s"
        yield "SDPA, boolean mask", self.masked, needed, product, "TFLOP/s"
        causal = 4 * HEADS * GROUPS * DIM * self.length * (self.length + 1) / 2
        self._all = torch.randn(1, HEADS * GROUPS, self.length, DIM, dtype=torch.bfloat16, device=self.rows.device)
        yield "SDPA, dense causal", self.dense, causal, product, "TFLOP/s"
        del self._all
        yield "rotate and place", self.placing(), 4 * HEADS * self.tokens * DIM * 2, copy, "GB/s"
        yield "attention mass", self.mass, self.keys.nbytes, copy, "GB/s"

    def check(self) -> None:
        """The kernel against its twin and SDPA.

        Raises:
            ValueError: with the figure.
        """
        want = naive.scattered_attention(self.query, self.rows, self.keys, self.values, DIM**-0.5).float()
        error = float((self.attention().float() - want).square().mean().sqrt() / want.square().mean().sqrt())
        if not error <= 1e-2:
            raise ValueError(f"the attention kernel is off by {error:.2g}: no time is reported")
