"""What comes next, over the link and on the processor, so that a prompt's chunks are there in time with little lost.

A `Stream` is the state of one prompt: which level of which chunk has come, what is decoded, what is being recomputed
from text. It has no clock and moves no bytes: who drives it (`loading.client` in real time, `bench.simulation` in
counted time) tells it what happened when, and asks what to do. A `Policy` decides, and knows nothing of the future.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from blendkv.loading.throughput import Throughput

WINDOW = 0.25
"""Share of the target that a look back at the link covers."""


@dataclass(frozen=True)
class Rung:
    """One level in which a chunk can be had.

    Attributes:
        name: the same for all chunks, such as `klt@4`.
        nbytes: to be brought.
        loss: what it costs in quality (KL divergence, nats); 0 for none.
        decode_s: seconds of the processor until it is a chunk.
        builds_on: name of the rung whose bytes are the first of this one's (the base of a refinement).
    """

    name: str
    nbytes: int
    loss: float
    decode_s: float = 0.0
    builds_on: str = ""


@dataclass(frozen=True)
class Item:
    """A chunk that is wanted.

    Attributes:
        rungs: levels that there are, any order; none if it must be recomputed.
        text_s: seconds of the processor to recompute it from its text, which loses nothing.
    """

    rungs: tuple[Rung, ...]
    text_s: float


@dataclass(frozen=True)
class Load:
    """Work of the link: bytes `[start, rung.nbytes)` of a level."""

    item: int
    rung: Rung
    start: int = 0


@dataclass(frozen=True)
class Work:
    """Work of the processor."""

    item: int
    kind: Literal["decode", "text"]
    rung: Rung | None = None


@dataclass
class Progress:
    """How far a chunk is.

    Attributes:
        have: the level that has come.
        ready: what it is as a chunk: a rung's name, "text", or "" for not yet.
        loss: of what is ready.
        parts: bytes that came of levels that are not complete.
        broken: names of rungs that cannot be had.
        computing: whether its text is being recomputed.
    """

    have: Rung | None = None
    ready: str = ""
    loss: float = math.inf
    parts: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    computing: bool = False


class Policy(Protocol):
    """Decides what the link and the processor do."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def load(self, stream: Stream, now: float) -> Load | None:
        """What the link brings next; None for nothing."""
        ...

    def go_on(self, stream: Stream, now: float) -> bool:
        """Whether what is under way is still wanted, asked after every piece of it."""
        ...

    def text(self, stream: Stream, now: float) -> int | None:
        """The chunk to be recomputed next; None for none as yet. Decoding what has come goes before."""
        ...

    def wake(self, stream: Stream, now: float) -> float:
        """When to ask `text` and `go_on` again if nothing happens before."""
        ...


