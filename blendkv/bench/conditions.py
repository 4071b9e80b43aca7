"""What stands before a chunk while it is computed, for `bench quality --condition`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blendkv.bench.methods import Case
from blendkv.layout import encode
from blendkv.prefilling import prefill

DUMMY = "This is a passage of text.\n\n"
"""Neutral words in front of every chunk: they, and not the chunk's first words, become the sink of its attention."""
CONDITIONS = ("none", "bos", "system", "dummy")


def conditioning_ids(name: str | None, tokenizer: Any, head: Sequence[int]) -> tuple[int, ...]:
    """The ids in front of a chunk.

    Args:
        name: of `CONDITIONS`; None for "none".
        tokenizer: has the BOS, and cuts the dummy prefix.
        head: ids of what stands before the chunks in the prompt.

    Raises:
        ValueError: for "bos" where the tokenizer has none.
    """
    if name == "bos":
        if tokenizer.bos_token_id is None:
            raise ValueError("condition 'bos': this tokenizer has no BOS token; leave bos out of --condition")
        return (tokenizer.bos_token_id,)
    if name == "dummy":
        front = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        return (*front, *encode(tokenizer, DUMMY))
    return tuple(head) if name == "system" else ()


def conditioned(case: Case, name: str | None, tokenizer: Any) -> Case:
    """A case whose chunks, all but the first piece, were computed behind a prefix."""
    head, chunks = case.chunks[0], case.chunks[1:]
    ids = conditioning_ids(name, tokenizer, head.ids.tolist())
    if not ids or not chunks:
        return case
    made = prefill(case.model, [chunk.ids for chunk in chunks], conditioning=ids, progress=False)
    return replace(case, chunks=(head, *made))
