"""Selectors made of selectors: products, unions that share a budget, budgets spread over chunks, windows.

None of them is told the budget: each makes one order of which any beginning is what it promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blendkv.selectors.base import Candidates, Selector, ranks, scores_of


class Combined(Selector):
    """Needs what its parts need.

    Args:
        parts: selectors without a ratio of their own.

    Raises:
        ValueError: if a part has a ratio of its own, or they want different rows of the question.
    """

    def __init__(self, parts: Sequence[Selector]) -> None:
        fixed = [part.name for part in parts if part.ratio is not None]
        if fixed:
            raise ValueError(f"{fixed[0]!r} has a ratio of its own and cannot be combined with others")
        asking = [part for part in parts if "question" in part.needs]
        if len({part.last for part in asking}) > 1:
            raise ValueError("one question pass, but its parts count different rows of it: give them the same `last`")
        self.parts = tuple(parts)
        self.needs = tuple(sorted({need for part in parts for need in part.needs}))
        comparing = "".join(part.sources for part in parts if "deviation" in part.needs)
        self.sources = "".join(source for source in "kv" if source in comparing)
        self.stored = tuple(sorted({name for part in parts for name in part.stored}))
        self.last = asking[0].last if asking else None
        everywhere = any(part.layers is None for part in asking)
        self.layers = None if everywhere or not asking else sorted({i for part in asking for i in part.layers or ()})

    def __eq__(self, other: object) -> bool:
        """Of the same kind, with the same parts and settings."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None


class Product(Combined):
    """Scores multiplied, each raised to a power: what matters and is wrong as well.

    Args:
        parts: selectors whose scores are at least 0 (`weighs`).
        powers: one each.
    """

    weighs = True

    def __init__(self, parts: Sequence[Selector], powers: Sequence[float] | None = None) -> None:
        super().__init__(parts)
        self.powers = tuple(float(power) for power in powers or [1.0] * len(parts))
        if len(self.powers) != len(parts) or not parts:
            raise ValueError(f"{len(parts)} selectors and {len(self.powers)} powers: give one each")
        for part in parts:
            if not part.weighs:
                raise ValueError(
                    f"{part.name!r} cannot be multiplied: its scores only say what comes first; join it with '+'"
                )

    @property
    def name(self) -> str:
        """`attention*hkvd-v^0.5`."""
        told = (f"^{power:g}" if power != 1 else "" for power in self.powers)
        return "*".join(_inner(part) + power for part, power in zip(self.parts, told, strict=True))

    def score(self, candidates: Candidates) -> Tensor:
        """The product, each factor divided by its mean, so that none is too small for fp32."""
        total = torch.ones(len(candidates.rows), device=candidates.rows.device)
        for part, power in zip(self.parts, self.powers, strict=True):
            scores = scores_of(part, candidates).float()
            total = total * (scores / scores.nanmean().clamp_min(1e-30)) ** power
        return total


class Union(Combined):
    """Several selectors share a budget: of the first n tokens, each has chosen its share, its best ones.

    What two of them choose is counted once, and leaves room for more of both.

    Args:
        *parts: the selectors.
        shares: of the budget, one each, or None for equal ones; they are divided by their sum.
    """

    def __init__(self, *parts: Selector, shares: Sequence[float] | None = None) -> None:
        super().__init__(parts)
        given = list(shares) if shares is not None else [1.0] * len(parts)
        if len(given) != len(parts) or not parts or min(given) <= 0:
            raise ValueError(f"{len(parts)} selectors and shares {given}: give one share above 0 each")
        self.shares = tuple(share / sum(given) for share in given)

    @property
    def name(self) -> str:
        """`20%boundary+80%attention`, without shares where they are equal."""
        if len(set(self.shares)) == 1:
            return "+".join(_inner(part) for part in self.parts)
        return "+".join(f"{100 * s:g}%{_inner(p)}" for p, s in zip(self.parts, self.shares, strict=True))

    def score(self, candidates: Candidates) -> Tensor:
        """Minus the smallest budget at which one of the selectors, with its share of it, would choose a token."""
        wanted = [
            (ranks(scores_of(part, candidates)) + 1) / share
            for part, share in zip(self.parts, self.shares, strict=True)
        ]
        return -torch.stack(wanted).amin(0)


class PerChunk(Combined):
    """The same share of every chunk: a token's place among those of its chunk, relative to the chunk's length.

    Args:
        inner: ranks the tokens of a chunk.
    """

    def __init__(self, inner: Selector) -> None:
        super().__init__([inner])

    @property
    def name(self) -> str:
        """`attention@per-chunk`."""
        return f"{_inner(self.parts[0])}@per-chunk"

    def score(self, candidates: Candidates) -> Tensor:
        """Minus the share of its chunk at which a token would be chosen."""
        place = ranks(scores_of(self.parts[0], candidates))
        order = torch.argsort(place)
        order = order[torch.sort(candidates.chunk[order], stable=True).indices]  # by chunk, best first
        chunk = candidates.chunk[order]
        first = torch.searchsorted(chunk.contiguous(), chunk.contiguous())
        within = torch.arange(len(chunk), device=chunk.device) - first
        return -torch.empty_like(place).index_copy_(0, order, within + 0.5) / candidates.length


class Window(Combined):
    """A token counts as much as the best within a window around it, in its chunk (as SnapKV and CacheClip smooth).

    Args:
        inner: scores the tokens.
        width: of the window in tokens, the token itself in the middle; odd.
    """

    def __init__(self, inner: Selector, width: int) -> None:
        super().__init__([inner])
        if width < 1 or width % 2 == 0:
            raise ValueError(f"a window of {width} tokens: give an odd number, the token itself is in the middle")
        self.width, self.weighs = width, inner.weighs

    @property
    def name(self) -> str:
        """`attention@window5`."""
        return f"{_inner(self.parts[0])}@window{self.width}"

    def score(self, candidates: Candidates) -> Tensor:
        """The largest score of the window."""
        scores = scores_of(self.parts[0], candidates)
        best = scores.clone()
        for shift in range(1, min(self.width // 2 + 1, len(scores))):
            near = candidates.chunk[shift:] == candidates.chunk[:-shift]
            for a, b in ((slice(shift, None), slice(None, -shift)), (slice(None, -shift), slice(shift, None))):
                close = near & ((candidates.offset[a] - candidates.offset[b]).abs() <= self.width // 2)
                best[a] = torch.where(close, torch.maximum(best[a], scores[b]), best[a])
        return best


class First(Combined):
    """The first tokens of every chunk before any other, whatever the budget (protected tokens; LegoLink-k).

    Args:
        inner: ranks them, and the others after them.
        tokens: of each chunk.
    """

    def __init__(self, inner: Selector, tokens: int) -> None:
        super().__init__([inner])
        if tokens < 1:
            raise ValueError(f"first{tokens}: protect at least one token of each chunk")
        self.tokens = tokens

    @property
    def name(self) -> str:
        """`hkvd@first4`."""
        return f"{_inner(self.parts[0])}@first{self.tokens}"

    def score(self, candidates: Candidates) -> Tensor:
        """Minus the place among all tokens, above all others for the first ones."""
        place = ranks(scores_of(self.parts[0], candidates))
        return (candidates.offset < self.tokens) * len(place) - place


def _inner(selector: Selector) -> str:
    """A name that can be followed by `@`."""
    return f"({selector.name})" if isinstance(selector, Union | Product) else selector.name
