"""Selectors that look at positions only: known before anything is loaded or computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blendkv.selectors.base import Candidates, Selector


@dataclass
class Boundary(Selector):
    """The first tokens of every chunk, which act as false attention sinks (EPIC's LegoLink, Hu et al. 2410.15332).

    The budget is spread evenly: token i of every chunk comes before token i + 1 of any.
    """

    def score(self, candidates: Candidates) -> Tensor:
        """Earlier in its chunk is better."""
        return -candidates.offset.float()


@dataclass
class Every(Selector):
    """Every n-th token of a chunk, from its first; then the tokens after those, and so on.

    Args:
        n: distance in tokens; about the reciprocal of the ratio.
    """

    n: int = 8

    def __post_init__(self) -> None:
        """Refuses distances below one token."""
        if self.n < 1:
            raise ValueError(f"selector 'every-{self.n}': give a distance of at least 1 token")

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`every-8`."""
        return cls(_whole("every", argument)) if argument else cls()

    @property
    def name(self) -> str:
        """`every-8`."""
        return f"every-{self.n}"

    def score(self, candidates: Candidates) -> Tensor:
        """Nearer to the last multiple of n is better."""
        return -(candidates.offset % self.n).float()


@dataclass
class Random(Selector):
    """A uniform draw, the control that every other selector must beat.

    Args:
        seed: of the draw; the same seed and prompt give the same rows.
    """

    seed: int = 0

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`random-7`: the seed."""
        return cls(_whole("random", argument)) if argument else cls()

    @property
    def name(self) -> str:
        """`random`, with its seed if that is not 0."""
        return f"random-{self.seed}" if self.seed else "random"

    def score(self, candidates: Candidates) -> Tensor:
        """Seeded uniform scores, drawn on the CPU so that they do not depend on the device."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(candidates.rows), generator=generator).to(candidates.rows.device)


@dataclass
class All(Selector):
    """Every chunk token: full prefill, by way of the blend."""

    ratio: ClassVar[float | None] = 1.0

    def score(self, candidates: Candidates) -> Tensor:
        """All equal."""
        return torch.zeros(len(candidates.rows), device=candidates.rows.device)


@dataclass
class Nothing(All):
    """No chunk token: full reuse."""

    ratio: ClassVar[float | None] = 0.0

    @property
    def name(self) -> str:
        """Registered as `none`."""
        return "none"


def _whole(family: str, argument: str) -> int:
    if not argument.isdecimal():
        raise ValueError(f"{family}-{argument}: a whole number goes after {family!r} and a hyphen")
    return int(argument)
