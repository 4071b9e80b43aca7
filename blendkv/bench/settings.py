"""What `bench quality` compares: methods with their selectors and ratios, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from blendkv.bench.mapping import MAPPING, QUALITY_METHODS
from blendkv.bench.methods import Blend, Prefix, Reuse
from blendkv.cache import make_schedule
from blendkv.selectors import Selector, get_selector

NO_CONTEXT = "nocontext"
REFERENCE = ("hkvd", 0.15)
"""Selector and ratio that KL is given relative to, unless another row is named."""
CONTROLS = ("random", "none")


@dataclass(frozen=True)
class Setting:
    """One line of the comparison.

    Attributes:
        method: one of `QUALITY_METHODS`, or "nocontext": the question without any chunk.
        selector: as it was named; None where nothing is selected.
        ratio: share of chunk tokens recomputed; None where that is not what the method does.
        how: makes the cache, for methods that answer from one.
    """

    method: str
    selector: str | None = None
    ratio: float | None = None
    how: Blend | Prefix | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, str | None, float | None]:
        """What tells it apart."""
        return self.method, self.selector, self.ratio


def settings_of(
    methods: Sequence[str], selectors: Sequence[str | Selector], ratios: Sequence[float], answers: bool = True
) -> list[Setting]:
    """The settings that names mean, each once: full recompute always, no context where answers are scored.

    Blends at ratio 0 are all the same, full reuse, and one line. A selector with a ratio of its own (`none`, `all`) has
    one line at that ratio.

    Raises:
        ValueError: for an unknown method or selector, or a ratio outside [0, 1].
    """
    unknown = [name for name in methods if name not in QUALITY_METHODS]
    if unknown or not methods:
        told = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"unknown method {told}; choose among {', '.join(QUALITY_METHODS)}")
    if not answers and (mapping := [name for name in methods if name in MAPPING]):
        raise ValueError(f"{', '.join(mapping)}: its figures are of answers, so it needs them (leave out --no-answers)")
    found = [Setting("full"), *([Setting(NO_CONTEXT)] if answers else [])]
    found += [Setting("prefix", how=Prefix())] if "prefix" in methods else []
    if "reuse" in methods or ("blend" in methods and 0.0 in ratios):
        found.append(Setting("reuse", None, 0.0, Reuse()))
    found += list(_blends(selectors, ratios)) if "blend" in methods else []
    found += [Setting(name) for name in MAPPING if name in methods]
    return list({setting.key: setting for setting in found}.values())


def reference_of(settings: Sequence[Setting], selector: str = REFERENCE[0], ratio: float = REFERENCE[1]) -> Setting:
    """The setting that KL is given relative to; the first blend, or full reuse, where that one is not compared."""
    blends = [setting for setting in settings if setting.method in ("blend", "reuse")]
    named = [s for s in blends if s.selector == selector and s.ratio == ratio]
    others = [s for s in blends if s.method == "blend"] + blends
    return (named or others or list(settings))[0]


def _blends(selectors: Sequence[str | Selector], ratios: Sequence[float]) -> Iterator[Setting]:
    for given in selectors:
        selector = get_selector(given)
        name = given if isinstance(given, str) else selector.name
        for ratio in ratios if selector.ratio is None else [selector.ratio]:
            make_schedule(selector, ratio)  # refuses what is out of range
            if ratio or selector.ratio is not None:
                yield Setting("blend", name, ratio, Blend(ratio, selector))
