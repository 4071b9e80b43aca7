"""Scores that were computed with a chunk and stored beside it: rows are known before anything is loaded or computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from blendkv.selectors.base import Candidates, Selector


@dataclass
class Stored(Selector):
    """Ranks tokens by `ChunkCache.scores`; those of chunks without come last.

    Args:
        scores: their name.
    """

    scores: str = "asked"
    weighs = True

    def __post_init__(self) -> None:
        """Asks for them."""
        self.stored = (self.scores,)

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`stored-asked`: their name."""
        return cls(argument) if argument else cls()

    @property
    def name(self) -> str:
        """`stored-asked`."""
        return f"stored-{self.scores}"

    def score(self, candidates: Candidates) -> Tensor:
        """What was stored."""
        if self.scores not in candidates.scores:
            raise ValueError(f"no scores {self.scores!r} were given: let a blend call the selector")
        return candidates.scores[self.scores]
