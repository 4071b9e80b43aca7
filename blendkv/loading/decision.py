"""What a loading controller chose for a prompt, what it predicted, and what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blendkv.loading.plans import Offer

TEXT = "text"
"""Level of chunks that are computed from their text, although a store has them."""


@dataclass(frozen=True)
class Decision:
    """What was chosen for a prompt, what was predicted, and what happened.

    Attributes:
        ratio: share of reused tokens that is recomputed.
        text: keys of chunks that are computed from their text, although a store has them.
        chosen: by key, the form in which each of the others is loaded, or is in memory.
        levels: names of those levels in prompt order, "text" for what is computed.
        kl: predicted, of what levels lose, the mean over tokens; None where it was not measured.
        load_s, compute_s, ttft_s: predicted seconds: of loading, of computing, and until the first token; None where
            a store was never seen before.
        loaded_s: seconds after which the last layer that was wanted had come; None until then.
        took_s: seconds until the first token's forward was over; None until then.
        target_s: seconds to the first token that were wanted.
        why: in words.
    """

    ratio: float
    text: frozenset[str] = frozenset()
    chosen: Mapping[str, Offer] = field(default_factory=dict)
    levels: tuple[str, ...] = ()
    kl: float | None = None
    load_s: float | None = None
    compute_s: float | None = None
    ttft_s: float | None = None
    loaded_s: float | None = None
    took_s: float | None = None
    target_s: float | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; keys of chunks are counted, not listed."""
        said = {name: value for name, value in vars(self).items() if name != "chosen"}
        return said | {"text": len(self.text), "levels": list(self.levels)}


def with_outcome(decision: Decision, loaded_s: float | None, took_s: float) -> Decision:
    """A decision with what happened."""
    return replace(decision, loaded_s=loaded_s, took_s=took_s)
