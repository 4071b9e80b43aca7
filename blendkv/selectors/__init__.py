"""Selectors: which chunk tokens to recompute. One family a file, registered by name, put together by name too."""

from __future__ import annotations

from blendkv.plugins import plugins
from blendkv.selectors.attention import Attention
from blendkv.selectors.base import Candidates, Selector
from blendkv.selectors.combined import First, PerChunk, Product, Union, Window
from blendkv.selectors.deviation import HKVD
from blendkv.selectors.names import parse
from blendkv.selectors.static import All, Boundary, Every, Nothing, Random
from blendkv.selectors.stored import Stored

__all__ = [
    "HKVD",
    "All",
    "Attention",
    "Boundary",
    "Candidates",
    "Every",
    "First",
    "Nothing",
    "PerChunk",
    "Product",
    "Random",
    "Selector",
    "Stored",
    "Union",
    "Window",
    "get_selector",
    "selector_names",
]

GROUP = "blendkv.selectors"
"""Entry point group in which other packages register families."""
_SELECTORS: dict[str, type[Selector]] = {
    "attention": Attention,
    "hkvd": HKVD,
    "boundary": Boundary,
    "every": Every,
    "random": Random,
    "stored": Stored,
    "all": All,
    "none": Nothing,
}


def selector_names() -> list[str]:
    """Families that `get_selector` knows, with those of installed plug-ins (entry point group `blendkv.selectors`)."""
    return sorted({*_SELECTORS, *plugins(GROUP)})


def get_selector(selector: str | Selector) -> Selector:
    """The selector of a name, or the selector itself.

    A name is a family (`hkvd`), with an argument after a hyphen if it takes one (`hkvd-v`, `attention-last8`), or
    several put together: `attention*hkvd-v^0.5` multiplies scores, `20%boundary+attention` shares the budget,
    `attention@per-chunk` spreads it over chunks, `attention@window5` smooths (docs/guides/selectors.md).

    Raises:
        ValueError: for an unknown name, or one that cannot be read.
    """
    return selector if isinstance(selector, Selector) else parse(selector, _of_family)


def _of_family(name: str) -> Selector:
    """The selector of a family's name and what follows it; a family may have hyphens in its own name."""
    parts = name.split("-")
    for count in range(len(parts), 0, -1):
        family, argument = "-".join(parts[:count]), "-".join(parts[count:])
        if family in _SELECTORS:
            return _SELECTORS[family].parse(argument)
        if family in plugins(GROUP):
            kind = plugins(GROUP)[family].load()
            return kind.parse(argument) if argument else kind()
    raise ValueError(f"unknown selector {name!r}; choose one of {', '.join(selector_names())}")
