"""Cases whose chunks were computed behind something, for `bench quality --condition`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blendkv.bench.methods import Case
from blendkv.layout import conditioning_ids
from blendkv.prefilling import prefill


def conditioned(case: Case, condition: str | None, tokenizer: Any) -> Case:
    """A case whose chunks, all but the first piece, were computed behind a prefix.

    Args:
        case: its first piece is the head.
        condition: of `layout.CONDITIONS`; None for "none".
        tokenizer: of the model.

    Raises:
        ValueError: for "bos" where the tokenizer has none.
    """
    head, chunks = case.chunks[0], case.chunks[1:]
    ids = conditioning_ids(condition or "none", tokenizer, head.ids.tolist())
    if not ids or not chunks:
        return case
    made = prefill(case.model, [chunk.ids for chunk in chunks], conditioning=ids, progress=False)
    return replace(case, chunks=(head, *made))
