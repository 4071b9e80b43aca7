"""Highest KV deviation (CacheBlend, EuroSys'25, section 4): recompute the tokens whose keys or values changed most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
from torch import Tensor

from blendkv.selectors.base import Candidates, Selector


@dataclass
class HKVD(Selector):
    """Ranks tokens by squared distance between recomputed and stored KV at the check layer.

    Args:
        source: "k" compares keys, "v" values, "kv" both, each divided by its mean so that neither outweighs the other.
    """

    source: Literal["k", "v", "kv"] = "k"

    needs = ("deviation",)
    weighs = True

    def __post_init__(self) -> None:
        """Refuses unknown sources."""
        if self.source not in ("k", "v", "kv"):
            raise ValueError(f"source={self.source!r}: choose 'k', 'v' or 'kv'")
        self.sources = self.source

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`hkvd-v`: the source."""
        return cls(cast("Literal['k', 'v', 'kv']", argument or "k"))

    @property
    def name(self) -> str:
        """`hkvd` with its source if that is not the default."""
        return "hkvd" if self.source == "k" else f"hkvd-{self.source}"

    def score(self, candidates: Candidates) -> Tensor:
        """Deviation of the chosen source."""
        both = {"k": candidates.k_deviation, "v": candidates.v_deviation}
        wanted = [d for d in (both[source] for source in self.source) if d is not None]
        if len(wanted) != len(self.source):
            raise ValueError(f"HKVD with source={self.source!r} was not given the deviations it needs")
        if len(wanted) == 1:
            return wanted[0]
        return sum((d / d.mean().clamp_min(1e-30) for d in wanted), torch.zeros_like(wanted[0]))
