"""What the question attends to (ProphetKV 2602.02579; A3; FusionRAG): known after a question pass over reused keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from blendkv.selectors.base import Candidates, Selector

_RANGE = re.compile(r"(\d+):(\d+)")
_LIST = re.compile(r"\d+(?:\.\d+)*")
_LAST = re.compile(r"last(\d+)")


@dataclass
class Attention(Selector):
    """Ranks tokens by the attention that they get from the question, summed over its rows, heads and layers.

    Args:
        layers: only these count; None for all. The pass ends after the last of them (QCFuse 2606.05875 takes a few that
            were profiled).
        last: only this many of the question's last rows count; None for all.
    """

    layers: Sequence[int] | None = None
    last: int | None = None
    needs = ("question",)
    weighs = True

    def __post_init__(self) -> None:
        """Refuses what names no layer or no row.

        Raises:
            ValueError: for no layers, a negative one, or less than one row.
        """
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ValueError(f"layers={self.layers}: give at least one, counted from 0, or None for all")
        if self.last is not None and self.last < 1:
            raise ValueError(f"last={self.last}: give at least one row of the question, or None for all")

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`10:20` or `3.7.11` for those layers, `last8` for the question's last 8 rows, or both, as `10:20-last8`."""
        layers, last = None, None
        for part in filter(None, argument.split("-")):
            if found := _RANGE.fullmatch(part):
                layers = range(int(found[1]), int(found[2]))
            elif _LIST.fullmatch(part):
                layers = tuple(map(int, part.split(".")))
            elif found := _LAST.fullmatch(part):
                last = int(found[1])
            else:
                raise ValueError(
                    f"attention-{argument}: after 'attention-' goes 10:20 or 3.7.11 (layers), or last8 (rows)"
                )
        return cls(layers, last)

    @property
    def name(self) -> str:
        """`attention`, with what is not the default."""
        rows = "" if self.last is None else f"-last{self.last}"
        if self.layers is None:
            return f"attention{rows}"
        found = sorted(set(self.layers))
        whole = found == list(range(found[0], found[-1] + 1))
        told = f"{found[0]}:{found[-1] + 1}" if whole else ".".join(map(str, found))
        return f"attention-{told}{rows}"

    def score(self, candidates: Candidates) -> Tensor:
        """The sum."""
        found = candidates.attention
        layers = list(found) if self.layers is None else sorted(set(self.layers))
        if not layers or not set(layers) <= set(found):
            raise ValueError("a selector by attention was not given what it needs: let a blend call it, which asks")
        return torch.stack([found[layer] for layer in layers]).sum(0)
