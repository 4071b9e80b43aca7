"""Prompts to measure speed on: random ids, whose chunks lie where the caller wants them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from blendkv.bench.methods import Case
from blendkv.bench.ondisk import OnDisk
from blendkv.chunk import ChunkCache
from blendkv.prefilling import BATCH_TOKENS, prefill

POOLS = ("auto", "cuda", "cpu", "pinned", "disk")
"""Where chunks are kept: where they were computed (auto), GPU memory, pageable or pinned host memory, files."""


def random_case(
    model: PreTrainedModel,
    tokens: int,
    chunk_tokens: int,
    question_tokens: int,
    seed: int = 0,
    progress: bool = False,
    *,
    batch: int = 1,
    pool: str = "auto",
) -> Case:
    """A prompt of random ids cut into chunks, the question last.

    Args:
        model: attached by this.
        tokens: of all chunks.
        chunk_tokens: of a chunk (the last may be shorter).
        question_tokens: after them.
        seed: of the ids.
        progress: whether to show a bar.
        batch: how many times the prompt is answered at once; the rows share the chunks.
        pool: one of `POOLS`.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens + question_tokens,), generator=generator).tolist()
    pieces = [ids[start : min(start + chunk_tokens, tokens)] for start in range(0, tokens, chunk_tokens)]
    check_pool(pool, next(model.parameters()).device)
    chunks = [
        kept_in(chunk, pool) for group in _groups(pieces) for chunk in prefill(model, group, progress=progress)
    ]  # moved group by group, so that the device never holds all of what is to lie elsewhere
    read = OnDisk(model, chunks) if pool == "disk" else None
    return Case(model, tuple(chunks), tuple(ids[tokens:]), batch, read)


def check_pool(pool: str, device: torch.device) -> None:
    """Refuses a place for chunks that is not to be had beside a model on `device`.

    Raises:
        ValueError: with the reason.
    """
    if pool not in POOLS:
        raise ValueError(f"unknown pool {pool!r}; choose one of {', '.join(POOLS)}")
    if pool == "cuda" and device.type != "cuda":
        raise ValueError(f"pool 'cuda' is where the model's chunks are computed, but the model is on {device}")
    if pool == "pinned" and not torch.cuda.is_available():
        raise ValueError("pinned host memory needs CUDA, which this torch does not see")


def kept_in(chunk: ChunkCache, pool: str) -> ChunkCache:
    """A chunk moved to a pool."""
    if pool in ("auto", "cuda"):
        return chunk
    return chunk.pin_memory() if pool == "pinned" else chunk.to("cpu")


def pool_name(case: Case) -> str:
    """Where the chunks of a case are: cuda, cpu, pinned or disk."""
    if case.read is not None:
        return "disk"
    keys = case.chunks[0].keys[0]
    return "pinned" if keys.device.type == "cpu" and keys.is_pinned() else keys.device.type


def _groups(pieces: list[list[int]]) -> Iterator[list[list[int]]]:
    """Pieces that share a forward."""
    step = max(1, BATCH_TOKENS // len(pieces[0]))
    for start in range(0, len(pieces), step):
        yield pieces[start : start + step]
