"""How many arenas glibc's malloc keeps: up to eight a core, each of which holds on to what its threads freed."""

from __future__ import annotations

import ctypes
import os

ARENAS = 1
"""Enough for the threads of a gateway, which seldom want memory at once: a fifth less of it, and it stays as it is
(docs/guides/serving.md)."""
_M_ARENA_MAX = -8


def share_arenas(most: int = ARENAS) -> bool:
    """Lets threads share so many arenas, unless the environment says how many there are; earlier ones stay.

    Returns:
        Whether malloc took it: not where it is another's than glibc's, and not against `MALLOC_ARENA_MAX` or
        `GLIBC_TUNABLES`.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most))
    except (AttributeError, OSError, TypeError):  # no such function; no such library; Windows
        return False
