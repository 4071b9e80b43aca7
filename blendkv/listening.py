"""Who wants to hear of every blend; a listener that fails is none of the prompt's business."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blendkv.report import BlendReport

Listener = Callable[["BlendReport"], object]
_LOG = logging.getLogger("blendkv")


class Listeners:
    """Functions that are told. Safe to share among threads. A copy, or what was pickled, tells nobody."""

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()
        self._failed: set[int] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Listeners], tuple[()]]:
        """Without the functions: a copied report is not one more blend."""
        return Listeners, ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Tells a function from now on, until what this returns is called."""
        if not callable(listener):
            raise TypeError(f"a listener is a function of a BlendReport, not {listener!r}")
        kept = partial(listener)  # one for each call, so that what was added twice goes one by one

        def remove() -> None:
            with self._lock:
                self._all = tuple(one for one in self._all if one is not kept)
                self._failed.discard(id(kept))

        with self._lock:
            self._all = (*self._all, kept)
        return remove

    def tell(self, report: BlendReport) -> None:
        """Tells all; one that raises is written into the log `blendkv`, the first time."""
        for listener in self._all:
            try:
                listener(report)
            except Exception:
                with self._lock:
                    known = id(listener) in self._failed
                    self._failed.add(id(listener))
                if not known:
                    _LOG.warning("a listener of reports failed (told once); prompts go on without it", exc_info=True)
