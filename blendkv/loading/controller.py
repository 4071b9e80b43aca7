"""What to load, and how much to recompute meanwhile: settled for each prompt, before its first layer runs.

CacheBlend (2405.16444), section 5.1: recompute as many tokens as loading hides, and never fewer than a floor. Beyond
it, a chunk whose bytes take longer than its tokens is computed from its text, while others are loaded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from blendkv import flops
from blendkv.loading.costs import ComputeCosts, Costs, calibration_path, machine
from blendkv.pace import matmul_rate

FLOOR = 0.15
"""The smallest share of reused tokens that is recomputed (CacheBlend's r*)."""
STEP = 0.01
MARGIN = 0.8
"""More is recomputed only where that is predicted to take no more than this share of the time of loading."""
WORTH = 0.9
"""A chunk is computed from text only where the first token is predicted to come in this share of the time, or less."""

Schedule = Callable[[float], Mapping[int, float]]


@dataclass(frozen=True)
class Offer:
    """A chunk that a store has.

    Attributes:
        key: of the chunk.
        tokens: of it.
        nbytes: of its file.
        decoded: bytes of its keys and values.
        url: of the store; "" for memory.
        codec: that wrote the file.
    """

    key: str
    tokens: int
    nbytes: int = 0
    decoded: int = 0
    url: str = ""
    codec: str = "raw"


@dataclass(frozen=True)
class Decision:
    """What was chosen for a prompt, what was predicted, and what happened.

    Attributes:
        ratio: share of reused tokens that is recomputed.
        text: keys of chunks that are computed from their text, although a store has them.
        load_s, compute_s, ttft_s: predicted seconds: of loading, of computing, and until the first token; None where
            a store was never seen before.
        loaded_s: seconds after which the last layer that was wanted had come; None until then.
        took_s: seconds until the first token's forward was over; None until then.
        why: in words.
    """

    ratio: float
    text: frozenset[str] = frozenset()
    load_s: float | None = None
    compute_s: float | None = None
    ttft_s: float | None = None
    loaded_s: float | None = None
    took_s: float | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; keys of chunks are counted, not listed."""
        return asdict(self) | {"text": len(self.text)}


class Controller:
    """Chooses ratio and road of every prompt from what loading and computing cost here. Safe to share among threads.

    Args:
        costs: measured ones (`blendkv calibrate`); None: those that are kept for the model, or rates that are measured
            when the first prompt comes.
        floor: the smallest share of reused tokens that is recomputed.
        most: the largest.
        text: whether chunks that stores have may be computed from their text where that is faster.

    Raises:
        ValueError: for shares outside [0, 1], or a floor above `most`.
    """

    def __init__(self, costs: Costs | None = None, floor: float = FLOOR, most: float = 1.0, text: bool = True) -> None:
        if not 0.0 <= floor <= most <= 1.0:
            raise ValueError(f"floor={floor}, most={most}: give 0 <= floor <= most <= 1")
        self.costs, self.floor, self.most, self.text = costs, floor, most, text
        self._first: str | None = None
        self._others: dict[str, Costs] = {}
        self._lock = threading.Lock()

    def ready(self, fingerprint: str, device: torch.device, dtype: torch.dtype) -> Costs:
        """The costs that hold for a model here; read or measured if none were given.

        What was given is the first model's that asks; each of the others has costs of its own. A calibration of another
        machine, or one that cannot be read, is not used: what matrix products reach here takes its place, and `notes`
        say so.
        """
        with self._lock:
            if self.costs is None:
                self.costs = _kept(fingerprint)
            if self._first in (None, fingerprint):
                self._first, costs = fingerprint, self.costs
            elif (costs := self._others.get(fingerprint)) is None:
                costs = self._others[fingerprint] = _kept(fingerprint)
            here = machine(device)
            wrong = [
                f"was made on {costs.machine!r}, and this is {here!r}" * (costs.machine != here),
                "is of another model, or its weights have changed" * (costs.fingerprint != fingerprint),
            ]
            if costs.compute is None or any(wrong):
                if costs.compute is not None:
                    said = " and ".join(filter(None, wrong))
                    costs.notes.append(f"the calibration {said}: run `blendkv calibrate`; until then rates are guessed")
                    costs.sources.clear()
                    costs.decoding.clear()
                costs.compute = _guessed(device, dtype)
                costs.machine, costs.fingerprint = here, fingerprint
            return costs

    def decide(
        self,
        shape: flops.ModelShape | None,
        offers: Sequence[Offer],
        computed: int,
        schedule: Schedule,
        probe: bool,
        costs: Costs | None = None,
    ) -> Decision:
        """Chooses for one prompt.

        Args:
            shape: of the model; None if its layers could not be counted.
            offers: chunks that memory and stores have, in prompt order.
            computed: tokens that are computed in any case: the question, chunks that nobody has.
            schedule: what a ratio means, layer -> share kept from there on.
            probe: whether the selector compares (`flops.blend_flops`).
            costs: of the model (`ready`); None: those that the controller was made with.

        Returns:
            The decision; `text` and ratios above the floor only where they make the first token no later. Where all
            would come from text, and nothing was seen of the store for a minute, the first chunk is loaded all the
            same: else a link that was slow once would never be found to be fast again.
        """
        costs = self.costs if costs is None else costs
        if costs is None or costs.compute is None or shape is None or not offers:
            return Decision(self.floor, why="nothing is known of what computing costs here")
        far = [offer for offer in offers if offer.url]
        if any(offer.url not in costs.sources for offer in far):
            return Decision(self.floor, why="a store that was never seen: its rate is learnt from this prompt")
        compute, total = costs.compute, sum(offer.tokens for offer in offers)

        def seconds(ratio: float, from_text: int) -> float:
            return compute.seconds(shape, total - from_text, computed + from_text, schedule(ratio), probe)

        plans = []
        for count in range(len(far) + 1 if self.text else 1):  # the last ones: the first layers of the first come first
            kept, given = far[: len(far) - count], far[len(far) - count :]
            load = _load_seconds(costs, kept)
            plans.append((max(load, seconds(self.floor, sum(o.tokens for o in given))), load, kept, given))
        best = min(plans, key=lambda plan: plan[0])
        if best[0] > WORTH * plans[0][0]:
            best = plans[0]
        if far and not best[2] and costs.try_again(far[0].url):
            best = plans[-2]
        _, load, _, given = best
        from_text = sum(offer.tokens for offer in given)
        ratio = self._hidden(lambda ratio: seconds(ratio, from_text), load)
        took = seconds(ratio, from_text)
        return Decision(
            ratio,
            frozenset(offer.key for offer in given),
            load,
            took,
            max(load, took),
            why=_words(ratio, self.floor, load, took, given, far),
        )

    def _hidden(self, seconds: Callable[[float], float], load: float) -> float:
        """The largest ratio whose computing loading hides, by bisection; never below the floor."""
        if seconds(self.floor) >= MARGIN * load:
            return self.floor
        low, high = self.floor, self.most
        if seconds(high) <= MARGIN * load:
            return high
        while high - low > STEP:
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(middle) <= MARGIN * load else (low, middle)
        return max(self.floor, math.floor(100 * low) / 100)


def slowest(
    costs: Costs,
    shape: flops.ModelShape,
    tokens: int,
    nbytes: int,
    ratio: float = FLOOR,
    schedule: Mapping[int, float] | None = None,
    question: int = 32,
) -> float:
    """The inverse question: bytes a second of the slowest device that still hides behind a ratio's recomputing.

    CacheBlend, section 5.1: pick the cheapest device that is at least so fast.

    Args:
        costs: with `compute` measured.
        shape: of the model.
        tokens: of the chunks.
        nbytes: of their files.
        ratio: recomputed.
        schedule: what it means; None: the check is in layer 1.
        question: tokens after them.

    Raises:
        ValueError: if `compute` was not measured.
    """
    if costs.compute is None:
        raise ValueError("what computing costs was not measured: run `blendkv calibrate`")
    return nbytes / costs.compute.seconds(shape, tokens, question, schedule or {min(1, len(shape.layers) - 1): ratio})


def cheapest(devices: Mapping[str, tuple[float, float]], needed: float) -> str | None:
    """The cheapest of devices that is fast enough, or None.

    Args:
        devices: name -> (bytes a second, price).
        needed: bytes a second (`slowest`).
    """
    good = {name: price for name, (rate, price) in devices.items() if rate >= needed}
    return min(good, key=lambda name: good[name], default=None)


def with_outcome(decision: Decision, loaded_s: float | None, took_s: float) -> Decision:
    """A decision with what happened."""
    return replace(decision, loaded_s=loaded_s, took_s=took_s)


def _kept(fingerprint: str) -> Costs:
    path = calibration_path(fingerprint)
    if not path.exists():
        return Costs(notes=["no calibration of this model here: run `blendkv calibrate`; until then rates are guessed"])
    try:
        return Costs.read(path)
    except (OSError, ValueError) as error:
        return Costs(notes=[f"{error}; until then rates are guessed"])


def _guessed(device: torch.device, dtype: torch.dtype) -> ComputeCosts:
    """Half of what matrix products reach: layers are smaller, and do other things too."""
    rate = matmul_rate(device.type, device.index, dtype) / 2
    return ComputeCosts(0.0, rate, rate / 4)


def _load_seconds(costs: Costs, offers: Iterable[Offer]) -> float:
    """Files of one store share its link; stores are asked at the same time, but what is decoded shares this machine."""
    urls: dict[tuple[str, str], list[Offer]] = {}
    for offer in offers:
        urls.setdefault((offer.url, offer.codec), []).append(offer)
    by_store: dict[str, float] = {}
    for (url, codec), those in urls.items():
        sizes = sum(o.nbytes for o in those), sum(o.decoded for o in those)
        by_store[url] = by_store.get(url, 0.0) + (costs.load_seconds(url, len(those), *sizes, codec) or 0.0)
    return max(by_store.values(), default=0.0)


def _words(ratio: float, floor: float, load: float, took: float, given: Sequence[Offer], far: Sequence[Offer]) -> str:
    if not far:
        return "all chunks are in memory: the smallest ratio"
    said = f"loading is predicted to take {load:.3g} s and computing {took:.3g} s"
    if given:
        said += f"; {len(given)} of {len(far)} chunks are computed from text, which is faster than loading them"
    return said + ("; loading hides more than the smallest ratio" if ratio > floor else "")
