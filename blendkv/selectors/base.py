"""What a selector sees and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The chunk tokens of one prompt that may be recomputed; N of them, in prompt order.

    Attributes:
        rows: `[N]` prompt indices.
        chunk: `[N]` which span of the prompt each token belongs to, counted from 0.
        offset: `[N]` index of the token within its span.
        length: `[N]` number of tokens of its span.
        k_deviation: `[N]` fp32 squared distance between the recomputed and the stored key, summed over heads and
            dims, at the layer where the selector asked for it; None for selectors that need only spans.
        v_deviation: the same for values.
    """

    rows: Tensor
    chunk: Tensor
    offset: Tensor
    length: Tensor
    k_deviation: Tensor | None = None
    v_deviation: Tensor | None = None


class Selector(ABC):
    """Ranks candidates; the blend recomputes the best `ratio * N` of them. Subclass and write `score`.

    Attributes:
        needs: "spans" if positions are enough (rows are known before the first layer, which is then narrowed too),
            "deviation" if `k_deviation` and `v_deviation` at the check layer are wanted (every layer before it runs
            for all rows).
        sources: which of the two, "kv" or only "k" or "v"; the other stays None.
        ratio: overrides the cache's `recompute_ratio` and schedule if not None.
    """

    needs: ClassVar[Literal["spans", "deviation"]] = "spans"
    sources: str = "kv"
    ratio: ClassVar[float | None] = None

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """`[N]` scores, higher is recomputed first; ties go to the earlier token."""

    @property
    def name(self) -> str:
        """Name for reports."""
        return type(self).__name__.lower()
