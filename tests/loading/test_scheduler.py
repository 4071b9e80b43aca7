"""Transfers share slots: bounded, cancelled, failing, in whatever thread; and nothing is left behind."""

import gc
import os
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import CancelledError, wait

import pytest

from blendkv.loading.queues import POLICIES
from blendkv.loading.scheduler import TransferScheduler, shared_scheduler
from blendkv.stores import deadline
from blendkv.stores.deadline import remaining
from tests.patience import until


@pytest.fixture(params=POLICIES)
def scheduler(request):
    with TransferScheduler(3, request.param) as made:
        yield made


class Gate:
    """Work that waits until it may go on."""

    def __init__(self, scheduler, pieces):
        self.open, self.begun = threading.Event(), threading.Semaphore(0)
        self.futures = [scheduler.submit("gate", self.run) for _ in range(pieces)]
        for _ in range(pieces):
            assert self.begun.acquire(timeout=20)

    def run(self):
        self.begun.release()
        assert self.open.wait(20)


def test_results_and_arguments(scheduler):
    futures = [scheduler.submit(n % 4, divmod, n, 7, cost_bytes=n) for n in range(200)]
    assert [future.result(20) for future in futures] == [divmod(n, 7) for n in range(200)]
    assert scheduler.submit("x", dict, a=1).result(20) == {"a": 1}


def test_exceptions_reach_who_submitted(scheduler):
    with pytest.raises(ZeroDivisionError):
        scheduler.submit("x", divmod, 1, 0).result(20)

    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        scheduler.submit("x", leave).result(20)
    assert scheduler.submit("x", int, "5").result(20) == 5


def test_never_more_than_the_slots(scheduler):
    lock, now, most = threading.Lock(), 0, 0

    def work():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1

    wait([scheduler.submit(n % 5, work) for n in range(100)])
    assert most == scheduler.slots  # all of them are used, too


def test_what_waits_is_taken_back(scheduler):
    gate, ran = Gate(scheduler, 3), []
    mine = [scheduler.submit("mine", ran.append, n) for n in range(10)]
    others = [scheduler.submit("other", ran.append, "other") for _ in range(3)]
    assert mine[4].cancel()
    assert scheduler.cancel("mine") == 9
    assert scheduler.cancel("mine") == 0
    assert not wait(mine, 20).not_done  # who waits for them is told
    assert scheduler.state.waiting == 3
    gate.open.set()
    wait(others)
    assert ran == ["other"] * 3
    with pytest.raises(CancelledError):
        mine[0].result(0)
    assert scheduler.state.cancelled == 10
    assert not gate.futures[0].cancel()  # it ran


def test_a_lane_leaves_nothing(scheduler):
    gate, ran = Gate(scheduler, 2), []

    def slow():
        time.sleep(0.05)
        ran.append("slow")

    def request():
        with scheduler.lane("request") as lane:
            first = lane.submit(slow)
            until(first.running)
            rest.extend(lane.submit(ran.append, "late") for _ in range(5))
            raise KeyError

    rest = []
    with pytest.raises(KeyError):
        request()
    assert ran == ["slow"]  # what was under way has ended when the block is left
    assert all(future.cancelled() for future in rest)
    assert scheduler.state.waiting == 0
    gate.open.set()


def test_lanes_of_one_name_keep_to_themselves(scheduler):
    gate = Gate(scheduler, 3)
    with scheduler.lane("same") as other:
        kept = other.submit(int, "1")
        with scheduler.lane("same") as lane:
            lane.submit(int, "2")
        assert not kept.cancelled()
        gate.open.set()
        assert kept.result(20) == 1


def test_a_deadline_around_submit_holds_for_the_piece(scheduler):
    with deadline(60):
        left = scheduler.submit("x", remaining, 99.0).result(20)
    assert 0 < left <= 60
    assert scheduler.submit("x", remaining, 99.0).result(20) == 99.0


def test_threads_end_by_themselves():
    scheduler = TransferScheduler(4, linger=0.01)
    seen = weakref.ref(scheduler)
    for _ in range(3):
        wait([scheduler.submit("x", time.sleep, 0.001) for _ in range(8)])
        until(lambda: seen().state.threads == 0)
    del scheduler
    gc.collect()
    until(lambda: seen() is None)


def test_close_takes_back_and_waits():
    scheduler = TransferScheduler(1)
    gate = Gate(scheduler, 1)
    late = scheduler.submit("x", int, "1")
    assert not scheduler.close(timeout=0.05)
    assert late.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.submit("x", int, "1")
    gate.open.set()
    assert scheduler.close(timeout=20)
    assert gate.futures[0].result(0) is None
    assert scheduler.state.threads == 0


