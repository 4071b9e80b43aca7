"""Attempts: what one prompt tells the breaker of a store, from several threads at once."""

import threading
from contextlib import suppress

import pytest

from blendkv.loading.incoming import Attempt


class Told:
    """A breaker that keeps what it is told."""

    def __init__(self):
        self.words = []

    def succeeded(self):
        self.words.append("succeeded")

    def failed(self):
        self.words.append("failed")


class Counted(int):
    """A count between whose reading and writing another thread gets its turn."""

    both = threading.Barrier(2)

    def __add__(self, more):
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
        return Counted(int(self) + more)

    __radd__ = __add__

    def __sub__(self, less):
        return self + -less


def at_once(*calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_files_that_come_at_the_same_time_are_all_counted(monkeypatch):
    attempt = Attempt(told := Told())
    attempt.begin(Counted(2))
    monkeypatch.setattr(Counted, "both", threading.Barrier(2))  # whole again
    at_once(attempt.came, attempt.came)
    assert told.words == ["succeeded"]


@pytest.mark.parametrize("files", [0, 1])
def test_a_breaker_is_told_once(files):
    attempt = Attempt(told := Told())
    attempt.begin(files)
    at_once(*[attempt.came] * files, attempt.late, attempt.late)
    assert len(told.words) == 1
    assert files or told.words == ["succeeded"]


def test_what_came_after_it_was_late_is_late():
    attempt = Attempt(told := Told())
    attempt.begin(2)
    attempt.came()
    attempt.late()
    attempt.came()
    assert told.words == ["failed"]
    attempt = Attempt(told := Told())
    attempt.late()  # its store did not even say what it has
    attempt.begin(0)
    assert told.words == ["failed"]
