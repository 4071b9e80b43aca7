"""From which tier and at which level each chunk of a prompt is loaded, and which are computed from their text.

A plan is judged by what it takes until the first token: loading and computing go on at the same time, but for what is
read before anything is computed. Of all that take about as long as the fastest, the one that loses least is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blendkv.loading.costs import Costs

WORTH = 0.9
"""A plan is worth something that others are not, text or a lossier level, where the first token is predicted to come in
this share of the time that they take, or less."""


@dataclass(frozen=True)
class Offer:
    """A chunk in one form that memory or a store has.

    Attributes:
        key: of the chunk.
        tokens: of it.
        nbytes: of its file.
        decoded: bytes of its keys and values.
        url: of the store; "" for memory.
        codec: that wrote the file.
        level: name of its level (`levelkeys.name_of`).
        number: the codec's own number of the level.
        lossy: whether the codec loses anything.
        profile: hash of that by which it does.
        first: whether it is read whole before anything is computed (`Pipeline.comes_first`).
    """

    key: str
    tokens: int
    nbytes: int = 0
    decoded: int = 0
    url: str = ""
    codec: str = "raw"
    level: str = ""
    number: int = 0
    lossy: bool = False
    profile: str = ""
    first: bool = False

    @property
    def name(self) -> str:
        """Of the level, or of the codec if it has none."""
        return self.level or self.codec

    @property
    def identity(self) -> str:
        """What its losses go by (`str(LevelId)`): levels of two profiles have one name."""
        return f"{self.name}:{self.profile}" if self.profile else self.name


Choices = Mapping[str, Sequence[Offer]]
"""Offers of each chunk, by key, in prompt order."""
Loss = Callable[[Offer], float]
Kept = Callable[[Offer], float]
"""Share of an offer's bytes that is loaded."""


@dataclass
class Plan:
    """What is loaded, and what is computed instead.

    Attributes:
        loads: an offer for each chunk that is loaded or in memory, by key.
        text: chunks that are computed from their text, by key, with their tokens.
        seconds: predicted until the first token, at the smallest ratio.
    """

    loads: dict[str, Offer]
    text: dict[str, int]
    seconds: float


@dataclass
class Load:
    """Seconds of loading, kept up to date while files are added and taken away.

    Files of one store share its link; stores are asked at the same time, but what is decoded shares this machine.

    Attributes:
        costs: of stores and decoding.
        kept: of each; the rest is of tokens that are computed anyway.
    """

    costs: Costs
    kept: Kept = lambda offer: 1.0
    _sums: dict[tuple[bool, str, str], list[float]] = field(default_factory=dict)

    def add(self, offer: Offer, times: int = 1) -> None:
        """One file more, or less with -1; what is in memory is none."""
        if offer.url:
            sums = self._sums.setdefault((offer.first, offer.url, offer.codec), [0, 0.0, 0.0])
            share = 1.0 if offer.first else self.kept(offer)
            for i, each in enumerate((1, share * offer.nbytes, share * offer.decoded)):
                sums[i] += times * each

    @property
    def before(self) -> float:
        """Of what is read before anything is computed; files of one store after those of another."""
        return sum(self._stores(True).values())

    @property
    def beside(self) -> float:
        """Of what is read while others are computed."""
        return max(self._stores(False).values(), default=0.0)

    @property
    def seconds(self) -> float:
        """Of all."""
        return self.before + self.beside

    def until(self, compute: float) -> float:
        """Until the first token, where computing takes so long."""
        return self.before + max(self.beside, compute)

    def _stores(self, first: bool) -> dict[str, float]:
        stores: dict[str, float] = {}
        for (own, url, codec), (files, nbytes, decoded) in self._sums.items():
            if files and own is first:
                took = self.costs.load_seconds(url, int(files), nbytes, decoded, codec) or 0.0
                stores[url] = stores.get(url, 0.0) + took
        return stores


