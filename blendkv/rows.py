"""Rows of tensors: those that are computed, taken out, padded, and put back to their places in the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blendkv.errors import UnsupportedModelError


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `[B or 1, T, ...]` at `index [B, S]`: `[B, S, ...]`."""
    index = index.to(x.device)
    if x.shape[0] == 1 and index.shape[0] == 1:
        return x.index_select(1, index[0])
    batch = torch.arange(index.shape[0], device=x.device)[:, None] if x.shape[0] > 1 else torch.zeros_like(index)
    return x[batch, index]


class TakenRows:
    """Tensors at the rows that are computed, each made once for all layers that share it.

    Args:
        rows: `[B, S]` prompt indices; None for all, which leaves everything as it is.
    """

    def __init__(self, rows: Tensor | None) -> None:
        self._rows = rows
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Those of a tensor `[B or 1, T, ...]`, or of the tensors in a tuple; anything else as it is."""
        if isinstance(value, tuple | list):
            return tuple(map(self.of, value))
        if self._rows is None or not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, take_rows(value, self._rows)
        return self._made[id(value)][1]

    def of_mask(self, mask: Tensor) -> Tensor:
        """Those of a mask `[B or 1, H or 1, T, keys]`."""
        if self._rows is None:
            return mask
        if id(mask) not in self._made:
            self._made[id(mask)] = mask, take_rows(mask.transpose(1, 2), self._rows).transpose(1, 2)
        return self._made[id(mask)][1]


def left_pad(row: Tensor, width: int) -> Tensor:
    """Repeats the first entry so that rows of a batch get equal length."""
    return torch.cat([row[:1].expand(width - len(row)), row]) if len(row) < width else row


def put_back(hidden: Tensor, rows: Tensor | None, length: int) -> Tensor:
    """`[B, S, ...]` of computed rows as `[B, T, ...]`, NaN where nothing was computed.

    What has T rows although fewer were computed (the embeddings) stays as it is.

    Raises:
        UnsupportedModelError: if the number of rows is neither, so that nobody could say which they are.
    """
    computed = length if rows is None else rows.shape[1]
    if rows is None or hidden.shape[1] != computed:
        if hidden.shape[1] == length:
            return hidden
        raise UnsupportedModelError(
            f"an output of {hidden.shape[1]} rows where {computed} of {length} were computed: leave out "
            "output_hidden_states and output_attentions for a blend with this model"
        )
    full = hidden.new_full((hidden.shape[0], length, *hidden.shape[2:]), float("nan"))
    batch = torch.arange(hidden.shape[0], device=hidden.device)[:, None]
    full[batch, rows.to(hidden.device)] = hidden
    return full
