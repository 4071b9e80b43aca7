"""A multi-hop task made by code: who works where, and where that is, in two different chunks among others."""

from __future__ import annotations

import random

from blendkv.bench.records import Example

CHUNKS = 8
_STARTS = (
    "Bel",
    "Cor",
    "Dra",
    "Fen",
    "Gal",
    "Hol",
    "Kes",
    "Lun",
    "Mar",
    "Nor",
    "Ost",
    "Per",
    "Quil",
    "Ros",
    "Tam",
    "Vel",
)
_ENDS = ("dane", "mont", "wick", "ford", "haven", "stead", "mere", "gate", "burg", "holm", "field", "moor")
_FIRST = ("Ada", "Bram", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Levi", "Mona")
_LAST = ("Abel", "Brandt", "Costa", "Duarte", "Engel", "Fischer", "Grant", "Haas", "Ivers", "Jansen", "Klein", "Lund")
_KINDS = ("Institute", "Museum", "Library", "Laboratory", "Archive", "Foundation", "Academy", "Observatory")
_ABOUT_PERSON = (
    "Colleagues describe the work as careful and slow.",
    "A short portrait appeared in a newspaper some years ago.",
    "Before that came several years of travel and study.",
    "Most mornings begin early, with letters and a walk.",
)
_ABOUT_PLACE = (
    "The building was restored after a fire and has three floors.",
    "Visitors are welcome on weekdays, and entry is free.",
    "Its collection grew through gifts from private owners.",
    "A small garden behind it is open in summer.",
)


def synthetic(count: int, chunks: int = CHUNKS, seed: int = 0) -> list[Example]:
    """Questions that need two chunks: which institute a person works at, and in which city that is.

    Nothing but these two chunks holds the answer: each person, institute and city occurs once, and every other chunk
    tells of other ones in the same words.

    Args:
        count: how many questions.
        chunks: of each, an even number of at least 4.
        seed: the same seed gives the same questions, whatever their number.

    Raises:
        ValueError: for a number of chunks that cannot be.
    """
    pairs = chunks // 2
    if chunks % 2 or not 2 <= pairs <= len(_LAST):
        raise ValueError(f"{chunks} chunks: give an even number from 4 to {2 * len(_LAST)}")
    return [_example(random.Random(f"{seed}:{i}"), pairs) for i in range(count)]


def _example(rng: random.Random, pairs: int) -> Example:
    people = [f"{a} {b}" for a, b in zip(rng.sample(_FIRST, pairs), rng.sample(_LAST, pairs), strict=True)]
    names = rng.sample([start + end for start in _STARTS for end in _ENDS], 2 * pairs)
    places = [f"{name} {rng.choice(_KINDS)}" for name in names[:pairs]]
    cities = names[pairs:]
    told = []
    for person, place, city in zip(people, places, cities, strict=True):
        person_filler, place_filler = rng.sample(_ABOUT_PERSON, 2), rng.sample(_ABOUT_PLACE, 2)
        told.append(f"{person} works at the {place}. {' '.join(person_filler)}\n\n")
        told.append(f"The {place} stands in the city of {city}. {' '.join(place_filler)}\n\n")
    order = list(range(len(told)))
    rng.shuffle(order)
    asked = rng.randrange(pairs)
    support = tuple(sorted(order.index(2 * asked + half) for half in range(2)))
    question = f"In which city does {people[asked]} work?"
    return Example(question, [told[i] for i in order], [cities[asked]], support=support)
