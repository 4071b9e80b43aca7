"""A library's chunks by a target: one after the other, each at a level that is decided when its turn is there.

CacheGen (Liu et al. 2024), section 5.3, with the policy `Adaptive`: what chunks before took says how fast the link is,
and nobody knows what it will be. What would come too late is computed from its text meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from blendkv.chunk import ChunkCache
from blendkv.errors import ChunkFileError
from blendkv.levelkeys import EXACT
from blendkv.loading.client import StreamClient, Streamed, Wanted
from blendkv.loading.clocks import Clock, RealClock
from blendkv.loading.decision import TEXT, Decision
from blendkv.loading.guided import Guided
from blendkv.loading.incoming import Attempt
from blendkv.loading.levels import Level
from blendkv.loading.pipeline import Pipeline
from blendkv.loading.scheduler import Lane
from blendkv.loading.survey import MEMORY, Place, Places, survey
from blendkv.stores import Budget, Store, TieredStore
from blendkv.stores.deadline import remaining
from blendkv.stores.pool import Fetched


class Timely:
    """Brings a prompt's chunks so that its first token is there by a target.

    Args:
        pipeline: whose tiers, slots and breakers are used.
        guided: knows what computing takes, and what may be used.
        homes: where each layer is wanted.
        clock: shows the time.
    """

    def __init__(
        self, pipeline: Pipeline, guided: Guided, homes: Sequence[torch.device] = (), clock: Clock | None = None
    ) -> None:
        self._pipeline, self._tiers, self._guided = pipeline, pipeline.tiers, guided
        self._homes = tuple(homes) or (torch.device("cpu"),)
        self._clock: Clock = RealClock() if clock is None else clock

    def fetch(self, keys: Sequence[str], compute: Callable[[str], ChunkCache]) -> list[Fetched]:
        """Gets every chunk that memory or a store has, in one form or another, or as its text says.

        Args:
            keys: of chunks, each once, in prompt order.
            compute: gives the chunk of a key, from its text.

        Returns:
            One a key; without a chunk where nobody has it. Of those that were computed the tier is `TEXT`.
        """
        guided, begin = self._guided, self._clock.now()
        target = guided.target_s
        assert target is not None
        lanes, budget = self._pipeline.lanes(), Budget(target)
        attempts: dict[int, Attempt] = {}

        def allows(tier: int, count: int) -> bool:
            breaker = self._pipeline.breakers[tier]
            if getattr(self._tiers.stores[tier], "local", False) or breaker.allows():
                attempts[tier] = Attempt(breaker)
            else:
                self._tiers.stores[tier].stats.count("misses", "breaker", count)
            return tier in attempts

        asked = allows, guided.prefers, lambda tier: attempts[tier].late(), guided.accepts
        there = survey(self._tiers, lanes, keys, budget, *asked)
        good = {key: [place for place in places if guided.may(key, place)] for key, places in there.items()}
        found = self._tiers.remembered({key: places[0].form for key, places in good.items() if _near(places)})
        wanted = {key: places for key, places in good.items() if key not in found}
        after_s = guided.seconds(sum(guided.chunks[key] for key in there), guided.rest(list(there)))
        left = max(target - (self._clock.now() - begin), 1e-3)
        tiers = sorted(attempts)
        if wanted:
            streamed = self._streamed(wanted, tiers, lanes, compute, left, after_s)
            found |= self._kept(wanted, tiers, streamed, attempts, compute)
        self._tell(there, found, after_s, self._clock.now() - begin)
        self._tiers.count([got.tier for got in found.values() if got.tier != TEXT], len(keys) - len(found))
        return [found.get(key, Fetched(None)) for key in keys]

    def _streamed(
        self,
        there: Places,
        tiers: Sequence[int],
        lanes: Callable[[int], Lane],
        compute: Callable[[str], ChunkCache],
        target_s: float,
        after_s: float,
    ) -> Streamed:
        guided, own = self._guided, self._tiers
        losses = guided.losses(there)
        decoding = {} if guided.costs is None else guided.costs.decoding
        wanted = []
        for key, places in there.items():
            levels: dict[str, Level] = {}
            for place in places:  # the nearest store's size counts; the others should have the same file
                form, name = place.form, str(place.level)
                if place.tier != MEMORY:
                    levels.setdefault(name, Level(name, form.codec, key, place.nbytes, main=form.main))
            seconds = {
                name: guided.offer(key, places[0]).decoded / decoding[level.codec.name]
                for name, level in levels.items()
                if level.codec.name in decoding
            }
            text_s = guided.seconds(0, guided.chunks[key])
            wanted.append(Wanted(key, tuple(levels.values()), losses, text_s, seconds))
        stores = [_InTurn(own.stores[tier], lanes(tier)) for tier in tiers]
        client = StreamClient(
            stores or [_Nothing()],  # ty: ignore[invalid-argument-type]
            secret=own.secret,
            key_id=own.key_id,
            profiles=own.opener.profile,
            device=self._homes[0] if len(set(self._homes)) == 1 and self._homes[0].type != "cpu" else None,
            clock=self._clock,
            prior=self._prior(tiers),
        )
        keys = list(there)
        return client.run(wanted, lambda item: compute(keys[item]), target_s, after_s=after_s)

    def _prior(self, tiers: Sequence[int]) -> float | None:
        """Bytes a second of the nearest store, as earlier prompts saw it."""
        sources = {} if self._guided.costs is None else self._guided.costs.sources
        known = sources.get(self._tiers.stores[tiers[0]].url) if tiers else None
        return None if known is None else known.bytes_per_s

    def _kept(
        self,
        there: Places,
        tiers: Sequence[int],
        streamed: Streamed,
        attempts: Mapping[int, Attempt],
        compute: Callable[[str], ChunkCache],
    ) -> dict[str, Fetched]:
        """What came: memory and nearer stores get it, and who gave it, or did not, is told of."""
        found: dict[str, Fetched] = {}
        for key, chunk, came in zip(there, streamed.chunks, streamed.came, strict=True):
            if came is not None and chunk.coded is not None and not self._guided.accepts(chunk.coded):
                chunk, came = compute(key), None  # another codec has written it
            if came is None:
                self._tiers.keep(MEMORY, chunk.key, chunk, None)
                found[key] = Fetched(chunk, TEXT)
                continue
            tier = tiers[came.source]
            form = next(place.form for place in there[key] if place.form.entry == came.level.key)
            found[key] = Fetched(chunk, self._tiers.stores[tier].url, form.unless(chunk))
            wants = tier > 0 or self._tiers.pool.codec is not None
            self._tiers.keep(tier, came.level.key, chunk, came.data if wants else None)
        for number, tier in enumerate(tiers):
            url, nbytes = self._tiers.stores[tier].url, streamed.told.nbytes[number]
            if nbytes:
                self._guided.report.loading.nbytes[url] += nbytes
                if self._guided.costs is not None and streamed.rate:
                    self._guided.costs.saw_transfer(url, nbytes, nbytes / streamed.rate)
            if nbytes or not streamed.told.failures[number]:
                attempts[tier].begin(0)
            else:
                attempts[tier].late()
        for entry, number in streamed.wrong:  # read at once it may be good: then it was written anew meanwhile
            look = partial(_put_away, self._tiers, self._tiers.stores[tiers[number]], entry)
            with suppress(Exception):  # the scheduler was closed
                self._pipeline.lanes()(tiers[number]).submit(look)
        return found

    def _tell(self, there: Places, found: Mapping[str, Fetched], after_s: float, took_s: float) -> None:
        """Writes into the report what was chosen, and what is left to be computed."""
        guided, main = self._guided, {key: places[0].form for key, places in there.items()}
        levels, losses = [], {} if guided.costs is None else guided.costs.losses
        lost: float | None = 0.0
        for key in there:
            got = found.get(key, Fetched(None, TEXT))
            form = next(form for form in self._tiers.forms(key) if form.main)
            used = EXACT if got.chunk is None or got.tier == TEXT else form.id_of(got.chunk)
            levels.append(TEXT if got.tier == TEXT else used.name)
            guided.report.loading.levels[key] = levels[-1]
            if used.profile and str(used) not in losses:
                lost = None
            elif used.profile and lost is not None:
                lost += losses[str(used)] * guided.chunks[key]
        tokens = sum(guided.chunks[key] for key in main)
        guided.report.loading.loaded_s = took_s
        text = frozenset(key for key in there if found.get(key, Fetched(None, TEXT)).tier == TEXT)
        guided.settle(
            Decision(
                guided.floor,
                text,
                levels=tuple(levels),
                kl=None if lost is None else lost / max(1, tokens),
                compute_s=after_s,
                ttft_s=took_s + after_s,
                target_s=guided.target_s,
                why=f"chunks came one after the other, by a target of {guided.target_s:g} s",
            )
        )


class _InTurn:
    """A store whose bytes are asked for in the prompt's turn among all transfers, and must come before the deadline."""

    def __init__(self, store: Store, lane: Lane) -> None:
        self._store, self._lane = store, lane

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        future = self._lane.submit(self._store.get, key, start, stop, cost_bytes=(stop or start) - start)
        most = remaining(math.inf)
        try:
            return future.result(None if math.isinf(most) else most)
        except TimeoutError:
            future.cancel()
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Nothing:
    """A source where no store may be asked."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> None:
        return None


def _near(places: Sequence[Place]) -> bool:
    return bool(places) and places[0].tier == MEMORY


def _put_away(tiers: TieredStore, store: Store, entry: str) -> None:
    """Takes an entry out of use, if it is not good when it is read at once."""
    if (data := store.get(entry)) is None:
        return
    try:
        tiers.opener.checked(entry, data, torch.device("cpu")).verify()
    except ChunkFileError as error:
        tiers.discard(store, entry, error.bare())
