"""Correctors: what is done to stored states that a blend keeps, beside recomputing others. None, unless one is named.

They change answers where a selector alone would not, for better or worse; docs/guides/selectors.md has the figures.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from blendkv.plugins import plugins


@dataclass(frozen=True)
class Kept:
    """Tokens of one prompt that keep their stored states in a layer, and how far those of the others were off.

    Attributes:
        keys: `[H, N, D]` fp32 stored keys of tokens that are kept, turned to where they stand in the prompt.
        values: `[H, N, Dv]` fp32 stored values of them.
        chunk: `[N]` the number of each token's chunk, counted as they stand in the prompt.
        offset: `[N]` the index of each in what stands of its chunk.
        chunks: how many there are.
        key_errors: `[H, M, D]` fp32 fresh less stored keys of tokens that are recomputed, un-rotated; None unless the
            corrector `compares`.
        value_errors: `[H, M, Dv]` fp32, likewise.
        error_chunk: `[M]` the number of the chunk of each.
        error_offset: `[M]` the index of each in what stands of its chunk.
        place: turns un-rotated `[H, N, D]` to the positions of the tokens that are kept.
    """

    keys: Tensor
    values: Tensor
    chunk: Tensor
    offset: Tensor
    chunks: int
    key_errors: Tensor | None
    value_errors: Tensor | None
    error_chunk: Tensor | None
    error_offset: Tensor | None
    place: Callable[[Tensor], Tensor]


class Corrector(ABC):
    """Changes stored states that are kept. Subclass, register under the entry point group `blendkv.correctors`.

    Attributes:
        compares: whether it wants to know how far stored states of recomputed tokens are off. Then all of them are
            loaded, and a blend runs without CUDA graphs, as with any corrector.
    """

    compares: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """As `get_corrector` takes it, settings included."""

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Makes one of what follows its family's name and a hyphen ("" for nothing).

        Raises:
            ValueError: if that cannot be.
        """
        if argument:
            raise ValueError(f"{cls.__name__} takes no argument; got {argument!r}")
        return cls()

    @abstractmethod
    def correct(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Keys `[H, N, D]` and values `[H, N, Dv]` to take in place of those that are kept; nothing in place."""


SINKS = 4
"""First tokens of a chunk, which were attention sinks while it was computed alone: off in a way of their own."""


@dataclass
class MeanShift(Corrector):
    """Adds to what is kept of a chunk the mean error of what is recomputed of it (AgentKVShift, 2607.21604).

    Beyond the paper: the first tokens of chunks are left out on both sides, as sinks are off in a way of their own, and
    each head's mean is shrunk by what is noise of it (James and Stein 1961): where few tokens are recomputed, or each
    is off in a direction of its own, little is added.

    Args:
        weight: of that mean.

    Raises:
        ValueError: for a weight that is not a positive number.
    """

    compares: ClassVar[bool] = True
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what is no weight."""
        if not 0 < self.weight < math.inf:
            raise ValueError(f"mean-shift-{self.weight:g}: give a weight above 0, such as 0.5")

    @property
    def name(self) -> str:
        """`mean-shift`, with its weight if that is not 1."""
        return "mean-shift" if self.weight == 1 else f"mean-shift-{self.weight:g}"

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`mean-shift-0.5`: the weight."""
        return cls(_number("mean-shift", argument)) if argument else cls()

    def correct(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Un-rotated keys of a chunk are all moved the same way, and so are its values."""
        keys = kept.keys + kept.place(self._shift(kept, kept.key_errors))
        return keys, kept.values + self._shift(kept, kept.value_errors)

    def _shift(self, kept: Kept, errors: Tensor | None) -> Tensor:
        """`[H, N, D]` for each token that is kept; zeros where no two tokens of its chunk are recomputed."""
        assert errors is not None
        assert kept.error_chunk is not None
        assert kept.error_offset is not None
        told = (kept.error_offset >= SINKS).nonzero()[:, 0]
        errors, chunk = errors[:, told], kept.error_chunk[told]
        count = torch.bincount(chunk, minlength=kept.chunks).clamp_min(1)[:, None]
        zeros = errors.new_zeros(errors.shape[0], kept.chunks, errors.shape[2])
        mean = zeros.index_add(1, chunk, errors) / count
        square = mean.square().sum(-1, keepdim=True)
        spread = zeros.index_add(1, chunk, (errors - mean[:, chunk]).square()).sum(-1, keepdim=True)
        noise = spread / (count * (count - 1).clamp_min(1))  # expected square of the mean, were there nothing but noise
        shrunk = (1 - noise / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp_min(0) * (count > 1)
        return (self.weight * shrunk * mean)[:, kept.chunk] * (kept.offset >= SINKS)[:, None]


@dataclass
class Temperature(Corrector):
    """Sharpens attention to what is kept: its logits are divided by a temperature (APE, Yang et al. 2502.05431).

    Attention to chunks that were computed apart is too flat over all of them together. Logits are linear in keys, so
    keys are divided. (APE scales the whole context's weight as well; no change of its keys does that, so it is left
    out.)

    Args:
        temperature: below 1 sharpens.

    Raises:
        ValueError: for a temperature that is not a positive number.
    """

    temperature: float = 0.95

    def __post_init__(self) -> None:
        """Refuses what is no temperature."""
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature-{self.temperature:g}: give a temperature above 0, such as 0.95")

    @property
    def name(self) -> str:
        """`temperature-0.95`."""
        return f"temperature-{self.temperature:g}"

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`temperature-0.9`."""
        return cls(_number("temperature", argument)) if argument else cls()

    def correct(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Values stay as they are."""
        return kept.keys / self.temperature, kept.values


_CORRECTORS: dict[str, type[Corrector]] = {"mean-shift": MeanShift, "temperature": Temperature}


def corrector_names() -> list[str]:
    """Families that `get_corrector` knows, with those of plug-ins (entry point group `blendkv.correctors`)."""
    return sorted({*_CORRECTORS, *plugins("blendkv.correctors")})


def get_corrector(corrector: str | Corrector | None) -> Corrector | None:
    """The corrector of a name (`mean-shift-0.5`, `temperature-0.9`), or the corrector itself; None for none.

    Raises:
        ValueError: for an unknown name, or one that cannot be read.
    """
    if corrector is None or isinstance(corrector, Corrector):
        return corrector
    name = str(corrector)
    known: dict[str, Callable[[], type[Corrector]]] = {
        **{family: entry.load for family, entry in plugins("blendkv.correctors").items()},
        **{family: lambda kind=kind: kind for family, kind in _CORRECTORS.items()},
    }
    for family in sorted(known, key=len, reverse=True):  # a family may have hyphens in its own name
        if name == family or name.startswith(f"{family}-"):
            return known[family]().parse(name[len(family) + 1 :])
    raise ValueError(
        f"unknown corrector {name!r}; choose one of {', '.join(corrector_names())}, pass a Corrector, or None"
    )


def _number(family: str, argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise ValueError(f"{family}-{argument}: a number goes after {family!r} and a hyphen") from None
