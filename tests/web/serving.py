"""A page that is served by a thread of the test, and stand-ins for what computes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from blendkv.sockets import listen
from blendkv.web.page import application
from blendkv.web.running import View


class Slow:
    """In place of a `Comparison`: tells the first word, five times a second, for a minute or until somebody ends it.

    Attributes:
        running: how many are under way.
        asked: documents of every run.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds, self.running, self.asked = seconds, 0, []
        self.most_at_once = 0
        self._lock = threading.Lock()

    def run(self, asked: Any, stopped: threading.Event | None = None) -> Generator[View]:
        stopped = stopped or threading.Event()
        with self._lock:
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
            self.asked.append(asked.documents)
        try:
            word, view, end = asked.documents[0].split()[0], View("Answering"), time.monotonic() + self.seconds
            while time.monotonic() < end and not stopped.is_set():
                stopped.wait(0.2)
                view = view.with_column(0, state="running", text=f"{view.columns[0].text} {word}")
                yield view
            yield View("Stopped" if stopped.is_set() else "Done", view.columns, finished=True)
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def served(comparison: Any) -> Generator[str]:
    """The address of a page that is served meanwhile."""
    sock = listen("127.0.0.1", 0)
    made: list[uvicorn.Server] = []

    def run() -> None:  # all of it in a thread: where playwright is at work, this one has an event loop
        config = uvicorn.Config(application(comparison, "tiny"), log_level="warning", timeout_graceful_shutdown=1)
        made.append(uvicorn.Server(config))
        made[0].run(sockets=[sock])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while thread.is_alive() and not (made and made[0].started):
            time.sleep(0.02)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        if made:
            made[0].should_exit = True
        thread.join()
        sock.close()


def wait_for(condition: Any, seconds: float = 20.0) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
