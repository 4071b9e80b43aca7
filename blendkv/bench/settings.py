"""What `bench quality` compares: methods with their selectors and ratios, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from blendkv.bench.mapping import MAPPING, QUALITY_METHODS
from blendkv.bench.methods import Blend, Prefix, Reuse
from blendkv.cache import make_schedule
from blendkv.correctors import Corrector, get_corrector
from blendkv.layout import CONDITIONS
from blendkv.scoring import SCORES
from blendkv.selectors import Selector, get_selector

NO_CONTEXT = "nocontext"
REFERENCE = ("hkvd", 0.15)
"""Selector and ratio that KL is given relative to, unless another row is named."""
CONTROLS = ("random", "none")
NAMES = ("method", "selector", "ratio", "condition", "check_layers", "corrector")
"""Fields that name a setting."""


@dataclass(frozen=True)
class Setting:
    """One line of the comparison.

    Attributes:
        method: one of `QUALITY_METHODS`, or "nocontext": the question without any chunk.
        selector: as it was named; None where nothing is selected.
        ratio: share of chunk tokens recomputed (the last of a schedule); None where that is not what the method does.
        condition: what stands before a chunk while it is computed, of `CONDITIONS`; None for nothing.
        check_layers: the schedule, as `1:0.3,4:0.15`; None for the selector's own.
        corrector: what is done to stored states that are kept; None for nothing.
        how: makes the cache, for methods that answer from one.
    """

    method: str
    selector: str | None = None
    ratio: float | None = None
    condition: str | None = None
    check_layers: str | None = None
    corrector: str | None = None
    how: Blend | Prefix | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple:
        """Method, selector, ratio; condition and schedule, and the corrector, where those are not the usual."""
        varied = (self.condition, self.check_layers) if self.condition or self.check_layers or self.corrector else ()
        return (self.method, self.selector, self.ratio, *varied, *filter(None, [self.corrector]))


def settings_of(
    methods: Sequence[str],
    selectors: Sequence[str | Selector],
    ratios: Sequence[float],
    answers: bool = True,
    *,
    conditions: Sequence[str] = ("none",),
    schedules: Sequence[Mapping[int, float]] = (),
    correctors: Sequence[str | Corrector] = (),
) -> list[Setting]:
    """The settings that names mean, each once: full recompute always, no context where answers are scored.

    Blends at ratio 0 are all the same, full reuse, and one line. A selector with a ratio of its own (`none`, `all`) has
    one line at that ratio. Reuse and blends are there once for each condition. The first selector has a line for
    each schedule too, in the first condition, under its last ratio: one thing is varied at a time. So are correctors:
    full reuse, and each blend, has a line for each that does something to it.

    Raises:
        ValueError: for an unknown method, selector, corrector or condition, a ratio outside [0, 1], or a schedule that
            grows.
    """
    unknown = [name for name in methods if name not in QUALITY_METHODS]
    if unknown or not methods:
        told = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"unknown method {told}; choose among {', '.join(QUALITY_METHODS)}")
    if not answers and (mapping := [name for name in methods if name in MAPPING]):
        raise ValueError(f"{', '.join(mapping)}: its figures are of answers, so it needs them (leave out --no-answers)")
    strange = [name for name in conditions if name not in CONDITIONS]
    if strange or not conditions:
        told = ", ".join(map(repr, strange)) or "none"
        raise ValueError(f"unknown condition {told}; choose among {', '.join(CONDITIONS)}")
    if "blend" in methods and not selectors:
        raise ValueError("blends need a selector, such as hkvd")
    found = [Setting("full"), *([Setting(NO_CONTEXT)] if answers else [])]
    found += [Setting("prefix", how=Prefix())] if "prefix" in methods else []
    for i, name in enumerate(conditions):
        condition = None if name == "none" else name
        if "reuse" in methods or ("blend" in methods and 0.0 in ratios):
            found.append(Setting("reuse", None, 0.0, condition, how=Reuse()))
        found += _blends(selectors, ratios, condition, () if i else schedules) if "blend" in methods else []
    for corrector in filter(None, map(get_corrector, correctors)):
        found += [
            replace(setting, corrector=corrector.name, how=replace(setting.how, corrector=corrector))
            for setting in found
            if isinstance(setting.how, Blend)
            and setting.condition in (None, conditions[0])
            and setting.check_layers is setting.corrector is None
            and (setting.ratio or not corrector.compares)
        ]
    found += [Setting(name) for name in MAPPING if name in methods]
    return list({setting.key: setting for setting in found}.values())


def reference_of(settings: Sequence[Setting], selector: str = REFERENCE[0], ratio: float = REFERENCE[1]) -> Setting:
    """The setting that KL is given relative to; the first blend, or full reuse, where that one is not compared."""
    blends = [setting for setting in settings if setting.method in ("blend", "reuse")]
    named = [s for s in blends if s.selector == selector and s.ratio == ratio]
    others = [s for s in blends if s.method == "blend"] + blends
    return min(named or others or list(settings), key=lambda setting: len(setting.key))


def schedule_name(schedule: Mapping[int, float]) -> str:
    """`1:0.3,4:0.15`."""
    return ",".join(f"{layer}:{ratio:g}" for layer, ratio in sorted(schedule.items()))


def _blends(
    selectors: Sequence[str | Selector],
    ratios: Sequence[float],
    condition: str | None,
    schedules: Sequence[Mapping[int, float]],
) -> Iterator[Setting]:
    for i, given in enumerate(selectors):
        selector = get_selector(given)
        name = given if isinstance(given, str) else selector.name
        if unknown := sorted(set(selector.stored) - SCORES.keys()):
            raise ValueError(
                f"selector {name!r}: no score {unknown[0]!r} is known; choose of {', '.join(sorted(SCORES))}"
            )
        for ratio in ratios if selector.ratio is None else [selector.ratio]:
            make_schedule(selector, ratio)  # refuses what is out of range
            if ratio or selector.ratio is not None:
                yield Setting("blend", name, ratio, condition, how=Blend(ratio, selector))
        for schedule in schedules if i == 0 and selector.ratio is None else ():
            make_schedule(selector, 1.0, schedule)
            if 0 in schedule and "deviation" in selector.needs:
                raise ValueError(f"selector {name!r} compares, and at layer 0 nothing deviates yet: begin at layer 1")
            last = float(schedule[max(schedule)])
            how = Blend(last, selector, schedule)
            yield Setting("blend", name, last, condition, schedule_name(schedule), how=how)
