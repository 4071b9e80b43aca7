"""Which level of which chunk, or its text: rules that know what was, and nothing of what will be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from blendkv.loading.streaming import Load, Rung, Stream

LATEST = 1.1
"""Times the seconds of recomputing everything from text after which no prompt may be."""
NOTHING = Rung("", 0, 0.0)


@dataclass(frozen=True)
class FixedLevel:
    """Every chunk at one level, in order, however long that takes; its text only where the level cannot be had.

    Attributes:
        level: name of the rung.
    """

    level: str

    @property
    def name(self) -> str:
        """That of the level."""
        return self.level

    def load(self, stream: Stream, now: float) -> Load | None:
        """The next chunk."""
        for item in stream.missing():
            for rung in stream.rungs(item):
                if rung.name == self.level:
                    return stream.to_load(item, rung)
        return None

    def go_on(self, stream: Stream, now: float) -> bool:
        """Always."""
        return True

    def text(self, stream: Stream, now: float) -> int | None:
        """What does not have the level."""
        lacking = (i for i in stream.missing() if all(r.name != self.level for r in stream.rungs(i)))
        return next(lacking, None)

    def wake(self, stream: Stream, now: float) -> float:
        """Never."""
        return math.inf


@dataclass(frozen=True)
class Text:
    """Everything from text; nothing is brought."""

    name: ClassVar[str] = "text"

    def load(self, stream: Stream, now: float) -> Load | None:
        """Nothing."""
        return None

    def go_on(self, stream: Stream, now: float) -> bool:
        """Never."""
        return False

    def text(self, stream: Stream, now: float) -> int | None:
        """One after another."""
        return next(iter(stream.missing()), None)

    def wake(self, stream: Stream, now: float) -> float:
        """Never."""
        return math.inf


@dataclass(frozen=True)
class InOrder:
    """CacheGen's rule (Liu et al. 2024, section 5.3), kept as what the adaptive one is compared with.

    Before each chunk the throughput of those before is taken to hold for all that remain, and the least lossy level is
    chosen with which all of them come in time; text if none does and it is quicker. The first chunk has a medium level.
    What is under way is never given up.
    """

    name: ClassVar[str] = "in-order"

    def load(self, stream: Stream, now: float) -> Load | None:
        """The next chunk that is not to be recomputed."""
        for item in stream.missing():
            rungs = stream.rungs(item)
            if item in stream.to_text or not rungs:
                continue
            rate = stream.link.mean()
            if rate is None:
                return stream.to_load(item, rungs[len(rungs) // 2])
            rest = [i for i in stream.missing() if i not in stream.to_text]
            left = stream.end - now - stream.busy_s(now)
            for rung in rungs:
                if sum(stream.alike(i, rung).nbytes / rate + rung.decode_s for i in rest) <= left:
                    return stream.to_load(item, rung)
            if stream.items[item].text_s < rungs[-1].nbytes / rate:
                stream.to_text.add(item)
            else:
                return stream.to_load(item, rungs[-1])
        return None

    def go_on(self, stream: Stream, now: float) -> bool:
        """Always."""
        return True

    def text(self, stream: Stream, now: float) -> int | None:
        """What was decided to be."""
        return next((i for i in stream.missing() if i in stream.to_text), None)

    def wake(self, stream: Stream, now: float) -> float:
        """Never."""
        return math.inf


@dataclass(frozen=True)
class Adaptive:
    """Something of every chunk first, then better: the link from the front, the processor from the back.

    As long as chunks are missing, the link brings their smallest level: that insures against whatever comes. Then,
    before each chunk, all those that lost more than `enough` are planned at each level: the link brings them in order
    at the rate that is expected, and the processor recomputes from the last one on, which loses nothing. The least
    lossy level with which all are done by the target is taken, if there is one that the link can bring alone; if not,
    with text; if that does not do either, what gains most for its bytes. What is under way is given up when it would
    come too late. With a base and its refinement no byte comes twice; with levels that are files of their own the
    smallest is a few percent of what follows.

    The processor begins with text when the link alone would not bring every chunk well enough in time, and whenever it
    must: so late that all that is missing can just be recomputed. A prompt is then never later than `latest` times
    recomputing everything, whatever the link does, and never later than the target if recomputing everything keeps it.

    Attributes:
        enough: loss below which nothing more is spent.
        floor: loss above which no level is used, however slow the link.
        latest: times the seconds of recomputing everything.
    """

    enough: float = 0.005
    floor: float = math.inf
    latest: float = LATEST
    name: ClassVar[str] = "adaptive"

    # -- the link -----------------------------------------------------------------------------------------------------

    def load(self, stream: Stream, now: float) -> Load | None:
        """The smallest level of the first chunk that is missing, or a better level of one that is there."""
        for item in stream.missing():
            if rungs := self._rungs(stream, item):
                return stream.to_load(item, min(rungs, key=lambda rung: (stream.left(item, rung), rung.loss)))
        lossy, rate = self._lossy(stream), stream.link.expected(now)
        if not lossy or rate is None or rate <= 0:
            return None
        return self._better(stream, now, lossy, rate)

    def go_on(self, stream: Stream, now: float) -> bool:
        """Whether what is under way is missing, or comes in time."""
        load, rate = stream.under_way, stream.link.expected(now)
        if load is None:
            return False
        progress = stream.progress[load.item]
        if progress.have is None and not progress.ready:
            return True
        return rate is None or now + stream.loading_left() / max(rate, 1e-9) + load.rung.decode_s <= self._goal(stream)

    def _better(self, stream: Stream, now: float, lossy: list[int], rate: float) -> Load | None:
        """An improvement of the first chunk that fits with those of all others, or else what gains most a byte."""
        goal = self._goal(stream)
        for alone in (True, False):  # what needs no text goes first, if it is good enough
            for rung in self._rungs(stream, lossy[0]):
                if alone and rung.loss > self.enough:
                    continue
                better = [i for i in lossy if stream.alike(i, rung).loss < _lost(stream, i)]
                if better and self._plan(stream, now, better, rung, rate, text=not alone) <= goal:
                    return stream.to_load(better[0], stream.alike(better[0], rung))
        left, found, most = goal - now - stream.busy_s(now), None, 0.0
        for item in lossy:
            for rung in self._rungs(stream, item):
                nbytes, gain = stream.left(item, rung), _lost(stream, item) - rung.loss
                if gain / max(1, nbytes) > most and nbytes / rate + rung.decode_s <= left:
                    found, most = stream.to_load(item, rung), gain / max(1, nbytes)
        return found

    # -- the processor ------------------------------------------------------------------------------------------------

    def text(self, stream: Stream, now: float) -> int | None:
        """The last chunk that is missing, if it is time; or the last one that lost too much, if there is time."""
        under_way = None if stream.under_way is None else stream.under_way.item
        missing = stream.missing()
        rest = [i for i in missing if i != under_way]
        must = now >= self._must_begin(stream, now)
        if missing and not rest:
            late = must or self._overtakes(stream, now, stream.link.hoped(now))
            return under_way if late else None
        lossy = [] if missing else [i for i in self._lossy(stream) if i != under_way and stream.progress[i].ready]
        if not rest and not lossy:
            return None
        last = rest[-1] if rest else lossy[-1]
        rate, goal = stream.link.expected(now), self._goal(stream)
        if rest and (must or rate is None):
            return last
        if self._well(stream, now, rate or 0.0):
            return None
        waits = sum(stream.rungs(i)[-1].decode_s for i in missing if i != last and stream.rungs(i))
        end = now + stream.busy_s(now) + stream.items[last].text_s + waits  # what comes meanwhile waits for it
        if end <= goal:
            return last
        hoped = stream.link.hoped(now) or 0.0
        hopeless = not rest or self._plan(stream, now, missing, None, hoped, text=False) > goal
        return last if rest and hopeless else None

    def _well(self, stream: Stream, now: float, rate: float) -> bool:
        """Whether the link alone brings every chunk in time with as little loss as is wanted."""
        wanted = sorted([*stream.missing(), *self._lossy(stream)])
        rungs = self._rungs(stream, wanted[0]) if wanted else []
        goal = self._goal(stream)
        return any(
            rung.loss <= self.enough and self._plan(stream, now, wanted, rung, rate, text=False) <= goal
            for rung in rungs
        )

    def wake(self, stream: Stream, now: float) -> float:
        """When text must be begun, or a little later, to see whether the link stands still."""
        look, load = now + 0.02 * stream.text_s, stream.under_way
        if load is not None and stream.progress[load.item].ready:  # what would make it better must not make it later
            look = max(now, min(look, self._goal(stream) - load.rung.decode_s))
        return look if stream.working is not None else max(now, min(self._must_begin(stream, now), look))

    def _overtakes(self, stream: Stream, now: float, rate: float | None) -> bool:
        """Whether what is under way is late, and its text would be there before."""
        load = stream.under_way
        if load is None or rate is None:
            return load is not None
        comes = now + stream.loading_left() / rate + load.rung.decode_s if rate > 0 else math.inf
        return comes > self._goal(stream) and now + stream.busy_s(now) + stream.items[load.item].text_s < comes

    def _must_begin(self, stream: Stream, now: float) -> float:
        """From when on all that is missing can no longer be recomputed in time, if nothing more comes."""
        all_text = stream.text_s
        latest = stream.begin + self.latest * all_text
        safe = latest if stream.end < stream.begin + all_text * (1 - 1e-9) else min(stream.end, latest)
        rest = sum(stream.items[i].text_s for i in stream.missing())
        return safe - stream.busy_s(now) - rest - 1e-9 * all_text

    # -- planning -----------------------------------------------------------------------------------------------------

    def _goal(self, stream: Stream) -> float:
        return min(stream.end, stream.begin + self.latest * stream.text_s)

    def _rungs(self, stream: Stream, item: int) -> list[Rung]:
        rungs = stream.rungs(item)
        return list(rungs) if self.floor == math.inf else [rung for rung in rungs if rung.loss <= self.floor]

    def _lossy(self, stream: Stream) -> list[int]:
        return stream.lossy(self.enough)

    def _plan(
        self, stream: Stream, now: float, items: list[int], rung: Rung | None, rate: float, text: bool = True
    ) -> float:
        """When all of some chunks are there at a level; infinity for never.

        Args:
            stream: what is there.
            now: the time.
            items: chunks; the link takes the first ones, the processor the last ones.
            rung: the level, or what is most like it; None: the smallest of each.
            rate: bytes a second.
            text: whether the processor may recompute; as many as let both end soonest.
        """
        busy = now + stream.busy_s(now)
        if rate <= 0:
            return busy + sum(stream.items[i].text_s for i in items) if text else math.inf
        comes, decode = [now], [0.0]
        for i in items:
            like = stream.alike(i, rung) if rung is not None else stream.rungs(i)[-1] if stream.rungs(i) else NOTHING
            comes.append(comes[-1] + stream.left(i, like) / rate)
            decode.append(decode[-1] + like.decode_s)
        last = decode[-1] - decode[-2] if items else 0.0
        done = max(comes[-1] + last, busy + decode[-1])
        recomputed = 0.0
        for loaded in range(len(items) - 1, -1, -1) if text else ():
            recomputed += stream.items[items[loaded]].text_s
            after = decode[loaded] - decode[loaded - 1] if loaded else 0.0
            done = min(done, max(comes[loaded] + after, busy + decode[loaded] + recomputed))
        return done


def _lost(stream: Stream, item: int) -> float:
    have = stream.progress[item].have
    return 0.0 if have is None else have.loss
