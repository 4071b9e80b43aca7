"""How the loading of one prompt goes, and how it was meant to go."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from blendkv.loading.decision import TEXT, Decision, with_outcome


class Progress:
    """Pieces that have come. Safe to share among threads.

    Attributes:
        decision: what the controller chose, or None.
        nbytes: that have come, by URL of the store.
        levels: by key of the chunk, the level that it is of, or "text" where its tokens are computed.
        left_out_tokens: chunk tokens that were not waited for, in some layer or all, as they are computed anyway.
        left_out_bytes: of those tokens, that were not waited for.
        asked_bytes: of what was left out, that the prompt asked for after all.
        loaded_s: seconds until the last piece that was wanted had come, with those in which files were read whole
            before; None until then.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.nbytes: Counter[str] = Counter()
        self.levels: dict[str, str] = {}
        self.left_out_tokens = self.left_out_bytes = self.asked_bytes = 0
        self.loaded_s: float | None = None
        self.on_loaded: Callable[[Progress], None] | None = None
        self._wanted, self._first_s, self._begin, self._lock = 0, 0.0, time.monotonic(), threading.Lock()

    def came_first(self, url: str, nbytes: int, seconds: float) -> None:
        """Files of a store were read whole, before anything is computed."""
        self.nbytes[url] += nbytes
        self._first_s += seconds * bool(nbytes)

    def begin(self, wanted: int) -> None:
        """Pieces are asked for from now on, so many of them for this prompt."""
        self._wanted, self._begin = wanted, time.monotonic() - self._first_s
        if not wanted and self._first_s:
            self._all_came()

    def leave_out(self, tokens: int, nbytes: int) -> None:
        """So many tokens and bytes of a chunk are not waited for."""
        with self._lock:
            self.left_out_tokens += tokens
            self.left_out_bytes += nbytes

    def asked_for(self, nbytes: int, told: bool = True) -> None:
        """Something that was left out, and told of if it was, is wanted after all."""
        with self._lock:
            self.left_out_bytes -= nbytes * told
            self.asked_bytes += nbytes

    def came(self, url: str, nbytes: int, wanted: bool) -> None:
        """A piece has come."""
        with self._lock:
            self.nbytes[url] += nbytes
            self._wanted -= wanted
            if self._wanted or not wanted:
                return
        self._all_came()

    def _all_came(self) -> None:
        self.loaded_s = time.monotonic() - self._begin
        if self.on_loaded is not None:
            self.on_loaded(self)

    def lost(self, key: str) -> None:
        """A chunk does not come after all."""
        self.levels[key] = TEXT

    def to_dict(self, took_s: float) -> dict[str, Any]:
        """For JSON.

        Args:
            took_s: seconds of the prompt until its first token.
        """
        said = {
            "bytes": dict(self.nbytes),
            "loaded_s": self.loaded_s,
            "left_out_tokens": self.left_out_tokens,
            "left_out_bytes": self.left_out_bytes,
            "asked_bytes": self.asked_bytes,
            "levels": list(self.levels.values()),
        }
        if self.decision is not None:
            said["decision"] = with_outcome(self.decision, self.loaded_s, took_s).to_dict()
        return said

    def __str__(self) -> str:
        """A line for people."""
        came = sum(self.nbytes.values())
        said = f"{came:,} bytes" + (f" in {self.loaded_s:.3f} s" if self.loaded_s is not None else " so far")
        if self.left_out_bytes:
            said += f", {self.left_out_bytes:,} bytes of {self.left_out_tokens:,} tokens that are recomputed left out"
        if (decision := self.decision) is None:
            return said
        if decision.load_s is not None:
            said += f" (predicted {decision.load_s:.3f} s)"
        counts = Counter(self.levels.values())
        said += f"; {', '.join(f'{count} {level}' for level, count in counts.items())}" if len(counts) > 1 else ""
        return f"{said}; ratio {decision.ratio:g}: {decision.why}"
