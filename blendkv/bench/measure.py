"""Figures of quality and cost: KL, F1, intervals, time to first token, peak memory."""

from __future__ import annotations

import ctypes
import gc
import re
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from blendkv.divergence import kl_divergence

__all__ = [
    "Interval", "PeakMemory", "exact_match", "in_turns", "kl_divergence", "median", "normalize_answer",
    "paired_bootstrap", "time_to_first_token", "token_f1",
]  # fmt: skip

STATM = Path("/proc/self/statm")


class Interval(NamedTuple):
    """A mean and the bounds of its 95% interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def paired_bootstrap(values: Sequence[float], n: int = 10_000, seed: int = 0) -> Interval:
    """Mean of per-prompt values with its 95% percentile interval, by resampling prompts.

    To compare two methods, pass their differences prompt by prompt: the methods stay paired.

    Args:
        values: One figure per prompt.
        n: Resamples.
        seed: Of the generator; the same seed gives the same interval.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not data.size:
        raise ValueError(f"expected a non-empty list of numbers, got shape {data.shape}")
    generator = np.random.default_rng(seed)
    means = data[generator.integers(data.size, size=(n, data.size))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(data.mean()), float(low), float(high))


def normalize_answer(text: str) -> list[str]:
    """Words of an answer as SQuAD compares them: lower case, no punctuation, no articles."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def token_f1(prediction: str, answers: Iterable[str]) -> float:
    """SQuAD word F1 of a prediction with the accepted answer that fits best, 0 to 1."""
    words = normalize_answer(prediction)
    return max((_f1(words, normalize_answer(answer)) for answer in _listed(answers)), default=0.0)


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether a prediction equals an accepted answer, both normalised as in SQuAD."""
    return any(normalize_answer(prediction) == normalize_answer(answer) for answer in _listed(answers))


def time_to_first_token(
    call: Callable[[], object], device: torch.device | str = "cpu", repeats: int = 3, warmup: int = 1
) -> list[float]:
    """Seconds that `call` takes, each from an idle device to an idle device.

    Args:
        call: Produces one token, such as `lambda: model.generate(..., max_new_tokens=1)`; what it builds
            (a new cache) is counted.
        device: Where it computes; CUDA is synchronised before and after each call.
        repeats: Timed calls.
        warmup: Calls before, not timed.

    Returns:
        `repeats` durations in seconds, in order.
    """
    return in_turns([call], device, repeats, warmup)[0]


def in_turns(
    calls: Sequence[Callable[[], object]], device: torch.device | str = "cpu", repeats: int = 3, warmup: int = 1
) -> list[list[float]]:
    """`time_to_first_token` of several calls that take turns, so that what slows the machine down slows all of them."""
    for call in calls:
        for _ in range(warmup):
            call()
    turns = [[_timed(call, torch.device(device)) for call in calls] for _ in range(repeats)]
    return [list(seconds) for seconds in zip(*turns, strict=True)]


class PeakMemory:
    """Peak memory inside a `with` block above what was held at its start: `.bytes`.

    On CUDA, bytes of tensors by PyTorch's own count. On CPU, resident memory, read every `interval` seconds
    by a thread (shorter peaks are missed); memory that the allocator had kept from before is given back
    first, where the C library can, so that blocks measured one after another are comparable.

    Args:
        device: What to measure.
        interval: Seconds between readings on CPU.
    """

    bytes: int = 0

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.002) -> None:
        self.device = torch.device(device)
        self.interval = interval

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
            return self
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)
        self._start = self._peak = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="blendkv-peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._start
            return
        self._stop.set()
        self._thread.join()
        self.bytes = max(self._peak, _resident_bytes()) - self._start

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self._peak = max(self._peak, _resident_bytes())


def _resident_bytes() -> int:
    """Resident memory of this process; its high-water mark on systems without /proc."""
    import resource

    if STATM.exists():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _listed(answers: Iterable[str]) -> Iterable[str]:
    """One answer or several; a lone string is not a list of letters."""
    return [answers] if isinstance(answers, str) else answers


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))
