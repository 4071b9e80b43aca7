"""What other packages add to this one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group by name, of the packages that were installed when it was first asked for.

    Looking reads the metadata of every package, which takes milliseconds: names of selectors are read for each prompt.
    """
    return {entry.name: entry for entry in entry_points(group=group)}
