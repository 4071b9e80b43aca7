"""What the order of sending is worth by a deadline, and what a moving client loses (`blendkv bench streaming`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.bench.bandwidth import Bandwidth
from blendkv.bench.throttle import ThrottledStore
from blendkv.codecs import Codec
from blendkv.loading.assembly import Assembly
from blendkv.loading.clocks import VirtualClock
from blendkv.loading.handover import Handover, transfer
from blendkv.loading.levels import Level
from blendkv.loading.orders import ORDERS, pieces
from blendkv.stores import Store

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Deadlines, in seconds in which all would have come at the link's nominal rate."""


@dataclass(frozen=True)
class Sent:
    """What had come by a deadline.

    Attributes:
        files: as far as they have come.
        usable: share of tokens that are usable, at least as a base.
        refined: share of tokens and layers that are usable and refined.
        brought: bytes.
    """

    files: tuple[Assembly, ...]
    usable: float
    refined: float
    brought: int


def send(files: Sequence[bytes], codec: Codec, order: str, link: Bandwidth, deadline_s: float, piece: int) -> Sent:
    """Sends progressive files over a link, and cuts it off at a deadline. Heads go first, whatever the order."""
    assemblies, head_bytes = [], 0
    for data in files:
        assembly = Assembly(len(data), codec=codec)
        while assembly.header is None:
            for start, stop in assembly.missing():
                assembly.add(start, data[start:stop])
        head_bytes += int(assembly.starts[0])
        assemblies.append(assembly)
    sent, most = head_bytes, link.until(deadline_s)
    for one in pieces(assemblies, order, piece):
        if sent + one.nbytes > most:
            break
        wrong = assemblies[one.file].add(one.start, files[one.file][one.start : one.stop])
        assert not wrong
        sent += one.nbytes
    usable = refined = tokens = 0
    for assembly in assemblies:
        header = assembly.file.header
        there = min(assembly.groups * header.arrangement.group_tokens, header.tokens) if head_bytes <= most else 0
        tokens += header.tokens
        usable += there
        if there:
            fine = sum(assembly.streams(unit, assembly.groups) > 1 for unit in range(header.units))
            refined += there * fine / header.units
    return Sent(tuple(assemblies), usable / tokens, refined / tokens, min(sent, int(most)))


def order_rows(
    files: Sequence[bytes],
    codec: Codec,
    sets: Mapping[str, Sequence[Bandwidth]],
    text_s: float,
    *,
    slos: Sequence[float] = (0.5, 1.0),
    loads: Sequence[float] = (0.5, 1.0, 2.0, 5.0),
    piece: int = 1 << 14,
    about: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each set of links, load, deadline and order; real bytes, each piece checked.

    Args:
        files: chunk files of two streams.
        codec: that wrote them.
        sets: links of nominally 1 byte a second, by name.
        text_s: seconds of recomputing everything.
        slos: deadlines, in seconds of recomputing everything.
        loads: seconds of sending all files at the nominal rate, likewise.
        piece: bytes.
        about: added to every row.

    Yields:
        `order`, `usable` and `refined` (means over links of `Sent`'s), `none` (share of links with nothing usable).
    """
    total = sum(map(len, files))
    for name, nominal in sets.items():
        for load in loads:
            links = [link.scaled(total / (load * text_s)) for link in nominal]
            for slo in slos:
                for order in ORDERS:
                    found = [send(files, codec, order, link, slo * text_s, piece) for link in links]
                    yield {
                        **(about or {}),
                        "traces": name,
                        "load": load,
                        "slo": slo,
                        "slo_s": slo * text_s,
                        "order": order,
                        "usable": sum(one.usable for one in found) / len(found),
                        "refined": sum(one.refined for one in found) / len(found),
                        "none": sum(one.usable == 0 for one in found) / len(found),
                    }


MOVES = ("hand over", "begin anew", "stay")


def move_rows(
    store: Store,
    level: Level,
    links: Sequence[Bandwidth],
    text_s: float,
    *,
    stall_s: float | None = None,
    about: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """A client that leaves one gateway's reach in the middle of a chunk: what it does, and when it has all.

    The first gateway's link ends for good when 10%, 50% or 90% of the file has come; the second's is as it was.

    Args:
        store: that both gateways serve.
        level: an entry of it.
        links: courses of nominally 1 byte a second.
        text_s: seconds in which the file would come at the nominal rate.
        stall_s: seconds that a piece may take before the next gateway is asked; None: a quarter of `text_s`.
        about: added to every row.

    Yields:
        `move`, `at` (share of the file), `ttft_s` (mean; None if it never came), `arrived` (share of links),
        `brought` (bytes over the file's).
    """
    size = level.nbytes or 0
    for at in (0.1, 0.5, 0.9):
        for move in MOVES:
            seconds, brought = [], 0
            for nominal in links:
                link = nominal.scaled(size / text_s)
                clock = VirtualClock()
                first = ThrottledStore(store, _ending(link, at * size), clock=clock, burst_s=0.0)
                second = ThrottledStore(store, link, clock=clock, burst_s=0.0)
                stores = [first] if move == "stay" else [first, second]
                patience = text_s / 4 if stall_s is None else stall_s
                handover = Handover(stores, piece_s=patience, clock=clock)
                assembly = Assembly(size, codec=level.codec)
                with clock.deadline(20 * text_s):
                    if move == "begin anew":
                        transfer(
                            Handover([first], piece_s=patience, clock=clock), level.key, assembly, size // 50, tries=1
                        )
                        assembly = Assembly(size, codec=level.codec)
                        handover = Handover([second], piece_s=patience, clock=clock)
                    done = transfer(handover, level.key, assembly, max(4096, size // 50))
                brought += first.carried + second.carried
                if done:
                    seconds.append(clock.now())
            yield {
                **(about or {}),
                "move": move,
                "at": at,
                "ttft_s": sum(seconds) / len(seconds) if seconds else None,
                "arrived": len(seconds) / len(links),
                "brought": brought / size / len(links),
            }


def _ending(link: Bandwidth, nbytes: float) -> Bandwidth:
    """A link that carries so many bytes, and then nothing more."""
    step, left, rates = link.step_s / 8, nbytes, []
    while left > 0 and len(rates) < 100_000:
        carried = link.until((len(rates) + 1) * step) - link.until(len(rates) * step)
        rates.append(min(carried, left) / step)
        left -= carried
    return Bandwidth((*rates, 0.0), step, repeat=False)
