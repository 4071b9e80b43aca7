"""What a selector sees and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

Need = Literal["deviation", "question"]


@dataclass(frozen=True)
class Candidates:
    """The chunk tokens of one prompt that may be recomputed; N of them, in prompt order.

    Attributes:
        rows: `[N]` prompt indices.
        chunk: `[N]` which span of the prompt each token belongs to, counted from 0.
        offset: `[N]` index of the token within its span.
        length: `[N]` number of tokens of its span.
        k_deviation: `[N]` fp32 squared distance between the recomputed and the stored key, summed over heads and
            dims, at the layer where the selector asked for it; None for selectors that do not compare.
        v_deviation: the same for values.
        attention: for each layer that the selector asked for, `[N]` fp32 attention that the question pays to each token
            over reused keys, summed over its rows and over heads; empty for selectors that do not ask.
        scores: by name `[N]` fp32 what was stored with the chunks; NaN for tokens of chunks without.
        exact: `[N]` True where what is stored is what the model would compute (a chunk that stands where it was
            computed, after the same tokens), or None if that is not known. The blend recomputes such tokens last,
            whatever their score.
    """

    rows: Tensor
    chunk: Tensor
    offset: Tensor
    length: Tensor
    k_deviation: Tensor | None = None
    v_deviation: Tensor | None = None
    attention: Mapping[int, Tensor] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    exact: Tensor | None = None


class Selector(ABC):
    """Ranks candidates; the blend recomputes the best `ratio * N` of them. Subclass and write `score`.

    Attributes:
        needs: what must be computed before tokens can be ranked. Empty: positions (and stored scores) are enough, rows
            are known before anything is loaded. "question": a question pass, over the stored keys of all layers up to
            the last of `layers`; rows are known before the first layer. "deviation": `k_deviation` and `v_deviation`
            at the check layer; every layer before it runs for all rows.
        sources: which deviation, "kv" or only "k" or "v"; the other stays None.
        layers: in which the question's attention is kept; None for all.
        last: how many of the question's last rows count in it; None for all.
        stored: names of the scores wanted from the chunks.
        weighs: whether scores are at least 0 and in proportion to how much a token matters, so that a product makes
            sense; otherwise they only say what comes first.
        ratio: overrides the cache's `recompute_ratio` and schedule if not None.
    """

    needs: Collection[Need] = ()
    sources: str = "kv"
    layers: Sequence[int] | None = None
    last: int | None = None
    stored: Collection[str] = ()
    weighs: bool = False
    ratio: ClassVar[float | None] = None

    @classmethod
    def parse(cls, argument: str) -> Self:
        """The selector of a name such as `every-8`, from what follows the family's name and a hyphen.

        Raises:
            ValueError: for an argument that it does not know.
        """
        if argument:
            raise ValueError(f"{cls.__name__.lower()}-{argument}: this selector takes nothing after its name")
        return cls()

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """`[N]` scores, higher is recomputed first; ties go to the earlier token."""

    @property
    def name(self) -> str:
        """Name for reports; `get_selector` should make the same selector of it."""
        return type(self).__name__.lower()


def scores_of(selector: Selector, candidates: Candidates) -> Tensor:
    """`[N]` what a selector says, looked at, for it may be anybody's.

    Raises:
        ValueError: if that is not one number for each candidate.
    """
    scores = selector.score(candidates)
    if not isinstance(scores, Tensor) or scores.shape != candidates.rows.shape or scores.is_complex():
        told = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"selector {selector.name!r}: score() gave {told}; give a tensor of {len(candidates.rows)} numbers, "
            "one for each candidate"
        )
    return scores.to(candidates.rows.device)


def best_first(scores: Tensor) -> Tensor:
    """`[N]` indices, highest score first; ties, and NaN as the lowest, in order."""
    return torch.sort(scores.nan_to_num(nan=-torch.inf), descending=True, stable=True).indices


def ranks(scores: Tensor) -> Tensor:
    """`[N]` fp32 place of each score, 0 for the highest."""
    order = best_first(scores)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device)).float()
