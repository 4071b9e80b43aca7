"""Who waits how long for a slot, and who gets how much: policies of transfers on a made-up clock, and in threads."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from blendkv.bench.results import Row
from blendkv.loading.queues import POLICIES, Piece, PieceQueue, SoftmaxQueue
from blendkv.loading.scheduler import TransferScheduler

LIGHT = 9
"""Light clients beside one that floods."""
MIB = 1 << 20
COMPARED: dict[str, Callable[[], PieceQueue]] = POLICIES | {"softmax, temperature 0.1": lambda: SoftmaxQueue(0.1)}
SERVICES = ("equal", "exponential")
THREAD_SECONDS = 0.02
"""Of a piece in threads: sleeping is late by some tenths of a millisecond."""


@dataclass
class Outcome:
    """What came of one run.

    Attributes:
        waits: of each client's pieces for a slot, in mean service times.
        served: bytes of each client.
    """

    waits: dict[str, list[float]] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)


def simulate(
    queue: PieceQueue, slots: int, arrivals: Sequence[tuple[float, str, int]], seconds: float, mean: int = MIB
) -> Outcome:
    """Serves pieces on a made-up clock, on which a piece of `mean` bytes takes a second in its slot.

    Args:
        queue: says who is next.
        slots: that there are.
        arrivals: second, client and bytes of each piece, in order of time.
        seconds: after which it ends.
        mean: bytes that take a second.
    """
    found, free, at = Outcome(), slots, 0
    ends: list[tuple[float, int, str, int]] = []
    number = itertools.count()
    while True:
        now = min(arrivals[at][0] if at < len(arrivals) else np.inf, ends[0][0] if ends else np.inf)
        if now > seconds:
            while len(queue):  # they wait for at least so long
                piece = queue.pop()
                found.waits.setdefault(str(piece.client), []).append(seconds - piece.item)
            return found
        while at < len(arrivals) and arrivals[at][0] <= now:
            queue.push(Piece(arrivals[at][1], arrivals[at][2], arrivals[at][0]))
            at += 1
        while ends and ends[0][0] <= now:
            _, _, client, cost = heapq.heappop(ends)
            found.served[client] += cost
            free += 1
        while free and len(queue):
            piece = queue.pop()
            free -= 1
            found.waits.setdefault(str(piece.client), []).append(now - piece.item)
            heapq.heappush(ends, (now + piece.cost / mean, next(number), str(piece.client), piece.cost))


def flood_and_light(slots: int, load: float, service: str, seconds: float, seed: int) -> list[tuple[float, str, int]]:
    """One client hands in more than all slots can do, at once; nine others a piece now and then (Poisson).

    Args:
        slots: that there are.
        load: of all light clients together, as a share of what the slots can do.
        service: "equal" pieces, or "exponential" ones.
        seconds: of the clock.
        seed: of what is drawn.
    """
    draw = random.Random(seed)
    size = _sizes(draw, service)
    arrivals = [(0.0, "flood", size()) for _ in range(int(1.2 * slots * seconds) + 10)]
    rate = load * slots / LIGHT
    for light in range(LIGHT):
        now = draw.expovariate(rate)
        while now < seconds:
            arrivals.append((now, f"light {light}", size()))
            now += draw.expovariate(rate)
    return sorted(arrivals, key=lambda arrival: arrival[0])


def backlogged(clients: Sequence[int], seconds: float, slots: int, seed: int) -> list[tuple[float, str, int]]:
    """Clients that all have more to do than can be done, in random order; of each the mean bytes of a piece."""
    draw = random.Random(seed)
    pieces = [
        (0.0, f"client {number}", max(1, int(mean * draw.uniform(0.5, 1.5))))
        for number, mean in enumerate(clients)
        for _ in range(int(1.2 * slots * seconds * MIB / mean))
    ]
    draw.shuffle(pieces)
    return pieces


def jain(amounts: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all have the same, 1/n if one has all."""
    values = np.asarray(amounts, dtype=float)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def fairness_rows(
    slots: Sequence[int] = (1, 4, 8, 16),
    loads: Sequence[float] = (0.1, 0.3, 0.5),
    seconds: float = 1000.0,
    seeds: int = 5,
    threads: bool = True,
    progress: bool = False,
) -> list[Row]:
    """Policies beside each other.

    Args:
        slots: numbers of slots.
        loads: of the light clients together, as shares of what the slots can do.
        seconds: of the made-up clock, whose second is the mean service time of a piece.
        seeds: runs of each setting.
        threads: also run a `TransferScheduler` in threads, with pieces of 20 ms.
        progress: shows a bar on stderr.

    Returns:
        Rows of kind `flood` with `light_wait_p50` and `light_wait_p99` (in mean service times, over all light clients)
        and `flood_wait_p50`; of kind `shares` with `jain_equal` (ten clients with equal pieces) and `jain_sizes` (five
        of them with pieces four times as large), the worst of the seeds; of kind `threads` as `flood`, by the clock.
    """
    rows: list[Row] = []
    settings = list(itertools.product(COMPARED.items(), slots))
    for (name, make), count in tqdm(settings, disable=not progress, desc="policies"):
        for load, service in itertools.product(loads, SERVICES):
            runs = [
                simulate(make(), count, flood_and_light(count, load, service, seconds, seed), seconds)
                for seed in range(seeds)
            ]
            setting = {"policy": name, "slots": count, "light_load": load, "service": service}
            rows.append({"bench": "fairness", "kind": "flood", **setting, **_waits(runs)})
        equal, sizes = ((MIB,) * 10, (MIB,) * 5 + (4 * MIB,) * 5)
        found = {"jain_equal": _worst(make, count, equal, seeds), "jain_sizes": _worst(make, count, sizes, seeds)}
        rows.append({"bench": "fairness", "kind": "shares", "policy": name, "slots": count, **found})
    for name, make in COMPARED.items() if threads else ():
        runs = [in_threads(make(), 8, 0.3, seed) for seed in range(2)]
        setting = {"policy": name, "slots": 8, "light_load": 0.3, "service": "equal"}
        rows.append({"bench": "fairness", "kind": "threads", **setting, **_waits(runs)})
    return rows


