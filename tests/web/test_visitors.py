"""Each visitor stops what is theirs, and nothing else."""

from blendkv.web.visitors import Visitors


def test_a_run_ends_when_its_visitor_says_so():
    visitors = Visitors()
    a, b = visitors.begin("a"), visitors.begin("b")
    first, second = visitors.event("a", a), visitors.event("b", b)
    visitors.stop("a")
    visitors.stop("nobody")
    assert (first.is_set(), second.is_set()) == (True, False)


def test_a_newer_run_ends_the_one_before_even_if_that_has_not_begun():
    visitors = Visitors()
    old = visitors.begin("a")
    under_way = visitors.event("a", old)
    new = visitors.begin("a")
    assert under_way.is_set()
    assert visitors.event("a", old).is_set()
    assert not visitors.event("a", new).is_set()
    visitors.end("a", old)  # the old one's end does not touch the new one
    assert not visitors.event("a", new).is_set()


def test_who_has_left_is_not_served():
    visitors = Visitors()
    number = visitors.begin("a")
    event = visitors.event("a", number)
    visitors.leave("a")
    assert event.is_set()
    assert visitors.event("a", number).is_set()
    assert visitors._runs == {}


def test_runs_that_are_over_are_forgotten():
    visitors = Visitors()
    for _ in range(3):
        number = visitors.begin("a")
        visitors.event("a", number)
        visitors.end("a", number)
    assert visitors._runs == {}


def test_all_of_them_end_with_the_program():
    visitors = Visitors()
    events = [visitors.event(name, visitors.begin(name)) for name in "abc"]
    visitors.stop_all()
    assert all(event.is_set() for event in events)
