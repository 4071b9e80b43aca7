"""One prompt of a library, as its loading controller sees it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from blendkv.attachment import Attachment
from blendkv.cache import make_schedule
from blendkv.loading.controller import Controller, Offer
from blendkv.loading.costs import Costs
from blendkv.loading.progress import Progress
from blendkv.report import BlendReport
from blendkv.selectors import Selector


class Guided:
    """Asks a controller once the prompt's chunks have been found, and tells it what came of it.

    Args:
        controller: to ask.
        attachment: of the model.
        tokens: of the prompt.
        selector: of the prompt's cache.
        options: of the prompt's cache; `recompute_ratio` becomes the one chosen, unless `check_layers` are given.
        report: of the prompt.
    """

    def __init__(
        self,
        controller: Controller,
        attachment: Attachment,
        tokens: int,
        selector: Selector,
        options: dict[str, Any],
        report: BlendReport,
    ) -> None:
        self._controller, self._attachment, self._tokens = controller, attachment, tokens
        self._selector, self._options, self._report = selector, options, report
        self._costs: Costs | None = None

    def choose(self, offers: list[Offer]) -> Collection[str]:
        """Keys of chunks that are to be computed from their text; a controller that raises chooses none."""
        try:
            return self._choose(offers)
        except Exception as error:
            self._report.notes.append(f"the loading controller chose nothing: {error!r}")
            return ()

    def _choose(self, offers: list[Offer]) -> Collection[str]:
        facts, weight = self._attachment.facts, next(self._attachment.model.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else facts.dtype
        costs = self._costs = self._controller.ready(facts.fingerprint, weight.device, dtype)
        fixed = self._options["check_layers"]
        decision = self._controller.decide(
            facts.shape,
            offers,
            self._tokens - sum(offer.tokens for offer in offers),
            lambda ratio: make_schedule(self._selector, ratio, fixed),
            "deviation" in self._selector.needs,
            costs,
        )
        if fixed is None:
            self._options["recompute_ratio"] = decision.ratio
        self._report.loading.decision = decision
        self._report.notes += costs.notes
        return decision.text

    def learn(self, progress: Progress) -> None:
        """What came from one store says how fast it is."""
        costs = self._costs
        if costs is not None and progress.loaded_s is not None and len(progress.nbytes) == 1:
            ((url, nbytes),) = progress.nbytes.items()
            costs.saw_transfer(url, nbytes, progress.loaded_s)
