"""Who is next: pieces of work of many clients, and the order in which they get a slot.

No threads, no clock: `TransferScheduler` and the gateway bring those, and `blendkv bench fairness` a made-up one.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

QUANTUM_BYTES = 4 << 20
"""Of a turn: some pieces, which a light client may need at once (`blendkv bench fairness`)."""
USUAL_BYTES = 1 << 20
"""Of a piece whose size is not known."""
LEAST_BYTES = 64 << 10
"""What a piece counts for at least: the way there and back takes as long as some bytes do."""
LEAD = 16


class Piece:
    """A piece of work that waits.

    Args:
        client: whose it is.
        cost: of it, in bytes; at least 1.
        item: what the owner of the queue wants to find again.
    """

    __slots__ = ("client", "cost", "item")

    def __init__(self, client: Hashable, cost: int, item: Any = None) -> None:
        self.client, self.cost, self.item = client, max(1, int(cost)), item


class PieceQueue(Protocol):
    """Pieces that wait. Not safe to share among threads: whoever has it holds a lock."""

    def __len__(self) -> int:
        """Pieces that wait."""
        ...

    def push(self, piece: Piece) -> None:
        """Another piece; those of one client stay in their order."""
        ...

    def pop(self) -> Piece:
        """The next one. `IndexError` if none waits."""
        ...

    def remove(self, piece: Piece) -> bool:
        """Takes a piece out; False if it does not wait here."""
        ...


class FifoQueue:
    """First come, first served, whoever it is: the baseline."""

    def __init__(self) -> None:
        self._pieces: dict[Piece, None] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def push(self, piece: Piece) -> None:
        """Another piece, behind all others."""
        self._pieces[piece] = None

    def pop(self) -> Piece:
        """The one that came first."""
        return _first(self._pieces)

    def remove(self, piece: Piece) -> bool:
        """Takes a piece out."""
        return self._pieces.pop(piece, self) is None


class SoftmaxQueue:
    """Draws a client with probability softmax(1 / (pieces that it has waiting) / temperature).

    Whoever waits for one piece is drawn more often than whoever waits for many. It knows pieces, not bytes, and a draw
    gives no bound on a wait.

    Args:
        temperature: the lower, the more surely the shortest queue is drawn.
        seed: of the draws.
    """

    def __init__(self, temperature: float = 1.0, seed: int | None = None) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: give a number above 0")
        self._temperature, self._random = temperature, random.Random(seed)
        self._pieces: dict[Hashable, dict[Piece, None]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, piece: Piece) -> None:
        """Another piece, behind those of its client."""
        self._pieces.setdefault(piece.client, {})[piece] = None
        self._waiting += 1

    def pop(self) -> Piece:
        """The first one of a client that is drawn."""
        if not self._waiting:
            raise IndexError("no piece waits")
        clients = list(self._pieces)
        if len(clients) > 1:  # 1 / length is at most 1: taking that off keeps low temperatures from overflowing
            weights = [math.exp((1 / len(self._pieces[client]) - 1) / self._temperature) for client in clients]
            clients = self._random.choices(clients, weights) if sum(weights) > 0 else [self._shortest()]
        piece = _first(self._pieces[clients[0]])
        self._left(piece.client)
        return piece

    def remove(self, piece: Piece) -> bool:
        """Takes a piece out."""
        found = self._pieces.get(piece.client, {}).pop(piece, self) is None
        if found:
            self._left(piece.client)
        return found

    def _shortest(self) -> Hashable:
        return min(self._pieces, key=lambda client: len(self._pieces[client]))

    def _left(self, client: Hashable) -> None:
        self._waiting -= 1
        if not self._pieces[client]:
            del self._pieces[client]


class DeficitQueue:
    """Deficit round robin by bytes; who comes newly is served first.

    Clients take turns. A turn gives `quantum` bytes of credit, and a client whose credit is used up waits for its next
    turn, so that all get the same bytes however large their pieces are (Shreedhar and Varghese, 1996). A client with
    nothing waiting so far goes in front of those that have had turns, as in FQ-CoDel (RFC 8290): one piece of a light
    client waits for a slot, not for a round; and so do the next ones, until it has had a turn's bytes. It then stays in
    the round until its next turn even if it has nothing left, so that coming and going earns a turn's bytes a round at
    most. After `lead` pieces of newcomers in a row somebody of the round is served, so that newcomers without end
    starve nobody.

    Args:
        quantum: bytes of a turn.
        least: bytes that a piece counts for at least. Without it a client with thousands of tiny pieces would have a
            turn of thousands.
        lead: most pieces of newcomers that go in front, one after the other.
    """

    def __init__(self, quantum: int = QUANTUM_BYTES, least: int = LEAST_BYTES, lead: int = LEAD) -> None:
        if quantum < 1 or least < 1 or lead < 1:
            raise ValueError(f"quantum={quantum}, least={least}, lead={lead}: give positive numbers")
        self._quantum, self._least, self._lead = quantum, least, lead
        self._pieces: dict[Hashable, dict[Piece, None]] = {}
        self._credit: dict[Hashable, int] = {}
        self._new: OrderedDict[Hashable, None] = OrderedDict()
        self._round: OrderedDict[Hashable, None] = OrderedDict()
        self._left: set[Hashable] = set()  # of the round: with nothing waiting, and credit left of the first turn
        self._waiting = self._led = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, piece: Piece) -> None:
        """Another piece, behind those of its client."""
        client = piece.client
        if client not in self._pieces:
            self._pieces[client], self._credit[client] = {}, self._quantum
            self._new[client] = None
        elif client in self._left:
            self._left.remove(client)
            del self._round[client]
            self._new[client] = None
        self._pieces[client][piece] = None
        self._waiting += 1

    def pop(self) -> Piece:
        """The first one of the client whose turn it is."""
        if not self._waiting:
            raise IndexError("no piece waits")
        broke = 0
        while True:
            if not self._round:
                self._led = 0
            new = bool(self._new) and self._led < self._lead
            line = self._new if new else self._round
            client = next(iter(line))
            if self._credit[client] <= 0:
                self._credit[client] += self._quantum
                del line[client]
                self._round[client] = None
                broke += 1
                if broke > len(self._pieces):
                    self._skip()
                    broke = 0
            elif not self._pieces[client]:
                del line[client]
                if new and self._round:
                    self._round[client] = None
                    self._left.add(client)
                else:
                    self._left.discard(client)
                    del self._pieces[client], self._credit[client]
            else:
                piece = _first(self._pieces[client])
                self._waiting -= 1
                self._credit[client] -= max(piece.cost, self._least)
                self._led = self._led + 1 if new else 0
                return piece

    def remove(self, piece: Piece) -> bool:
        """Takes a piece out; its client keeps its place."""
        found = self._pieces.get(piece.client, {}).pop(piece, self) is None
        self._waiting -= found
        return found

    def _skip(self) -> None:
        """Takes whole rounds in which nobody could pay at once: after a piece of many quanta there are many."""
        rounds = min(-self._credit[client] // self._quantum for client, pieces in self._pieces.items() if pieces)
        for client, credit in self._credit.items():
            self._credit[client] = min(credit + max(0, rounds) * self._quantum, max(credit, self._quantum))


POLICIES: dict[str, Callable[[], PieceQueue]] = {"drr": DeficitQueue, "softmax": SoftmaxQueue, "fifo": FifoQueue}
DEFAULT_POLICY = "drr"


def get_queue(policy: str | PieceQueue = DEFAULT_POLICY) -> PieceQueue:
    """The queue of a policy's name, or the one given.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[policy]()


def _first(pieces: dict[Piece, None]) -> Piece:
    piece = next(iter(pieces), None)
    if piece is None:
        raise IndexError("no piece waits")
    del pieces[piece]
    return piece
