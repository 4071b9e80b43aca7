"""Which level of which chunk, or its text: rules that know what was, and nothing of what will be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from blendkv.loading.streaming import Load, Rung, Stream

LATEST = 1.1
"""Times the seconds of recomputing everything from text after which no prompt may be."""


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
    """The link from the front, the processor from the back, each as far as the other does not come in time.

    Before every chunk all chunks that are missing are planned at each level: the link brings them in order, and the
    processor recomputes from the last one on. The least lossy level is taken with which the target is kept at the
    expected rate, and is kept at the rate that can be counted on if all chunks after this one have the smallest level.
    The latter is asked again after every piece: a level is given up for a smaller one when it no longer holds. If
    nothing is known of the link, the smallest level is asked for, since it can be improved: time that is left when
    everything has come goes into better levels.

    The processor begins with text when the link alone would not bring every chunk well enough in time, and whenever it
    must: so late that all that is missing can just be recomputed. A prompt is then never later than `LATEST` times
    recomputing everything, whatever the link does, and never later than the target if recomputing everything keeps it.

    Attributes:
        enough: loss below which nothing more is spent.
        floor: loss above which no level is used, however slow the link.
        latest: times the seconds of recomputing everything.
        reserve: share of the target that is kept free when a level is chosen.
    """

    enough: float = 0.005
    floor: float = math.inf
    latest: float = LATEST
    reserve: float = 0.1
    name: ClassVar[str] = "adaptive"

    # -- the link -----------------------------------------------------------------------------------------------------

    def load(self, stream: Stream, now: float) -> Load | None:
        """The first chunk that is missing, at the level of the plan; or a better level of one that is there."""
        missing = [i for i in stream.missing() if self._rungs(stream, i)]
        if missing:
            return stream.to_load(missing[0], self._best(stream, now, missing))
        return self._better(stream, now, stream.link.expected(now))

    def go_on(self, stream: Stream, now: float) -> bool:
        """Whether what is under way still comes in time, or there is nothing smaller than what is left of it."""
        load, rate = stream.under_way, stream.link.estimate(now)
        if load is None or rate is None:
            return load is not None
        left = stream.loading_left()
        if stream.progress[load.item].have is not None or stream.progress[load.item].ready:
            return now + left / max(rate, 1e-9) + load.rung.decode_s <= self._goal(stream)
        missing = [load.item, *(i for i in stream.missing() if i != load.item and self._rungs(stream, i))]
        if self._safe(stream, now, missing, load.rung, rate):
            return True
        return stream.left(load.item, self._best(stream, now, missing)) >= left

    def _best(self, stream: Stream, now: float, missing: list[int]) -> Rung:
        """The level at which the first chunk that is missing is brought."""
        rungs = self._rungs(stream, missing[0])
        smallest = min(rungs, key=lambda rung: stream.left(missing[0], rung))
        rate, cautious, goal = stream.link.expected(now), stream.link.estimate(now), self._goal(stream)
        if cautious is None or rate is None:
            return smallest
        safe = [rung for rung in rungs if self._safe(stream, now, missing, rung, cautious)]
        for alone in (True, False):  # what needs no text goes first, if it is good enough
            for rung in safe:
                if alone and rung.loss > self.enough:
                    continue
                if self._plan(stream, now, missing, rung, rung, rate, text=not alone) <= goal:
                    return rung
        return smallest

    def _safe(self, stream: Stream, now: float, missing: list[int], rung: Rung, rate: float) -> bool:
        """Whether the target is kept with a level for the first chunk, if the link is slow and the rest gives way."""
        smallest = self._rungs(stream, missing[0])[-1]
        return (
            self._plan(stream, now, missing, rung, smallest, rate)
            <= self._goal(stream) - self.reserve * stream.target_s
        )

    def _better(self, stream: Stream, now: float, rate: float | None) -> Load | None:
        """The improvement that gains most for its bytes, of those that come in time."""
        if rate is None or rate <= 0:
            return None
        left = self._goal(stream) - now - stream.busy_s(now)
        found, most = None, 0.0
        for item, progress in enumerate(stream.progress):
            now_lost = progress.have.loss if progress.have is not None else 0.0
            if progress.ready == "text" or now_lost <= self.enough:
                continue
            for rung in self._rungs(stream, item):
                nbytes = stream.left(item, rung)
                if rung.loss < now_lost and nbytes / rate + rung.decode_s <= left:
                    gain = (now_lost - rung.loss) / max(1, nbytes)
                    if gain > most:
                        found, most = stream.to_load(item, rung), gain
        return found

    # -- the processor ------------------------------------------------------------------------------------------------

    def text(self, stream: Stream, now: float) -> int | None:
        """The last chunk that is missing, if it is time."""
        under_way = None if stream.under_way is None else stream.under_way.item
        missing = stream.missing()
        rest = [i for i in missing if i != under_way]
        must, rate, goal = now >= self._must_begin(stream, now), stream.link.estimate(now), self._goal(stream)
        if not rest:
            late = must or self._overtakes(stream, now, stream.link.hoped(now))
            return under_way if under_way in missing and late else None
        last = rest[-1]
        if must or rate is None:
            return last
        rungs, mean = self._rungs(stream, missing[0]), stream.link.expected(now) or 0.0
        well = any(
            rung.loss <= self.enough and self._plan(stream, now, missing, rung, rung, mean, text=False) <= goal
            for rung in rungs
        )
        if well and self._plan(stream, now, missing, rungs[-1], rungs[-1], rate, text=False) <= goal:
            return None
        after = sum(stream.rungs(i)[-1].decode_s for i in missing if i != last and stream.rungs(i))
        end = now + stream.busy_s(now) + stream.items[last].text_s + after  # what comes meanwhile waits for it
        hoped = stream.link.hoped(now) or 0.0
        alone = self._plan(stream, now, missing, rungs[-1], rungs[-1], hoped, text=False) if rungs else math.inf
        return last if end <= goal or alone > goal else None

    def wake(self, stream: Stream, now: float) -> float:
        """When text must be begun, or a little later, to see whether the link stands still."""
        look = now + 0.02 * stream.text_s
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

    def _plan(
        self, stream: Stream, now: float, missing: list[int], first: Rung, rest: Rung, rate: float, text: bool = True
    ) -> float:
        """When all chunks are there; infinity for never.

        Args:
            stream: what is there.
            now: the time.
            missing: chunks; the link takes the first ones, the processor the last ones.
            first: level of the first chunk.
            rest: level of the others, or what is most like it.
            rate: bytes a second.
            text: whether the processor may recompute; as many as let both end soonest.
        """
        busy = now + stream.busy_s(now)
        if rate <= 0:
            return busy + sum(stream.items[i].text_s for i in missing) if text else math.inf
        comes, decode = [now], [0.0]
        for place, i in enumerate(missing):
            like = stream.alike(i, rest if place else first)
            comes.append(comes[-1] + stream.left(i, like) / rate)
            decode.append(decode[-1] + like.decode_s)
        last = decode[-1] - decode[-2] if missing else 0.0
        done = max(comes[-1] + last, busy + decode[-1])
        recomputed = 0.0
        for loaded in range(len(missing) - 1, -1, -1) if text else ():
            recomputed += stream.items[missing[loaded]].text_s
            after = decode[loaded] - decode[loaded - 1] if loaded else 0.0
            done = min(done, max(comes[loaded] + after, busy + decode[loaded] + recomputed))
        return done
