"""Which forms of chunks are where: no store is asked for what a nearer one has, unless it is the faster one."""

import pytest

from blendkv import Pool
from blendkv.codecs import get_codec
from blendkv.levelkeys import id_of, level_key
from blendkv.loading.scheduler import TransferScheduler
from blendkv.loading.survey import MEMORY, everywhere, survey
from blendkv.stores import Budget, TieredStore
from tests.drawn import SMALL, chunk_of, profile_of
from tests.stores.dicts import DictStore

KLT = [get_codec("klt", level=level, profile=profile_of("klt")) for level in (0, 8)]
CHUNKS = [chunk_of(SMALL, 30 + i, seed=i) for i in range(3)]
KEYS = [chunk.key for chunk in CHUNKS]


class Asked(DictStore):
    """Notes whose size was asked for, one by one or many at once."""

    def __init__(self, name, at_once=False):
        super().__init__(name)
        self.asked = []
        if at_once:
            self.sizes = lambda keys: {key: size for key in keys if (size := self._size(key)) is not None}

    def size(self, key):
        return self._size(key)

    def _size(self, key):
        if self.raises is not None:
            raise self.raises
        self.asked.append(key)
        return super().size(key)


def surveyed(
    tiers, keys=KEYS, budget=None, asks=lambda tier, count: True, prefers=lambda farther, nearer: False, **more
):
    scheduler = TransferScheduler(2)
    try:
        lane = scheduler.lane()
        return survey(tiers, lambda tier: lane, keys, budget, asks, prefers, **more)
    finally:
        scheduler.close()


def test_stores_are_asked_where_what_memory_has_may_not_be_used():
    """Its own entry may be another codec's."""
    far = Asked("far")
    TieredStore(far, codec=KLT[1], levels=KLT[:1], write="through").put_many(CHUNKS[:1])
    tiers = TieredStore(far, codec="raw", levels=KLT[:1])
    assert tiers.get(KEYS[0]) is not None
    far.asked.clear()
    for accepts in (lambda level: True, lambda level: level.level < 8):
        near, *others = surveyed(tiers, KEYS[:1], accepts=accepts)[KEYS[0]]
        assert (near.tier, near.form.level, near.level) == (MEMORY, "raw", id_of(KLT[1]))
        assert [place.form.level for place in others] == ([] if not far.asked else ["raw", "klt@0"])
    assert far.asked


def told(there):
    return {key: [(place.url, place.form.level) for place in places] for key, places in there.items()}


@pytest.mark.parametrize("at_once", [False, True])
def test_everything_that_is_there_with_its_size(at_once):
    near, far = Asked("near", at_once), Asked("far", at_once)
    TieredStore(near, levels=KLT, write="through").put(CHUNKS[0])
    TieredStore(far, levels=KLT[1:], write="through").put_many(CHUNKS[:2])
    near.entries |= {level_key(KEYS[1], KLT[1]): b"x" * 7}
    there = surveyed(TieredStore(near, far, levels=KLT))
    whole = [("near://", level) for level in ("raw", "klt@0", "klt@8")]
    assert told(there) == {KEYS[0]: whole, KEYS[1]: [("near://", "klt@8"), ("far://", "raw"), ("far://", "klt@8")]}
    for places in there.values():
        for place in places:
            store = (near, far)[place.tier]
            assert place.nbytes == len(store.entries[place.form.entry])
    assert KEYS[0] not in far.asked  # the nearer one has it in every form
    assert KEYS[2] in far.asked


def test_what_memory_has_in_full_is_asked_of_nobody_and_a_level_of_it_is():
    near = Asked("near")
    TieredStore(near, levels=KLT, write="through").put_many(CHUNKS[:2])
    tiers = TieredStore(Pool(), near, levels=KLT)
    tiers.get(KEYS[0])
    tiers.take(0, {KEYS[1]: tiers.forms(KEYS[1])[1]})
    there = surveyed(tiers)
    assert [place.tier for place in there[KEYS[0]]] == [MEMORY]
    assert told(there)[KEYS[1]][0] == ("", "klt@0")
    assert [place.tier for place in there[KEYS[1]]] == [MEMORY, 0, 0, 0]
    assert KEYS[0] not in near.asked


def test_a_farther_store_that_is_faster_is_asked_too():
    near, far = Asked("near"), Asked("far")
    for store in (near, far):
        TieredStore(store, write="through").put_many(CHUNKS)
    tiers = TieredStore(near, far)
    assert all(len(places) == 1 for places in surveyed(tiers).values())
    both = surveyed(tiers, prefers=lambda farther, nearer: (farther, nearer) == ("far://", "near://"))
    assert all([place.url for place in places] == ["near://", "far://"] for places in both.values())


def test_stores_that_fail_or_may_not_be_asked():
    near, far = Asked("near"), Asked("far")
    TieredStore(far, write="through").put_many(CHUNKS)
    near.raises = OSError("unreachable")
    tiers = TieredStore(near, far)
    assert set(told(surveyed(tiers, budget=Budget(5.0)))) == set(KEYS)
    assert near.stats.faults == {"error": 3}
    far.asked.clear()
    assert surveyed(tiers, asks=lambda tier, count: False) == {}
    assert not far.asked


def test_without_a_choice_the_chunk_itself_is_looked_for_before_its_levels():
    tiers = TieredStore(DictStore("near"), DictStore("far"), levels=KLT[:1])
    (places,) = everywhere(tiers, KEYS[:1]).values()
    assert [(place.url, place.form.level) for place in places] == [
        *((url, "raw") for url in ("", "near://", "far://")),
        *((url, "klt@0") for url in ("", "near://", "far://")),
    ]
