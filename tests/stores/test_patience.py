"""Calls that may take for ever, in threads that are used again."""

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from blendkv.stores import patience as module
from blendkv.stores.patience import Patience
from tests.patience import until

LONG = 60.0


@pytest.fixture
def short(monkeypatch):
    """Threads without work end soon."""
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.01)


def threads():
    return sum(thread.name == "blendkv-store" for thread in threading.enumerate())


def test_one_call_after_the_other_takes_one_thread(monkeypatch):
    monkeypatch.setattr(module, "LINGER_SECONDS", LONG)
    calls = Patience()
    assert len({calls.call(threading.get_ident, LONG) for _ in range(200)}) == 1
    assert calls.call(threading.get_ident, LONG) != threading.get_ident()


def test_threads_without_work_end(short):
    before, calls = threads(), Patience()
    for _ in range(3):
        barrier = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _, barrier=barrier: calls.call(barrier.wait, LONG), range(4)))
        until(lambda: threads() <= before)


def test_what_a_call_gives_and_raises():
    calls = Patience()
    assert calls.call(lambda: 3, LONG) == 3
    for raised in (KeyError("it"), SystemExit(2), TimeoutError("its own")):

        def fails(raised=raised):
            raise raised

        with pytest.raises(type(raised)) as caught:
            calls.call(fails, LONG)
        assert caught.value is raised
    assert calls.call(lambda: 4, LONG) == 4


def test_late_ones_count_until_they_end_and_hold_up_nobody_else():
    calls, stalled, told = Patience(3), threading.Event(), []
    for _ in range(2):
        with pytest.raises(TimeoutError):
            calls.call(lambda: told.append(stalled.wait(LONG)), 0.01)
    assert calls.call(lambda: 5, LONG) == 5
    with pytest.raises(TimeoutError):
        calls.call(lambda: told.append(stalled.wait(LONG)), 0.01)
    with pytest.raises(TimeoutError, match="too many calls are under way"):
        calls.call(lambda: 6, 0.01)
    with pytest.raises(TimeoutError):
        calls.call(lambda: 7, 0.0)
    stalled.set()
    assert calls.call(lambda: 8, LONG) == 8
    until(lambda: told == [True] * 3)


def test_many_at_once_each_get_their_own_and_no_more_are_under_way(short):
    calls, lock, under, most = Patience(5), threading.Lock(), 0, 0

    def call(number):
        nonlocal under, most
        with lock:
            under += 1
            most = max(most, under)
        if number % 7 == 0:
            time.sleep(0.002 if number % 2 else 0.02)  # longer than a thread without work stays
        with lock:
            under -= 1
        return number

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda number: calls.call(lambda: call(number), LONG), range(3000))) == list(
                range(3000)
            )
    finally:
        sys.setswitchinterval(before)
    assert 1 < most <= 5


def test_no_more_threads_to_be_had_is_an_error_that_costs_no_slot(short, monkeypatch):
    calls, start = Patience(1), threading.Thread.start

    def none(self):
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        monkeypatch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="can't start"):
            calls.call(lambda: 1, 1.0)
        monkeypatch.setattr(threading.Thread, "start", start)
        assert calls.call(lambda: 2, LONG) == 2
        until(lambda: not calls._free)


def test_a_thread_that_waits_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(module, "LINGER_SECONDS", LONG)

    class Thing:
        """Something big."""

    calls, thing = Patience(), Thing()
    gone = weakref.ref(thing)
    assert calls.call(lambda thing=thing: thing, LONG) is thing
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda thing=thing: 1 / 0, LONG)
    del thing
    gc.disable()
    try:
        until(lambda: gone() is None)
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_of_the_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "LINGER_SECONDS", LONG)
    calls, stalled = Patience(2), threading.Event()
    assert calls.call(lambda: 1, LONG) == 1  # its thread waits for more, but not in the child
    with pytest.raises(TimeoutError):
        calls.call(stalled.wait, 0.01)  # it takes a slot, but not in the child
    if not (child := os.fork()):
        code = 1
        try:
            code = 0 if [calls.call(lambda: 2, 20.0) for _ in range(2)] == [2, 2] else 3
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    stalled.set()
