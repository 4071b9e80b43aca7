"""One prompt of a library, as its loading controller sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from blendkv.attachment import Attachment
from blendkv.cache import make_schedule
from blendkv.codecs import Codec, LayerShape, dtype_name
from blendkv.levelkeys import LevelId
from blendkv.loading.controller import Controller, Offer
from blendkv.loading.costs import Costs
from blendkv.loading.decision import Decision
from blendkv.loading.plans import order_of
from blendkv.loading.progress import Progress
from blendkv.loading.sparing import LEAST_GAP, Sparing, share_read
from blendkv.loading.survey import Place
from blendkv.report import BlendReport
from blendkv.selectors import Selector


class Guided:
    """Asks a controller once the prompt's chunks have been found, and tells it what came of it.

    Args:
        controller: to ask.
        attachment: of the model.
        tokens: of the prompt.
        chunks: tokens of each chunk, by key.
        selector: of the prompt's cache.
        options: of the prompt's cache; `recompute_ratio` becomes the one chosen, unless `check_layers` are given.
        report: of the prompt.
        sparing: says what will not be read at a ratio, and is not loaded then; None: all is loaded.
        least_gap: see `sparing.LEAST_GAP`.
        first: whether what lies somewhere is read before anything is computed.
    """

    def __init__(
        self,
        controller: Controller,
        attachment: Attachment,
        tokens: int,
        chunks: Mapping[str, int],
        selector: Selector,
        options: dict[str, Any],
        report: BlendReport,
        sparing: Sparing | None = None,
        least_gap: int = LEAST_GAP,
        first: Callable[[Place], bool] = lambda place: False,
    ) -> None:
        self._controller, self._attachment, self._tokens, self._chunks = controller, attachment, tokens, chunks
        self._selector, self._options, self._report = selector, options, report
        self._sparing, self._least_gap, self._first = sparing, least_gap, first
        self._spared: dict[float, Mapping[str, np.ndarray]] = {}
        self._shares: dict[tuple, float] = {}
        facts = attachment.facts
        self.costs: Costs | None = None
        try:
            self.costs = _costs(controller, attachment)
            report.notes += self.costs.notes
        except Exception as error:
            report.notes.append(f"the loading controller chose nothing: {error!r}")
        self._token_bytes = sum(heads * (k + v) for heads, k, v in facts.sizes) * facts.dtype.itemsize

    @property
    def target_s(self) -> float | None:
        """Seconds to the first token that are wanted, if what is left can be predicted."""
        known = self.costs is not None and self.costs.compute is not None and self._attachment.facts.shape is not None
        return self._controller.target_s if known else None

    @property
    def chunks(self) -> Mapping[str, int]:
        """Tokens of each chunk, by key."""
        return self._chunks

    @property
    def report(self) -> BlendReport:
        """Of the prompt."""
        return self._report

    def may(self, key: str, place: Place) -> bool:
        """Whether a chunk is good enough as it lies there."""
        return self._allows(self.offer(key, place))

    def losses(self, there: Mapping[str, Sequence[Place]]) -> dict[str, float]:
        """What each level loses, by its identity (`plans.order_of`)."""
        offers = [self.offer(key, place) for key, places in there.items() for place in places]
        loss = order_of(offers, {} if self.costs is None else self.costs.losses)
        return {offer.identity: loss(offer) for offer in offers}

    def seconds(self, tokens: int, computed: int) -> float:
        """Predicted seconds of computing at the smallest ratio; of the blend of so many tokens, and so many others."""
        facts, costs = self._attachment.facts, self.costs
        if costs is None or costs.compute is None or facts.shape is None:
            return 0.0
        schedule = self.schedule(self._controller.floor) if tokens else {}
        return costs.compute.seconds(facts.shape, tokens, computed, schedule, self.probe)

    def settle(self, decision: Decision) -> None:
        """Notes what was decided, and takes its ratio."""
        if self._options["check_layers"] is None:
            self._options["recompute_ratio"] = decision.ratio
        self._report.loading.decision = decision

    @property
    def floor(self) -> float:
        """The smallest ratio."""
        return self._controller.floor

    def rest(self, keys: Sequence[str]) -> int:
        """Tokens of the prompt that are not of these chunks."""
        return self._tokens - sum(self._chunks[key] for key in keys)

    def prefers(self, farther: str, nearer: str) -> bool:
        """Whether the farther store is known to be the faster one."""
        sources = {} if self.costs is None else self.costs.sources
        if farther not in sources or nearer not in sources:
            return False
        return sources[farther].bytes_per_s > sources[nearer].bytes_per_s

    def choose(self, there: Mapping[str, Sequence[Place]]) -> Mapping[str, Sequence[Place]]:
        """Places of each chunk that are worth a look, the chosen one first.

        Where a controller raises, or knows nothing: as without one, own entries before levels, but for levels that lose
        more than it allows.
        """
        try:
            if self.costs is not None:
                return self._choose(there, self.costs)
        except Exception as error:
            self._report.notes.append(f"the loading controller chose nothing: {error!r}")
        good = {key: [place for place in places if self.may(key, place)] for key, places in there.items()}
        return {key: sorted(places, key=lambda place: not place.form.main) for key, places in good.items()}

    def offer(self, key: str, place: Place) -> Offer:
        """A place as the controller sees it."""
        count = self._chunks[key]
        first = bool(place.url) and self._first(place)
        offer = _offer(place.level, key, count, place.nbytes or 0, count * self._token_bytes, place.url)
        return replace(offer, first=first)

    def schedule(self, ratio: float) -> Mapping[int, float]:
        """What a ratio means."""
        return make_schedule(self._selector, ratio, self._options["check_layers"])

    @property
    def probe(self) -> bool:
        """Whether the selector compares."""
        return "deviation" in self._selector.needs

    def accepts(self, level: LevelId) -> bool:
        """Whether a level is good enough, as it turns out to be: a chunk's own entry may be of any codec."""
        return self._allows(_offer(level))

    def _allows(self, offer: Offer) -> bool:
        return _allows(self._controller, offer, self.costs)

    def _choose(self, there: Mapping[str, Sequence[Place]], costs: Costs) -> Mapping[str, Sequence[Place]]:
        offers = {key: {self.offer(key, place): place for place in places} for key, places in there.items()}
        every = [offer for each in offers.values() for offer in each]
        codecs = {offer: place.form.codec for each in offers.values() for offer, place in each.items()}
        kept = lambda offer, ratio: self._kept(offer, codecs[offer], ratio)  # noqa: E731
        given = (self._attachment.facts.shape, every, self.rest(list(there)), self.schedule, self.probe, costs, kept)
        decision = self._controller.decide(*given)
        self.settle(decision)
        loss = order_of(every, costs.losses)
        queues: dict[str, list[Place]] = {}
        for key, chosen in decision.chosen.items():
            good = [offer for offer in offers[key] if self._controller.may(offer, costs)]
            # should it not be there after all: the next lossier one, which comes sooner, before better ones
            good.sort(key=lambda one, own=chosen: (one != own, loss(one) < loss(own), abs(loss(one) - loss(own))))
            queues[key] = [offers[key][offer] for offer in good]
        return queues

    def _kept(self, offer: Offer, codec: Codec, ratio: float) -> float:
        """Share of an offer's bytes that the prompt waits for at a ratio.

        An estimate, as no file was looked at: as many bytes for every token and layer, cut as the codec cuts, which may
        be another than that of the file; and as if all other chunks were loaded too.
        """
        if self._sparing is None:
            return 1.0
        if ratio not in self._spared:
            self._spared[ratio] = self._sparing.at(ratio)
        if (spare := self._spared[ratio].get(offer.key)) is None:
            return 1.0
        alike = id(codec), offer.nbytes >> 12, spare.shape[1], spare.tobytes()  # so are most chunks of a prompt
        if alike not in self._shares:
            facts = self._attachment.facts
            shapes = [LayerShape(*sizes) for sizes in facts.sizes]
            given = dtype_name(facts.dtype), offer.nbytes, spare, self._least_gap
            self._shares[alike] = share_read(codec, shapes, *given)
        return self._shares[alike]

    def learn(self, progress: Progress) -> None:
        """What came from one store says how fast it is."""
        costs = self.costs
        if costs is not None and progress.loaded_s is not None and len(progress.nbytes) == 1:
            ((url, nbytes),) = progress.nbytes.items()
            costs.saw_transfer(url, nbytes, progress.loaded_s)


def allowed(controller: Controller, attachment: Attachment, level: LevelId) -> bool:
    """Whether a controller lets what is of a level be used with a model, whatever the prompt."""
    costs = None
    if level.profile:
        with suppress(Exception):  # a plug-in's
            costs = _costs(controller, attachment)
    return _allows(controller, _offer(level), costs)


def _costs(controller: Controller, attachment: Attachment) -> Costs:
    facts, weight = attachment.facts, next(attachment.model.parameters())
    dtype = weight.dtype if weight.dtype.is_floating_point else facts.dtype
    return controller.ready(facts.fingerprint, weight.device, dtype)


def _allows(controller: Controller, offer: Offer, costs: Costs | None) -> bool:
    """As the controller says; of one that raises, only what loses nothing."""
    try:
        return controller.may(offer, costs)
    except Exception:
        return not offer.lossy


def _offer(level: LevelId, key: str = "", tokens: int = 0, nbytes: int = 0, decoded: int = 0, url: str = "") -> Offer:
    lossy = bool(level.profile)
    return Offer(key, tokens, nbytes, decoded, url, level.codec, level.name, level.level, lossy, level.profile)
