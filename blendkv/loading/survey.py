"""Which forms of a prompt's chunks memory and stores have: asked for sizes alone, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from blendkv.levelkeys import LevelId, id_of
from blendkv.loading.scheduler import Lane
from blendkv.stores import Budget, TieredStore
from blendkv.stores.deadline import remaining
from blendkv.stores.filing import Form

MEMORY = -1
"""Number of the tier that needs no loading."""


@dataclass(frozen=True)
class Place:
    """Where one form of a chunk is, or may be.

    Attributes:
        form: of the chunk.
        tier: number of the store, or `MEMORY`.
        url: of the store; "" for memory.
        nbytes: of its entry; None if nobody asked yet.
        held: the level that memory has there, which may be another than the form's; None of a store.
    """

    form: Form
    tier: int = MEMORY
    url: str = ""
    nbytes: int | None = None
    held: LevelId | None = None

    @property
    def level(self) -> LevelId:
        """What is there, as far as is known."""
        return self.held or id_of(self.form.codec)


Places = dict[str, list[Place]]
"""By key of the chunk."""


class Chooser(Protocol):
    """Says from where chunks are loaded, and in which form."""

    def prefers(self, farther: str, nearer: str) -> bool:
        """Whether the farther of two stores, by URL, is known to be the faster one."""
        ...

    def accepts(self, level: LevelId) -> bool:
        """Whether what is of a level may be used: another codec may have written it than the one that was expected."""
        ...

    def choose(self, there: Mapping[str, Sequence[Place]]) -> Mapping[str, Sequence[Place]]:
        """Where each chunk is looked for, the best first; nowhere: its text is computed."""
        ...


def everywhere(tiers: TieredStore, keys: Sequence[str]) -> Places:
    """Where chunks are looked for if nobody chooses: their own entries, the nearest first, then levels."""
    stores = [(MEMORY, ""), *((tier, store.url) for tier, store in enumerate(tiers.stores))]
    return {key: [Place(form, tier, url) for form in tiers.forms(key) for tier, url in stores] for key in keys}


def survey(
    tiers: TieredStore,
    lanes: Callable[[int], Lane],
    keys: Sequence[str],
    budget: Budget | None,
    asks: Callable[[int, int], bool],
    prefers: Callable[[str, str], bool],
    late: Callable[[int], object] = lambda tier: None,
    accepts: Callable[[LevelId], bool] = lambda level: True,
) -> Places:
    """Looks for every form of every chunk.

    A store is not asked for what a nearer one has in every form, unless it is known to be the faster one.

    Args:
        tiers: memory over stores.
        lanes: to transfer slots, by number of the store.
        keys: of chunks.
        budget: how long stores that are not local may be waited for.
        asks: whether a store, by number, may be asked about so many chunks.
        prefers: whether the farther of two stores is faster.
        late: told of each store, by number, that did not answer in time.
        accepts: whether what is of a level may be used: where what memory has may not be, stores are asked.

    Returns:
        Places of those that are anywhere, nearest first.
    """
    forms = {key: tiers.forms(key) for key in keys}
    there: Places = {
        key: [Place(form, nbytes=0, held=held) for form in those if (held := tiers.held(form))]
        for key, those in forms.items()
    }
    whole: dict[str, list[str]] = {key: [] for key in keys}
    for tier, store in enumerate(tiers.stores):
        lacking = {
            key: those
            for key, those in forms.items()
            if not any(place.form.main and place.tier == MEMORY and accepts(place.level) for place in there[key])
            and all(prefers(store.url, nearer) for nearer in whole[key])
        }
        if not lacking or not asks(tier, len(lacking)):
            continue
        entries = [form.entry for those in lacking.values() for form in those]
        sizes = _sizes(tiers, lanes(tier), tier, entries, budget, late)
        for key, those in lacking.items():
            found = [Place(form, tier, store.url, size) for form in those if (size := sizes.get(form.entry))]
            there[key] += found
            if len(found) == len(those):
                whole[key].append(store.url)
    return {key: places for key, places in there.items() if places}


def sizes_at_once(tiers: TieredStore, tier: int, entries: Sequence[str]) -> dict[str, int | None]:
    """Sizes of entries, None of those that are absent, from a store that tells many at once; else nothing."""
    store = tiers.stores[tier]
    asked = [entry for entry in entries if tiers.waiting(tier, entry) is None]
    sizes: Any = getattr(store, "sizes", None)
    if sizes is None or not asked:
        return {}
    try:
        return dict.fromkeys(asked) | sizes(asked)
    except Exception:  # a plug-in's, for ours never raise
        store.stats.count("misses", "error", len(asked))
        return dict.fromkeys(asked)


def _sizes(
    tiers: TieredStore,
    lane: Lane,
    tier: int,
    entries: Sequence[str],
    budget: Budget | None,
    late: Callable[[int], object],
) -> dict[str, int | None]:
    store = tiers.stores[tier]
    local = budget is None or getattr(store, "local", False)
    found: dict[str, int | None] = {
        entry: len(data) for entry in entries if (data := tiers.waiting(tier, entry)) is not None
    }
    with nullcontext() if local else budget.spend():
        found |= sizes_at_once(tiers, tier, entries)
        asked = {entry: lane.submit(store.size, entry, cost_bytes=1) for entry in entries if entry not in found}
        most = remaining(float("inf"))
        wait(asked.values(), None if most == float("inf") else most)
    for entry, future in asked.items():
        if not future.done():
            future.cancel()
            store.stats.count("misses", "deadline")
            late(tier)
        elif future.cancelled() or future.exception() is not None:  # cancelled: the scheduler was closed
            store.stats.count("misses", "error")
        else:
            found[entry] = future.result()
    return found
