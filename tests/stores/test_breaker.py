"""The breaker: closed, open, half-open."""

import threading

from blendkv.stores.breaker import Breaker


def test_opens_after_failures_in_a_row_and_tries_once_a_second():
    now = [0.0]
    breaker = Breaker(failures=3, pause=1.0, clock=lambda: now[0])
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()
    for _ in range(3):
        breaker.failed()
    assert breaker.state == "open"
    assert not breaker.allows()
    now[0] = 1.0
    assert breaker.allows()
    assert breaker.state == "half-open"
    assert not breaker.allows()
    breaker.failed()
    assert breaker.state == "open"
    now[0] = 1.9
    assert not breaker.allows()
    now[0] = 2.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.allows()


def test_an_attempt_of_which_nothing_is_heard_is_followed_by_another():
    now = [0.0]
    breaker = Breaker(failures=1, clock=lambda: now[0])
    breaker.failed()
    for second in range(1, 10):
        now[0] = float(second)
        assert breaker.allows()
        assert not breaker.allows()


def test_one_thread_of_many_is_the_attempt():
    breaker = Breaker(failures=1, pause=0.0)
    breaker.failed()
    slow = Breaker(failures=1, pause=100.0, clock=iter([0.0, 1000.0, *[1000.0] * 999]).__next__)
    slow.failed()
    allowed = []
    threads = [threading.Thread(target=lambda: allowed.append(slow.allows())) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(allowed) <= 1
    assert breaker.allows()


def test_who_only_shows_that_it_is_there_is_on_probation():
    """Behind a slow network a server answers every PING, and sends no value in time."""
    now = [0.0]
    breaker = Breaker(failures=5, clock=lambda: now[0])
    for _ in range(4):
        breaker.failed()
        breaker.succeeded(fully=False)  # the small question before the large one
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open"
    now[0] = 1.0
    assert breaker.allows()
    breaker.succeeded(fully=False)
    assert breaker.state == "closed"
    breaker.failed()  # one is enough now
    assert breaker.state == "open"
    breaker.succeeded()
    for _ in range(4):
        breaker.failed()
    assert breaker.state == "closed"