def in_threads(queue: PieceQueue, slots: int, load: float, seed: int, pieces: int = 320) -> Outcome:
    """The same in a `TransferScheduler`, with pieces that sleep; waits are in mean times that pieces took."""
    seconds = pieces / slots
    arrivals = flood_and_light(slots, load, "equal", seconds, seed)
    begun: list[tuple[str, float]] = []
    took: list[float] = []

    def work(client: str, submitted: float) -> None:
        begin = time.perf_counter()
        begun.append((client, begin - submitted))
        time.sleep(THREAD_SECONDS)
        took.append(time.perf_counter() - begin)

    with TransferScheduler(slots, queue) as scheduler:
        flood = [arrival for arrival in arrivals if arrival[1] == "flood"]
        light = [arrival for arrival in arrivals if arrival[1] != "flood"]
        futures = [scheduler.submit(who, work, who, time.perf_counter(), cost_bytes=cost) for _, who, cost in flood]
        start = time.perf_counter()
        for second, client, cost in light:
            time.sleep(max(0.0, start + second * THREAD_SECONDS - time.perf_counter()))
            futures.append(scheduler.submit(client, work, client, time.perf_counter(), cost_bytes=cost))
        scheduler.cancel("flood")
        wait([future for future in futures if not future.cancelled()])
    found, mean = Outcome(), float(np.mean(took))
    for client, waited in begun:
        found.waits.setdefault(client, []).append(waited / mean)
    return found


def _sizes(draw: random.Random, service: str) -> Callable[[], int]:
    if service not in SERVICES:
        raise ValueError(f"service={service!r}: choose one of {', '.join(SERVICES)}")
    return (lambda: MIB) if service == "equal" else (lambda: max(1, int(draw.expovariate(1 / MIB))))


def _waits(runs: Sequence[Outcome]) -> Row:
    light = [wait for run in runs for client, waits in run.waits.items() if client != "flood" for wait in waits]
    flood = [wait for run in runs for wait in run.waits.get("flood", ())]
    if not light:
        raise ValueError("no light client had a piece to wait for: give more seconds (--seconds) or seeds (--seeds)")
    return {
        "light_wait_p50": float(np.percentile(light, 50)),
        "light_wait_p99": float(np.percentile(light, 99)),
        "light_wait_most": float(max(light)),
        "flood_wait_p50": float(np.percentile(flood, 50)),
        "light_pieces": len(light),
    }


def _worst(make: Callable[[], PieceQueue], slots: int, clients: Sequence[int], seeds: int) -> float:
    """Jain's index when every client has been served about 200 MiB, in the worst run."""
    seconds = 200.0 * len(clients) / slots
    found = []
    for seed in range(seeds):
        run = simulate(make(), slots, backlogged(clients, seconds, slots, seed), seconds)
        found.append(jain([run.served[f"client {number}"] for number in range(len(clients))]))
    return min(found)