def test_a_thread_that_waits_keeps_nothing_alive():
    class Data:
        pass

    with TransferScheduler(1) as scheduler:
        future = scheduler.submit("x", lambda data: data, Data())
        seen = weakref.ref(future.result(20))
        del future
        until(lambda: (gc.collect(), seen() is None)[1])


def test_one_more_thread_than_the_process_may_have(monkeypatch):
    scheduler = TransferScheduler(2)
    gate = Gate(scheduler, 1)

    def refused(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        second = scheduler.submit("x", int, "2")  # the thread that there is does it
        empty = TransferScheduler(2)
        with pytest.raises(RuntimeError, match="can't start"):
            empty.submit("x", int, "3")
    assert empty.state.waiting == empty.state.threads == 0
    gate.open.set()
    assert second.result(20) == 2
    assert empty.submit("x", int, "3").result(20) == 3
    assert scheduler.close(20)
    assert empty.close(20)


def test_many_threads_submit_and_cancel(scheduler):
    ran, kept, taken_back, cancelled = Counter(), [], [], Counter()

    def client(name):
        for n in range(300):
            future = scheduler.submit(name, ran.update, [(name, n)], cost_bytes=n * 1000)
            if n % 3 == 0 and future.cancel():
                cancelled[name, n] += 1
                taken_back.append(future)
            else:
                kept.append(future)

    threads = [threading.Thread(target=client, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wait(kept + taken_back, 20).not_done
    assert all(future.exception() is None for future in kept)
    assert not set(ran) & set(cancelled)
    assert len(ran) + len(cancelled) == 2400
    state = scheduler.state
    assert (state.waiting, state.running) == (0, 0)
    assert (state.done, state.cancelled) == (len(ran), len(cancelled))
    assert not scheduler._waiting


@pytest.mark.parametrize(("policy", "fair"), [("drr", True), ("fifo", False)])
def test_a_light_client_is_not_stuck_behind_a_flood(policy, fair):
    """Counted in pieces that went first, not in seconds."""
    with TransferScheduler(2, policy) as scheduler:
        gate, order = Gate(scheduler, 2), []
        flood = [scheduler.submit("flood", order.append, "flood", cost_bytes=1 << 20) for _ in range(500)]
        light = [scheduler.submit(f"light-{n}", order.append, "light", cost_bytes=1 << 20) for n in range(9)]
        gate.open.set()
        wait(flood + light)
    last = max(at for at, who in enumerate(order) if who == "light")
    assert (last < 20) is fair


def test_one_that_somebody_closed_is_shared_no_longer():
    with shared_scheduler("s3://closed") as closed:
        pass
    assert closed.closed
    assert shared_scheduler("s3://closed").submit("x", int, "1").result(20) == 1
    assert shared_scheduler("s3://closed") is shared_scheduler("s3://closed")


def test_one_for_the_process():
    assert shared_scheduler() is shared_scheduler()
    assert shared_scheduler().submit("x", int, "1").result(20) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_makes_its_own():
    """It has none of its parent's threads, which wait for work or are at it."""
    shared, free = shared_scheduler(), threading.Event()
    futures = [shared.submit("parent", free.wait, 60) for _ in range(shared.slots)]
    try:
        if (pid := os.fork()) == 0:
            try:
                os._exit(shared_scheduler().submit("child", lambda: 7).result(30))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        free.set()
    assert all(future.result(30) for future in futures)
    assert shared_scheduler() is shared


def test_no_slots():
    with pytest.raises(ValueError, match="at least 1"):
        TransferScheduler(0)


class Thing:
    """Something that work holds."""


@pytest.mark.parametrize("how", ["done", "raises", "cancelled", "client", "closed"])
def test_work_that_is_over_lets_go_at_once_of_what_it_held(scheduler, how):
    """Without the garbage collector: of a prompt that is all its chunks."""
    waits = how not in ("done", "raises")
    gate, held, result = Gate(scheduler, 3 if waits else 0), [Thing(), Thing()], Thing()

    def work(thing, result=result):
        if how == "raises":
            raise ValueError(how) from None
        return result

    known = [weakref.ref(thing) for thing in (*held, result)]
    gc.disable()
    try:
        futures = [scheduler.submit("x", work, thing) for thing in held]
        held.clear()
        del result, work
        if how == "cancelled":
            assert all(future.cancel() for future in futures)
        elif how == "client":
            assert scheduler.cancel("x") == 2
        elif how == "closed":
            assert not scheduler.close(0.01)
        assert not wait(futures, 20).not_done
        assert all(future.cancelled() == waits for future in futures)
        assert waits or all(bool(future.exception(0)) == (how == "raises") for future in futures)
        del futures
        until(lambda: not any(thing() for thing in known))
    finally:
        gc.enable()
        gate.open.set()
