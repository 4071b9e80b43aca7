"""Eviction policies beside what is possible at all: `blendkv bench eviction`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from blendkv.bench.measure import paired_bootstrap
from blendkv.bench.results import Row
from blendkv.bench.traces import Trace, next_requests, zipf_trace
from blendkv.stores.eviction import POLICIES, get_eviction

ZIPF, CAPACITIES = (0.7, 0.9, 1.1), (0.05, 0.1, 0.25)
BASELINE = "lru"


def eviction_rows(
    zipf: Sequence[float] = ZIPF,
    capacities: Sequence[float] = CAPACITIES,
    documents: int = 2000,
    requests: int = 20_000,
    seeds: int = 10,
    progress: bool = False,
) -> list[Row]:
    """Hit rates of every policy on Zipf traces, with and without drift.

    Args:
        zipf: exponents of the law of popularity.
        capacities: shares of the bytes of all documents.
        documents: of a trace.
        requests: of a trace; all are counted, first ones too, which nobody can hit.
        seeds: traces of each kind; every policy sees the same ones.
        progress: shows a bar on stderr.

    Returns:
        Rows of `policy`, `zipf`, `drift`, `capacity`, with `hit_rate` and `byte_hit_rate` (means over seeds), the
        bounds of their 95% intervals (`_low`, `_high`), and, but for the baseline, the differences to it, paired by
        seed (`..._minus_lru`), with theirs. `byte_hit_rate` is the share of tokens that are not computed again. Policy
        `belady` knows the future, and is what can be reached; `bound` is what nobody can exceed (see `bound`).
    """
    settings = [(s, drift, seed) for s in zipf for drift in (False, True) for seed in range(seeds)]
    rates: dict[tuple, list[tuple[float, float]]] = {}
    for s, drift, seed in tqdm(settings, disable=not progress, desc="traces"):
        trace = zipf_trace(s, drift, documents, requests, seed)
        for share in capacities:
            capacity = int(share * trace.sizes.sum())
            for name, found in _each(trace, capacity):
                rates.setdefault((s, drift, share, name), []).append(found)
    common = {"documents": documents, "requests": requests, "seeds": seeds}
    return [
        {"bench": "eviction", "policy": name, "zipf": s, "drift": drift, "capacity": share}
        | _figures(np.array(own), None if name == BASELINE else np.array(rates[s, drift, share, BASELINE]))
        | common
        for (s, drift, share, name), own in rates.items()
    ]


def replay(policy: str, trace: Trace, capacity: int) -> np.ndarray:
    """[R] whether each request is a hit, where what was missed is put: as a `Pool` of `capacity` bytes does.

    Only a pool without pins, codec and chunks: tests/bench/test_eviction.py compares the two.
    """
    eviction, held, room = get_eviction(policy), {}, capacity
    hits = np.zeros(len(trace.requests), dtype=bool)
    names, sizes = [str(number) for number in range(len(trace.sizes))], trace.sizes.tolist()
    for at, number in enumerate(trace.requests.tolist()):
        key, size = names[number], sizes[number]
        if key in held:
            hits[at] = True
            eviction.used(key)
        elif size <= capacity:
            while room < size:
                victim = next(iter(eviction.victims()))
                eviction.drop(victim)
                room += held.pop(victim)
            held[key] = size
            eviction.put(key, size)
            room -= size
    return hits


def belady(trace: Trace, capacity: int) -> np.ndarray:
    """[R] hits of one that knows the future: the largest (bytes x requests until it is wanted again) goes first.

    Belady's rule with sizes; what has just been missed is not kept if it is the one to go. With sizes the best order is
    NP-hard to find, so this is what can be reached, and may be exceeded.
    """
    size, total = trace.sizes.astype(float), len(trace.requests)
    after = next_requests(trace.requests).astype(float)
    after[after == total] = np.inf
    wanted = np.full(len(size), -np.inf)  # of what is not held: never the one to go
    hits, room = np.zeros(total, dtype=bool), float(capacity)
    for at, number in enumerate(trace.requests.tolist()):
        hits[at] = wanted[number] > -np.inf
        if not hits[at]:
            room -= size[number]
        wanted[number] = after[at]
        while room < 0:
            goes = int(np.argmax(size * (wanted - at)))
            wanted[goes] = -np.inf
            room += size[goes]
    return hits


def bound(trace: Trace, capacity: int) -> tuple[float, float]:
    """A hit rate and a byte hit rate that no policy exceeds, whatever it knows, each by itself.

    A hit needs its chunk in memory from the request before until this one: bytes x requests of room. The room of the
    whole trace is capacity x requests, and is sold here to whoever needs least of it for a hit (or for a byte), the
    last one in part, as if room could be moved in time (Berger, Beckmann and Harchol-Balter 2018, PFOO-L).
    """
    after = next_requests(trace.requests)
    again = np.flatnonzero(after < len(after))
    sizes = trace.sizes[trace.requests].astype(float)
    size, needed = sizes[again], sizes[again] * (after[again] - again)
    room = float(capacity) * (len(after) - 1)

    def most(gain: np.ndarray) -> float:
        order = np.argsort(needed / gain, kind="stable")
        spent = np.concatenate([[0.0], np.cumsum(needed[order])])
        return float(np.interp(room, spent, np.concatenate([[0.0], np.cumsum(gain[order])])))

    fits = size <= capacity
    size, needed = size[fits], needed[fits]
    return most(np.ones_like(size)) / len(after), most(size) / float(sizes.sum())


def _each(trace: Trace, capacity: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Hit rate and byte hit rate of each policy, and what is possible."""
    runs: dict[str, Callable[[], np.ndarray]] = {
        **{name: lambda name=name: replay(name, trace, capacity) for name in POLICIES},
        "belady": lambda: belady(trace, capacity),
    }
    bytes_ = trace.sizes[trace.requests]
    for name, run in runs.items():
        hits = run()
        yield name, (float(hits.mean()), float(bytes_[hits].sum() / bytes_.sum()))
    yield "bound", bound(trace, capacity)


def _figures(own: np.ndarray, baseline: np.ndarray | None) -> Row:
    """Means with their intervals; and of differences to the baseline, trace by trace."""
    found: Row = {}
    for column, field in enumerate(("hit_rate", "byte_hit_rate")):
        values = {field: own[:, column]}
        if baseline is not None:
            values[f"{field}_minus_{BASELINE}"] = own[:, column] - baseline[:, column]
        for name, each in values.items():
            mean, low, high = paired_bootstrap(each.tolist())
            found |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return found