def order_of(offers: Iterable[Offer], losses: Mapping[str, float]) -> Loss:
    """What each level loses: KL where that was measured for all of them, else its place in the order of bytes.

    Of a level that only memory has nobody knows the bytes: it is put beside the nearest one of its codec.

    Args:
        offers: of a prompt.
        losses: measured, by `Offer.identity`.
    """
    levels: dict[str, Offer] = {}
    sizes: dict[str, float] = {}
    for offer in offers:
        if offer.lossy:
            levels[offer.identity] = offer
            sizes[offer.identity] = max(sizes.get(offer.identity, 0.0), offer.nbytes / max(1, offer.tokens))

    def place(level: Offer) -> tuple[float, int]:
        alike = [each for each in levels.values() if each.codec == level.codec and sizes[each.identity]]
        near = min(alike, key=lambda each: abs(each.number - level.number), default=level)
        return -sizes[near.identity] * (1 + 1e-6 * (near.number - level.number)), level.number

    known = {identity: losses[identity] for identity in levels if identity in losses}
    if len(known) < len(levels):
        known = {level.identity: float(i) for i, level in enumerate(sorted(levels.values(), key=place), 1)}
    return lambda offer: known[offer.identity] if offer.lossy else 0.0


def best_plan(
    empty: Callable[[], Load],
    choices: Choices,
    loss: Loss,
    compute: Callable[[int], float],
    text: bool,
    must: Mapping[str, int],
) -> Plan:
    """The plan that loses least of those that are about as fast as the fastest.

    Plans that are compared: every chunk at the cheapest form that loses no more than some bound, or the cheapest of
    those that are read while others are computed, and the last ones that are not in memory from text. Then single
    chunks are loaded at better levels as long as that costs nothing.

    Args:
        empty: nothing loaded yet.
        choices: what may be used of each chunk.
        loss: of an offer.
        compute: seconds of computing at the smallest ratio when so many tokens come from text.
        text: whether chunks that stores have may be computed from their text.
        must: chunks that must be, with their tokens: nothing may be used of them.

    Returns:
        The plan; text, or a lossier level, only where it is worth it (`WORTH`).
    """
    far = [key for key, those in choices.items() if all(offer.url for offer in those)]
    counts = range(len(far) + 1 if text else 1)
    tokens = [sum(must.values())]
    for key in reversed(far):  # the last ones: the first layers of the first come first
        tokens.append(tokens[-1] + choices[key][0].tokens)
    computing = [compute(tokens[count]) for count in counts]
    plans: list[tuple[float, int, float, dict[str, Offer]]] = []
    beside = {key: [offer for offer in those if not offer.first] or those for key, those in choices.items()}
    for bound in sorted({loss(offer) for those in choices.values() for offer in those}) or [0.0]:
        for some in (choices, beside) if beside != choices else (choices,):
            picked = {key: _cheapest(empty, those, loss, bound) for key, those in some.items()}
            load = empty()
            for offer in picked.values():
                load.add(offer)
            for count in counts:
                if count:
                    load.add(picked[far[len(far) - count]], -1)
                plans.append((bound, count, load.until(computing[count]), picked))
    goal = min(until for _, _, until, _ in plans) / WORTH
    good = [plan for plan in plans if plan[2] <= goal]
    good = [plan for plan in good if not plan[1]] or good
    bound, count, _, picked = min(good, key=lambda plan: (plan[0], plan[2]))
    given = far[len(far) - count :]
    loads = {key: offer for key, offer in picked.items() if key not in given}
    until = _improve(empty, choices, loss, loads, computing[count], goal)
    return Plan(loads, {**must, **{key: choices[key][0].tokens for key in given}}, until)


def _improve(
    empty: Callable[[], Load], choices: Choices, loss: Loss, loads: dict[str, Offer], compute: float, goal: float
) -> float:
    """Gives single chunks better levels, from the first one on, where the first token still comes by the goal; when."""
    load = empty()
    for offer in loads.values():
        load.add(offer)
    for key, offer in loads.items():
        for better in sorted(choices[key], key=lambda each: (loss(each), _alone(empty, each))):
            if loss(better) >= loss(offer):
                break
            load.add(offer, -1)
            load.add(better)
            if load.until(compute) <= goal:
                loads[key] = better
                break
            load.add(better, -1)
            load.add(offer)
    return load.until(compute)


def _cheapest(empty: Callable[[], Load], offers: Sequence[Offer], loss: Loss, bound: float) -> Offer:
    """Of those that lose no more, the one that comes soonest; if all lose more, the one that loses least."""
    good = [offer for offer in offers if loss(offer) <= bound]
    if not good:
        least = min(map(loss, offers))
        good = [offer for offer in offers if loss(offer) == least]
    return min(good, key=lambda offer: (_alone(empty, offer), loss(offer)))


def _alone(empty: Callable[[], Load], offer: Offer) -> float:
    load = empty()
    load.add(offer)
    return load.seconds