class Stream:
    """The state of one prompt.

    Args:
        items: chunks.
        policy: that decides.
        target_s: wanted time to the first token, from the beginning.
        begin: what the clock shows then.
        after_s: seconds from the last chunk until the first token (blend and question).
        prior: bytes a second that earlier requests saw.

    Attributes:
        progress: of each chunk.
        under_way: of the link.
        working: of the processor, and since when.
        link: estimates of the link.
        brought: bytes that came, whether used or not.
        switched: loads that were given up for something else.
        text_s: seconds of recomputing everything.
        to_text: chunks that the policy has decided to recompute, and not yet begun.
    """

    def __init__(
        self,
        items: Sequence[Item],
        policy: Policy,
        target_s: float,
        *,
        begin: float = 0.0,
        after_s: float = 0.0,
        prior: float | None = None,
    ) -> None:
        if not target_s > 0:
            raise ValueError(f"a target of {target_s!r} s: give a positive number of seconds")
        self.items, self.policy, self.begin, self.after_s = tuple(items), policy, begin, after_s
        self.target_s = target_s
        self.end = begin + target_s - after_s
        self.progress = [Progress() for _ in self.items]
        self.link = Throughput(prior, WINDOW * target_s)
        self.under_way: Load | None = None
        self.working: tuple[Work, float] | None = None
        self.brought = self.switched = 0
        self.to_text: set[int] = set()
        self._got = 0
        self._rungs = [sorted(item.rungs, key=lambda r: (r.loss, -r.nbytes)) for item in self.items]
        self._named = [{rung.name: rung for rung in item.rungs} for item in self.items]
        self.text_s = sum(item.text_s for item in self.items)

    # -- the link -----------------------------------------------------------------------------------------------------

    def load(self, now: float) -> Load | None:
        """What to bring next; it is then under way."""
        if self.under_way is not None:
            return self.under_way
        if not self.complete or self._may_improve:
            self.under_way = self.policy.load(self, now)
        self._got = 0 if self.under_way is None else self.under_way.start
        return self.under_way

    def asked(self, now: float, nbytes: int) -> None:
        """So many bytes of what is under way were asked for."""
        self.link.began(now, nbytes)

    def came(self, now: float, nbytes: int) -> bool:
        """They came. True: go on with the next; False: ask `load`."""
        load = self._loading()
        self.link.ended(now, nbytes)
        self.brought += nbytes
        self._got += nbytes
        progress = self.progress[load.item]
        if self._got >= load.rung.nbytes:
            progress.parts.pop(load.rung.name, None)
            in_time = now + self.busy_s(now) + load.rung.decode_s <= self.end
            if not progress.ready or (load.rung.loss < progress.loss and in_time):
                progress.have = load.rung
            self.under_way = None
            return False
        progress.parts[load.rung.name] = self._got
        return self.still_wanted(now)

    def still_wanted(self, now: float) -> bool:
        """Whether what is under way is; if not, it no longer is under way."""
        load = self._loading()
        if self.progress[load.item].ready == "text" or not self.policy.go_on(self, now):
            self.under_way, self.switched = None, self.switched + 1
            return False
        return True

    def failed(self, now: float, for_good: bool = True) -> None:
        """What is under way cannot be had: from no source, or what came was not what was written."""
        load = self._loading()
        self.link.dropped(now)
        if for_good:
            self.progress[load.item].broken.add(load.rung.name)
            self.progress[load.item].parts.pop(load.rung.name, None)
        self.under_way = None

    # -- the processor ------------------------------------------------------------------------------------------------

    def work(self, now: float) -> Work | None:
        """What the processor does next; it is then working on it."""
        if self.working is not None:
            return None
        work = self._decode() or self._text(now)
        if work is not None:
            self.working = (work, now)
            self.progress[work.item].computing = work.kind == "text"
        return work

    def worked(self, now: float, usable: bool = True) -> None:
        """It has done that; `usable` is False if a level could not be decoded."""
        assert self.working is not None
        work, self.working = self.working[0], None
        progress = self.progress[work.item]
        progress.computing = False
        if work.kind == "text":
            progress.ready, progress.loss = "text", 0.0
        elif work.rung is not None and usable:
            progress.ready, progress.loss = work.rung.name, work.rung.loss
        elif work.rung is not None:
            progress.broken.add(work.rung.name)
            progress.have = None

    def _decode(self) -> Work | None:
        for i in self.undecoded():
            return Work(i, "decode", self.progress[i].have)
        return None

    def _text(self, now: float) -> Work | None:
        lost = [i for i in self.missing() if not self.rungs(i)]  # text is all that is left of them
        item = lost[0] if lost else self.policy.text(self, now)
        return None if item is None else Work(item, "text")

    # -- what policies ask --------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every chunk is there in some form."""
        return all(progress.ready for progress in self.progress)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to wait for; asked when link and processor had their chance to begin something."""
        return self.complete and self.working is None and self.under_way is None and not self.undecoded()

    def missing(self) -> list[int]:
        """Chunks of which nothing has come, and that nobody recomputes."""
        return [i for i, p in enumerate(self.progress) if p.have is None and not p.ready and not p.computing]

    def lossy(self, enough: float) -> list[int]:
        """Chunks that have come, and lost more than so much, and that nobody recomputes."""
        return [
            i
            for i, p in enumerate(self.progress)
            if p.have is not None and p.have.loss > enough and p.ready != "text" and not p.computing
        ]

    def undecoded(self) -> list[int]:
        """Chunks of which a level has come that is not decoded."""
        return [
            i
            for i, p in enumerate(self.progress)
            if p.have is not None and p.ready != "text" and p.ready != p.have.name and not p.computing
        ]

    def rungs(self, item: int) -> Sequence[Rung]:
        """Levels of a chunk that can still be had, the least lossy first."""
        broken = self.progress[item].broken
        return self._rungs[item] if not broken else [r for r in self._rungs[item] if r.name not in broken]

    def alike(self, item: int, rung: Rung) -> Rung:
        """The same level of another chunk; where it is not there, the next lossier one, or else the lossiest."""
        same = self._named[item].get(rung.name)
        if same is not None and same.name not in self.progress[item].broken:
            return same
        rungs = self.rungs(item)
        return next((r for r in rungs if r.loss >= rung.loss), rungs[-1] if rungs else Rung("", 0, 0.0))

    def left(self, item: int, rung: Rung) -> int:
        """Bytes of a level that have not come."""
        have = self.progress[item].have
        there = have.nbytes if have is not None and have.name == rung.builds_on else 0
        return rung.nbytes - max(there, self.progress[item].parts.get(rung.name, 0))

    def to_load(self, item: int, rung: Rung) -> Load:
        """A load of what has not come of a level."""
        return Load(item, rung, rung.nbytes - self.left(item, rung))

    def loading_left(self) -> int:
        """Bytes of what is under way that have not come."""
        return 0 if self.under_way is None else self.under_way.rung.nbytes - self._got

    def busy_s(self, now: float) -> float:
        """Seconds of the processor's work that is begun, or cannot be avoided."""
        seconds = sum(p.have.decode_s for i in self.undecoded() if (p := self.progress[i]).have is not None)
        if self.working is not None:
            work, since = self.working
            whole = self.items[work.item].text_s if work.rung is None else work.rung.decode_s
            seconds += max(0.0, whole - max(0.0, now - since))
        return seconds

    @property
    def loss(self) -> float:
        """Mean over chunks of what was lost."""
        return sum(progress.loss for progress in self.progress) / len(self.progress)

    @property
    def chosen(self) -> tuple[str, ...]:
        """What each chunk was made of: a rung's name, or "text"."""
        return tuple(progress.ready for progress in self.progress)

    @property
    def _may_improve(self) -> bool:
        return any(p.ready != "text" and p.loss > 0 for p in self.progress)

    def _loading(self) -> Load:
        if self.under_way is None:
            raise ValueError("nothing is under way: ask load() first")
        return self.under_way
