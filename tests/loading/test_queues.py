"""Who is next: bytes are shared, light clients go first, nobody starves, nothing is lost."""

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.loading.queues import POLICIES, DeficitQueue, FifoQueue, Piece, SoftmaxQueue, get_queue


def bytes_served(queue, pieces, begin, budget):
    """Bytes of each client after about `begin` bytes and until `budget`, when all pieces wait from the start."""
    for piece in pieces:
        queue.push(piece)
    while begin > 0:
        begin -= queue.pop().cost
    served = Counter()
    while sum(served.values()) < budget:
        piece = queue.pop()
        served[piece.client] += piece.cost
    return served


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=st.lists(st.tuples(st.sampled_from("pppor"), st.integers(0, 4), st.integers(0, 5 << 20)), max_size=80))
def test_every_piece_comes_out_once_and_in_order(policy, steps):
    queue, twin, out = get_queue(policy), [], []
    for what, client, cost in steps:
        if what == "p":
            twin.append(Piece(client, cost))
            queue.push(twin[-1])
        elif what == "r" and twin:
            gone = twin.pop(cost % len(twin))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif what == "o" and twin:
            piece = queue.pop()
            assert piece is next(each for each in twin if each.client == piece.client)
            twin.remove(piece)
            out.append(piece)
        assert len(queue) == len(twin)
    while twin:
        piece = queue.pop()
        assert piece is next(each for each in twin if each.client == piece.client)
        twin.remove(piece)
    with pytest.raises(IndexError):
        queue.pop()


def test_fifo_is_fifo():
    queue, pieces = FifoQueue(), [Piece(client, 1) for client in "aabac"]
    for piece in pieces:
        queue.push(piece)
    assert [queue.pop() for _ in pieces] == pieces


def test_deficit_shares_bytes_not_pieces():
    sizes = {"large": 4 << 20, "small": 64 << 10, "odd": 700_001}
    pieces = [Piece(client, size) for client, size in sizes.items() for _ in range((512 << 20) // size)]
    served = bytes_served(DeficitQueue(), pieces, 40 << 20, 300 << 20)
    assert max(served.values()) - min(served.values()) <= 2 * (4 << 20)  # however much was served
    softmax = bytes_served(SoftmaxQueue(seed=0), pieces, 40 << 20, 300 << 20)  # the check can fail
    assert max(softmax.values()) - min(softmax.values()) > 32 << 20


def classic(pieces, quantum):
    """Deficit round robin as in the paper (figure 3), for clients that all wait from the start."""
    lines, credit = {}, Counter()
    for piece in pieces:
        lines.setdefault(piece.client, deque()).append(piece)
    while any(lines.values()):
        for client, line in lines.items():
            credit[client] += quantum if line else -credit[client]
            while line and line[0].cost <= credit[client]:
                credit[client] -= line[0].cost
                yield line.popleft()


def test_deficit_is_within_a_round_of_the_paper():
    draw = random.Random(0)
    pieces = [Piece(client, draw.randint(1, 1 << 20)) for client in range(5) for _ in range(400)]
    draw.shuffle(pieces)
    ours = DeficitQueue(quantum=1 << 20, least=1)
    for piece in pieces:
        ours.push(piece)
    mine, theirs = Counter(), Counter()
    for piece in list(classic(pieces, 1 << 20))[:1000]:
        theirs[piece.client] += piece.cost
        own = ours.pop()
        mine[own.client] += own.cost
        assert all(abs(mine[client] - theirs[client]) <= 4 << 20 for client in range(5))


def test_a_newcomer_goes_before_those_who_had_turns():
    queue = DeficitQueue()
    for client in "fgh":
        for _ in range(100):
            queue.push(Piece(client, 1 << 20))
    for _ in range(30):
        queue.pop()
    queue.push(Piece("light", 1000))
    assert queue.pop().client == "light"


@pytest.mark.parametrize("size", [1 << 20, 3 << 20, 8 << 20])
@pytest.mark.parametrize("pause", [0, 1])
def test_coming_and_going_earns_little(size, pause):
    """One that never has two pieces waiting gets as much as one that always has many; if sometimes none, little more.

    (One that is forgotten when it has nothing waiting gets three times as much.)
    """
    queue, served, again = DeficitQueue(), Counter(), deque([0])
    for _ in range(1000):
        queue.push(Piece("many", 1 << 20))
    for turn in range(400):
        if again and again[0] <= turn:
            again.popleft()
            queue.push(Piece("one", size))
        piece = queue.pop()
        served[piece.client] += piece.cost
        if piece.client == "one":
            again.append(turn + 1 + pause)
    assert served["one"] <= (1.5 if pause else 1.0) * served["many"] + 2 * (8 << 20)
    assert pause or served["many"] - served["one"] <= 2 * (8 << 20)


def test_tiny_pieces_are_no_long_turn():
    queue = DeficitQueue()
    for client in ("tiny", "other"):
        for _ in range(1000):
            queue.push(Piece(client, 1))
    order = [queue.pop().client for _ in range(640)]
    assert 256 <= order.count("other") <= 384
    assert max(len(list(run)) for _, run in itertools.groupby(order)) <= (4 << 20) // (64 << 10)


def test_newcomers_without_end_starve_nobody():
    queue, served = DeficitQueue(lead=8), Counter()
    for _ in range(1000):
        queue.push(Piece("old", 1))
    for number in range(900):
        queue.push(Piece(("new", number), 1))
        queue.push(Piece(("new", number, "too"), 1))  # two come while one is served
        served[queue.pop().client == "old"] += 1
    assert served[True] >= 900 // 9 - 1


def test_clients_that_went_away_are_forgotten():
    queue = DeficitQueue()
    for number in range(1000):
        queue.push(Piece(number, 5 << 20))
        queue.pop()
    assert len(queue._pieces) <= 16


def test_a_piece_of_very_many_quanta_takes_no_loop_of_that_length():
    queue = DeficitQueue(quantum=1, least=1)
    for client in "ab":
        queue.push(Piece(client, 1 << 62))
        queue.push(Piece(client, 1))
    assert sorted(queue.pop().client for _ in range(4)) == list("aabb")  # one by one it would take 10 ** 18 turns


def test_softmax_draws_as_its_formula_says():
    import math

    counts, turns = Counter(), 4000
    queue = SoftmaxQueue(temperature=0.5, seed=0)
    for turn in range(turns):
        pieces = [Piece("one", 1)] + [Piece("four", 1) for _ in range(4)]
        for piece in pieces:
            queue.push(piece)
        counts[queue.pop().client] += 1
        for piece in pieces:
            queue.remove(piece)
        assert len(queue) == 0, turn
    expected = math.exp(1 / 0.5) / (math.exp(1 / 0.5) + math.exp(0.25 / 0.5))
    assert abs(counts["one"] / turns - expected) < 5 * math.sqrt(expected * (1 - expected) / turns)


def test_a_cold_softmax_draws_the_shortest_queue():
    queue = SoftmaxQueue(temperature=1e-6)
    for client, length in (("a", 3), ("b", 2), ("c", 5)):
        for _ in range(length):
            queue.push(Piece(client, 1))
    assert queue.pop().client == "b"


def test_settings_that_make_no_sense():
    with pytest.raises(ValueError, match="choose one of drr"):
        get_queue("lifo")
    with pytest.raises(ValueError, match="above 0"):
        SoftmaxQueue(0)
    with pytest.raises(ValueError, match="positive"):
        DeficitQueue(quantum=0)
