"""What somebody who knows the future could have done at best: a bound for policies that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blendkv.bench.bandwidth import Bandwidth
from blendkv.loading.streaming import Item

GRID = (384, 192)
"""Steps into which the link's bytes and the processor's seconds are cut; costs are rounded down."""


@dataclass(frozen=True)
class Best:
    """What could be done by the target.

    Attributes:
        loss: the least mean loss of chunks; infinity if nothing keeps the target.
        chosen: what each chunk would be made of; empty if nothing keeps it.
    """

    loss: float
    chosen: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the target can be kept."""
        return self.loss < math.inf


def best(
    items: Sequence[Item], bandwidth: Bandwidth, target_s: float, *, after_s: float = 0.0, latency_s: float = 0.0
) -> Best:
    """The least loss with which a target can be kept, by a program over all choices of level or text for each chunk.

    It is generous, so that no policy can do better: the link needs one latency for everything, the processor never
    waits for the link but for the last decoding, and costs are rounded down to a grid.

    Args:
        items: chunks.
        bandwidth: of the link, all of it.
        target_s: time to the first token.
        after_s: seconds from the last chunk until it.
        latency_s: of a request.
    """
    end = target_s - after_s
    seconds = end * (1 + 1e-9)
    decodes = [rung.decode_s for item in items for rung in item.rungs]
    capacity = bandwidth.until(max(0.0, end - min(decodes, default=0.0))) - bandwidth.until(latency_s)
    if end <= 0:
        return Best(math.inf)
    least = np.full(GRID, math.inf)
    least[0, 0] = 0.0
    steps: list[np.ndarray] = []
    options: list[list[tuple[str, int, int, float]]] = []
    for item in items:
        own = [("text", 0, _cut(item.text_s, seconds, GRID[1]), 0.0)]
        for rung in item.rungs:
            own.append(
                (rung.name, _cut(rung.nbytes, capacity, GRID[0]), _cut(rung.decode_s, seconds, GRID[1]), rung.loss)
            )
        own = [option for option in own if option[1] < GRID[0] and option[2] < GRID[1]]
        after, choice = np.full(GRID, math.inf), np.full(GRID, -1, np.int8)
        for number, (_, nbytes, work, loss) in enumerate(own):
            moved = least[: GRID[0] - nbytes, : GRID[1] - work] + loss
            here = (slice(nbytes, None), slice(work, None))
            better = moved < after[here]
            after[here][better], choice[here][better] = moved[better], number
        least = after
        steps.append(choice)
        options.append(own)
    if not items or least.min() == math.inf:
        return Best(math.inf if items else 0.0)
    place = np.unravel_index(int(least.argmin()), GRID)
    loss, at, chosen = float(least[place]), [int(place[0]), int(place[1])], []
    for choice, own in zip(reversed(steps), reversed(options), strict=True):
        name, nbytes, work, _ = own[int(choice[at[0], at[1]])]
        chosen.append(name)
        at = [at[0] - nbytes, at[1] - work]
    return Best(loss / len(items), tuple(reversed(chosen)))


def _cut(cost: float, whole: float, steps: int) -> int:
    """A cost in steps, rounded down; `steps` or more if it does not fit."""
    if cost <= 0:
        return 0
    if whole <= 0 or cost > whole:
        return steps
    return int(cost / whole * (steps - 1))
