"""One sequence of token ids, and where the chunks lie in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

SHORT_CHUNK = 8
"""A chunk of fewer tokens is found at most as often as it was given: it would turn up in ordinary text by chance."""
MIN_RUN = 16
"""The shortest run of a chunk worth reusing when the whole chunk is not found (half the chunk, if that is less)."""


@dataclass(frozen=True)
class Span:
    """A run of prompt tokens that are also in a chunk.

    Attributes:
        chunk: index into the list of chunks.
        start: first prompt index.
        offset: index in the chunk of the token at `start`.
        length: number of tokens.
    """

    chunk: int
    start: int
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last prompt index."""
        return self.start + self.length

    def of(self, states: Tensor) -> Tensor:
        """The tokens of this span in the chunk's states `[H, T, D]`: `[H, length, D]`."""
        return states[:, self.offset : self.offset + self.length]

    def cut(self, stop: int) -> Span | None:
        """The part of this span before prompt index `stop`, or None."""
        length = min(self.length, stop - self.start)
        return Span(self.chunk, self.start, self.offset, length) if length > 0 else None


def find_spans(prompt: np.ndarray, chunks: Sequence[np.ndarray]) -> list[Span]:
    """Finds chunks in a prompt, in any order, repeated, with other text between them.

    Every occurrence of a whole chunk is found, longer chunks first. Of a chunk that is nowhere whole (a tokenizer
    merged ids across its border, or the prompt ends inside it) the longest run that matches is reused.

    Args:
        prompt: `[T]` token ids.
        chunks: token ids of each chunk.

    Returns:
        Spans that do not overlap, in prompt order.
    """
    prompt = np.ascontiguousarray(prompt, dtype=np.int64)
    free = np.ones(len(prompt), dtype=bool)
    spans: list[Span] = []
    times = Counter(c.tobytes() for c in (np.asarray(c, dtype=np.int64) for c in chunks))
    firsts: dict[bytes, int] = {}
    for i, chunk in enumerate(chunks):
        firsts.setdefault(np.asarray(chunk, dtype=np.int64).tobytes(), i)
    lost = []
    for i in sorted(firsts.values(), key=lambda i: -len(chunks[i])):
        needle = np.asarray(chunks[i], dtype=np.int64)
        limit = times[needle.tobytes()] if len(needle) < SHORT_CHUNK else len(prompt)
        starts = []
        for start in _occurrences(prompt, needle):
            if len(starts) < limit and free[start : start + len(needle)].all():
                starts.append(start)
                free[start : start + len(needle)] = False
        spans += [Span(i, start, 0, len(needle)) for start in starts]
        if not starts:
            lost.append(i)
    for i in lost:
        needle, rest = np.asarray(chunks[i], dtype=np.int64), np.where(free, prompt, -1)
        enough = max(1, min(MIN_RUN, (len(needle) + 1) // 2))
        run = _longest_run(rest, needle) if _may_share_run(rest, needle, enough) else None
        if run is not None and run[2] >= enough:
            spans.append(Span(i, *run))
            free[run[0] : run[0] + run[2]] = False
    return sorted(spans, key=lambda s: s.start)


def _occurrences(prompt: np.ndarray, needle: np.ndarray) -> list[int]:
    """Starts of every occurrence of `needle`, overlapping ones too."""
    haystack, pattern, size = prompt.tobytes(), needle.tobytes(), prompt.itemsize
    found, at = [], haystack.find(pattern)
    while at >= 0:
        if at % size == 0:
            found.append(at // size)
        at = haystack.find(pattern, at + 1)
    return found


def _may_share_run(prompt: np.ndarray, chunk: np.ndarray, length: int) -> bool:
    """Whether a common run of `length` tokens is possible: False is certain (compares hashes of windows)."""
    if min(len(prompt), len(chunk)) < length:
        return False
    weights = np.random.default_rng(0).integers(1, 2**62, length) | 1
    a, b = (np.lib.stride_tricks.sliding_window_view(x, length) @ weights for x in (prompt, chunk))
    return bool(np.isin(b, a).any())


def _longest_run(prompt: np.ndarray, chunk: np.ndarray) -> tuple[int, int, int] | None:
    """(prompt start, chunk offset, length) of the longest common run: the textbook table, one row at a time."""
    best = (0, 0, 0)
    lengths = np.zeros(len(prompt) + 1, dtype=np.int64)  # lengths[j + 1]: run ending at prompt[j] and the current id
    for i, token in enumerate(chunk):
        lengths[1:] = np.where(prompt == token, lengths[:-1] + 1, 0)
        end = int(lengths.argmax())
        if lengths[end] > best[2]:
            length = int(lengths[end])
            best = (end - length, i + 1 - length, length)
    return best if best[2] else None


def count_joint_differences(tokenizer, texts: Sequence[str]) -> int:
    """How many token ids change if `texts` are tokenised joined instead of one by one (D22).

    Args:
        tokenizer: a HF tokenizer.
        texts: pieces of one prompt, in order.

    Returns:
        Number of ids of the joint tokenisation that do not stand at the same characters in the separate one.
    """
    joint = tokenizer("".join(texts), add_special_tokens=False, return_offsets_mapping=True)
    apart, at = set(), 0
    for text in texts:
        piece = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        apart |= {(i, a + at, b + at) for i, (a, b) in zip(piece["input_ids"], piece["offset_mapping"], strict=True)}
        at += len(text)
    return sum((i, a, b) not in apart for i, (a, b) in zip(joint["input_ids"], joint["offset_mapping"], strict=True))


def as_array(ids: Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
    """Token ids as int64 `[T]` in host memory."""
    array = np.asarray(ids.detach().cpu() if isinstance(ids, Tensor) else ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be one row of integers, not shape {array.shape} of {array.dtype}")
    return array.astype(np.int64)
