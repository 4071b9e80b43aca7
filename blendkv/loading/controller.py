"""What to load, and how much to recompute meanwhile: settled for each prompt, before its first layer runs.

CacheBlend (2405.16444), section 5.1: recompute as many tokens as loading hides, and never fewer than a floor. Beyond
it, chunks are loaded at the least lossy level that loading hides (as CacheGen chooses: Liu et al. 2024, section 5.3),
and a chunk whose bytes take longer than its tokens is computed from its text, while others are loaded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from blendkv import flops
from blendkv.loading.costs import ComputeCosts, Costs, calibration_path, machine
from blendkv.loading.decision import TEXT, Decision
from blendkv.loading.plans import WORTH, Load, Loss, Offer, best_plan, order_of
from blendkv.pace import matmul_rate

__all__ = ["FLOOR", "MARGIN", "WORTH", "Controller", "Decision", "Offer", "cheapest", "slowest"]

FLOOR = 0.15
"""The smallest share of reused tokens that is recomputed (CacheBlend's r*)."""
STEP = 0.01
MARGIN = 0.8
"""More is recomputed only where that is predicted to take no more than this share of the time of loading."""
LEARNS_BYTES = 1 << 16
"""A transfer of fewer bytes does not tell how fast a store is."""

Schedule = Callable[[float], Mapping[int, float]]


class Controller:
    """Chooses ratio and road of every prompt from what loading and computing cost here. Safe to share among threads.

    Args:
        costs: measured ones (`blendkv calibrate`); None: those that are kept for the model, or rates that are measured
            when the first prompt comes.
        floor: the smallest share of reused tokens that is recomputed.
        most: the largest.
        text: whether chunks that stores have may be computed from their text where that is faster.
        max_kl: the most that a level may lose, in nats of KL divergence as `blendkv calibrate` measured it; a level
            that was not measured is then not used. A chunk of which no level may be used is computed from its text.
        coarsest: the codec's number of the coarsest level that may be used, such as 4 for `klt@4`; None: any.
        target_s: seconds to the first token. None: all is decided before the first layer, and loaded while layers are
            computed. With a target, chunks come one after the other, each at a level that is decided when its turn is
            there (`loading.policies.Adaptive`), and the prompt is computed once all are there.

    Raises:
        ValueError: for shares outside [0, 1], or a floor above `most`; a bound or a target that is none.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        floor: float = FLOOR,
        most: float = 1.0,
        text: bool = True,
        *,
        max_kl: float = math.inf,
        coarsest: int | None = None,
        target_s: float | None = None,
    ) -> None:
        if not 0.0 <= floor <= most <= 1.0:
            raise ValueError(f"floor={floor}, most={most}: give 0 <= floor <= most <= 1")
        if not max_kl >= 0:
            raise ValueError(f"max_kl={max_kl}: give nats, 0 or more")
        if target_s is not None and not 0 < target_s < math.inf:
            raise ValueError(f"target_s={target_s}: give a positive number of seconds, or None")
        self.costs, self.floor, self.most, self.text = costs, floor, most, text
        self.max_kl, self.coarsest, self.target_s = max_kl, coarsest, target_s
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
                    if costs.fingerprint != fingerprint:
                        costs.losses.clear()
                costs.compute = _guessed(device, dtype)
                costs.machine, costs.fingerprint = here, fingerprint
            return costs

    def may(self, offer: Offer, costs: Costs | None) -> bool:
        """Whether a level is good enough to be used."""
        if not offer.lossy:
            return True
        loss = None if costs is None else costs.losses.get(offer.identity)
        good = self.max_kl == math.inf or (loss is not None and loss <= self.max_kl)
        return good and (self.coarsest is None or offer.number <= self.coarsest)

    def decide(
        self,
        shape: flops.ModelShape | None,
        offers: Sequence[Offer],
        computed: int,
        schedule: Schedule,
        probe: bool,
        costs: Costs | None = None,
        kept: Callable[[Offer, float], float] = lambda offer, ratio: 1.0,
    ) -> Decision:
        """Chooses for one prompt.

        Args:
            shape: of the model; None if its layers could not be counted.
            offers: chunks that memory and stores have, in prompt order; of each one or more, for every tier and level.
            computed: tokens that are computed in any case: the question, chunks that nobody has.
            schedule: what a ratio means, layer -> share kept from there on.
            probe: whether the selector compares (`flops.blend_flops`).
            costs: of the model (`ready`); None: those that the controller was made with.
            kept: share of an offer's bytes that is waited for at a ratio; the rest is of tokens that will be computed.

        Returns:
            The decision; text, lossier levels, and ratios above the floor only where they make the first token no
            later (`plans.best_plan`). Where all would come from text, and nothing was seen of the store for a minute,
            the first chunk is loaded all the same: else a link that was slow once would never be found to be fast
            again.
        """
        costs = self.costs if costs is None else costs
        tokens: dict[str, int] = {}
        choices: dict[str, list[Offer]] = {}
        for offer in offers:
            tokens[offer.key] = offer.tokens
            if self.may(offer, costs):
                choices.setdefault(offer.key, []).append(offer)
        must = {key: count for key, count in tokens.items() if key not in choices}
        usable = [offer for those in choices.values() for offer in those]
        loss = order_of(usable, {} if costs is None else costs.losses)
        if costs is None or costs.compute is None or shape is None or not offers:
            return self._medium(choices, must, tokens, loss, "nothing is known of what computing costs here")
        if any(offer.url and offer.url not in costs.sources for offer in usable):
            why = "a store that was never seen: its rate is learnt from this prompt"
            return self._medium(choices, must, tokens, loss, why)
        compute, total = costs.compute, sum(tokens.values())

        def seconds(ratio: float, from_text: int) -> float:
            return compute.seconds(shape, total - from_text, computed + from_text, schedule(ratio), probe)

        def loading(ratio: float) -> Load:
            load = Load(costs, lambda offer: kept(offer, ratio))
            for offer in plan.loads.values():
                load.add(offer)
            return load

        empty = partial(Load, costs, lambda offer: kept(offer, self.floor))
        plan = best_plan(empty, choices, loss, lambda count: seconds(self.floor, count), self.text, must)
        far = [key for key, those in choices.items() if all(offer.url for offer in those)]
        if far and not plan.loads and costs.try_again(choices[far[0]][0].url):
            first = choices[far[0]]
            tells = [offer for offer in first if offer.nbytes >= LEARNS_BYTES] or first
            plan.loads = {far[0]: min(tells, key=lambda offer: (offer.nbytes, loss(offer)))}
            del plan.text[far[0]]
        from_text = sum(plan.text.values())
        ratio = self._hidden(lambda ratio: seconds(ratio, from_text), lambda ratio: loading(ratio).beside)
        load, took = loading(ratio), seconds(ratio, from_text)
        return Decision(
            ratio,
            frozenset(plan.text),
            plan.loads,
            tuple(plan.loads[key].name if key in plan.loads else TEXT for key in tokens),
            _mean_kl(plan.loads, tokens, costs),
            load.seconds,
            took,
            load.until(took),
            why=_words(ratio, self.floor, load, took, len(plan.text), len(far) + len(must)),
        )

    def _medium(
        self,
        choices: Mapping[str, Sequence[Offer]],
        must: Mapping[str, int],
        tokens: Mapping[str, int],
        loss: Loss,
        why: str,
    ) -> Decision:
        """Where nothing can be predicted: a medium level of each chunk, as CacheGen begins."""
        chosen: dict[str, Offer] = {}
        for key, those in choices.items():
            levels = sorted({loss(offer) for offer in those})
            chosen[key] = next(offer for offer in those if loss(offer) == levels[len(levels) // 2])
        levels = tuple(chosen[key].name if key in chosen else TEXT for key in tokens)
        return Decision(self.floor, frozenset(must), chosen, levels, why=why)

    def _hidden(self, seconds: Callable[[float], float], load: Callable[[float], float]) -> float:
        """The largest ratio whose computing loading hides, by bisection; never below the floor."""
        if seconds(self.floor) >= MARGIN * load(self.floor):
            return self.floor
        low, high = self.floor, self.most
        if seconds(high) <= MARGIN * load(high):
            return high
        while high - low > STEP:
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(middle) <= MARGIN * load(middle) else (low, middle)
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


def _mean_kl(loads: Mapping[str, Offer], tokens: Mapping[str, int], costs: Costs) -> float | None:
    """Predicted KL of the levels of a prompt, text losing nothing; None if one of them was not measured."""
    if any(offer.lossy and offer.identity not in costs.losses for offer in loads.values()):
        return None
    lost = sum(costs.losses[offer.identity] * offer.tokens for offer in loads.values() if offer.lossy)
    return lost / max(1, sum(tokens.values()))


def _words(ratio: float, floor: float, load: Load, took: float, given: int, far: int) -> str:
    if not far:
        return "all chunks are in memory: the smallest ratio"
    first = f", {load.before:.3g} s of it before anything is computed," if load.before else ""
    said = f"loading is predicted to take {load.seconds:.3g} s{first} and computing {took:.3g} s"
    if given:
        said += f"; {given} of {far} chunks are computed from text, which is faster or better than loading them"
    return said + ("; loading hides more than the smallest ratio" if ratio > floor else "")
