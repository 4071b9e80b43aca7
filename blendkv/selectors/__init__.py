"""Selectors: which chunk tokens to recompute. One family a file, registered by name."""

from __future__ import annotations

from importlib.metadata import entry_points

from blendkv.selectors.base import Candidates, Selector
from blendkv.selectors.deviation import HKVD
from blendkv.selectors.static import All, Boundary, Nothing, Random

__all__ = ["HKVD", "All", "Boundary", "Candidates", "Nothing", "Random", "Selector", "get_selector", "selector_names"]

_SELECTORS: dict[str, type[Selector]] = {
    "hkvd": HKVD,
    "boundary": Boundary,
    "random": Random,
    "all": All,
    "none": Nothing,
}


def selector_names() -> list[str]:
    """Names that `get_selector` knows, those of installed plug-ins (entry point group `blendkv.selectors`) included."""
    return sorted({*_SELECTORS, *(e.name for e in entry_points(group="blendkv.selectors"))})


def get_selector(selector: str | Selector) -> Selector:
    """The selector of that name with its defaults, or the selector itself.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(selector, Selector):
        return selector
    if selector in _SELECTORS:
        return _SELECTORS[selector]()
    plugin = next((e for e in entry_points(group="blendkv.selectors") if e.name == selector), None)
    if plugin is None:
        raise ValueError(
            f"unknown selector {selector!r}; choose one of {', '.join(selector_names())} or pass a Selector"
        )
    return plugin.load()()
