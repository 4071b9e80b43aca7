"""Chunks on their way while something else happens: loading, or computing, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, get_args

from blendkv.library import ChunkLibrary
from blendkv.report import BlendReport

Mode = Literal["prefill", "load"]
_LOG = logging.getLogger("blendkv")


def check_mode(mode: str) -> None:
    """Refuses a mode that is none.

    Raises:
        ValueError: with those that are.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}: choose 'prefill' (compute what is not stored) or 'load' (only what is)")


def usable(documents: Iterable[Any]) -> list[Any]:
    """Documents that have text; what a retriever finds may be empty, and then has no chunk."""
    return [document for document in documents if text_in(document)]


def text_in(document: Any) -> str:
    """The text of a string, or of an object with `page_content`, `text` or `content`; "" if there is none.

    Raises:
        TypeError: for anything else.
    """
    text = document
    for name in ("page_content", "text", "content"):
        if not isinstance(document, str) and hasattr(document, name):
            text = getattr(document, name)
            break
    if text is None and text is not document:  # Haystack's documents may have a blob instead
        return ""
    if not isinstance(text, str):
        raise TypeError(f"a document is a {type(document).__name__} without text: give strings, or documents with text")
    return text


class Prefetcher:
    """Brings chunks of documents into memory in one thread, in the order asked for. Never raises: what fails is logged.

    What is on its way when a prompt asks for it is asked for twice, or, if it is being computed, waited for; what comes
    too late is there for the next prompt.

    Args:
        library: whose chunks.
        mode: "load" brings only those that a store has, "prefill" also computes and stores the others.
        system: the system prompt they will be used under (matters with `condition="system"`).
        waiting: most requests that wait; more are dropped, and logged.

    Raises:
        ValueError: for another mode.
    """

    def __init__(
        self, library: ChunkLibrary, mode: Mode = "load", system: str | None = None, waiting: int = 16
    ) -> None:
        check_mode(mode)
        self.library, self.mode, self.system, self.waiting = library, mode, system, waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blendkv-prefetch")
        self._futures: list[Future[BlendReport | None]] = []
        self._lock = threading.Lock()

    def start(self, texts: Iterable[str]) -> None:
        """Starts; returns at once."""
        wanted = list(dict.fromkeys(texts))
        if not wanted:
            return
        with self._lock:
            self._futures = [future for future in self._futures if not future.done()]
            if (full := len(self._futures)) < self.waiting:
                self._futures.append(self._thread.submit(self._run, wanted))
        if full >= self.waiting:
            _LOG.warning("blendkv: %d requests to prefetch are waiting, so another is dropped", full)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for what was started; False if that takes longer than `timeout` seconds."""
        with self._lock:
            started = list(self._futures)
        return not wait(started, timeout).not_done

    def _run(self, texts: list[str]) -> BlendReport | None:
        try:
            if self.mode == "load":
                return self.library.prefetch(texts, self.system)
            report = BlendReport()
            self.library.prefill(texts, self.system, report)
        except Exception as error:
            _LOG.warning("blendkv: %d documents could not be prefetched: %r", len(texts), error)
            return None
        return report
